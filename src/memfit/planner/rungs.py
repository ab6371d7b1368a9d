"""The ladder as a table: each rung is what a practitioner would try next, the cheapest change first."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from memfit.nouns.gpu import Gpu
from memfit.nouns.job import Job, Recipe
from memfit.tables.optimizers import optimizer

Change = Callable[[Recipe, Job], Recipe]


@dataclass(frozen=True, slots=True)
class LadderStep:
    """One row: the change, its cost in quality, and the setting that turns it on in each framework."""

    key: str
    title: str
    change: Change
    caveat: str
    flags: Mapping[str, str] = field(default_factory=dict)
    learns: str = "full"  # what is trained from this rung on: full | lora | qlora
    sets: tuple[str, ...] = ()  # recipe fields it changes: a rung is left out when the user set all of them


def sequences_each(job: Job, recipe: Recipe) -> int:
    """Return the sequences of a step that one GPU trains, or the GPUs that share its sequences."""
    return max(job.effective_batch // recipe.replicas, 1)


def sixteen_bit(gpu: Gpu) -> str:
    """Return the mixed precision a card can run."""
    return "bf16-mixed" if gpu.bf16 else "fp16-mixed"


def backend_precision(r: Recipe, job: Job) -> Recipe:
    """Return the recipe with its backend's mixed precision: a master copy under DeepSpeed, else fp32 weights.

    A precision that the user or their file set stays.
    """
    fixed = "precision" in job.stated or "precision" in dict(job.wanted)
    if fixed or r.method != "full" or r.precision not in ("bf16-mixed", "bf16-master"):
        return r
    mixed = r.but(precision="bf16-mixed")
    return r.but(precision="bf16-master") if mixed.zero else mixed


def _sharded(what: str) -> Change:
    return lambda r, job: backend_precision(r.but(shard=what), job)


def _smallest_batch(r: Recipe, job: Job) -> Recipe:
    return r.but(micro_batch=1, accumulation=sequences_each(job, r))


def half_precision(gpu: Gpu) -> str:
    """Return the precision a frozen base is loaded in."""
    return "bf16" if sixteen_bit(gpu) == "bf16-mixed" else "fp16-mixed"


def _lora(r: Recipe, job: Job) -> Recipe:
    """Switch to LoRA with plain AdamW, as adapters need no small optimizer; a file's choice stays if it works."""
    precision = "fp16-mixed" if r.precision == "fp16-mixed" else half_precision(job.gpu)
    kept = "optimizer" in job.stated and not optimizer(r.optimizer).rank_of
    return r.but(method="lora", precision=precision, quantization="none", optimizer=r.optimizer if kept else "adamw")


def _qlora(r: Recipe, job: Job) -> Recipe:
    return _lora(r, job).but(method="qlora", quantization="nf4-double", loading="auto")


EIGHT_BIT = {
    "adamw": "adamw-8bit", "adamw-foreach": "adamw-8bit", "adamw-forloop": "adamw-8bit", "adamw-32bit": "adamw-8bit",
    "paged-adamw-32bit": "paged-adamw-8bit", "lion": "lion-8bit",
}  # fmt: skip


def _eight_bit(r: Recipe, job: Job) -> Recipe:
    """Switch to 8-bit states of the same optimizer, torchao's under FSDP2; one without an 8-bit version stays."""
    twin = EIGHT_BIT.get(r.optimizer, r.optimizer)
    return r.but(optimizer="adamw-8bit-torchao" if twin == "adamw-8bit" and r.shard == "parameters" else twin)


def _fused(r: Recipe, job: Job) -> Recipe:
    return r.but(loss="fused")


def _offloaded(r: Recipe, job: Job, what: str) -> Recipe:
    """Switch to DeepSpeed's offload: 16-bit weights on the card, an fp32 master copy and the states on the host.

    DeepSpeed's CPU step is AdamW, so a file with another optimizer is not changed.
    """
    if "optimizer" in job.stated and "adamw" not in r.optimizer:
        return r
    precision = "bf16-master" if job.gpu.bf16 and r.precision != "fp16-mixed" else "fp16-mixed"
    return r.but(offload=what, optimizer="adamw", precision=precision if r.method == "full" else r.precision)


