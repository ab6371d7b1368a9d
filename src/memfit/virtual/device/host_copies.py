"""Defined contents for host tensors that a trace leaves unwritten: one number where that is cheap, else zeros."""

from __future__ import annotations

import ctypes
import mmap

from torch import Tensor

_PAGE = mmap.PAGESIZE
_DONTNEED = 4  # MADV_DONTNEED of Linux: the pages read as zeros from now on, and take no memory
_PIECE = 1 << 19  # bytes that are written at once, fewer than `process.host` leaves out
MOST_WRITTEN = 64 << 20  # bytes of one host copy that are written
_TOTAL = 1 << 30  # bytes of all host copies that are written: offloaded optimizer states would fill the host's memory

_libc = ctypes.CDLL(None)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def _dense(t: Tensor) -> bool:
    """Return whether a tensor fills its span of memory, in whatever order of dimensions (channels_last)."""
    return 1 + sum((n - 1) * step for n, step in zip(t.shape, t.stride(), strict=True)) == t.numel()


def blank(t: Tensor) -> None:
    """Make a dense host tensor all zeros, and give back its whole pages instead of writing to them."""
    size = t.numel() * t.element_size()
    if not size or not _dense(t):
        return
    start = t.data_ptr()
    first, last = -(-start // _PAGE) * _PAGE, (start + size) // _PAGE * _PAGE
    if last <= first or _libc.madvise(first, last - first, _DONTNEED):
        ctypes.memset(start, 0, size)
        return
    ctypes.memset(start, 0, first - start)
    ctypes.memset(last, 0, start + size - last)


class HostCopies:
    """Fills host tensors to which unknown data of the card is copied."""

    def __init__(self) -> None:
        self._written = 0

    def fill(self, t: Tensor, value: complex) -> None:
        """Write one value; large tensors, and all once enough was written, become zeros."""
        size = t.numel() * t.element_size()
        if size > MOST_WRITTEN or self._written + size > _TOTAL or not _dense(t):
            blank(t)
            return
        self._written += size
        for piece in t.as_strided((t.numel(),), (1,)).split(max(_PIECE // t.element_size(), 1)):
            piece.fill_(value)
