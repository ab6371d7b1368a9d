"""Tells what DDP's C++ lays out by size: the tensors that it is given, kept as rows, and names for what it allocates of them."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from memfit.virtual.device.dispatch import current
from memfit.virtual.device.ledger import BROADCAST, BUCKET
from memfit.virtual.device.rows import Piece, Row
from memfit.virtual.patching import patched

_dist: Any = dist
_c10d: Any = torch._C._distributed_c10d


def _pieces(tensors: Sequence[Tensor]) -> tuple[Piece, ...]:
    return tuple((t.dtype, t.numel()) for t in tensors)


@contextmanager
def told() -> Iterator[None]:
    """While a world is open, the card keeps the rows that are laid out on it, whose allocations are named."""
    init, rebuild, send = _c10d.Reducer.__init__, _c10d.Reducer._rebuild_buckets, _dist._broadcast_coalesced
    # by id of the reducer: what it reduces, what arrived in which order, limits; no tensor is held, which would keep it alive
    arriving: dict[int, tuple[tuple[Piece, ...], list[int], tuple[int, ...], ExitStack]] = {}

    def begin(self: Any, parameters: Any, *args: Any) -> None:
        _, _, _, _, cap, unused, _, _, first = args[:9]
        limits, start = (first, cap) if first < cap else (cap,), len(current().ledger.ops)
        init(self, parameters, *args)
        pieces, order, hooks = _pieces(parameters), list[int](), ExitStack()
        current().keep(Row(BUCKET, pieces, limits if unused else (sys.maxsize,)), start)
        if unused:  # buckets stay as they are
            return
        for i, p in enumerate(parameters):
            hooks.callback(p.register_post_accumulate_grad_hook(lambda _, i=i: order.append(i)).remove)
        arriving[id(self)] = pieces, order, limits, hooks

    def again(self: Any) -> bool:
        start = len(current().ledger.ops)
        made = rebuild(self)
        if made and (told := arriving.pop(id(self), None)):
            pieces, order, limits, hooks = told
            hooks.close()
            last = tuple(pieces[i] for i in order[-len(pieces) :])  # micro-batches that were not reduced came before
            current().keep(Row(BUCKET, last, limits, arrived=True), start)
        return bool(made)

    def coalesced(group: Any, tensors: Any, size: int, *args: Any) -> None:
        start = len(current().ledger.ops)
        send(group, tensors, size, *args)
        current().keep(Row(BROADCAST, _pieces(tensors), (size,)), start)

    with (
        patched(_c10d.Reducer, {"__init__": begin, "_rebuild_buckets": again}),
        patched(dist, {"_broadcast_coalesced": coalesced}),
    ):
        yield
