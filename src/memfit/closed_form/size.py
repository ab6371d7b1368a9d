"""Sizes as polynomials of the batch: bytes = sum(coefficient * basis), so one trace of a block serves every batch size.

Basis names: "1" constant · "B" sequences · "S" tokens per sequence · "T" tokens per micro-batch (B*S) · "SS" S*S · "TS"
T*S · "processors" the card's multiprocessors · "T+" T, but 0 for one sequence, where a view suffices · "T32", "T64",
"T128" B * S rounded up to 32, 64 or 128 (kernel buffers) · "L" positions with a label · "tile" min(L, 4096) · ("past",
n, 0) 1 where more than n positions have a label, else 0 · ("whole", n, 0) T where S is a multiple of n, else 0 ·
("mask", N, n) a [B, 1, S, S] mask, or a copy for N heads where S is no multiple of n · ("chunk", n, 0) B * min(S, n) ·
("chunks", n, 0) S / n · ("reduce", columns, rows of a token) the staging buffer of a sum over rows, which depends on
the card's multiprocessors · ("embed", D, itemsize) sort buffers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from memfit.tables.cuda_kernels import key_splits, reduction

Basis = str | tuple[str, int, int]
Size = Mapping[Any, int]  # keys are Basis; Any because Mapping is invariant in its keys

NOTHING: Size = {}
TILE_TOKENS = 4096  # rows of a logits tile in TRL's fused head (trl/kernels/chunked_logprob.py)


def scaled(size: Size, factor: int) -> dict[Basis, int]:
    """Every coefficient times `factor`."""
    return {k: v * factor for k, v in size.items()}


def added(total: dict[Basis, int], size: Size, sign: int = 1) -> None:
    """Add `size` to `total` in place."""
    for k, v in size.items():
        total[k] = total.get(k, 0) + sign * v


def covers(big: Size, small: Size) -> bool:
    """True when `big` is at least `small` for every batch (no coefficient is smaller)."""
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
    label_share: float = 1.0  # of the positions that have a successor

    @property
    def labels(self) -> int:
        """L: positions whose next token is learned."""
        return int(self.batch * (self.sequence - 1) * self.label_share)

    def value(self, basis: Basis) -> int:
        """Return the number a basis stands for."""
        b, s = self.batch, self.sequence
        if isinstance(basis, tuple):
            kind, columns, width = basis
            if kind == "chunk":
                return b * min(s, columns)
            if kind == "chunks":
                return -(-s // columns)
            if kind == "rows":
                return min(self.labels, columns)
            if kind == "part":
                return b * -(-s // columns)
            if kind == "liger":
                return min(b * s, 1 << (max(-(-b * s // columns), 1) - 1).bit_length())
            if kind == "tiles":
                return b * width * -(-s // columns)
            if kind == "past":
                return int(self.labels > columns)
            if kind == "whole":
                return 0 if s % columns else b * s
            if kind == "mask":
                return b * s * (columns * _ceil(s, width) if s % width else s)
            if kind == "keysplit":
                return b * columns * width * key_splits(b * columns, s)
            if kind == "reduce":
                return self._staging(b * s * width, columns)
            return embedding_sort(b * s, columns, width)
        match basis:
            case "1":
                return 1
            case "processors":
                return self.multiprocessors
            case "B":
                return b
            case "T":
                return b * s
            case "T+":
                return b * s if b > 1 else 0
            case "S":
                return s
            case "TS":
                return b * s * s
            case "SS":
                return s * s
            case "T32":
                return b * _ceil(s, 32)
            case "L":
                return self.labels
            case "tile":
                return min(self.labels, TILE_TOKENS)
            case "T64":
                return b * _ceil(s, 64)
            case "T128":
                return b * _ceil(s, 128)
        raise KeyError(basis)

    def _staging(self, rows: int, columns: int) -> int:
        """Return bytes of the staging buffer of `x.sum(0)` over [rows, columns]."""
        found = reduction(
            rows, columns, fastest=False, multiprocessors=self.multiprocessors, threads=self.threads_per_multiprocessor
        )
        return found[0] if found else 0

    def bytes(self, size: Size) -> int:
        """Return a size for this batch, in bytes."""
        return sum(c * self.value(k) for k, c in size.items())


def _ceil(n: int, step: int) -> int:
    return -(-n // step) * step


EMBEDDING_SORT_FROM = 3072  # indices; below it embedding_backward uses one dense kernel without buffers


def embedding_sort(rows: int, columns: int, itemsize: int) -> int:
    """Bytes of the sort buffers of nn.Embedding's backward (embedding_backward_cuda_kernel) for `rows` indices.

    Measured on 2.13: 8192 indices x 4096 columns, bf16 -> 147,636,224 B. Eight int64 copies of the indices and fp32
    partial sums, one per 10 indices in the worst case (NROWS_PER_THREAD).
    """
    if rows <= EMBEDDING_SORT_FROM:
        return 0
    return 64 * rows + 4 * columns * (rows // 10 + rows)
