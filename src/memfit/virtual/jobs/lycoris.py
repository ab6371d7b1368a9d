"""LoKr adapters as SimpleTuner 4 runs them: LyCORIS 3.3 in its bypass mode, written after its source.

Each adapted linear layer adds to its own output that of a Kronecker product of two small matrices, which is never
formed (lycoris/modules/lokr.py, bypass_forward_diff): the input is split into groups, multiplied with the larger
matrix in each, and the groups with the smaller one.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from peft.tuners.lokr.layer import factorization
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.nn.modules.conv import _ConvNd

from memfit.errors import BadInput, Unsupported

DEVICE = "cuda"
HINT = "--lora-targets Attention:16, classes of diffusers' modules, each with the factor of its matrices"


class LoKr(nn.Module):
    """The matrices of one layer; the larger is a product of two of rank `rank` where that is less than half of it."""

    def __init__(self, of: nn.Linear, rank: int, factor: int, dtype: torch.dtype) -> None:
        super().__init__()
        (tall, out), (wide, inner) = (factorization(n, factor) for n in (of.out_features, of.in_features))
        whole = 2 * rank >= max(out, inner)
        sizes = ((tall, wide), *(((out, inner),) if whole else ((rank, inner), (out, rank))))
        self.small, *self.large = (nn.Parameter(torch.empty(size, dtype=dtype, device=DEVICE)) for size in sizes)
        for i, weight in enumerate(self.large):
            self.register_parameter(f"large_{i}", weight)

    def forward(self, x: Tensor) -> Tensor:
        """Return what it adds to the layer's output. [..., in] -> [..., out]"""
        found = x.reshape(*x.shape[:-1], self.small.shape[1], -1)
        for weight in self.large:
            found = linear(found, weight)
        found = linear(found.transpose(-1, -2), self.small).transpose(-1, -2)
        return found.reshape(*found.shape[:-2], -1) * 1.0  # its `multiplier`, in a tensor of its own


def adapt(denoiser: nn.Module, classes: tuple[str, ...], rank: int, dtype: torch.dtype) -> None:
    """Add adapters to the linear layers within modules of these classes: "Attention:25" with a factor of 25.

    A layer within several of them takes the innermost's factor. Raises BadInput and Unsupported.
    """
    factors = {name: int(n) if n.isdecimal() else -1 if not n else 0 for name, _, n in
               (one.partition(":") for one in classes)}  # fmt: skip
    if unread := [name for name, factor in factors.items() if factor < -1 or factor == 0]:
        raise BadInput(f"{unread[0]!r} has no factor above 0", hint=HINT)
    found: dict[nn.Linear, int] = {}
    for module in denoiser.modules():  # outer ones come first
        factor = factors.get(type(module).__name__)
        if factor is not None:
            found |= {layer: factor for layer in module.modules() if isinstance(layer, nn.Linear)}
            if any(isinstance(layer, _ConvNd) for layer in module.modules()):
                raise Unsupported("trace cannot run LyCORIS' adapters of convolutions", hint=HINT)
    if not found:
        raise BadInput(f"the model has no module of the class {', '.join(map(repr, factors))}", hint=HINT)
    added = [LoKr(layer, rank, factor, dtype) for layer, factor in found.items()]
    for layer, adapter in zip(found, added, strict=True):
        layer.forward = partial(_with, layer.forward, adapter)  # type: ignore[method-assign]
    denoiser.lycoris = nn.ModuleList(added)


def _with(forward: Any, adapter: LoKr, x: Tensor) -> Tensor:
    return forward(x) + adapter(x)
