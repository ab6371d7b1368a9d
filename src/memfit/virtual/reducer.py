"""Tells what DDP's C++ lays out by size: the tensors that it is given, kept as rows, and names for what it allocates of them."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from memfit.virtual.dispatch import current
from memfit.virtual.ledger import BROADCAST, BUCKET
from memfit.virtual.patching import patched
from memfit.virtual.rows import Piece, Row

_dist: Any = dist
_c10d: Any = torch._C._distributed_c10d


def _pieces(tensors: Sequence[Tensor]) -> tuple[Piece, ...]:
    return tuple((t.dtype, t.numel()) for t in tensors)


@contextmanager
def told() -> Iterator[None]:
    """While a world is open, the card keeps the rows that are laid out on it, whose allocations are named."""
    init, rebuild, send = _c10d.Reducer.__init__, _c10d.Reducer._rebuild_buckets, _dist._broadcast_coalesced
    arriving: dict[int, tuple[list[Tensor], list[int], tuple[int, ...], ExitStack]] = {}  # by id of the reducer

    def begin(self: Any, parameters: Any, *args: Any) -> None:
        _, _, _, _, cap, unused, _, _, first = args[:9]
        limits, parameters, start = (first, cap) if first < cap else (cap,), list(parameters), len(current().ledger.ops)
        init(self, parameters, *args)
        current().keep(Row(BUCKET, _pieces(parameters), limits if unused else (sys.maxsize,)), start)
        if unused:  # buckets stay as they are
            return
        order, hooks = list[int](), ExitStack()
        for i, p in enumerate(parameters):
            hooks.callback(p.register_post_accumulate_grad_hook(lambda _, i=i: order.append(i)).remove)
        arriving[id(self)] = parameters, order, limits, hooks

    def again(self: Any) -> bool:
        start = len(current().ledger.ops)
        if not rebuild(self):
            return False
        parameters, order, limits, hooks = arriving.pop(id(self))
        hooks.close()
        last = [parameters[i] for i in order[-len(parameters) :]]  # micro-batches that were not reduced came before
        current().keep(Row(BUCKET, _pieces(last), limits, arrived=True), start)
        return True

    def coalesced(group: Any, tensors: Any, size: int, *args: Any) -> None:
        start = len(current().ledger.ops)
        send(group, tensors, size, *args)
        current().keep(Row(BROADCAST, _pieces(tensors), (size,)), start)

    with (
        patched(_c10d.Reducer, {"__init__": begin, "_rebuild_buckets": again}),
        patched(dist, {"_broadcast_coalesced": coalesced}),
    ):
        yield
