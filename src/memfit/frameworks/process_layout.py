"""The process layout of a recipe (plain, DDP, FSDP2, DeepSpeed), its launch command, and what cannot be run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import memfit.frameworks.names as names
from memfit.errors import Unsupported
from memfit.nouns.job import Recipe
from memfit.tables.loading import loading_of
from memfit.tables.optimizers import optimizer
from memfit.tables.precisions import Backend as Backend
from memfit.tables.precisions import backend as backend
from memfit.tables.precisions import meaning
from memfit.tables.quantization import QUANTIZATIONS
from memfit.tables.trainers import trainer

ACCELERATE_FILE, DEEPSPEED_FILE = "accelerate.yaml", "ds_config.json"
# blocks that FSDP2 wraps, for model types whose `_no_split_modules` name classes that the text model lacks:
# accelerate refuses those (transformers 5.23)
BLOCKS = {
    "qwen3_5": "Qwen3_5DecoderLayer", "qwen3_5_text": "Qwen3_5DecoderLayer",
    "qwen3_5_moe": "Qwen3_5MoeDecoderLayer", "qwen3_5_moe_text": "Qwen3_5MoeDecoderLayer",
}  # fmt: skip
STAGES = {"none": 0, "optimizer": 1, "gradients": 2, "parameters": 3}


def zero_stage(recipe: Recipe) -> int:
    """Return the ZeRO stage; offloading needs a stage that shards what it moves."""
    stage = STAGES[recipe.shard]
    if recipe.offload == "parameters":
        return 3
    return 2 if recipe.offload == "optimizer" and stage == 0 else stage


@dataclass(frozen=True, slots=True)
class Launch:
    """How train.py is started: the backend, and accelerate.yaml, a cluster's own line (`started_by`) or python."""

    backend: Backend
    by_accelerate: bool
    started_by: str = ""

    @property
    def command(self) -> str:
        """Return the line that starts training."""
        if self.started_by:
            return self.started_by
        by = f"accelerate launch --config_file {ACCELERATE_FILE}" if self.by_accelerate else "python"
        return f"{by} train.py"


def quantised_on_host(recipe: Recipe) -> bool:
    """Return whether 4-bit weights are made on the host, so that no card ever has the whole model."""
    return recipe.method == "qlora" and loading_of(recipe) == "host"


# the argument of from_pretrained that does it
ON_HOST = ("device_map", '{"": "cpu"}', "quantised on the host and sharded from there: no card holds the whole model")


def reduction(recipe: Recipe) -> dict[str, dict[str, dict[str, bool]]]:
    """Return the setting that reduces gradients after every micro-batch under FSDP2.

    By default accelerate reduces only in the last micro-batch and keeps whole gradients on every card until then.
    """
    if backend(recipe) != "fsdp" or recipe.method != "full" or recipe.accumulation == 1:
        return {}
    return {"accelerator_config": {"gradient_accumulation_kwargs": {"sync_each_batch": True}}}


def launch_of(recipe: Recipe, target: str = "") -> Launch:
    """Return the launch of a recipe. The targets "accelerate" and "deepspeed" always have the launcher's file."""
    kind = "deepspeed" if target == "deepspeed" else backend(recipe)
    return Launch(kind, kind != "plain" or target == "accelerate")


def numbers(recipe: Recipe, kind: Backend) -> names.Numbers:
    """Return the dtypes of weights and autocast under a backend."""
    meant = meaning(recipe, kind)
    if meant.autocast == "never" or meant.computed == "fp32":
        return names.Numbers(weights=names.DTYPES[meant.stored], mixed="no")
    return names.Numbers(weights=names.DTYPES[meant.stored], mixed=meant.computed)


# ---- what cannot be run

_FUSED_SINCE = (1, 15)  # the first TRL with the fused loss that memfit's scripts rely on


@dataclass(frozen=True, slots=True)
class CannotRun:
    """One row: who cannot run the recipes for which `applies` is true; {optimizer} and {trainer} are the recipe's."""

    by: str  # backends and frameworks; "": all of them
    applies: Callable[[Recipe], bool]
    why: str
    hint: str


def check(recipe: Recipe, *by: str) -> None:
    """Raise Unsupported for a recipe that one of these backends or frameworks cannot run."""
    for row in CANNOT_RUN:
        if (not row.by or not {*row.by.split()}.isdisjoint(by)) and row.applies(recipe):
            why = row.why.format(optimizer=optimizer(recipe.optimizer).title, trainer=recipe.trainer)
            raise Unsupported(why, hint=row.hint)


def _pure(r: Recipe) -> bool:
    return r.precision == "bf16" and r.method == "full"


def _full_under(r: Recipe, *kinds: str) -> bool:
    return r.method == "full" and backend(r) in kinds


