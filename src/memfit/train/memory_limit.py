"""Limit memory: on a GPU by PyTorch's memory fraction, on a CPU by counting the bytes of live tensors.

On the CPU the new storages of every operator are counted until they are freed. The operator whose result would exceed
the limit raises torch.OutOfMemoryError with the text of PyTorch's allocator. Data and losses are real. Tensors created
outside the dispatcher (mapped files) are not counted until an operator first reads them.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from memfit.units import human

BLOCK = 512  # bytes: CUDA's allocator rounds sizes up to it, and so does this count


class MemoryMeter:
    """Bytes of tensors on the device, and on a CPU the peak of each stage."""

    limit = 0

    def __init__(self) -> None:
        self.peaks: dict[str, int] = {}
        self.stage = "load"

    def enter(self, stage: str) -> None:
        """Count peaks for `stage` from here on."""
        self.stage = stage

    @property
    def held(self) -> int:
        """Return the bytes of live tensors; 0 if they are not counted."""
        return 0


class CudaMemoryMeter(MemoryMeter):
    """PyTorch's own limit and statistics of the current device; the watch records its peaks."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        total = torch.cuda.get_device_properties().total_memory
        self.limit = min(limit or total, total)
        torch.cuda.set_per_process_memory_fraction(self.limit / total)

    @property
    def held(self) -> int:
        return torch.cuda.memory_allocated()


class Counted(TorchDispatchMode):
    """Passes the storages that operators read and make on the CPU to a meter."""

    def __init__(self, meter: CountingMeter) -> None:
        super().__init__()
        self.meter = meter

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.meter.see(tree_leaves((args, kwargs)))
        result = func(*args, **(kwargs or {}))
        self.meter.see(tree_leaves(result), new=True)
        return result


class CountingMeter(MemoryMeter):
    """Counts a CPU's tensors against a limit. `before` is called with the bytes of a new storage, and may change it."""

    def __init__(self, limit: int, before: Callable[[CountingMeter, int], None] | None = None) -> None:
        super().__init__()
        self.limit, self.live, self.before = limit, 0, before
        self._known: dict[int, weakref.ref[Any]] = {}

    @property
    def held(self) -> int:
        return self.live

    def see(self, values: list[Any], new: bool = False) -> None:
        """Count storages not seen before. Raises OutOfMemoryError where a new one exceeds the limit."""
        for value in values:
            value = getattr(value, "_local_tensor", value)  # the local shard of a DTensor
            if isinstance(value, torch.Tensor) and type(value) in PLAIN and value.device.type == "cpu":
                self._count(value.untyped_storage(), new)

    def _count(self, storage: Any, new: bool) -> None:
        key = storage._cdata
        if key in self._known:
            return
        size = -(-storage.nbytes() // BLOCK) * BLOCK
        if new:
            if self.before:
                self.before(self, size)
            if self.limit and self.live + size > self.limit:
                raise torch.OutOfMemoryError(oom_message(size, self.limit, self.live))

        def gone(_: Any, key: int = key, size: int = size) -> None:
            if self._known.pop(key, None) is not None:
                self.live -= size

        self._known[key] = weakref.ref(storage, gone)
        self.live += size
        if self.live > self.peaks.get(self.stage, 0):
            self.peaks[self.stage] = self.live


PLAIN = (torch.Tensor, torch.nn.Parameter)  # other classes only wrap tensors of these


def oom_message(requested: int, limit: int, held: int) -> str:
    """Return the message of PyTorch's allocator for a failed allocation."""
    return (
        f"CUDA out of memory. Tried to allocate {human(requested)}. GPU 0 has a total capacity of {human(limit)} "
        f"of which {human(max(limit - held, 0))} is free. "
        f"Of the allocated memory {human(held)} is allocated by PyTorch."
    )


@contextlib.contextmanager
def metered(cpu: bool, limit: int, before: Callable[[CountingMeter, int], None] | None = None) -> Iterator[MemoryMeter]:
    """Measure the memory of the block, and limit it to `limit` bytes (0: no limit)."""
    if not cpu:
        yield CudaMemoryMeter(limit)
        torch.cuda.set_per_process_memory_fraction(1.0)
    elif limit or before:
        meter = CountingMeter(limit, before)
        with Counted(meter):
            yield meter
    else:
        yield MemoryMeter()
