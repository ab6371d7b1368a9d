"""Cautions to print with an answer: they do not forbid the recipe. A new caution is one row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from memfit.nouns.architecture import Architecture
from memfit.nouns.gpu import Gpu, Platform
from memfit.nouns.job import Recipe
from memfit.tables.combinations import head_apart
from memfit.tables.optimizers import optimizer
from memfit.tables.trainers import checkpointing_of, holds_unit_inputs, taken_as, trainer
from memfit.units import human

PLATFORMS: dict[Platform, str] = {
    "cuda": "CUDA", "rocm": "ROCm", "xpu": "Intel's XPU", "hpu": "Gaudi's HPU", "mps": "Apple's Metal",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Caution:
    """A sentence to print, and the condition under which it holds."""

    when: Callable[[Architecture, Recipe, Gpu], bool]
    text: Callable[[Architecture, Recipe, Gpu], str]


def _compiled(a: Architecture, r: Recipe) -> str:
    """Return the caution about torch.compile.

    In traces of compiled steps, models of 135 M to 1.2 B weights needed 0 to 37 % less, and tiny ones with 2,048 tokens
    59 % more, for the mask.
    """
    base = "counted as without torch.compile, which mostly needs less (memfit trace compiles)"
    mask = max((x.attention.heads for x in a.kinds), default=0) * r.micro_batch * r.sequence_length**2 * 2
    if r.attention != "sdpa" or r.padding == "packing" or not mask:
        return base
    return f"{base}, but writes a mask out for every head where a model gets one: up to {human(mask)} more"


def _fsdp1(r: Recipe) -> bool:
    return r.fsdp_version == 1 and r.shard == "parameters" and not r.zero


def _held(a: Architecture, r: Recipe) -> int:
    """Return the bytes of the 16-bit inputs of all blocks and of their gradients."""
    return 4 * r.tokens_each * a.width * len(a.layers)


def _older(a: Architecture, r: Recipe) -> str:
    """Return the assumption about the version of transformers, where another would make a difference."""
    older = r.but(trainer="transformers==4.51")
    if trainer(r.trainer) is not trainer(r.trainer.partition("==")[0]) or not holds_unit_inputs(older):
        return ""
    return f"; transformers before 4.52 would keep {human(_held(a, r))} of blocks' inputs (--trainer {older.trainer})"


CAUTIONS: tuple[Caution, ...] = (
    Caution(
        lambda a, r, g: bool(a.max_positions) and r.sequence_length > (a.max_positions or 0),
        lambda a, r, g: (
            f"sequence {r.sequence_length:,} is beyond the {a.max_positions:,} positions of the model's config"
        ),
    ),
    Caution(
        lambda a, r, g: not g.bf16 and r.precision == "fp16-mixed",
        lambda a, r, g: f"fp16 because {g.name} has no bf16 units",
    ),
    Caution(
        lambda a, r, g: bool(taken_as(r.trainer)),
        lambda a, r, g: f"{r.trainer} behaves like {taken_as(r.trainer)}, the version memfit knows",
    ),
    # Traces of six small runs under transformers 5.23 (LoRA and full, bf16 and mixed, two cards) need 3 % less to 4 %
    # more tensor bytes under FSDP1 than under FSDP2, and reserve 1 % less to 9 % more
    Caution(
        lambda a, r, g: _fsdp1(r) and not holds_unit_inputs(r),
        lambda a, r, g: f"FSDP1 counted as FSDP2, than which it reserves up to 9 % more{_older(a, r)}",
    ),
    Caution(
        lambda a, r, g: holds_unit_inputs(r),
        lambda a, r, g: (
            f"FSDP1 under {r.trainer} keeps every block's input and its gradient until the backward ends "
            f"({human(_held(a, r))}): transformers 4.52 and FSDP2 do not"
        ),
    ),
    # ROCm runs CUDA's allocator under another name; the other devices have allocators and kernels of their own
    Caution(
        lambda a, r, g: g.platform not in ("cuda", "rocm"),
        lambda a, r, g: f"allocator and kernels as on CUDA, those of {PLATFORMS[g.platform]} are not modelled",
    ),
    Caution(
        lambda a, r, g: g.platform == "rocm",
        lambda a, r, g: "kernel workspaces as on CUDA, ROCm's are not modelled",
    ),
    Caution(
        lambda a, r, g: g.platform == "hpu" and r.quantization != "none",
        lambda a, r, g: "bitsandbytes calls its 4-bit support on Gaudi partial",
    ),
    Caution(lambda a, r, g: r.compile, lambda a, r, g: _compiled(a, r)),
    Caution(
        lambda a, r, g: checkpointing_of(r) != r.checkpointing,
        lambda a, r, g: f"selective checkpointing is plain: {r.trainer}'s does not reach a model with adapters",
    ),
    Caution(
        lambda a, r, g: r.offloaded_by_fsdp and head_apart(r, a),
        lambda a, r, g: "TRL computes the loss on the CPU, where the head is offloaded: slow for a large vocabulary",
    ),
    Caution(
        lambda a, r, g: r.shard == "parameters" and optimizer(r.optimizer).package == "torchao",
        lambda a, r, g: "a run with torchao's 8-bit states cannot resume under FSDP2: torchao 0.18 has no broadcast_",
    ),
    Caution(
        lambda a, r, g: r.quantization == "int8" and r.checkpointing != "none",
        lambda a, r, g: "bitsandbytes' 8-bit layers keep their inputs, which checkpointing cannot free; 4 bits do not",
    ),
)


def cautions(architecture: Architecture, recipe: Recipe, gpu: Gpu) -> tuple[str, ...]:
    """Return every caution about this recipe on this card."""
    return tuple(c.text(architecture, recipe, gpu) for c in CAUTIONS if c.when(architecture, recipe, gpu))
