"""A virtual card: its facts, its ledger, and the tensors that lie on it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from memfit.allocator import Allocator, OutOfMemory
from memfit.errors import Unsupported
from memfit.nouns.alloc_settings import parse_alloc_conf, torch_version
from memfit.nouns.gpu import Gpu
from memfit.tables.cuda_kernels import Free, Script, cublas_workspace, threads_per_multiprocessor
from memfit.virtual.device.device_guard import make_current, thread
from memfit.virtual.device.ledger import Ledger
from memfit.virtual.device.shapes import Blueprint
from memfit.virtual.device.storage import LOCK, NOTHING, Storages
from memfit.virtual.device.values import Answers, Values


class Card:
    """One virtual device with an allocator that is empty at first: the one of `count` that this process uses.

    capacity: bytes that the driver can hand out (None: any number), of which NCCL takes `nccl` with the first
    collective. Sizes are bytes. A device of another index is a further
    card like it.
    """

    def __init__(
        self, gpu: Gpu, capacity: int | None, alloc_conf: str, answers: Answers | None = None, count: int = 1,
        nccl: int = 0,
    ) -> None:  # fmt: skip
        self._nccl = nccl if capacity is not None else 0
        self.gpu, self.alloc_conf, self._capacity, self.count = gpu, alloc_conf, capacity, count
        self.capability = gpu.compute_capability or (8, 0)
        self.multiprocessors = gpu.sm_count or 108
        self.ledger = Ledger(self._allocator())
        self.values = Values(self.ledger.size_at)
        self.answers = answers or Answers()
        self.assumed: dict[str, None] = {}  # assumptions, as sentences for the user
        routing = self.answers.routing
        routing.assumed, routing.where = self.assumed, lambda: self.ledger.place()
        routing.layers = lambda: self.ledger.layers()
        self.paged = 0  # bytes of managed memory, which lies outside the allocator
        self.storages = Storages()
        self.threads = threads_per_multiprocessor(self.capability)
        # returns the settings to follow, asked once, before the first allocation
        self.alloc_conf_in_time: Callable[[], str] = lambda: self.alloc_conf
        # backward pass -> unfinished dist.Work -> results of an all-reduce that NCCL's watchdog thread still holds
        self.held_by_watchdog: dict[int, dict[Any, list[Tensor]]] = {}
        self.communicators: dict[str, int] = {}  # process groups of several ranks that passed its tensors -> their size
        self.capturing = False  # whether a CUDA graph is
        self.named = False  # whether the code has said which device it uses
        self.indices = {0}  # of the devices that were named
        self._workspaces: dict[tuple[Any, ...], int] = {}  # thread, stream and device -> number of its allocation

    @property
    def limit(self) -> int | None:
        """Return the bytes that the driver can hand out; None for any number."""
        capacity = self.ledger.allocator.capacity
        return capacity if capacity < 2 * self.gpu.total_bytes else None

    @property
    def free(self) -> int:
        """Return the bytes that the driver still has, as cudaMemGetInfo says."""
        allocator = self.settled()
        room = self.gpu.usable_bytes() if self.limit is None else allocator.capacity
        return max(room - allocator.reserved - allocator.padding, 0)

    @property
    def index(self) -> int:
        """Return the index of the current device, which new tensors report."""
        return self.storages.index

    @property
    def used(self) -> list[int]:
        """Return the indices of the devices that something was allocated on, if there are several."""
        return [device for device, allocator in self.ledger.allocators.items() if allocator.reserved_peak]

    def use(self, index: int) -> None:
        """Make `index` the current device."""
        self.named = True
        self.storages.index = index
        make_current(index)
        self.indices.add(index)
        self.ledger.use(index, self._allocator)

    def _allocator(self) -> Allocator:
        """Return an allocator for a device like this one."""
        version = torch_version(torch.__version__)
        settings = parse_alloc_conf(self.alloc_conf, version)
        return Allocator(self._capacity, settings, version, total_memory=self.gpu.total_bytes)

    @property
    def workspace(self) -> int:
        """Return the bytes of cuBLAS's workspace, as the environment sets it now."""
        config = os.environ.get("CUBLAS_WORKSPACE_CONFIG", "")
        return cublas_workspace(self.capability, config, torch_version(torch.__version__))

    def tensor(self, planned: Blueprint, label: str) -> Tensor:
        """Return a tensor with a new storage. Raises torch.OutOfMemoryError in PyTorch's own words."""
        shape, stride, dtype = planned
        self.settle()
        size = _storage_bytes(shape, stride, dtype.itemsize)
        ledger = self.ledger
        if size <= 0:
            if (least := min(shape, default=0)) < 0:
                raise RuntimeError(f"Trying to create tensor with negative dimension {least}: {list(shape)}")
            return self.storages.tensor(NOTHING, 0, shape, stride, dtype)
        number = self.allocate(size, label)
        return self.storages.tensor(number, ledger.address(number), shape, stride, dtype)

    def allocate(self, size: int, label: str) -> int:
        """Return the number of a new allocation. Raises torch.OutOfMemoryError in PyTorch's own words."""
        if not self.ledger.blocks:
            self.set_alloc_conf(self.alloc_conf_in_time())
        try:
            return self.ledger.alloc(size, label)
        except OutOfMemory as error:
            raise torch.OutOfMemoryError(out_of_memory_text(error, self.gpu.context_bytes, self.index)) from None

    def set_alloc_conf(self, text: str) -> None:
        """Follow a value of PYTORCH_ALLOC_CONF that is set before the first allocation. Raises Unsupported later."""
        self.alloc_conf_in_time = lambda: self.alloc_conf  # the environment is not asked again
        if text == self.alloc_conf:
            return
        if self.ledger.blocks:
            raise Unsupported(
                f"allocator settings that change during the run ({text}) are not modelled",
                hint=f"set them before the first allocation, or trace with --alloc-conf {text}",
            )
        allocator = self.ledger.allocator
        version = torch_version(torch.__version__)
        fraction = allocator.settings.per_process_memory_fraction
        settings = parse_alloc_conf(text, version)
        if fraction is not None:
            settings = replace(settings, per_process_memory_fraction=fraction)
        self.alloc_conf = text
        # the same object, which others hold
        Allocator.__init__(allocator, self._capacity, settings, version, total_memory=self.gpu.total_bytes)

    def communicate(self, group: str, ranks: int) -> None:
        """Note a collective of a group; with the first one NCCL takes its buffers.

        It asks the driver, for which PyTorch's allocator gives back nothing of its cache. Raises torch.OutOfMemoryError
        if too little is left.
        """
        if ranks == 1:
            return
        self.communicators[group] = ranks
        size, self._nccl = self._nccl, 0
        if not size or self._capacity is None:
            return
        allocator = self.settled()
        error = allocator.out_of_memory(size, size)
        self._capacity -= size
        allocator.capacity -= size
        if error.device_free < size:
            self.ledger.refuse(size, "NCCL's buffers")
            raise torch.OutOfMemoryError(out_of_memory_text(error, self.gpu.context_bytes, self.index))

    def resize(self, storage: torch.UntypedStorage, size: int) -> None:
        """Resize a storage: allocate the new memory before the old is freed, as resize_bytes_cuda does."""
        self.settle()
        if size == storage.nbytes():
            return
        before, lies = self.index, storage.device.index
        if lies != before:
            self.use(lies)
        number = self.allocate(size, "storage.resize_") if size else NOTHING
        self._free(self.storages.exchange(storage, number, self.ledger.address(number) if size else 0, size))
        if lies != before:
            self.use(before)

    def _free(self, number: int) -> None:
        if number != NOTHING:
            self.values.forget(self.ledger.address(number))
            self.ledger.free(number)

    def disown(self, address: int) -> None:
        """Free the memory at an address, whose storage lives on without it."""
        number = self.ledger.number_at[address]
        self.storages.reassign(address, number, NOTHING)
        self._free(number)

    def own(self, storage: torch.UntypedStorage) -> None:
        """Let the memory at a storage's address be freed when it dies."""
        number = self.ledger.number_at.get(storage.data_ptr())
        if number is not None:
            self.storages.reassign(storage.data_ptr(), NOTHING, number)

    def touch(self, script: Script, label: str) -> None:
        """Allocate and free a kernel's temporaries as its script says (see `temporaries`)."""
        self.settle()
        self._play(script, label, lambda _: None)

    def _play(self, script: Script, label: str, make: Callable[[int], None]) -> None:
        held: list[int] = []
        for step in script:
            if isinstance(step, Free):
                self.ledger.free(held.pop(-step.nth))
            elif isinstance(step, tuple):
                self._play(step, label, make)
            elif step < 0:
                make(~step)
            elif step:
                held.append(self.allocate(step, label))
        for number in reversed(held):
            self.ledger.free(number)

    def tensors(self, planned: Any, label: str) -> Any:
        """Replace the Blueprints in what an operator returns by new tensors, in the order of its outputs."""
        if isinstance(planned, tuple):
            return self.tensor(planned, label)
        if isinstance(planned, list):
            return tuple(self.tensors(p, label) for p in planned)
        return planned

    def scripted(self, planned: Any, script: Script, label: str) -> Any:
        """Make outputs and temporaries in the order of a kernel's script."""
        parts = planned if isinstance(planned, list) else [planned]
        self.settle()
        made = {i: self.tensors(p, label) for i, p in enumerate(parts) if ~i not in script}

        def make(i: int) -> None:
            made[i] = self.tensors(parts[i], label)

        self._play(script, label, make)
        return tuple(made[i] for i in range(len(parts))) if isinstance(planned, list) else made[0]

    def need_workspace(self) -> None:
        """Allocate cuBLAS's workspace at its first use on this thread and stream, which keep it."""
        key = (*thread(), self.ledger.stream, self.index)
        if key not in self._workspaces:
            self._workspaces[key] = self.allocate(self.workspace, "cuBLAS workspace")

    def clear_workspaces(self) -> None:
        """Free all workspaces, as torch._C._cuda_clearCublasWorkspaces() does."""
        while self._workspaces:
            self.ledger.free(self._workspaces.popitem()[1])

    def empty_cache(self) -> None:
        """Do torch.cuda.empty_cache()."""
        self.settle()
        self.ledger.empty_cache()

    def settled(self) -> Allocator:
        """Return the allocator after freeing what has died."""
        self.settle()
        return self.ledger.allocator

    def settle(self, arranged: Callable[[Iterable[int]], Iterable[int]] = iter) -> None:
        """Free storages that died since the last call; to be called before allocating or reading the allocator."""
        if self.storages.died:
            with LOCK:
                for number in arranged(self.storages.dead()):
                    self._free(number)


