"""Plain CUDA tensors whose storage is an address and a size, and a queue of the storages that died.

Tensors are made through DLPack, whose deleter C++ calls when a storage dies. That may happen while a Python exception
propagates (checkpointing stops its recomputation with one), and a callback into Python would lose the exception. So the
deleter is thirty bytes of machine code that append its argument to a ring, which Python empties before it looks at the
card. Ring and memory are the process's: C++ may report deaths long after a card was closed, so neither is ever freed,
and each card takes over what the one before has left. Linux on x86-64 only.
"""

from __future__ import annotations

import ctypes
import os
import struct
import threading
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from memfit.errors import BadInput

_ENTRIES = 1 << 20  # entries of the ring; fewer tensors than that die between two allocations
_PROT_ALL, _PROT_DATA, _PRIVATE_ANONYMOUS = 7, 3, 0x22
_CODE = (
    b"\x48\xb8{counter}"  # mov rax, counter
    b"\xb9\x01\x00\x00\x00"  # mov ecx, 1
    b"\xf0\x48\x0f\xc1\x08"  # lock xadd [rax], rcx
    b"\x81\xe1{mask}"  # and ecx, mask
    b"\x48\xba{ring}"  # mov rdx, ring
    b"\x48\x89\x3c\xca"  # mov [rdx + 8 * rcx], rdi
    b"\xc3"  # ret
)
_libc = ctypes.CDLL(None)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]


LOCK = threading.RLock()  # held by the thread that changes the card's books
os.register_at_fork(after_in_child=LOCK._at_fork_reinit)  # type: ignore[attr-defined]


def mapped(size: int, executable: bool = False) -> int:
    """Map memory that is never unmapped: C++ may use it until the process ends."""
    at = _libc.mmap(None, size, _PROT_ALL if executable else _PROT_DATA, _PRIVATE_ANONYMOUS, -1, 0)
    if at in (None, ctypes.c_void_p(-1).value):
        raise BadInput(
            "this system forbids a process to make code", hint="allow executable mappings, or use memfit estimate"
        )
    return int(at)


class Deaths:
    """A ring of dead storages, yielded in order. `function` is the address of its `void f(void* dead)`."""

    def __init__(self) -> None:
        self.function, counter, ring = mapped(4096, executable=True), mapped(4096), mapped(8 * _ENTRIES)
        code = _CODE.replace(b"{counter}", struct.pack("<Q", counter)).replace(b"{ring}", struct.pack("<Q", ring))
        code = code.replace(b"{mask}", struct.pack("<I", _ENTRIES - 1))
        ctypes.memmove(self.function, code, len(code))
        self._counter = ctypes.c_uint64.from_address(counter)
        self._ring = (ctypes.c_uint64 * _ENTRIES).from_address(ring)
        self._read = 0

    def __bool__(self) -> bool:
        """Return whether something died since the last iteration."""
        return self._read != self._counter.value

    def __iter__(self) -> Iterator[int]:
        while self._read < self._counter.value:
            entry = self._read & (_ENTRIES - 1)
            dead = self._ring[entry]
            if not dead:  # another thread has counted it and is about to write it
                continue
            self._ring[entry] = 0
            self._read += 1
            yield dead


# DLDataType codes and bits (dlpack.h)
_CODES: dict[torch.dtype, tuple[int, int]] = {
    torch.float32: (2, 32), torch.float64: (2, 64), torch.float16: (2, 16), torch.bfloat16: (4, 16),
    torch.int64: (0, 64), torch.int32: (0, 32), torch.int16: (0, 16), torch.int8: (0, 8),
    torch.uint8: (1, 8), torch.uint16: (1, 16), torch.uint32: (1, 32), torch.uint64: (1, 64), torch.bool: (6, 8),
    torch.complex64: (5, 64), torch.complex128: (5, 128),
}  # fmt: skip
DTYPES = frozenset(_CODES)  # what a card holds, and float8 as bytes
_CUDA = 2  # kDLCUDA
# DLManagedTensor: data, device, ndim, dtype, shape, strides, offset, context, deleter
_MANAGED = struct.Struct("=QiiiBBHQQQQQ")
_DIMENSIONS = 12
_SLOT = _MANAGED.size + 16 * _DIMENSIONS
_SLOTS = 4096  # per arena

_POINTER = struct.Struct("=Q")
_libc.malloc.restype, _libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
_capsule = ctypes.pythonapi.PyCapsule_New
_capsule.restype, _capsule.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
_shapes = [struct.Struct(f"={2 * n}q") for n in range(_DIMENSIONS + 1)]

NOTHING = -1  # the number of storages that own no memory
Slot = tuple[int, memoryview, int]  # address, the arena it lies in, its offset there


