"""Sampling the answers of a step by transformers' `generate`, before TRL's trainers learn from them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from memfit.allocator.heap import Heap
from memfit.closed_form.numerics import Numerics, kernel_width
from memfit.closed_form.run.micro_step import MicroStep, SizeMeter, fold, meter_of
from memfit.closed_form.run.setup import Situation, micro_step_of
from memfit.closed_form.run.unroll import Pass, free_all
from memfit.closed_form.size import Dims
from memfit.nouns.architecture import Architecture
from memfit.nouns.job import Recipe
from memfit.tables.cuda_kernels import Capability
from memfit.tables.quantization import QUANTIZATIONS
from memfit.tables.trainers import Trainer

# fp32 tensors of [answers, vocabulary] in GenerationMixin._sample of transformers 5.23 while the next token is chosen:
# the logits, their copy, the results of two processors with a copy of their input, and scores and probabilities of the
# token before. The last three stay during the next pass
SCORES, KEPT_SCORES = 7, 3
# In how many passes the cache grows to its length. A run takes one for each token; the sizes at the end are the same
GROWTHS = 5
SINGLE = 2  # passes of one token after them


@dataclass(frozen=True, slots=True, eq=False)
class Generation:
    """The answers of a step: one pass over all prompts, then one for each token on a growing cache."""

    prompts: MicroStep
    meter: SizeMeter  # of all prompts
    each: tuple[tuple[int, int], ...]  # of every layer: bytes of the keys of one token of all answers, its window
    prompt: int
    length: int  # of a prompt with its answer, without the last token
    scores: int  # bytes of one fp32 tensor of [answers, vocabulary]
    casts: int  # bytes of the weights that autocast holds during a pass
    restored: tuple[int, ...]  # bytes of the largest 4-bit weight and of its scales as they are restored for a product

    def keys(self, tokens: int) -> list[int]:
        """Return the bytes of each layer's keys, which its values take too."""
        return [size * min(tokens, window) for size, window in self.each]

    @property
    def reading(self) -> int:
        """Return the most bytes of the pass over the prompts."""
        return fold(self.prompts.until_loss, self.meter).height

    @property
    def cache(self) -> int:
        """Return the bytes of keys and values at their full length."""
        return 2 * sum(self.keys(self.length))

    @property
    def choosing(self) -> int:
        """Return the most bytes beside the cache: scores of the next token, or a pass with the keys it copies."""
        passing = KEPT_SCORES * self.scores + self.casts + max(*self.keys(self.length), sum(self.restored), 0)
        return max(SCORES * self.scores, passing)

    def play(self, heap: Heap) -> None:
        """Play the generation on a heap, and free everything."""
        Pass(heap, self.meter, self.prompts).run(0)
        cache = [[heap.malloc(size), heap.malloc(size)] for size in self.keys(self.prompt)]
        kept: list[Any] = []
        for tokens in self._lengths():
            for layer, size in zip(cache, self.keys(tokens), strict=True):
                for at in (0, 1):
                    grown = heap.malloc(size)
                    heap.free(layer[at])
                    layer[at] = grown
            free_all(heap, [heap.malloc(size) for size in self.restored])
            made = [heap.malloc(self.scores) for _ in range(SCORES - KEPT_SCORES)]
            free_all(heap, kept)
            kept = made[: -(SCORES - 2 * KEPT_SCORES)] if len(made) > KEPT_SCORES else made
            free_all(heap, made[len(kept) :])
        free_all(heap, [*kept, *(block for layer in cache for block in layer)])

    def _lengths(self) -> Iterator[int]:
        left = self.length - self.prompt - SINGLE
        for step in range(GROWTHS):
            yield self.prompt + left * (step + 1) // GROWTHS
        yield from range(self.length - SINGLE + 1, self.length + 1)


def generation_of(
    a: Architecture, r: Recipe, n: Numerics, t: Trainer, capability: Capability | None, dims: Dims
) -> Generation:
    """Return the generation of a recipe. dims: those of the card; its batch does not matter."""
    answers, shape = r.micro_batch * r.accumulation, a.shape
    n = n if r.method == "full" else replace(n, autocast=0)  # accelerate wraps the PeftModel, whose base generates
    situation = Situation(train=False, use_cache=True, mask_given=False)
    reading = r.but(micro_batch=answers, sequence_length=shape.prompt)
    width = kernel_width(r, n)
    layers = (x.attention for x in a.layers)
    trained = r.method == "full" and n.autocast not in (0, n.weight)
    weights = [w for x in a.layers for w in x.weights if w.kind == "linear"] + [w for w in a.head if w.kind == "linear"]
    return Generation(
        micro_step_of(a, reading, n, t, capability, situation),
        meter_of(Dims(answers, shape.prompt, dims.multiprocessors, dims.threads_per_multiprocessor)),
        tuple((answers * x.kv_heads * x.head_dim * width, x.window or r.sequence_length) for x in layers),
        shape.prompt, shape.prompt + shape.completion - 1, 4 * answers * a.vocabulary,
        n.autocast * sum(w.numel for w in weights) if trained else 0, _restored(a, r, n) if answers > 1 else (),
    )  # fmt: skip


def _restored(a: Architecture, r: Recipe, n: Numerics) -> tuple[int, ...]:
    """Return what the largest 4-bit weight takes for a product with several tokens; one alone has a kernel of its own.

    Source: bitsandbytes, autograd/_functions.py (matmul_4bit).
    """
    row = QUANTIZATIONS.get(r.quantization) if r.method == "qlora" else None
    if row is None or r.quantization == "int8":
        return ()
    largest = max((w.numel for x in a.layers for w in x.weights if w.kind == "linear" and not w.whole), default=0)
    return (largest * n.weight, *([4 * (largest // row.block)] if row.double else []))
