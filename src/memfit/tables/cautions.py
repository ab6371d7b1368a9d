"""Cautions to print with an answer: they do not forbid the recipe. A new caution is one row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from memfit.nouns.architecture import Architecture
from memfit.nouns.gpu import Gpu, Platform
from memfit.nouns.job import Recipe
from memfit.tables.combinations import head_apart
from memfit.tables.optimizers import optimizer
from memfit.tables.trainers import checkpointing_of, taken_as
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
