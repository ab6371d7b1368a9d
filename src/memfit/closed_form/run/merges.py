"""The merges of adapters into the weights of their base, one matrix at a time."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

from memfit.allocator.heap import Heap
from memfit.closed_form.numerics import DORA, Numerics
from memfit.nouns.architecture import Weight
from memfit.nouns.job import Recipe
from memfit.tables.quantization import CHECKPOINTS, QUANTIZATIONS


@dataclass(frozen=True, slots=True)
class Merge:
    """The tensors of one merge in order: a positive entry is the bytes of one, a negative one frees that of its number.

    Tensors are numbered from 1; what is left is freed at the end.
    """

    events: tuple[int, ...]

    @property
    def peak(self) -> int:
        """Return the most bytes that exist at once."""
        sizes = [0, *(size for size in self.events if size > 0)]
        return max(accumulate(size if size > 0 else -sizes[-size] for size in self.events))

    def play(self, heap: Heap) -> None:
        """Play the merge on a heap, and free everything."""
        blocks: dict[int, object] = {}
        for event in self.events:
            if event > 0:
                blocks[len(blocks) + 1] = heap.malloc(event)
            else:
                heap.free(blocks[-event])
                blocks[-event] = None
        for block in blocks.values():
            if block is not None:
                heap.free(block)


def merge_of(weight: Weight, r: Recipe, n: Numerics, adapter: int) -> Merge:
    """Return the merge into a weight; `adapter`: itemsize of the factors and their product, which is scaled.

    A quantised weight is dequantised, added to in the wider dtype, and sent to the host and back to be quantised.
    Source: PEFT 0.21, tuners/lora/layer.py and bnb.py.
    """
    numel = weight.numel
    row = (QUANTIZATIONS | CHECKPOINTS)[r.quantization] if r.method == "qlora" else None
    delta, base = numel * adapter, numel * (4 if r.quantization == "int8" and row else n.weight)
    total, rows = max(base, delta), weight.shape[-2]
    stored = (row.payload(numel), row.scales(numel, rows)) if row else ()
    halved = row is not None and row.key == "int8"  # dequantised in fp32, and sent back in fp16
    if r.adapter == DORA:
        after = (2 * numel if halved else base, *stored) if row else ()
        return _decomposed(rows * adapter, base, delta, total, after)
    if row is None:
        return Merge((delta, delta, -1))
    return Merge((base, delta, delta, -2, total, 2 * numel if halved else total, *stored))


def _decomposed(norms: int, base: int, delta: int, total: int, after: tuple[int, ...]) -> Merge:
    """Return the merge of DoRA's adapters, which needs the norms of the adapted weight before the sum is scaled.

    `after`: what a quantised weight is sent back in, and the tensors it is stored in; empty for any other weight.
    Source: PEFT 0.21, tuners/lora/variants.py, DoraLinearVariant.merge_safe.
    """
    events: list[int] = []

    def new(size: int) -> int:
        events.append(size)
        return sum(event > 0 for event in events)

    original = new(base) if after else 0
    product, scaled = new(delta), new(delta)
    events.append(-product)
    unmerged = new(base)
    again = new(delta)
    adapted = new(total)
    events.append(-again)
    new(norms)
    events.append(-adapted)
    if after:
        new(base)  # the weight is dequantised once more
    new(norms)  # magnitude / norms
    added, result = new(total), new(total)
    if total > base:
        new(base)  # the result in the dtype of the weight
        events.append(-result)
    events += [-added, -unmerged, -scaled]
    if after:
        events += [-original, *after]
    return Merge(tuple(events))
