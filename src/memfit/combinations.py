"""Which values of a recipe cannot go together, each with the reason; a new rule is one row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from memfit.architecture import Architecture
from memfit.errors import BadInput
from memfit.gpu import Gpu
from memfit.job import Recipe
from memfit.optimizers import optimizer
from memfit.trainers import trainer

Rule = Callable[[Recipe, Architecture | None, Gpu | None], bool]


@dataclass(frozen=True, slots=True)
class Impossible:
    """A combination that is refused when `when` holds."""

    when: Rule
    why: str
    hint: str


def _no_bf16(r: Recipe, a: Architecture | None, g: Gpu | None) -> bool:
    return bool(g and g.compute_capability and g.compute_capability < (8, 0) and r.precision.startswith("bf16"))


def _no_flash(r: Recipe, a: Architecture | None, g: Gpu | None) -> bool:
    return bool(g and g.compute_capability and g.compute_capability < (8, 0) and r.attention == "flash")


IMPOSSIBLE: tuple[Impossible, ...] = (
    Impossible(lambda r, a, g: r.method == "qlora" and r.quantization == "none",
               "QLoRA needs a quantised base", "add --quantization nf4-double, or take --method lora"),
    Impossible(lambda r, a, g: r.method == "full" and r.quantization != "none",
               "quantised weights cannot be trained by full fine-tuning", "take --method qlora, or --quantization none"),
    Impossible(lambda r, a, g: r.method == "lora" and r.quantization != "none",
               "LoRA on a quantised base is QLoRA", "take --method qlora"),
    Impossible(_no_bf16, "this card has no bf16 units (compute capability below 8.0)", "take --precision fp16-mixed"),
    Impossible(_no_flash, "FlashAttention-2 needs compute capability 8.0", "take --attention sdpa"),
    Impossible(lambda r, a, g: r.attention == "flash" and r.precision == "fp32",
               "FlashAttention works in 16 bits only", "take --precision bf16-mixed or --attention sdpa"),
    Impossible(lambda r, a, g: r.attention == "sdpa" and a is not None and not all(x.attention.sdpa for x in a.kinds),
               "transformers refuses SDPA for this model", "take --attention eager"),
    Impossible(lambda r, a, g: r.shard != "none" and r.num_gpus == 1,
               "sharding needs more than one GPU", "add --num-gpus 2, or take --shard none (one GPU can --offload)"),
    Impossible(lambda r, a, g: r.method == "qlora" and r.offload == "parameters",
               "bitsandbytes weights cannot be offloaded to the host", "take --offload optimizer, or --method lora"),
    Impossible(lambda r, a, g: r.offload != "none" and optimizer(r.optimizer).key not in ("adamw", "adamw-foreach"),
               "the step over offloaded states is AdamW on the CPU", "take --optimizer adamw with --offload"),
    Impossible(lambda r, a, g: r.offload != "none" and r.method == "full" and r.precision == "bf16",
               "DeepSpeed's CPU Adam keeps fp32 weights and states", "take --precision bf16-master with --offload"),
    Impossible(lambda r, a, g: r.shard == "parameters" and optimizer(r.optimizer).package == "bitsandbytes",
               "bitsandbytes optimizers do not run on FSDP2's sharded weights", "take --optimizer adamw-8bit-torchao, or --shard gradients"),
    Impossible(lambda r, a, g: r.shard != "none" and bool(optimizer(r.optimizer).rank_of),
               "low-rank optimizers need whole matrices, sharding cuts them", "take --optimizer adamw-8bit-torchao, or --shard none"),
    Impossible(lambda r, a, g: r.shard == "parameters" and r.quantization == "int8",
               "int8 weights cannot be sharded", "take --quantization nf4-double, or --shard none"),
    Impossible(lambda r, a, g: optimizer(r.optimizer).in_backward and (r.accumulation > 1 or r.num_gpus > 1),
               "an optimizer in the backward pass sees one micro-batch on one GPU", "take --accumulation 1 --num-gpus 1"),
    Impossible(lambda r, a, g: optimizer(r.optimizer).in_backward and trainer(r.trainer).name != "torch",
               "only a hand-written loop can step in the backward pass", "take --trainer torch"),
    Impossible(lambda r, a, g: bool(optimizer(r.optimizer).rank_of) and r.method != "full",
               "low-rank optimizers project full gradients; LoRA has none", "take --method full, or --optimizer adamw"),
    Impossible(lambda r, a, g: r.precision == "bf16-master" and r.method != "full",
               "master weights belong to trained weights; a frozen base has none", "take --precision bf16"),
    Impossible(lambda r, a, g: r.method == "qlora" and r.precision == "bf16-mixed" and r.quantization == "int8",
               "LLM.int8() computes in 16 bits", "take --precision bf16"),
    Impossible(lambda r, a, g: a is not None and bool(a.max_positions) and a.learned_positions and r.sequence_length > a.max_positions,
               "the model has no positions that far", "take a shorter --sequence-length"),
)  # fmt: skip


def check(recipe: Recipe, architecture: Architecture | None = None, gpu: Gpu | None = None) -> Recipe:
    """Refuse an impossible recipe with the reason (BadInput); returns it unchanged otherwise."""
    reason = refusal(recipe, architecture, gpu)
    if reason is not None:
        raise BadInput(reason.why, hint=reason.hint)
    return recipe


def refusal(recipe: Recipe, architecture: Architecture | None = None, gpu: Gpu | None = None) -> Impossible | None:
    """The first rule a recipe breaks, or None."""
    return next((rule for rule in IMPOSSIBLE if rule.when(recipe, architecture, gpu)), None)
