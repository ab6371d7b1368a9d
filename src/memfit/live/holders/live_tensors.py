"""The tensors that are alive in this process, found through Python's garbage collector: no hook, no mode, no cost before.

PyTorch keeps the Python object of a tensor that C++ still holds, so what autograd saved for the backward is seen too
(outputs that an operator saved of itself excepted). It takes about a tenth of a microsecond per object of the process.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator
from itertools import compress
from typing import Any

import torch
from torch import Tensor

MOST_NODES = 200_000  # of one graph that are counted


class _Kinds(dict[type, bool]):
    """type -> is it one of tensors? Asked once per type: the rest of the search never leaves C."""

    def __missing__(self, kind: type) -> bool:
        self[kind] = issubclass(kind, Tensor)
        return self[kind]


def live_tensors() -> list[Tensor]:
    """Every tensor object there is."""
    things = gc.get_objects()
    return list(compress(things, map(_Kinds().__getitem__, map(type, things))))


def storages(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Storage -> bytes: tensors may share one."""
    sizes: dict[int, int] = {}
    for t in tensors:
        if t.device.type == "meta" or t.layout is not torch.strided:
            continue
        try:
            storage = t.untyped_storage()
        except (RuntimeError, NotImplementedError):  # wrappers without memory of their own
            continue
        sizes[storage._cdata] = storage.nbytes()
    return sizes


def live_bytes() -> int:
    """Bytes of all live tensors, each storage once."""
    return sum(storages(live_tensors()).values())


def graph_size(root: Tensor) -> int:
    """How many nodes the autograd graph behind a tensor has, up to MOST_NODES."""
    return sum(1 for _ in graph([root]))


def graph(tensors: Iterable[Tensor]) -> Iterator[Any]:
    """The nodes of the autograd graphs behind tensors, each once, up to MOST_NODES."""
    todo = [t.grad_fn for t in tensors if t.grad_fn is not None]
    seen = set(todo)
    for _ in range(MOST_NODES):
        if not todo:
            return
        node = todo.pop()
        yield node
        fresh = {after for after, _ in node.next_functions if after is not None} - seen
        seen |= fresh
        todo += fresh


def saved_by(node: Any) -> Iterator[Tensor]:
    """The tensors a node keeps for its backward; none once that is done."""
    for name in dir(node):
        if name.startswith("_saved_"):
            try:
                value = getattr(node, name)
            except (RuntimeError, AttributeError):  # released, or of a kind Python cannot see
                continue
            saved = value if isinstance(value, tuple | list) else (value,)
            yield from (part for part in saved if isinstance(part, Tensor))
