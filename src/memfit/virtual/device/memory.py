"""torch.cuda.memory on a virtual card: statistics by pool, limits, snapshots, and what is refused."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from memfit._package import FOLDER
from memfit.allocator.compact import EMPTY_CACHE
from memfit.closed_form.run.unroll import WORKSPACE
from memfit.documents.snapshot_writer import snapshot
from memfit.errors import Unsupported
from memfit.nouns.alloc_settings import K_MIN_LARGE_ALLOC
from memfit.nouns.tape import SegmentAlloc, Tape
from memfit.virtual.device.ledger import ENGINE

if TYPE_CHECKING:
    from types import FrameType

    from memfit.allocator import Allocator
    from memfit.virtual.device.card import Card

POOLS = ("all", "large_pool", "small_pool")
_COUNTS = ("num_alloc_retries", "num_ooms", "num_device_alloc", "num_device_free", "num_oom_rejections")


def node_name(node: Any) -> str:
    """Return the name of a node of a graph; a function of the script may have set an attribute that is called so."""
    return str(type(node).name(node))


class Tally:
    """One statistic of c10: its current value, peak, and sums of allocated and freed, for each pool and for all."""

    def __init__(self) -> None:
        self.pools = {name: {"current": 0, "peak": 0, "allocated": 0, "freed": 0} for name in POOLS}

    def change(self, small: bool, amount: int) -> None:
        """Count bytes or blocks that were allocated (above 0) or freed."""
        for pool in (self.pools["all"], self.pools["small_pool" if small else "large_pool"]):
            pool["current"] += amount
            pool["allocated" if amount > 0 else "freed"] += abs(amount)
            pool["peak"] = max(pool["peak"], pool["current"])

    def become(self, small: bool, value: int) -> None:
        """Set the current value of a pool."""
        self.change(small, value - self.pools["small_pool" if small else "large_pool"]["current"])

    def reset(self) -> None:
        """Set the peaks to the current values."""
        for pool in self.pools.values():
            pool["peak"] = pool["current"]

    def forget(self) -> None:
        """Set the sums of what was allocated and freed to 0."""
        for pool in self.pools.values():
            pool["allocated"] = pool["freed"] = 0


class Statistics:
    """torch.cuda.memory_stats, brought up to date from the ledger whenever it is called.

    Peaks of `inactive_split` in one pool are the largest at any call; all other numbers are the allocator's.
    """

    _NAMES = (
        "allocation", "segment", "active", "inactive_split", "allocated_bytes", "reserved_bytes", "active_bytes",
        "inactive_split_bytes", "requested_bytes",
    )  # fmt: skip

    def __init__(self, card: Card, allocator: Allocator) -> None:
        self.card, self._allocator = card, allocator
        self.tallies = {name: Tally() for name in self._NAMES}
        self._op = self._born = self._call = 0  # how far the ledger and the driver's calls were read
        self._requested: list[int] = []

    def nested(self) -> dict[str, Any]:
        """Return what _cuda_memoryStats does: statistic -> pool -> "current", "peak", ... -> value."""
        self._read()
        stats = self._allocator.stats
        found: dict[str, Any] = {name: {k: dict(v) for k, v in t.pools.items()} for name, t in self.tallies.items()}
        for name in ("requested", "allocated", "active", "reserved", "inactive_split"):
            found[f"{name}_bytes"]["all"]["current"] = getattr(stats, name)
            found[f"{name}_bytes"]["all"]["peak"] = getattr(stats, f"{name}_peak")
        none = dict.fromkeys(("current", "peak", "allocated", "freed"), 0)
        limit = self._allocator.settings.max_split_size
        return found | {name: getattr(stats, name) for name in _COUNTS} | {
            "oversize_allocations": none, "oversize_segments": none,
            "num_sync_all_streams": stats.num_alloc_retries + self.card.ledger.ops.count(EMPTY_CACHE),
            "max_split_size": -1 if limit is None else limit,
        }  # fmt: skip

    def reset_peaks(self) -> None:
        """Do torch.cuda.reset_peak_memory_stats()."""
        self._read()
        self._allocator.reset_peak_stats()
        for tally in self.tallies.values():
            tally.reset()

    def reset_accumulated(self) -> None:
        """Do torch.cuda.reset_accumulated_memory_stats()."""
        self._read()
        for tally in self.tallies.values():
            tally.forget()

    def _read(self) -> None:
        self.card.settle()
        allocator, ledger = self._allocator, self.card.ledger
        for op in ledger.ops[self._op :]:
            if op >= 0:
                self._requested.append(op)
                self._block(self._born, 1)
                self._born += 1
            elif op > EMPTY_CACHE:
                self._block(~op, -1)
        self._op = len(ledger.ops)
        for call in allocator.driver_calls[self._call :]:
            sign, small = (1 if isinstance(call, SegmentAlloc) else -1), call.size < K_MIN_LARGE_ALLOC
            self.tallies["segment"].change(small, sign)
            self.tallies["reserved_bytes"].change(small, sign * call.size)
        self._call = len(allocator.driver_calls)
        self._splits()

    def _block(self, number: int, sign: int) -> None:
        ledger = self.card.ledger
        size = ledger.sizes[number]
        if not size or ledger.owner(number) is not self._allocator:  # no size: the request was refused
            return
        for name in ("allocation", "active"):
            self.tallies[name].change(size > 0, sign)
        for name in ("allocated_bytes", "active_bytes"):
            self.tallies[name].change(size > 0, sign * abs(size))
        self.tallies["requested_bytes"].change(size > 0, sign * self._requested[number])

    def _splits(self) -> None:
        """Count the free pieces of segments that are partly in use."""
        for small in (True, False):
            free = [block for pool in self._allocator.free_pools() if pool.small == small for block in pool.in_order()]
            pieces = [block for block in free if block.is_split]
            self.tallies["inactive_split"].become(small, len(pieces))
            self.tallies["inactive_split_bytes"].become(small, sum(b.size for b in pieces))


class Stacks:
    """Stacks as CUDA's allocator records them; `cpp`: with C++ frames. Stacks share one dict per frame."""

    def __init__(self) -> None:
        self.cpp = True
        self._frames: dict[tuple[str, str, int], dict[str, Any]] = {}

    def __call__(self) -> list[dict[str, Any]]:
        """Return the stack without the operator, innermost first: a backward's node, the engine, then Python."""
        node, found = torch._C._current_autograd_node(), []
        if node and self.cpp:
            names = (f"torch::autograd::{node_name(node)}::apply()", "torch::autograd::Engine::evaluate_function()")
            found = [self._frame(name, "??", 0) for name in names]
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            code = frame.f_code
            if node and code.co_name == ENGINE:  # on a real card another thread runs the backward
                break
            if not code.co_filename.startswith(FOLDER):
                found.append(self._frame(code.co_name, code.co_filename, frame.f_lineno))
            frame = frame.f_back
        return found

    def with_operator(self, label: str, frames: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the stack with its operator, `label`, which is known only after it ran."""
        if not self.cpp or not (label == WORKSPACE or label.isidentifier()):
            return frames
        name = "at::cuda::getCurrentCUDABlasHandle()" if label == WORKSPACE else f"at::_ops::{label}::call()"
        return [self._frame(name, "??", 0), *frames]

    def _frame(self, name: str, path: str, line: int) -> dict[str, Any]:
        made = self._frames.get((name, path, line))
        if made is None:
            made = self._frames[name, path, line] = {"name": name, "filename": path, "line": line}
        return made


def memory_functions(card: Card) -> dict[str, Callable[..., Any]]:
    """Return the functions that stand in for torch._C's, by name."""
    made, stacks = dict[int, Statistics](), Stacks()
    allocator = card.ledger.allocator

    def statistics(device: int) -> Statistics:
        found = card.ledger.of(device)
        return made.setdefault(id(found), Statistics(card, found))

    def recorded(pool: Any = None) -> dict[str, Any]:
        """Return the history from where the script recorded it, with stacks; else all of it, without stacks."""
        card.settle()
        ledger = card.ledger
        events = tuple(ledger.events(lambda number: ("temporaries", ledger.labels[number])))
        tape = Tape(events, "traced")
        stacks_of = {n: stacks.with_operator(ledger.labels[n], frames) for n, frames in ledger.stacks.items()}
        failed = [stacks_of.get(number, []) for number in sorted(ledger.refused)]
        found = snapshot(tape, allocator.settings, allocator.torch, allocator.capacity, stacks_of, failed)
        return found if pool is None or pool[:2] == (0, 0) else found | {"segments": []}

    def record(enabled: Any, context: Any = "all", kind: str = "python", *_: Any) -> None:
        stacks.cpp = kind == "all"
        card.ledger.stack = stacks if enabled else None

    def fraction(_: Any) -> float:
        share = allocator.settings.per_process_memory_fraction
        return 1.0 if share is None else share

    return {
        "_cuda_memoryStats": lambda device: statistics(device).nested(),
        "_cuda_resetPeakMemoryStats": lambda device: statistics(device).reset_peaks(),
        "_cuda_resetAccumulatedMemoryStats": lambda device: statistics(device).reset_accumulated(),
        "_cuda_getMemoryFraction": fraction,
        "_cuda_setMemoryFraction": lambda share, _: allocator.set_memory_fraction(share),
        "_cuda_record_memory_history": record,
        "_cuda_record_memory_history_legacy": lambda enabled, *_: record(enabled),
        "_cuda_memorySnapshot": recorded,
        "_cuda_attach_out_of_memory_observer": lambda _: None,
    }


def _refused(name: str, hint: str) -> type:
    """Return a class whose constructor raises; it has `__wrapped__` because PyTorch 2.15's compiler reads that."""

    def refuse(self: Any, *_: Any, **__: Any) -> None:
        raise Unsupported(f"torch.cuda.{name} is not modelled on a virtual card", hint=hint)

    return type(name, (), {"__init__": refuse, "__wrapped__": refuse, "__doc__": f"torch.cuda.{name}, refused."})


_POOLS = "trace with the default allocator; memfit models no pool beside it"
REFUSED: dict[str, type] = {
    **{name: _refused(name, _POOLS) for name in (
        "MemPool", "use_mem_pool", "CUDAPluggableAllocator", "change_current_allocator", "caching_allocator_alloc",
    )},
}  # fmt: skip
