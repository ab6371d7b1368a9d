"""Sampling the answers of a step by transformers' `generate`, before TRL's trainers learn from them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from memfit.allocator.heap import Heap
from memfit.closed_form.numerics import Numerics, attention_kernel, kernel_width
from memfit.closed_form.run.micro_step import MicroStep, SizeMeter, fold, meter_of
from memfit.closed_form.run.setup import Situation, micro_step_of
from memfit.closed_form.run.unroll import Pass, TapeWriter, free_all
from memfit.closed_form.size import Dims
from memfit.nouns.architecture import Architecture, Attention, Weight
from memfit.nouns.job import Recipe
from memfit.tables.cuda_kernels import Capability
from memfit.tables.precisions import BYTES, meaning
from memfit.tables.quantization import QUANTIZATIONS
from memfit.tables.trainers import Trainer

# fp32 tensors of [answers, vocabulary] in GenerationMixin._sample of transformers 5.23 while the next token is chosen:
# the logits, their copy, the results of two processors with a copy of their input, and scores and probabilities of the
# token before. The last three stay during the next pass
SCORES, KEPT_SCORES = 7, 3
# In how many passes the cache grows to its length. A run takes one for each token; the sizes at the end are the same
GROWTHS = 5
SINGLE = 2  # passes of one token after them


# Rows up to which bitsandbytes 0.50 multiplies by a 4-bit weight without restoring it, on every card and for every
# shape (_GEMM_4BIT_CUSTOM_FLOOR_M of backends/cuda/ops.py). Beyond them it depends on both
FUSED_ROWS = 4


@dataclass(frozen=True, slots=True)
class DecodingLayer:
    """What one layer allocates in a pass of one token for every answer, in bytes."""

    token: int  # keys of one token of all answers, which its values take too
    window: int
    copies: tuple[int, ...]  # what attention makes of the keys and values of one token, until the layer's output
    casts: tuple[int, ...]  # weights that autocast holds until the end of the pass
    restored: tuple[tuple[int, ...], ...]  # each 4-bit weight and its scales, as they are restored for a product

    def keys(self, tokens: int) -> int:
        """Return the bytes of the keys of so many tokens."""
        return self.token * min(tokens, self.window)

    def most(self, tokens: int) -> int:
        """Return the most bytes beside cache and casts."""
        seen = min(tokens, self.window)
        return max(self.keys(tokens), sum(self.copies) * seen, *map(sum, self.restored))

    def play(self, heap: Heap, cache: list[Any], tokens: int) -> list[Any]:
        """Play the layer on a heap, and return the casts it has made."""
        casts = [heap.malloc(size) for size in self.casts]
        for at, old in enumerate(cache):
            cache[at] = heap.malloc(self.keys(tokens))
            heap.free(old)
        copies = [heap.malloc(size * min(tokens, self.window)) for size in self.copies]
        free_all(heap, reversed(copies))
        for sizes in self.restored:
            free_all(heap, [heap.malloc(size) for size in sizes])
        return casts


@dataclass(frozen=True, slots=True, eq=False)
class Generation:
    """The answers of a step: one pass over all prompts, then one for each token on a growing cache."""

    prompts: MicroStep
    meter: SizeMeter  # of all prompts
    layers: tuple[DecodingLayer, ...]
    prompt: int
    length: int  # of a prompt with its answer, without the last token
    scores: int  # bytes of one fp32 tensor of [answers, vocabulary]
    head: tuple[int, ...]  # weights of the head that autocast holds during a pass

    @property
    def reading(self) -> int:
        """Return the most bytes of the pass over the prompts."""
        return fold(self.prompts.until_loss, self.meter).height

    @property
    def cache(self) -> int:
        """Return the bytes of keys and values at their full length."""
        return 2 * sum(layer.keys(self.length) for layer in self.layers)

    @property
    def choosing(self) -> int:
        """Return the most bytes beside the cache: scores of the next token, or a pass with what a layer copies."""
        casts = sum(self.head) + sum(sum(layer.casts) for layer in self.layers)
        most = max(layer.most(self.length) for layer in self.layers)
        return max(SCORES * self.scores, KEPT_SCORES * self.scores + casts + most)

    def play(self, heap: Heap, workspace: int = 0) -> None:
        """Play the generation on a heap, and free everything; `workspace`: bytes of cuBLAS's, if nothing ran before."""
        reading = Pass(heap, self.meter, self.prompts, keeps_cache=True)
        reading.run(workspace)
        cache = reading.cache
        if isinstance(heap, TapeWriter):
            heap.instant("generation")
        kept: list[Any] = []
        for tokens in self._lengths():
            casts: list[Any] = []
            for layer, held in zip(self.layers, cache, strict=True):
                casts += layer.play(heap, held, tokens)
            free_all(heap, [*casts, *(heap.malloc(size) for size in self.head)])
            made = [heap.malloc(self.scores) for _ in range(SCORES - KEPT_SCORES)]
            free_all(heap, kept)
            kept = made[: -(SCORES - 2 * KEPT_SCORES)] if len(made) > KEPT_SCORES else made
            free_all(heap, made[len(kept) :])
        free_all(heap, [*kept, *(block for held in cache for block in held)])

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
    trained = r.method == "full" and n.autocast not in (0, n.weight)
    linears = [[w for w in part if w.kind == "linear"] for part in (*(x.weights for x in a.layers), a.head)]
    casts = [tuple(n.autocast * w.numel for w in part) if trained else () for part in linears]
    layers = [
        _decoding(
            layer.attention, answers, r, n, t, capability, cast, _restored(weights, r) if answers > FUSED_ROWS else ()
        )
        for layer, cast, weights in zip(a.layers, casts[:-1], linears[:-1], strict=True)
    ]
    return Generation(
        micro_step_of(a, reading, n, t, capability, situation),
        meter_of(Dims(answers, shape.prompt, dims.multiprocessors, dims.threads_per_multiprocessor)),
        tuple(layers), shape.prompt, shape.prompt + shape.completion - 1, 4 * answers * a.vocabulary, casts[-1],
    )  # fmt: skip