def _storage_bytes(shape: tuple[int, ...], stride: tuple[int, ...], itemsize: int) -> int:
    """Count the bytes up to the last element that the strides reach, as computeStorageNbytes does."""
    last = 0
    for size, step in zip(shape, stride, strict=True):
        if size == 0:
            return 0
        last += (size - 1) * step
    return (last + 1) * itemsize


def _format_size(size: int) -> str:
    """Write a size as c10::CachingAllocator::format_size does."""
    for unit, shift in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if size > 1 << shift:
            return f"{size / (1 << shift):.2f} {unit}"
    return f"{size} bytes"


def out_of_memory_text(error: OutOfMemory, context: int, device: int) -> str:
    """Return the message of torch.OutOfMemoryError since PyTorch 2.11. context: bytes in use outside of PyTorch."""
    size = _format_size
    limit = f"{size(error.allowed)} allowed; " if error.allowed is not None else ""
    process = f"Including non-PyTorch memory, this process has {size(error.reserved + context)} memory in use. "
    return (
        f"CUDA out of memory. Tried to allocate {size(error.tried)}. GPU {device} has a total capacity of "
        f"{size(error.device_total)} of which {size(error.device_free)} is free. {process if context else ''}{limit}"
        f"Of the allocated memory {size(error.allocated)} is allocated by PyTorch, and "
        f"{size(error.reserved - error.allocated)} is reserved by PyTorch but unallocated. If reserved but unallocated "
        "memory is large try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation.  See "
        "documentation for Memory Management  (https://docs.pytorch.org/docs/stable/notes/cuda.html"
        "#optimizing-memory-usage-with-pytorch-cuda-alloc-conf)"
    )
