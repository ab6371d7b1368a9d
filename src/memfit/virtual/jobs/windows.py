"""Towers that attend within windows: windows of one size attend in one call, which takes the same bytes in less time.

Under sdpa, Qwen2.5-VL's tower calls attention once a window: 100 times a layer for an image of 1024 x 1024. The results
of all windows together are as large either way, and on a virtual card their order has no meaning.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from memfit.virtual.patching import patched

MODULES = {"qwen2_5_vl": "transformers.models.qwen2_5_vl.modeling_qwen2_5_vl"}
_TOKENS = 2  # the dimension of queries that windows divide: [1, heads, tokens, width]


class _Torch:
    """PyTorch for the module of a tower: windows are split and joined by their size."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def split(tensor: Tensor, sizes: Any, dim: int = 0) -> Any:
        """Return the windows of each size as one batch, [windows, heads, tokens, width]."""
        if dim != _TOKENS:
            return torch.split(tensor, sizes, dim)
        counted = sorted(Counter(sizes).items())
        parts = torch.split(tensor, [length * count for length, count in counted], dim)
        return [
            part[0].unflatten(1, (count, length)).transpose(0, 1)
            for part, (length, count) in zip(parts, counted, strict=True)
        ]

    @staticmethod
    def cat(tensors: Any, dim: int = 0) -> Tensor:
        """Join results, [windows, tokens, heads, width], to those of one sequence."""
        if dim == 1 and tensors[0].dim() == 4:
            return torch.cat([part.reshape(1, -1, *part.shape[2:]) for part in tensors], dim)
        return torch.cat(tensors, dim)


@contextmanager
def together(model_type: str) -> Iterator[None]:
    """Let the windows of a model's tower attend together, if it has windows."""
    if model_type not in MODULES:
        yield
        return
    with patched(import_module(MODULES[model_type]), {"torch": _Torch()}):
        yield
