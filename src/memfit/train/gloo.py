"""FSDP2 among the processes of a CPU, by accelerate's own code: it shards for processes that own a card, and is told these do."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def sharding() -> Iterator[None]:
    """In the block accelerate heeds FSDP's environment on a CPU too.

    AcceleratorState (accelerate 1.15, state.py) makes a run FSDP's where the type of its processes is one of eight, and
    MULTI_CPU is not among them. That word alone is changed, after the process group over gloo was made; wrapping, sharding,
    gathering, saving and loading ask for the type FSDP and take the device as it is.
    """
    from accelerate.state import DistributedType, PartialState

    made = PartialState.__init__

    def init(state: Any, *args: Any, **named: Any) -> None:
        made(state, *args, **named)
        if state.distributed_type is DistributedType.MULTI_CPU:
            state.distributed_type = DistributedType.MULTI_GPU

    PartialState.__init__ = init
    try:
        yield
    finally:
        PartialState.__init__ = made
