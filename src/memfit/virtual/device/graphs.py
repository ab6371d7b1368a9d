"""CUDA graphs on a virtual card: a capture allocates from a private pool that is kept, a replay adds nothing.

Those of torch.compile are trees of graphs that share one pool (torch/_inductor/cudagraph_trees.py). Their Python runs
as it is, above the functions of torch._C that a build without CUDA lacks: `pool_functions`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, NewType

import torch
from torch import Tensor

from memfit.allocator.blocks import PRIVATE_POOLS
from memfit.virtual.device.card import Card
from memfit.virtual.supported import MOVED

KEPT = "CUDA graphs: the pools of captures are kept to the end, also where their graphs are deleted"
_HANDLE = NewType("_HANDLE", tuple[int, int])


def _number(pool: _HANDLE) -> int:
    """Return the number of the stream that stands for a private pool."""
    return PRIVATE_POOLS + 1024 * pool[0] + pool[1]


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
            card.ledger.private, card.capturing = _number(self._pool), True

        def capture_end(self) -> None:
            """Allocate as before the capture."""
            card.settle()
            card.ledger.private, card.capturing = 0, False

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
        "is_current_stream_capturing": lambda: card.capturing,
    }  # fmt: skip


# --- the pools of torch.compile's graphs ---


@dataclass(frozen=True, slots=True)
class PoolState:
    """What was allocated in a private pool: bytes by address. pool: the number of its stream."""

    pool: int
    blocks: dict[int, int]


def _in_pool(card: Card, pool: int) -> dict[int, int]:
    """Return the number of each live allocation of a private pool, by address."""
    ledger = card.ledger
    return {at: number for at, number in sorted(ledger.number_at.items()) if ledger.streams.get(number) == pool}


def _same_pointers(inputs: Sequence[Any], pointers: Sequence[int | None], indices: Sequence[int]) -> bool:
    """Return whether the tensors at these indices lie at these addresses."""
    return all(inputs[i].data_ptr() == pointers[i] for i in indices)


def _tensor_of(metadata: dict[str, Any], storage: torch.UntypedStorage) -> Tensor:
    """Return a tensor of a storage with the size, strides and offset that were recorded."""
    made = torch.empty(0, dtype=metadata["dtype"], device=metadata["device"])
    return made.set_(storage, metadata["storage_offset"], metadata["size"], metadata["stride"])


def _restored(card: Card) -> Callable[..., None]:
    """Return torch._C._cuda_setCheckpointPoolState, before a graph is recorded beside outputs of replayed ones."""

    def restore(device: int, state: PoolState, stale: Sequence[int], live: Sequence[int]) -> None:
        card.settle()
        ledger, held = card.ledger, _in_pool(card, state.pool)
        for at in held:
            if ledger.size_at(at) != state.blocks.get(at):
                card.disown(at)
        ledger.private = state.pool
        for at, size in state.blocks.items():
            if not ledger.size_at(at) and ledger.address(card.allocate(size, "output of a CUDA graph")) != at:
                card.assumed.setdefault(MOVED)
        ledger.private = 0
        for storage in live:
            card.own(torch.UntypedStorage._new_with_weak_ptr(storage))

    return restore


def pool_functions(card: Card) -> dict[str, Callable[..., Any]]:
    """Return the functions of torch._C that allocate in private pools, and that free what lies there."""
    ledger, before = card.ledger, list[int]()

    def begin(device: int, pool: _HANDLE) -> None:
        card.settle()
        before.append(ledger.private)
        ledger.private = _number(pool)

    def end(device: int, pool: _HANDLE) -> None:
        card.settle()
        ledger.private = before.pop()

    def state(device: int, pool: _HANDLE) -> PoolState:
        card.settle()
        return PoolState(_number(pool), {at: ledger.size_at(at) for at in _in_pool(card, _number(pool))})

    def free(address: int) -> None:
        card.settle()
        if address in ledger.number_at:
            card.disown(address)

    nothing = lambda *_: None  # noqa: E731
    return {
        "_cuda_beginAllocateCurrentThreadToPool": begin,
        "_cuda_endAllocateToPool": end,
        "_cuda_releasePool": nothing,
        "_cuda_checkPoolLiveAllocations": lambda *_: True,
        "_cuda_getCheckpointState": state,
        "_cuda_setCheckpointPoolState": _restored(card),
        "_cuda_cudaCachingAllocator_raw_delete": free,
        "_free_And_Remove_DeleterFn": lambda ptr: free(torch.UntypedStorage._new_with_weak_ptr(ptr).data_ptr()),
        "_has_Standard_Deleter": lambda _: True,
        "_set_storage_access_error_msg": nothing,
        "_set_storage_data_ptr_access_error_msg": nothing,
        "_construct_storage_from_data_pointer": lambda at, _, size: card.storages.alias(at, size),
        "_construct_CUDA_Tensor_From_Storage_And_Metadata": _tensor_of,
        "_tensors_data_ptrs_at_indices_equal": _same_pointers,
        "_cuda_isHistoryEnabled": lambda: False,
        "_cuda_get_conv_benchmark_empty_cache": lambda: False,
        "_cudnn_set_conv_benchmark_empty_cache": nothing,
    }