LADDER: tuple[LadderStep, ...] = (
    LadderStep("mixed", "16-bit mixed precision",
         lambda r, j: backend_precision(r.but(precision=sixteen_bit(j.gpu)), j),
         "none: fp32 weights, 16-bit products",
         {"trl": "bf16=True", "transformers": "bf16=True", "axolotl": "bf16: true", "llamafactory": "bf16: true",
          "deepspeed": '"bf16": {"enabled": true}', "accelerate": "mixed_precision: bf16"}, sets=("precision",)),
    LadderStep("fused-loss", "+ fused loss", _fused, "none: the same numbers, the logits never exist whole",
         {"trl": "default since 1.15", "transformers": "use_liger_kernel=True",
          "axolotl": "liger_fused_linear_cross_entropy: true",
          "llamafactory": "enable_liger_kernel: true"}, sets=("loss",)),
    LadderStep("checkpointing", "+ activation checkpointing", lambda r, j: r.but(checkpointing="full"),
         "none: the same values are computed twice",
         {"trl": "gradient_checkpointing=True", "transformers": "activation_checkpointing=True",
          "axolotl": "gradient_checkpointing: true", "llamafactory": "disable_gradient_checkpointing: false"},
          sets=("checkpointing",)),
    LadderStep("8-bit-optimizer", "+ 8-bit optimizer", _eight_bit,
         "negligible in most fine-tunes; embeddings keep 32-bit states",
         {"trl": 'optim="adamw_bnb_8bit" (FSDP2: "adamw_torch_8bit")', "transformers": 'optim="adamw_bnb_8bit"',
          "axolotl": "optimizer: adamw_bnb_8bit",
          "llamafactory": "optim: adamw_bnb_8bit"}, sets=("optimizer",)),
    LadderStep("accumulation", "+ micro-batch 1, accumulated", _smallest_batch, "none at the same tokens per step",
         {"trl": "per_device_train_batch_size=1, gradient_accumulation_steps=N",
          "transformers": "per_device_train_batch_size=1, gradient_accumulation_steps=N",
          "axolotl": "micro_batch_size: 1, gradient_accumulation_steps: N",
          "llamafactory": "per_device_train_batch_size: 1, gradient_accumulation_steps: N",
          "deepspeed": '"train_micro_batch_size_per_gpu": 1'}, sets=("micro_batch",)),
    LadderStep("16-bit-weights", "+ 16-bit weights and states", lambda r, j: r.but(precision="bf16"),
         "small updates are rounded away: bf16 keeps 8 bits of a weight",
         {"trl": 'model_init_kwargs={"dtype": "bfloat16"}', "transformers": "from_pretrained(dtype=torch.bfloat16)",
          "axolotl": "bf16: full", "llamafactory": "pure_bf16: true"}, sets=("precision",)),
    LadderStep("lora", "LoRA", _lora, "learns a low-rank change of the weights; heavy domain shifts may need more",
         {"trl": "peft_config=LoraConfig(...)", "transformers": "get_peft_model(model, LoraConfig(...))",
          "axolotl": "adapter: lora",
          "llamafactory": "finetuning_type: lora"}, learns="lora", sets=("method",)),
    LadderStep("qlora", "QLoRA", _qlora, "as LoRA, on a base rounded to 4 bits: measure on your task",
         {"trl": "quantization_config=BitsAndBytesConfig(load_in_4bit=True, ...)",
          "transformers": "BitsAndBytesConfig(load_in_4bit=True, ...)", "axolotl": "adapter: qlora, load_in_4bit: true",
          "llamafactory": "quantization_bit: 4"}, learns="qlora", sets=("method", "quantization")),
    LadderStep("offload-checkpoints", "+ checkpoints kept in host RAM", lambda r, j: r.but(checkpointing="offload"),
         "none; PCIe traffic every step",
         {"trl": 'gradient_checkpointing_kwargs={"offload": True}',
          "transformers": 'activation_checkpointing_kwargs={"offload": True}',
          "axolotl": "activation_offloading: hidden_states", "llamafactory": "use_unsloth_gc: true"}, learns="",
          sets=("checkpointing",)),
    LadderStep("offload-optimizer", "+ optimizer states in host RAM", lambda r, j: _offloaded(r, j, "optimizer"),
         "none; every step crosses PCIe", {"deepspeed": '"offload_optimizer": {"device": "cpu"}'}, learns="full",
         sets=("offload",)),
    LadderStep("offload-parameters", "+ weights in host RAM", lambda r, j: _offloaded(r, j, "parameters"),
         "none; every block crosses PCIe twice a step",
         {"deepspeed": '"offload_param": {"device": "cpu"}'}, learns="full",
         sets=("offload",)),
)  # fmt: skip