def _decoding(
    a: Attention, answers: int, r: Recipe, n: Numerics, t: Trainer, capability: Capability | None,
    casts: tuple[int, ...], restored: tuple[tuple[int, ...], ...],
) -> DecodingLayer:  # fmt: skip
    """Return a layer in passes of one token, whose attention gets no mask."""
    width = kernel_width(r, n)
    kernel, written = attention_kernel(a, r, width, capability, masked=False, train=False), 4
    grouped = a.kv_heads not in (1, a.heads) and a.code != "falcon"
    repeated = grouped and (kernel in ("math", "eager") or a.head_dim > 256 or r.attention in t.repeats_keys)
    copies: list[int] = []
    if kernel == "math" and width != written:
        copies += [written * a.kv_heads * head for head in (a.head_dim, a.value_dim)]
    width = written if kernel == "math" else width
    if repeated:
        copies += [width * a.heads * head for head in (a.head_dim, a.value_dim)]
    if kernel == "math":  # scaled keys
        copies.append(width * (a.heads if repeated else a.kv_heads) * a.head_dim)
    return DecodingLayer(
        answers * a.kv_heads * a.head_dim * kernel_width(r, n), a.window or r.sequence_length,
        tuple(answers * size for size in copies), casts, restored,
    )  # fmt: skip


def _restored(weights: Sequence[Weight], r: Recipe) -> tuple[tuple[int, ...], ...]:
    """Return what each 4-bit weight takes for a product in the compute dtype.

    Source: bitsandbytes 0.50, backends/cuda/ops.py (_dequant_linear_fallback).
    """
    row = QUANTIZATIONS.get(r.quantization) if r.method == "qlora" else None
    if row is None or r.quantization == "int8":
        return ()
    width = BYTES[meaning(r).computed]
    scales = [4 * (w.numel // row.block) if row.double else 0 for w in weights]
    return tuple((size, w.numel * width) for size, w in zip(scales, weights, strict=True) if not w.whole)
