"""Find the tensors that are alive in this process through Python's garbage collector; nothing is hooked.

PyTorch keeps the Python object of a tensor that C++ still holds, so tensors that autograd saved for the backward are
found too, except an operator's own outputs. A search takes about a tenth of a microsecond per object of the process.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator
from itertools import compress
from typing import Any

import torch
from torch import Tensor

MOST_NODES = 200_000  # nodes of one graph that are counted


class _IsTensor(dict[type, bool]):
    """Maps a type to whether it is a tensor class, computed once per type: the rest of the search never leaves C."""

    def __missing__(self, kind: type) -> bool:
        self[kind] = issubclass(kind, Tensor)
        return self[kind]


def live_tensors() -> list[Tensor]:
    """Return every tensor object of the process."""
    objects = gc.get_objects()
    return list(compress(objects, map(_IsTensor().__getitem__, map(type, objects))))


def storages(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Return storage -> bytes, each storage once."""
    sizes: dict[int, int] = {}
    for t in tensors:
        if t.device.type == "meta" or t.layout is not torch.strided:
            continue
        try:
            storage = t.untyped_storage()
        except (RuntimeError, NotImplementedError):  # a wrapper without memory of its own
            continue
        sizes[storage._cdata] = storage.nbytes()
    return sizes


def live_bytes() -> int:
    """Return the bytes of all live tensors, each storage once."""
    return sum(storages(live_tensors()).values())


def graph_size(root: Tensor) -> int:
    """Count the nodes of the autograd graph behind a tensor, up to MOST_NODES."""
    return sum(1 for _ in graph([root]))


def graph(tensors: Iterable[Tensor]) -> Iterator[Any]:
    """Yield the nodes of the autograd graphs behind tensors, each once, up to MOST_NODES."""
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
    """Yield the tensors that a node keeps for its backward; none once the backward is done."""
    for name in dir(node):
        if name.startswith("_saved_"):
            try:
                value = getattr(node, name)
            except (RuntimeError, AttributeError):  # released, or of a type that Python cannot read
                continue
            saved = value if isinstance(value, tuple | list) else (value,)
            yield from (part for part in saved if isinstance(part, Tensor))
