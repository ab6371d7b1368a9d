"""What a file may cost: only regular files are read, and what is made of one takes a multiple of its bytes on disk.

The multiple holds for whatever reads a file and for what is computed from it in the same block. It is enforced as a
limit of the address space (Linux), so that no reader has to count what it builds.
"""

from __future__ import annotations

import json
import os
import stat
import threading
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from memfit.errors import BadInput
from memfit.units import MIB

# docs/tapes.md promises 64 MB and 40 times; an eighth and a tenth are left for what is imported meanwhile.
FLOOR = 56 << 20  # bytes of memory that any file may take
TIMES = 36  # bytes of memory for each byte on disk. Recorded snapshots take 4, JSON text up to 30
GZIP = b"\x1f\x8b"
IDLE = "memfit waits"  # the name of a thread that waits for an end, and takes no memory
STATM = Path("/proc/self/statm")
KINDS = (
    (stat.S_ISDIR, "is a folder"), (stat.S_ISFIFO, "is a pipe"), (stat.S_ISSOCK, "is a socket"),
    (stat.S_ISCHR, "is a device"), (stat.S_ISBLK, "is a device"),
)  # fmt: skip


def most_memory(size: int) -> int:
    """Return the bytes of memory that a file of `size` bytes on disk may take."""
    return max(FLOOR, TIMES * size)


def kind_of(mode: int) -> str:
    """Return what is no regular file as words, "" for a regular file."""
    return next((words for is_kind, words in KINDS if is_kind(mode)), "")


def size_of(path: Path, most: int, hint: str) -> int:
    """Return the bytes of a regular file. Raises BadInput for anything else, and for more than `most` bytes."""
    try:
        found = path.stat()
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise BadInput(f"cannot read {path}: {why}", hint=hint) from None
    if kind := kind_of(found.st_mode):
        raise BadInput(f"{path} {kind}, not a file", hint=hint)
    if found.st_size > most:
        shown = f"{most >> 20} MiB" if most >= MIB else f"{most >> 10} KiB"
        raise BadInput(f"{path} is larger than {shown}", hint=hint)
    return found.st_size


def content_of(path: Path, most: int, hint: str) -> bytes:
    """Return the content of a regular file of at most `most` bytes. Raises BadInput."""
    size = size_of(path, most, hint)
    try:
        with path.open("rb") as file:
            return file.read(size)  # a limit in place of the size would be allocated
    except OSError as error:
        raise BadInput(f"cannot read {path}: {error.strerror or error}", hint=hint) from None


def json_of(path: Path) -> Any:
    """Return the value of a JSON file that memfit wrote. Raises OSError, or ValueError for what is not one any more."""
    found = path.stat()
    if kind := kind_of(found.st_mode):
        raise ValueError(f"it {kind}, not a file")
    try:
        with _limited(most_memory(found.st_size)), path.open("rb") as file:
            return json.loads(file.read(found.st_size))
    except MemoryError:
        raise ValueError(_too_much(found.st_size, "it")) from None


def stream_of(path: Path, hint: str) -> BinaryIO:
    """Open a file or a pipe that is read once. Raises BadInput for what cannot be read, or need not end.

    Opening a pipe does not wait for its writer: without one it is empty.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise BadInput(f"cannot read {path}: {why}", hint=hint) from None
    file = os.fdopen(descriptor, "rb")
    kind = kind_of(os.fstat(descriptor).st_mode)
    if kind not in ("", "is a pipe") and not os.isatty(descriptor):
        file.close()
        raise BadInput(f"{path} {kind}, not a file", hint=hint)
    os.set_blocking(descriptor, True)
    return file


def unpacked(packed: bytes, what: str, hint: str) -> bytes:
    """Return the content of a gzipped file, which is unpacked once. Raises BadInput for a damaged or too large one."""
    unzip = zlib.decompressobj(wbits=31)
    try:
        content = unzip.decompress(packed, most_memory(len(packed)))
    except zlib.error as error:
        raise BadInput(f"{what} is damaged: {error}", hint="copy or record it again") from None
    if unzip.unconsumed_tail:
        raise BadInput(_too_much(len(packed), what), hint=hint)
    if not unzip.eof:
        raise BadInput(f"{what} ends too early", hint="copy or record it again")
    if content.startswith(GZIP):
        raise BadInput(f"{what} is packed twice", hint="unpack it once: gunzip FILE")
    return content


@contextmanager
def memory(size: int, what: str, hint: str) -> Iterator[None]:
    """Raise BadInput where the block takes more memory than a file of `size` bytes may."""
    try:
        with _limited(most_memory(size)):
            yield
    except MemoryError:
        raise BadInput(_too_much(size, what), hint=hint) from None


def _too_much(size: int, what: str) -> str:
    return f"{what} would take more than {most_memory(size) >> 20} MiB of memory, far more than its size explains"


@contextmanager
def _limited(extra: int) -> Iterator[None]:
    """Allow no more than `extra` bytes of address space beyond those in use, where that can be limited (Linux).

    The limit is the process's, so it is left alone where other threads of it might need memory at the same time.
    """
    try:
        import resource

        pages = int(STATM.read_text().split()[0])
        soft, hard = resource.getrlimit(resource.RLIMIT_AS)
        limit = pages * resource.getpagesize() + extra
        if soft != resource.RLIM_INFINITY:
            limit = min(limit, soft)
        if any(one is not threading.current_thread() and one.name != IDLE for one in threading.enumerate()):
            raise OSError
        resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    except (ImportError, OSError, ValueError):
        yield
        return
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def is_endless(descriptor: int) -> bool:
    """Return whether a device is open there that is no terminal: what is read from it need not end."""
    return kind_of(os.fstat(descriptor).st_mode) == "is a device" and not os.isatty(descriptor)
