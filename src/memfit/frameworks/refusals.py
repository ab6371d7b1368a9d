"""What a backend or a framework cannot run, one row each, with what to take instead."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from memfit.errors import Unsupported
from memfit.frameworks.process_layout import quantised_on_host, zero_stage
from memfit.nouns.job import Recipe
from memfit.tables.optimizers import optimizer
from memfit.tables.precisions import backend
from memfit.tables.trainers import trainer

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
    CannotRun("", lambda r: r.method == "qlora" and r.quantization == "none",
              "QLoRA needs a quantisation", "--quantization nf4-double, or --method lora"),
    # their kernels take plain tensors, but FSDP2 passes DTensors (bitsandbytes#1633)
    CannotRun("fsdp", lambda r: optimizer(r.optimizer).package in ("bitsandbytes", "galore-torch", "apollo-torch"),
              "{optimizer} does not run on FSDP2's sharded weights", "--optimizer adamw-8bit-torchao"),
    # DeepSpeed 0.19
    CannotRun("deepspeed", lambda r: r.offloaded_by_fsdp,
              "DeepSpeed does not offload 4-bit weights, FSDP2 does", "--target trl, or transformers"),
    CannotRun("deepspeed", lambda r: r.precision == "bf16-mixed",
              "DeepSpeed keeps 16-bit weights with an fp32 master copy, not fp32 weights under autocast",
              "--precision bf16-master, with LoRA bf16"),
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
              "transformers.Trainer has no chunked loss", "--loss fused (Liger), or --target trl"),
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
              "LLaMA-Factory has no chunked loss", "--loss fused (Liger), or --target trl"),
    CannotRun("llamafactory", lambda r: r.checkpointing == "selective",
              "LLaMA-Factory has no selective checkpointing", "--checkpointing full, or --target trl"),
    CannotRun("llamafactory", lambda r: _pure(r) and zero_stage(r) == 3,
              "LLaMA-Factory has no pure bf16 under ZeRO-3", "--precision bf16-master"),
    CannotRun("llamafactory", lambda r: r.method != "full" and r.precision in ("fp32", "bf16-mixed"),
              "LLaMA-Factory loads a frozen base in 16 bits", "--precision bf16, or --target trl"),
)  # fmt: skip
