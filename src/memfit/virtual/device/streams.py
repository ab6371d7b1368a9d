"""CUDA streams and events of a virtual card: work on them is already done; allocations under one come from its own pool."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from memfit.virtual.device.values import base

if TYPE_CHECKING:
    from memfit.virtual.device.card import Card


class Stream:
    """A CUDA stream: work on it is already done; allocations under it come from its own pool."""

    _count = 0

    def __init__(self, device: Any = None, priority: int = 0, **_: Any) -> None:
        Stream._count += 1
        self.stream_id = self.cuda_stream = Stream._count
        self.device, self.device_index, self.priority, self.device_type = torch.device("cuda", 0), 0, priority, 1

    def wait_event(self, event: Any) -> None:
        """Nothing is ever waited for."""

    def wait_stream(self, stream: Any) -> None:
        """Nothing is ever waited for."""

    def record_event(self, event: Any = None) -> Event:
        """An event that has happened."""
        return event or Event()

    def synchronize(self) -> None:
        """Nothing is ever waited for."""

    def query(self) -> bool:
        """All work is done."""
        return True

    def is_capturing(self) -> bool:
        """No graph is."""
        return False

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and other.stream_id == self.stream_id

    def __hash__(self) -> int:
        return self.stream_id


class Event:
    """A CUDA event that has happened."""

    def __init__(self, *_: Any, **__: Any) -> None:
        """Whatever torch.cuda.Event takes; time does not pass."""

    def record(self, stream: Any = None) -> None:
        """It has happened already."""

    def wait(self, stream: Any = None) -> None:
        """It has happened already."""

    def synchronize(self) -> None:
        """It has happened already."""

    def query(self) -> bool:
        """It has happened."""
        return True

    def elapsed_time(self, other: Event) -> float:
        """Milliseconds; time does not pass on a virtual card."""
        return 0.0


class _Default(Stream):
    def __init__(self) -> None:
        super().__init__()
        self.stream_id = self.cuda_stream = 0


def stream_functions(card: Card) -> dict[str, Any]:
    """Names in torch.cuda that make, choose and look at streams."""
    Stream._count = 0  # the same program has the same streams on every card
    default = _Default()
    current = [default]

    def set_stream(stream: Any) -> None:
        current[0] = stream
        card.ledger.stream = stream.stream_id

    class Using:
        def __init__(self, stream: Any) -> None:
            self.stream = stream

        def __enter__(self) -> None:
            self.before = current[0]
            if self.stream is not None:
                set_stream(self.stream)

        def __exit__(self, *_: Any) -> None:
            set_stream(self.before)

    return {
        "Stream": Stream, "Event": Event, "stream": Using, "StreamContext": Using, "set_stream": set_stream,
        "current_stream": lambda *_: current[0], "default_stream": lambda *_: default,
    }  # fmt: skip


def record_stream(card: Card) -> Callable[[Tensor, Any], None]:
    """Tensor.record_stream: its block is free again only once that stream has caught up."""

    def recorded(self: Tensor, stream: Any) -> None:
        if self.is_cuda:
            card.ledger.record_stream(base(self), stream.stream_id)

    return recorded
