"""A queue of dead storages that C++ can write to at any moment, without the interpreter.

A tensor may die while a Python exception is on its way (checkpointing stops its recomputation with one); a callback
into Python would lose it. So the function that C++ calls is thirty bytes of machine code that append its argument to
a ring, and Python empties the ring before it looks at the card. Linux on x86-64 only.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Iterator

from memfit.errors import BadInput

_ENTRIES = 1 << 20  # of the ring; more tensors than that never die between two allocations
_PROT_ALL, _PRIVATE_ANONYMOUS = 7, 0x22
_CODE = (
    b"\x48\xb8{counter}"  # mov rax, counter
    b"\xb9\x01\x00\x00\x00"  # mov ecx, 1
    b"\xf0\x48\x0f\xc1\x08"  # lock xadd [rax], rcx
    b"\x81\xe1{mask}"  # and ecx, mask
    b"\x48\xba{ring}"  # mov rdx, ring
    b"\x48\x89\x3c\xca"  # mov [rdx + 8 * rcx], rdi
    b"\xc3"  # ret
)


class Deaths:
    """`function` is the address of `void f(void* dead)`; iterating gives what died since the last time, in order."""

    def __init__(self) -> None:
        libc = ctypes.CDLL(None)
        libc.mmap.restype = ctypes.c_void_p
        libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]

        def memory(size: int, protection: int) -> int:
            """Never unmapped: C++ may report deaths until the process ends."""
            at = libc.mmap(None, size, protection, _PRIVATE_ANONYMOUS, -1, 0)
            if at in (None, ctypes.c_void_p(-1).value):
                raise BadInput(
                    "this system forbids a process to make code",
                    hint="allow executable mappings, or use memfit estimate",
                )
            return int(at)

        self.function, counter, ring = memory(4096, _PROT_ALL), memory(4096, 3), memory(8 * _ENTRIES, 3)
        code = _CODE.replace(b"{counter}", struct.pack("<Q", counter)).replace(b"{ring}", struct.pack("<Q", ring))
        code = code.replace(b"{mask}", struct.pack("<I", _ENTRIES - 1))
        ctypes.memmove(self.function, code, len(code))
        self._counter = ctypes.c_uint64.from_address(counter)
        self._ring = (ctypes.c_uint64 * _ENTRIES).from_address(ring)
        self._read = 0

    def __bool__(self) -> bool:
        """Whether something died since the last time."""
        return self._read != self._counter.value

    def __iter__(self) -> Iterator[int]:
        while self._read < self._counter.value:
            entry = self._read & (_ENTRIES - 1)
            dead = self._ring[entry]
            if not dead:  # counted by another thread, about to be written
                continue
            self._ring[entry] = 0
            self._read += 1
            yield dead
