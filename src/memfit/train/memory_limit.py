"""Less memory than there is: on a GPU through PyTorch's own fraction, on a CPU by counting the bytes of live tensors.

On the CPU every operator's new storages are counted as they are made and given back as they die, and the operator whose
result would pass the limit raises torch.OutOfMemoryError in the words of PyTorch's allocator. The data and the losses are
real; what is not seen are tensors made outside the dispatcher (files that are mapped) until an operator first reads them.
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

BLOCK = 512  # bytes: CUDA's allocator rounds to it, so this one counts alike


class Meter:
    """Bytes of tensors on the device, and on a CPU the most there were in each stage."""

    limit = 0

    def __init__(self) -> None:
        self.peaks: dict[str, int] = {}
        self.stage = "load"

    def enter(self, stage: str) -> None:
        """From here on peaks belong to `stage`."""
        self.stage = stage

    @property
    def held(self) -> int:
        """Bytes of tensors now; 0 where nobody counts."""
        return 0


class CudaMeter(Meter):
    """PyTorch's own limit and statistics of the present device; its peaks are the watch's."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        total = torch.cuda.get_device_properties().total_memory
        self.limit = min(limit or total, total)
        torch.cuda.set_per_process_memory_fraction(self.limit / total)

    @property
    def held(self) -> int:
        return torch.cuda.memory_allocated()


class Counted(TorchDispatchMode):
    """Counts the storages that operators make on the CPU. `limit` may change while it counts."""

    def __init__(self, meter: CountingMeter) -> None:
        super().__init__()
        self.meter = meter

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.meter.see(tree_leaves((args, kwargs)))
        result = func(*args, **(kwargs or {}))
        self.meter.see(tree_leaves(result), new=True)
        return result


class CountingMeter(Meter):
    """The ledger of a CPU with a limit. `before` is asked before every new storage, with its bytes: tests change the limit there."""

    def __init__(self, limit: int, before: Callable[[CountingMeter, int], None] | None = None) -> None:
        super().__init__()
        self.limit, self.live, self.before = limit, 0, before
        self._known: dict[int, weakref.ref[Any]] = {}

    @property
    def held(self) -> int:
        return self.live

    def see(self, values: list[Any], new: bool = False) -> None:
        """Count the storages among `values` that were not known. Raises OutOfMemoryError for a new one past the limit."""
        for value in values:
            value = getattr(value, "_local_tensor", value)  # this process's part of a DTensor
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
                raise torch.OutOfMemoryError(words(size, self.limit, self.live))

        def gone(_: Any, key: int = key, size: int = size) -> None:
            if self._known.pop(key, None) is not None:
                self.live -= size

        self._known[key] = weakref.ref(storage, gone)
        self.live += size
        if self.live > self.peaks.get(self.stage, 0):
            self.peaks[self.stage] = self.live


PLAIN = (torch.Tensor, torch.nn.Parameter)  # others wrap plain ones, which are counted by themselves


def words(asked: int, limit: int, held: int) -> str:
    """An allocation that failed, as PyTorch's allocator words it."""
    return (
        f"CUDA out of memory. Tried to allocate {human(asked)}. GPU 0 has a total capacity of {human(limit)} of which "
        f"{human(max(limit - held, 0))} is free. Of the allocated memory {human(held)} is allocated by PyTorch."
    )


@contextlib.contextmanager
def metered(cpu: bool, limit: int, before: Callable[[CountingMeter, int], None] | None = None) -> Iterator[Meter]:
    """Measure the block's memory, and keep it under `limit` bytes (0: what the device has)."""
    if not cpu:
        yield CudaMeter(limit)
        torch.cuda.set_per_process_memory_fraction(1.0)
    elif limit or before:
        meter = CountingMeter(limit, before)
        with Counted(meter):
            yield meter
    else:
        yield Meter()
