"""The logits of a program that ran out: the request that failed held against the shapes its frames know."""

from __future__ import annotations

from collections.abc import Iterator
from traceback import walk_tb

import torch
from torch import Tensor

from memfit.explain.evidence import SHOWN, SURE, Clue
from memfit.nouns.finding import Proof
from memfit.units import human

LEAST_WORDS = 30_000  # of a vocabulary: hidden layers of most models are narrower
WIDTHS = (4, 2)  # bytes of a logit
ROUNDING = 512  # bytes by which a request is more than its tensor


def logits_clue(error: BaseException, asked: int) -> Clue | None:
    """`asked` bytes as tokens x words x width, by a tensor or an output layer in the frames the error came through."""
    for rows, words, name in _shapes(error):
        for width in WIDTHS:
            if words >= LEAST_WORDS and rows and 0 <= asked - rows * words * width < ROUNDING:
                said = f"{human(asked)} are {rows:,} tokens x {words:,} words x {width} B, as of '{name}'"
                return Clue("logits", SURE + SHOWN, Proof(said, asked))
    return None


def _shapes(error: BaseException) -> Iterator[tuple[int, int, str]]:
    """(rows, columns, name) of what the frames hold, the innermost frame first."""
    for frame, _ in reversed(list(walk_tb(error.__traceback__))):
        values = list(frame.f_locals.items())
        for name, value in values:
            if isinstance(value, Tensor) and value.dim() >= 2:
                yield value.numel() // max(value.shape[-1], 1), value.shape[-1], name
        for _, layer in values:
            if isinstance(layer, torch.nn.Linear):
                for name, value in values:
                    if isinstance(value, Tensor) and value.dim() >= 2 and value.shape[-1] == layer.in_features:
                        yield value.numel() // value.shape[-1], layer.out_features, name