CANNOT_RUN: tuple[CannotRun, ...] = (
    CannotRun("", lambda r: r.method == "full" and r.quantization != "none",
              "a quantised base cannot be fully fine-tuned", "--method qlora, or --quantization none"),
    CannotRun("", lambda r: r.quantization in QUANTIZATIONS and QUANTIZATIONS[r.quantization].images,
              "such weights are those of SimpleTuner's denoisers", "--quantization nf4-double or int8"),
    CannotRun("", lambda r: r.method == "qlora" and r.quantization == "none",
              "QLoRA needs a quantisation", "--quantization nf4-double, or --method lora"),
    CannotRun("axolotl llamafactory arguments", lambda r: r.method != "full" and r.adapter != "lora",
              "memfit writes such files for LoRA alone, and scripts for all adapters",
              "--target trl, or --adapter lora"),
    # their kernels take plain tensors, but FSDP2 passes DTensors (bitsandbytes#1633)
    CannotRun("fsdp", lambda r: optimizer(r.optimizer).package in ("bitsandbytes", "galore-torch", "apollo-torch"),
              "{optimizer} does not run on FSDP2's sharded weights", "--optimizer adamw-8bit-torchao"),
    # DeepSpeed 0.19
    CannotRun("deepspeed", lambda r: r.offloaded_by_fsdp,
              "DeepSpeed does not offload 4-bit weights, FSDP2 does", "--target trl, or --target transformers"),
    CannotRun("deepspeed", lambda r: r.precision == "bf16-mixed",
              "DeepSpeed keeps 16-bit weights with an fp32 master copy, not fp32 weights under autocast",
              "--precision bf16-master, or --precision bf16"),
    CannotRun("deepspeed", lambda r: _pure(r) and zero_stage(r) == 0,
              "DeepSpeed trains without a master copy from ZeRO-1 on",
              "--shard optimizer, or --precision bf16-master"),
    CannotRun("deepspeed", lambda r: _pure(r) and r.offload != "none",
              "DeepSpeed's CPU Adam keeps fp32 states and weights", "--precision bf16-master"),
    CannotRun("deepspeed", lambda r: r.offload != "none" and r.optimizer not in ("adamw", "adamw-foreach"),
              "DeepSpeed's CPU step is AdamW, not {optimizer}", "--optimizer adamw, or --offload none"),
    CannotRun("deepspeed", lambda r: bool(optimizer(r.optimizer).rank_of and zero_stage(r)),
              "{optimizer} needs whole matrices, ZeRO flattens them", "--optimizer adamw-8bit"),
    CannotRun("fsdp deepspeed", lambda r: r.quantization == "int8" and r.shard == "parameters",
              "int8 weights cannot be sharded", "--quantization nf4-double, or --shard none"),

    CannotRun("trl", lambda r: r.trainer.startswith("trl==") and trainer(r.trainer).since < _FUSED_SINCE,
              "memfit writes scripts for TRL 1.15 and newer, not {trainer}", "--trainer trl"),
    CannotRun("trl", lambda r: r.method != "full" and "lm_head" in r.lora_targets,
              "TRL computes the loss from lm_head itself; an adapter on it would not learn", "--target transformers"),

    CannotRun("transformers", lambda r: r.loss == "chunked",
              "transformers.Trainer has no chunked loss", "--loss fused, or --target trl"),
    CannotRun("transformers", lambda r: r.padding == "packing",
              "transformers.Trainer does not pack sequences", "--padding longest, or --target trl"),
    CannotRun("transformers", lambda r: r.checkpointing == "selective",
              "transformers.Trainer has no selective checkpointing", "--checkpointing full, or --target trl"),

    CannotRun("axolotl", lambda r: r.optimizer == "muon" and backend(r) == "deepspeed",
              "axolotl's Muon does not run under DeepSpeed", "--shard parameters, or --optimizer adamw"),
    CannotRun("axolotl", quantised_on_host,
              "axolotl quantises onto the card (loaders/model.py, device_map LOCAL_RANK)", "--target trl"),
    # it loads weights in the compute dtype; only FSDP2 trains them in fp32
    CannotRun("axolotl", lambda r: r.precision == "bf16-mixed" and backend(r) != "deepspeed"
              and not _full_under(r, "fsdp"),
              "axolotl loads bf16 weights whenever it computes in bf16", "--precision bf16, or --target trl"),
    CannotRun("axolotl", lambda r: r.precision == "bf16" and _full_under(r, "fsdp"),
              "under FSDP2 axolotl trains fp32 weights", "--precision bf16-mixed, or --target trl"),
    CannotRun("axolotl", lambda r: r.precision == "fp16-mixed" and _full_under(r, "plain", "ddp", "fsdp"),
              "axolotl loads fp16 weights whenever it computes in fp16", "--precision bf16, or --target trl"),

    CannotRun("llamafactory", lambda r: bool(optimizer(r.optimizer).rank_of) and backend(r) in ("fsdp", "deepspeed"),
              "LLaMA-Factory's GaLore and APOLLO do not run under DeepSpeed", "--optimizer adamw-8bit"),
    CannotRun("llamafactory", lambda r: r.loss == "chunked",
              "LLaMA-Factory has no chunked loss", "--loss fused, or --target trl"),
    CannotRun("llamafactory", lambda r: r.checkpointing == "selective",
              "LLaMA-Factory has no selective checkpointing", "--checkpointing full, or --target trl"),
    CannotRun("llamafactory", lambda r: _pure(r) and zero_stage(r) == 3,
              "LLaMA-Factory has no pure bf16 under ZeRO-3", "--precision bf16-master"),
    CannotRun("llamafactory", lambda r: r.method != "full" and r.precision in ("fp32", "bf16-mixed"),
              "LLaMA-Factory loads a frozen base in 16 bits", "--precision bf16, or --target trl"),
)  # fmt: skip