_DEATHS: list[Deaths] = []  # the process's ring, made with its first card
_FREE: list[Slot] = []
_LIVE: dict[int, tuple[int, Slot, Storages]] = {}  # address of the slot -> number of the storage, slot, its card's


class Storages:
    """Makes tensors on the card and lists which of their storages died. index: of the device that they report."""

    def __init__(self) -> None:
        if not _DEATHS:
            _DEATHS.append(Deaths())
        self.index = 0
        self._deaths = _DEATHS[0]
        self._left: list[int] = []  # numbers of own storages whose deaths another card found
        self._resized: dict[int, int] = {}  # address of a StorageImpl -> address of the slot
        self._impls: dict[int, int] = {}  # address of a slot -> address of its StorageImpl, the reverse of `_resized`
        self._offsets: tuple[int, int] | None = None

    def tensor(
        self, number: int, address: int, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype
    ) -> Tensor:
        """Return a tensor with a new storage at `address`, numbered `number`."""
        if dtype not in _CODES:  # float8 and the like are made as bytes and viewed as their dtype
            return self.tensor(number, address, shape, stride, torch.uint8).view(dtype)
        try:
            at, memory, offset = slot = _FREE.pop()
        except IndexError:
            _more()
            at, memory, offset = slot = _FREE.pop()
        n, (code, bits) = len(shape), _CODES[dtype]
        dims, deleter = at + _MANAGED.size, self._deaths.function
        _MANAGED.pack_into(
            memory, offset, address, _CUDA, self.index, n, code, bits, 1, dims, dims + 8 * n, 0, 0, deleter
        )
        _shapes[n].pack_into(memory, offset + _MANAGED.size, *shape, *stride)
        _LIVE[at] = number, slot, self
        return torch._C._from_dlpack(_capsule(at, b"dltensor", None))

    @property
    def died(self) -> bool:
        """Return whether something died since the last call of `dead`."""
        return bool(self._deaths or self._left)

    def dead(self) -> list[int]:
        """Return the numbers of the storages that died since the last call, in order."""
        numbers, self._left = self._left, []
        for at in self._deaths:
            number, slot, owner = _LIVE.pop(at)
            _FREE.append(slot)
            (numbers if owner is self else owner._left).append(number)
            if at in owner._impls:
                del owner._resized[owner._impls.pop(at)]
        return numbers

    def alias(self, address: int, size: int) -> torch.UntypedStorage:
        """Return another storage of the memory at an address, which frees nothing when it dies."""
        return self.tensor(NOTHING, address, (size,), (1,), torch.uint8).untyped_storage()

    def reassign(self, address: int, before: int, number: int) -> None:
        """Let the youngest storage at an address that is numbered `before` be numbered otherwise: its death frees that.

        A storage of its own, if there is one: the memory may belong to no storage.
        """
        for at in reversed(_LIVE):
            held, slot, owner = _LIVE[at]
            if owner is self and held == before and _POINTER.unpack_from(slot[1], slot[2])[0] == address:
                _LIVE[at] = number, slot, self
                return

    def exchange(self, storage: torch.UntypedStorage, number: int, address: int, size: int) -> int:
        """Give a storage other memory, numbered `number`; return the number of the old one."""
        impl = storage._cdata
        at = self._resized.get(impl)
        if at is None:
            at = self._resized[impl] = self._slot_of(storage.data_ptr())
            self._impls[at] = impl
        before, slot, _ = _LIVE[at]
        _LIVE[at] = number, slot, self
        pointer, nbytes = self._layout()
        ctypes.c_uint64.from_address(impl + pointer).value = address
        ctypes.c_uint64.from_address(impl + nbytes).value = size
        return before

    def _slot_of(self, address: int) -> int:
        """Return the slot of the youngest live storage made at an address."""
        for at in reversed(_LIVE):
            (_, arena, offset), owner = _LIVE[at][1:]
            if owner is self and _POINTER.unpack_from(arena, offset)[0] == address:
                return at
        raise LookupError(f"no storage of the card at {address:#x}")

    def _layout(self) -> tuple[int, int]:
        """Return the offsets of pointer and size in a c10::StorageImpl, found by recognisable values in a new one."""
        if self._offsets is None:
            address, size = 0x5A5A_5A5A_5A00, 0x1234_567
            probe = self.tensor(-1, address, (size,), (1,), torch.uint8).untyped_storage()
            words = list((ctypes.c_uint64 * 16).from_address(probe._cdata))
            self._offsets = 8 * words.index(address), 8 * words.index(size)
        return self._offsets


def _more() -> None:
    """Allocate another arena, which is never freed: C++ reads it until the process ends."""
    base = _libc.malloc(_SLOT * _SLOTS)
    memory = memoryview((ctypes.c_char * (_SLOT * _SLOTS)).from_address(base)).cast("B")
    _FREE.extend((base + i * _SLOT, memory, i * _SLOT) for i in reversed(range(_SLOTS)))
