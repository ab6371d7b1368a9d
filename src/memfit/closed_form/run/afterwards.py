"""What comes after the steps of a run: a checkpoint saved and loaded again, adapters merged into their base."""

from __future__ import annotations

from dataclasses import dataclass, replace

from memfit.closed_form.numerics import Numerics
from memfit.closed_form.run.unroll import Heap
from memfit.closed_form.static import Static, static_of
from memfit.nouns.architecture import Architecture
from memfit.nouns.job import Recipe
from memfit.tables.optimizers import Optimizer
from memfit.tables.quantization import CHECKPOINTS, QUANTIZATIONS
from memfit.tables.trainers import Trainer

# stacked experts that are stored as they are; all others transformers stores expert by expert (conversion_mapping.py)
STORED_STACKED = frozenset({"gpt_oss", "llama4", "llama4_text"})


def taken_apart(a: Architecture, r: Recipe, n: Numerics) -> int:
    """Bytes that saving a whole model needs: the joint gate and up projections of all experts, copied apart."""
    if r.method != "full" or a.model_type in STORED_STACKED:
        return 0
    weights = (w for layer in a.layers for w in layer.weights if w.kind == "experts" and w.module == "gate_up_proj")
    return sum(w.numel for w in weights) * n.weight


def loaded_again(a: Architecture, r: Recipe, n: Numerics, o: Optimizer, t: Trainer) -> Static:
    """What lies on the card after resuming: PEFT loads 16-bit adapters in fp32, bitsandbytes paged states to the card."""
    wide = n if r.method == "full" else replace(n, adapter=4)
    return static_of(a, r, wide, replace(o, paged=False), t)


@dataclass(frozen=True, slots=True)
class Merge:
    """Bytes of the tensors of one merge: `before` and the product of the factors, made again when it is scaled; then `after`."""

    before: tuple[int, ...]
    delta: int
    after: tuple[int, ...]

    @property
    def peak(self) -> int:
        """The most that is there at once."""
        return sum(self.before) + self.delta + max(self.delta, sum(self.after))

    def play(self, memory: Heap) -> None:
        """All of it on a memory, and gone."""
        blocks = [memory.malloc(size) for size in (*self.before, self.delta, self.delta)]
        memory.free(blocks.pop(len(self.before)))
        blocks += [memory.malloc(size) for size in self.after]
        for block in blocks:
            memory.free(block)


def merging(s: Static, r: Recipe, n: Numerics, adapter: int) -> tuple[Merge, ...]:
    """How adapters go into the weights of one block of every kind, one after the other.

    adapter: itemsize of the factors, in which the product is made. A quantised weight is restored, added to in the wider
    dtype, and its sum sent to the host and back to be quantised. Source: PEFT 0.21, tuners/lora/layer.py and bnb.py.
    """
    return tuple(_merge(numel, r, n, adapter) for numel in s.adapted)


def _merge(numel: int, r: Recipe, n: Numerics, adapter: int) -> Merge:
    delta = numel * adapter
    if r.method != "qlora":
        return Merge((), delta, ())
    row = (QUANTIZATIONS | CHECKPOINTS)[r.quantization]
    stored = (row.payload(numel), row.scales(numel, 0))
    if r.quantization == "int8":  # restored in fp32, sent back in fp16
        return Merge((4 * numel,), delta, (4 * numel, 2 * numel, *stored))
    total = numel * max(n.weight, adapter)
    return Merge((numel * n.weight,), delta, (total, total, *stored))
