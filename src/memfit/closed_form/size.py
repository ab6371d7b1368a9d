"""Sizes as polynomials of the batch: bytes = sum(coefficient * basis), so one trace of a block serves every batch size.

A basis is a row of BASES by its name, or of PARAMETRIC_BASES as (name, n, m), two values that its row explains.
The code of layers counts tokens; `rows_of` turns its bases into those of images, whose patches are the tokens of a
tower: their number depends on the samples of a micro-batch and not on the length of its texts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

from memfit.nouns.architecture import Rows
from memfit.tables.cuda_kernels import key_splits, reduction
from memfit.tables.cudnn_convolutions import workspace

Basis = str | tuple[str, Any, int]
Size = Mapping[Any, int]  # keys are Basis; Any because Mapping is invariant in its keys

TILE_TOKENS = 4096  # rows of a logits tile in TRL's fused head (trl/kernels/chunked_logprob.py)


def scaled(size: Size, factor: int) -> dict[Basis, int]:
    """Return the size with every coefficient multiplied by `factor`."""
    return {k: v * factor for k, v in size.items()}


def added(total: dict[Basis, int], size: Size, sign: int = 1) -> None:
    """Add `size` to `total` in place."""
    for k, v in size.items():
        total[k] = total.get(k, 0) + sign * v


Units = Callable[[Size], Size]


def tokens_of_the_text(size: Size) -> Size:
    """Return a size as it is: its bases count the tokens of texts."""
    return size


@lru_cache(maxsize=256)
def rows_of(rows: Rows, *, one: bool = False) -> Units:
    """Return what turns bases of tokens into those of `rows`; `one`: into those of a single row of them."""
    return partial(_in_rows, Rows(1, rows.length) if one else rows, "1" if one else "B")


def _in_rows(rows: Rows, each: str, size: Size) -> Size:
    """Return a size whose sequences are rows of a fixed length; `each`: the basis of what is there for every sample."""
    total: dict[Basis, int] = {}
    for basis, coefficient in size.items():
        added(total, _of_rows(rows, each, basis), coefficient)
    return total


def _of_rows(rows: Rows, each: str, basis: Basis) -> Size:
    count, length = rows.count, rows.length
    if isinstance(basis, tuple):
        name, n, m = basis
        if name == "reduce":
            return {("summed", n, count * length * m) if each == "B" else ("summed once", n, length * m): 1}
        if name == "tiles":
            return {each: m * count * -(-length // n)}
        return {basis: 1}
    found = {"B": {each: count}, "S": {"1": length}, "SS": {"1": length**2}, "TS": {each: count * length**2}}
    if basis in found:
        return found[basis]
    if basis.startswith("T"):  # T, and T32, T64, T128: rows rounded up
        step = int(basis[1:]) if basis[1:].isdigit() else 1
        return {each: count * _rounded(length, step)}
    return {basis: 1}


def covers(big: Size, small: Size) -> bool:
    """Return whether `big` is at least `small` for every batch, because no coefficient is smaller."""
    for k, v in small.items():  # loops: any() would make a generator, in the hottest place of a trace
        if big.get(k, 0) < v:
            return False
    for k, v in big.items():  # noqa: SIM110
        if v < 0 and k not in small:
            return False
    return True


@dataclass(frozen=True, slots=True)
class Dims:
    """The micro-batch and the card, which give every basis its number."""

    batch: int  # B
    sequence: int  # S
    multiprocessors: int = 108
    threads_per_multiprocessor: int = 2048
    label_share: float = 1.0  # share of the positions with a successor that have a label
    target: int = 0  # tokens of what a decoder writes of `sequence` tokens of its encoder; 0: there is no encoder
    source: int = 0  # tokens of the encoder, in the dimensions of its decoder

    @property
    def labels(self) -> int:
        """Return L, the number of positions whose next token is learned."""
        return int(self.batch * (self.sequence - 1) * self.label_share)

    @property
    def tokens(self) -> int:
        """Return T, the tokens of a micro-batch."""
        return self.batch * self.sequence

    @property
    def decoder(self) -> Dims:
        """Return the dimensions of the decoder, whose sequences are the targets."""
        return replace(self, sequence=self.target, source=self.sequence)

    def value(self, basis: Basis) -> int:
        """Return the number a basis stands for."""
        if isinstance(basis, str):
            return BASES[basis](self)
        name, n, m = basis
        return PARAMETRIC_BASES[name](self, n, m)

    def staging(self, rows: int, columns: int) -> int:
        """Return the bytes of the staging buffer of `x.sum(0)` over [rows, columns]."""
        found = reduction(
            rows, columns, fastest=False, multiprocessors=self.multiprocessors, threads=self.threads_per_multiprocessor
        )
        return found[0] if found else 0

    def bytes(self, size: Size) -> int:
        """Return a size for this batch, in bytes."""
        return sum(c * self.value(k) for k, c in size.items())


def _rounded(n: int, step: int) -> int:
    return -(-n // step) * step


EMBEDDING_SORT_FROM = 3072  # indices; below it embedding_backward uses one dense kernel without buffers


def embedding_sort(rows: int, columns: int, table: int | None = None) -> int:
    """Return the bytes of the sort buffers of nn.Embedding's backward (embedding_backward_cuda_kernel).

    Measured on 2.13: 8192 indices x 4096 columns, bf16 -> 147,636,224 B. The buffers are eight int64 copies of the
    indices and fp32 partial sums, one per 10 indices (NROWS_PER_THREAD) and one more for each that differs, at most the
    rows of the table.
    """
    if rows <= EMBEDDING_SORT_FROM:
        return 0
    return 64 * rows + 4 * columns * (rows // 10 + min(rows, table or rows))


BASES: dict[str, Callable[[Dims], int]] = {
    "1": lambda d: 1,
    "B": lambda d: d.batch,
    "S": lambda d: d.sequence,
    "T": lambda d: d.tokens,
    "SS": lambda d: d.sequence**2,
    "BB": lambda d: d.batch**2,  # pairs of texts
    "TS": lambda d: d.tokens * d.sequence,
    "T+": lambda d: d.tokens if d.batch > 1 else 0,  # a copy that one sequence does not need, because a view suffices
    "T32": lambda d: d.batch * _rounded(d.sequence, 32),  # buffers of kernels
    "T64": lambda d: d.batch * _rounded(d.sequence, 64),
    "T128": lambda d: d.batch * _rounded(d.sequence, 128),
    "L": lambda d: d.labels,
    "X": lambda d: d.batch * d.source,  # tokens that the encoder of a decoder has read
    "SX": lambda d: d.sequence * d.source,
    "TX": lambda d: d.tokens * d.source,
    "tile": lambda d: min(d.labels, TILE_TOKENS),
    "processors": lambda d: d.multiprocessors,
}


def _pairs(d: Dims, basis: str) -> tuple[int, int]:
    """Return the rows and columns of a mask over pairs of tokens."""
    return d.tokens if basis[0] == "T" else d.sequence, d.source if basis[1] == "X" else d.sequence


def _aligned(d: Dims, basis: str, step: int) -> int:
    rows, columns = _pairs(d, basis)
    return rows * _rounded(columns, step)


def _ragged(d: Dims, basis: str, step: int) -> int:
    rows, columns = _pairs(d, basis)
    return rows * columns if columns % step else 0


def _evened(d: Dims, basis: str, step: int) -> int:
    return _aligned(d, basis, step) if _ragged(d, basis, step) else 0


PARAMETRIC_BASES: dict[str, Callable[[Dims, Any, int], int]] = {
    "aligned": _aligned,  # a mask whose rows are padded to a multiple of a number of elements
    "ragged": _ragged,  # one whose rows are not such a multiple; 0 if they are
    "evened": _evened,  # its padded copy; 0 if no copy is made
    "decoder": lambda d, basis, _: d.decoder.value(basis),  # of programs whose tokens are the targets
    "chunk": lambda d, n, _: d.batch * min(d.sequence, n),
    "chunks": lambda d, n, _: -(-d.sequence // n),
    "part": lambda d, n, _: d.batch * -(-d.sequence // n),
    "whole": lambda d, n, _: 0 if d.sequence % n else d.tokens,
    "rows": lambda d, n, _: min(d.labels, n),
    "past": lambda d, n, _: int(d.labels > n),
    "liger": lambda d, n, _: min(d.tokens, 1 << (max(-(-d.tokens // n), 1) - 1).bit_length()),  # rows of Liger's chunk
    "tiles": lambda d, n, heads: d.batch * heads * -(-d.sequence // n),
    # a [B, 1, S, S] mask, or a copy for every head where S is no multiple of n
    "mask": lambda d, heads, n: d.tokens * (heads * _rounded(d.sequence, n) if d.sequence % n else d.sequence),
    # n elements for every head and key split of the memory-efficient kernel
    "keysplit": lambda d, heads, n: d.batch * heads * n * key_splits(d.batch * heads, d.sequence),
    # staging buffer of a sum over rows, of which each token has `rows`; it depends on the card's multiprocessors
    "reduce": lambda d, columns, rows: d.staging(d.tokens * rows, columns),
    "reduce source": lambda d, columns, rows: d.staging(d.batch * d.source * rows, columns),  # ... of the encoder
    "embed": lambda d, columns, itemsize: embedding_sort(d.tokens, columns),
    # the same staging buffer where every sample has so many rows, and where there are so many in all
    "summed": lambda d, columns, rows: d.staging(d.batch * rows, columns),
    "summed once": lambda d, columns, rows: d.staging(rows, columns),
    # workspace of a pass (convolution of one image, part), of which each sample has `images`
    "convolution": lambda d, c, images: workspace(replace(c[0], batch=d.batch * images), c[1], d.multiprocessors),
    "embed pairs": lambda d, columns, rows: embedding_sort(d.sequence**2, columns, rows),
}
