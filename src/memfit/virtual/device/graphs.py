"""CUDA graphs on a virtual card: a capture allocates from a private pool that is kept, a replay adds nothing."""

from __future__ import annotations

from itertools import count
from typing import Any, NewType

import torch

from memfit.allocator.blocks import PRIVATE_POOLS
from memfit.virtual.device.card import Card

KEPT = "CUDA graphs: the pools of captures are kept to the end, also where their graphs are deleted"
_HANDLE = NewType("_HANDLE", tuple[int, int])


def graph_functions(card: Card) -> dict[str, Any]:
    """Return the parts of torch.cuda.graphs that a build without CUDA lacks; `graph`, say, is PyTorch's own."""
    numbers = count(1)
    seeded: list[list[torch.Tensor]] = []  # seed and offset of a generator, which the kernels of graphs read

    def new_pool() -> _HANDLE:
        return _HANDLE((0, next(numbers)))

    class CUDAGraph:
        """torch.cuda.CUDAGraph."""

        def __init__(self, keep_graph: bool = False) -> None:
            self._pool: _HANDLE | None = None

        def capture_begin(self, pool: _HANDLE | None = None, *_: Any, **__: Any) -> None:
            """Let every allocation come from the private pool."""
            if not seeded:  # CUDAGeneratorState::register_graph
                seeded.append([torch.empty(1, dtype=torch.int64, device="cuda") for _ in range(2)])
            card.assumed.setdefault(KEPT)
            card.settle()
            self._pool = pool or self._pool or new_pool()
            card.ledger.private = PRIVATE_POOLS + 1024 * self._pool[0] + self._pool[1]

        def capture_end(self) -> None:
            """Allocate as before the capture."""
            card.settle()
            card.ledger.private = 0

        def pool(self) -> _HANDLE | None:
            """Return the handle of the private pool."""
            return self._pool

        def register_generator_state(self, generator: Any) -> None:
            """Take a random generator whose numbers the graph draws."""

        def nothing(self, *_: Any, **__: Any) -> None:
            """Do nothing: a replay computes on memory that the capture has allocated."""

        replay = instantiate = reset = enable_debug_mode = debug_dump = nothing

    return {
        "CUDAGraph": CUDAGraph, "graph_pool_handle": new_pool,
        "is_current_stream_capturing": lambda: card.ledger.private != 0,
    }  # fmt: skip