SHARDING: tuple[LadderStep, ...] = (
    LadderStep("shard-optimizer", "+ optimizer states sharded (ZeRO-1)", _sharded("optimizer"),
         "none", {"deepspeed": '"zero_optimization": {"stage": 1}'}, sets=("shard",)),
    LadderStep("shard-gradients", "+ gradients sharded (ZeRO-2)", _sharded("gradients"),
         "none", {"deepspeed": '"zero_optimization": {"stage": 2}'}, sets=("shard",)),
    LadderStep("shard-parameters", "+ weights sharded (FSDP, ZeRO-3)", _sharded("parameters"),
         "none; weights cross the links in every pass",
         {"deepspeed": '"zero_optimization": {"stage": 3}', "accelerate": "fsdp_reshard_after_forward: true"},
         sets=("shard",)),
)  # fmt: skip

# What is learned, best first: each class is what its steps make of the start. The search takes the highest class that
# fits; offloading weights or states comes last, because it trades hours and host memory for bytes of the card.
LEARNED: tuple[tuple[str, ...], ...] = (
    ("mixed",),
    ("mixed", "8-bit-optimizer"),
    ("16-bit-weights",),
    ("16-bit-weights", "8-bit-optimizer"),
    ("lora",),
    ("qlora",),
    ("lora", "offload-optimizer"),  # few bytes of the card; DeepSpeed saves shards where FSDP2 gathers on the host
    ("qlora", "offload-optimizer"),
    ("lora", "offload-parameters"),
    ("qlora", "offload-parameters"),
    ("mixed", "offload-optimizer"),
    ("mixed", "offload-parameters"),
)
STEPS = {step.key: step for step in (*LADDER, *SHARDING)}

# values that later rungs never undo, each from the most memory to the least
ORDER: dict[str, tuple[str, ...]] = {
    "method": ("full", "lora", "qlora"),
    "checkpointing": ("none", "selective", "full", "offload"),
    "loss": ("full", "chunked", "fused"),
    "offload": ("none", "optimizer", "parameters"),
    "shard": ("none", "optimizer", "gradients", "parameters"),
}


def backwards(before: Recipe, after: Recipe) -> bool:
    """Return whether a step would undo something the recipe already does."""
    return any(
        values.index(getattr(after, name)) < values.index(getattr(before, name)) for name, values in ORDER.items()
    )


def already(step: LadderStep, recipe: Recipe) -> bool:
    """Return whether the recipe already has the effect of a step that `backwards` does not cover."""
    if step.key == "mixed":
        return recipe.precision != "fp32"
    if step.key == "accumulation":
        return recipe.micro_batch == 1
    return step.key == "8-bit-optimizer" and optimizer(recipe.optimizer).block > 0


def taken(step: LadderStep, recipe: Recipe, job: Job) -> Recipe:
    """Return the recipe after a step; what the user set stays, and the number of cards stays the recipe's."""
    return step.change(recipe, job).but(**{k: v for k, v in job.wanted if k not in ("method", "num_gpus")})


def steps_for(job: Job) -> tuple[LadderStep, ...]:
    """Return the rungs of a job; on several cards sharding comes first, because it costs no quality."""
    mixed, *rest = LADDER
    return (mixed, *SHARDING, *rest) if job.num_gpus > 1 else LADDER
