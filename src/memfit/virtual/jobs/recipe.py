"""Setup, a training job in its libraries' own terms, and how a Recipe becomes one or is refused."""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Literal, get_args

from memfit.errors import Unsupported
from memfit.frameworks import deepspeed as deepspeed_file
from memfit.frameworks import names, process_layout
from memfit.models import families
from memfit.nouns.job import Loading, Recipe
from memfit.nouns.tape import STEPS
from memfit.nouns.task import PLAIN, Shape
from memfit.tables.loading import loading_of
from memfit.tables.optimizers import OPTIMIZERS, optimizer
from memfit.tables.precisions import meaning
from memfit.tables.quantization import QUANTIZATIONS
from memfit.tables.tasks import TASKS
from memfit.tables.trainers import trainer

TrainerName = Literal["torch", "transformers", "trl"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """One training job. Sizes are in tokens and sequences."""

    config: dict[str, Any]  # the model's config.json
    task: str = ""  # a row of tables/tasks.py; "": a language model, which is trained on its own tokens
    shape: Shape = PLAIN  # of one sample, apart from `sequence`
    trainer: TrainerName = "trl"
    method: Literal["full", "lora", "qlora"] = "full"
    dtype: Literal["bf16", "fp16", "fp32"] = "bf16"  # of the loaded weights
    autocast: Literal["", "bf16", "fp16"] = ""
    quantization: dict[str, Any] = field(default_factory=dict)  # arguments of BitsAndBytesConfig
    stored: str = ""  # a row of tables/quantization.py, where it is not bitsandbytes' and only denoisers have it
    prepare_kbit: bool = True
    adapter: str = "lora"  # a row of tables/adapters.py
    rank: int = 16
    alpha: int = 32
    dropout: float = 0.0
    targets: str | tuple[str, ...] = "all-linear"
    modules_to_save: tuple[str, ...] = ()
    widen: bool = False  # cast adapters to fp32 after the trainer has made them 16-bit
    optimizer: str = "adamw_torch_fused"  # a row of tables/optimizers.py, by its key or by transformers' name
    checkpointing: Literal["none", "nonreentrant", "reentrant", "selective", "offload"] = "none"
    interval: int = 1  # blocks of a denoiser that are recomputed together
    stride: int = 0  # from one such group to the next; 0: the interval
    keep_gradients: bool = False  # zeroed between steps, not freed
    attention: str = "sdpa"
    compile: bool = False  # torch.compile of the whole model
    micro_batch: int = 1
    sequence: int = 512
    packing: bool = False  # every sequence is several short ones end to end
    accumulation: int = 1
    fetched: int = 1  # micro-batches whose inputs are on the card at once, of which `accumulation` run
    sampled: int = 1  # answers that are sampled at once on each rank, for all micro-batches of a step
    clip: float = 1.0  # largest norm of the gradients; 0: no clipping
    steps: int = 2
    sections: bool = False  # a hand-written loop marks its sections and leaves out those that repeat: `repeated_steps`
    evaluate: bool = False
    save: bool = False  # save a checkpoint after the last step
    resume: bool = True  # resume from it
    merge: bool = False  # merge the adapters into the weights at the end
    # "host", "device", "meta": build the model there; "checkpoint", "zero3": read a file, all of it or a rank's share
    load: Literal["host", "checkpoint", "zero3", "device", "meta"] = "host"
    world_size: int = 1  # ranks; the next eight fields are for several
    shard: Literal["none", "parameters"] = "none"  # DDP, FSDP2
    loading: Loading = "host"  # where weights are whole before FSDP2 shards them (tables/loading.py)
    reshard: bool = True  # FSDP2 frees a block's gathered parameters after its forward
    ends_in_root: bool = False  # FSDP2's root group holds embedding and head, see Trainer.ends_in_root
    offload: bool = False  # FSDP2 keeps the shards on the host
    sync_each: bool = False  # reduce gradients after every micro-batch
    bucket_view: bool = False  # DDP's gradients lie in its buckets
    # ds_config.json; if given, DeepSpeed distributes the job in place of DDP or FSDP2
    deepspeed: dict[str, Any] = field(default_factory=dict)
    mask: Literal["ones", "none", "padded"] = "ones"
    labelled: float = 1.0  # share of positions with a label
    holds_outputs: bool = False  # the hand-written loop keeps `outputs` through backward
    use_cache: bool | None = None  # None: the config's
    arguments: dict[str, Any] = field(default_factory=dict)  # further arguments of the trainer


_TRAINERS: tuple[str, ...] = get_args(TrainerName)
_DTYPES: dict[names.Dtype, Literal["bf16", "fp16", "fp32"]] = {
    "bfloat16": "bf16", "float16": "fp16", "float32": "fp32"
}  # fmt: skip
MICRO_STEPS = 2  # micro-batches of an accumulation that run; the second and all later ones begin with the same memory


def setup_of(recipe: Recipe, config: dict[str, Any], task: str = "", shape: Shape = PLAIN) -> Setup:
    """Return the job that a recipe describes; task: a row of tables/tasks.py other than sft.

    Raises Unsupported for what the trainer or memfit cannot run.
    """
    name: Any = trainer(recipe.trainer).loop
    for wrong, what, hint in _refused(recipe, name):
        if wrong:
            raise Unsupported(f"trace cannot run {what}", hint=hint)
    kind = process_layout.backend(recipe)
    numbers = process_layout.numbers(recipe, "plain" if name == "torch" else kind)
    mixed: Any = "" if numbers.mixed == "no" else numbers.mixed
    return Setup(
        config=config, task=task, shape=shape, trainer=name, method=recipe.method, dtype=_DTYPES[numbers.weights],
        autocast="" if name == "torch" and meaning(recipe).autocast != "always" else mixed,
        quantization=_quantization(recipe, numbers, TASKS[task or "sft"].new_modules),
        stored=recipe.quantization if _of_images(recipe) else "",
        prepare_kbit=trainer(recipe.trainer).kbit_prepare and kind != "fsdp", adapter=recipe.adapter,
        rank=recipe.lora_rank,
        alpha=recipe.lora_alpha, dropout=recipe.lora_dropout, targets=_targets(recipe, config),
        modules_to_save=recipe.modules_to_save,
        widen=_scales_bf16(recipe),
        optimizer=_optimizer(recipe, name),
        checkpointing="nonreentrant" if recipe.checkpointing == "full" else recipe.checkpointing,
        interval=recipe.checkpoint_interval, stride=recipe.checkpoint_stride, keep_gradients=recipe.keep_gradients,
        attention=names.ATTENTION[recipe.attention], compile=recipe.compile, micro_batch=recipe.micro_batch,
        sequence=recipe.sequence_length,
        packing=recipe.padding == "packing", accumulation=min(recipe.accumulation, MICRO_STEPS), clip=1.0, steps=STEPS,
        fetched=recipe.accumulation, sampled=recipe.micro_batch * recipe.accumulation,
        evaluate=not task or TASKS[task].evaluated, save=name != "torch",
        resume=(kind != "fsdp" or optimizer(recipe.optimizer).package != "torchao")
        and (not task or TASKS[task].resumed),  # FSDP2 cannot broadcast its states
        mask="padded" if recipe.micro_batch > 1 and recipe.padding == "longest" else "ones",
        merge=recipe.shard != "parameters", load=_load(recipe, name), world_size=recipe.num_gpus,
        shard="parameters" if kind == "fsdp" else "none", loading=loading_of(recipe),
        offload=recipe.offloaded_by_fsdp,
        deepspeed=deepspeed_file.config(recipe) if kind == "deepspeed" else {},
        arguments=_arguments(recipe, name),
    )  # fmt: skip


Refusal = tuple[bool, str, str]  # whether it applies, what cannot be run, what to take instead


def _refused(recipe: Recipe, name: str) -> tuple[Refusal, ...]:
    loop, plain = name == "torch", name == "transformers"
    return (
        (recipe.trainer == "axolotl-loss" and recipe.loss == "fused", "a fused loss without Liger's layers",
        f"--trainer {', '.join(_TRAINERS)}"),
        *_absent(recipe, name),
        (recipe.context_parallel > 1, "--context-parallel: GPUs that share sequences",
        "memfit trace train.py --gpu 2xh100 runs your own script"),
        (recipe.fsdp_version == 1 and process_layout.backend(recipe) == "fsdp",
        "--fsdp-version 1: a recipe is traced under FSDP2",
        "--fsdp-version 2; memfit trace train.py --gpu 2xh100 runs your own script, under FSDP1 too"),
        (loop and recipe.zero, "DeepSpeed's part in a hand-written loop", "--trainer transformers or trl"),
        (recipe.padding == "packing" and name != "trl", f"--padding packing: {name} does not pack",
        "--trainer trl, or --padding longest"),
        (plain and recipe.loss == "chunked", "--loss chunked: transformers.Trainer has none",
        "--loss fused (Liger), or --trainer trl"),
        (loop and recipe.loss != "full", f"--loss {recipe.loss}: the model computes its own in a hand-written loop",
        "--loss full, or --trainer trl"),
        (plain and recipe.checkpointing == "selective", "--checkpointing selective: transformers.Trainer has none",
        "--checkpointing full, or --trainer trl"),
    )  # fmt: skip


def _absent(recipe: Recipe, name: str) -> list[Refusal]:
    """Return refusals for what the recipe needs and is not installed: its trainer's version, packages."""
    found: list[Refusal] = []
    _, _, wanted = recipe.trainer.partition("==")
    installed = installed_version(name)
    if (
        wanted
        and installed
        and name == trainer(recipe.trainer).name
        and not f"{installed.partition('+')[0]}.".startswith(f"{wanted}.")
    ):
        hint = f"pip install {recipe.trainer}, or --trainer {name} for the installed one; memfit estimate knows others"
        found.append((True, f"{recipe.trainer}: {installed} is installed", hint))
    packages = [optimizer(recipe.optimizer).package]
    packages += ["bitsandbytes"] * (recipe.quantization != "none" and not _of_images(recipe))
    packages += ["liger-kernel"] * (name == "transformers" and recipe.loss == "fused")
    packages += ["deepspeed"] * recipe.zero
    for package in packages:
        hint = f"pip install {package}; memfit estimate answers without it"
        found.append((not installed_version(package), f"this without {package}, which is not installed", hint))
    return found


def installed_version(package: str) -> str:
    """Return the installed version of a package; '' if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _of_images(recipe: Recipe) -> bool:
    """Return whether the base is quantised as denoisers alone are."""
    return recipe.quantization in QUANTIZATIONS and QUANTIZATIONS[recipe.quantization].images


def _load(recipe: Recipe, name: str) -> Literal["checkpoint", "zero3", "meta", "host"]:
    """Return where the model is first: on meta in a loop that shards, on the host in Trainers, or in a file."""
    if recipe.quantization != "none":
        return "checkpoint"
    if recipe.zero and process_layout.zero_stage(recipe) == 3:
        return "zero3"
    return "meta" if name == "torch" and recipe.shard != "none" else "host"


def _quantization(recipe: Recipe, numbers: names.Numbers, new: tuple[str, ...]) -> dict[str, Any]:
    """Return BitsAndBytesConfig's arguments; FSDP2 shards 4-bit weights stored in the dtype of the others.

    new: modules that are not quantised, as no checkpoint has them.
    """
    given = {} if _of_images(recipe) else names.bitsandbytes(recipe)
    given |= {"llm_int8_skip_modules": list(new)} if given and new else {}
    if given and process_layout.backend(recipe) == "fsdp":
        return given | {"bnb_4bit_quant_storage": numbers.weights}
    return given


def _targets(recipe: Recipe, config: dict[str, Any]) -> str | tuple[str, ...]:
    """Return PEFT's target_modules; "attention" and names depend on the model."""
    if recipe.method == "full" or recipe.lora_targets == ("all-linear",):
        return "all-linear"
    if config.get("model_type") == "diffusers":
        return "all-linear" if recipe.lora_targets == ("attention",) else recipe.lora_targets
    return tuple(names.targets(recipe, families.architecture(config, str(config.get("model_type")))))


def _scales_bf16(recipe: Recipe) -> bool:
    """Return whether to widen what is trained: LLaMA-Factory does, and fp16's loss scaler rejects bf16 gradients."""
    row = trainer(recipe.trainer)
    if row.trained_fp32 and recipe.modules_to_save:
        return True
    return row.name == "trl" and recipe.method == "qlora" and recipe.precision == "fp16-mixed"


def _optimizer(recipe: Recipe, name: str) -> str:
    row = optimizer(recipe.optimizer)
    if name == "torch":
        if not row.loop:
            known = ", ".join(row.key for row in OPTIMIZERS.values() if row.loop)
            raise Unsupported(f"trace's own loop has no {row.key}", hint=f"choose one of {known}")
        return row.key
    return str(names.optim(recipe, name)["optim"])


def _arguments(recipe: Recipe, name: str) -> dict[str, Any]:
    """Return further arguments of TrainingArguments or SFTConfig."""
    if name == "torch":
        return {}
    liger = {"use_liger_kernel": True} if name == "transformers" and recipe.loss == "fused" else {}
    optim = {key: value for key, value in names.optim(recipe, name).items() if key != "optim"}
    return {**optim, **process_layout.reduction(recipe), **liger}
