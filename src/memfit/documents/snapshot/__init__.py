"""Saved memory histories as a Tape: torch's own snapshots, memfit's tapes and recorded runs, recognised by content.

A new format is one module and one branch of `read`. No file is trusted: nothing in it is executed, its size is bounded.
"""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

from memfit.documents import tape_file
from memfit.documents.snapshot import pickles, records
from memfit.documents.snapshot.history import tape_of
from memfit.documents.snapshot.shape import Smaller
from memfit.errors import BadInput
from memfit.nouns.alloc_settings import Torch
from memfit.nouns.tape import Tape

MAX_FILE = 1 << 30  # bytes on disk; a history of a million events with stacks has some hundred megabytes
MAX_CONTENT = 2 << 30  # bytes after decompression
GZIP, PICKLE = b"\x1f\x8b", b"\x80"
WANTED = "give a pickle of torch.cuda.memory._dump_snapshot, or a tape written by memfit"


def read(path: Path, device: int | None = None, torch: Torch | None = None) -> Tape:
    """Return the tape in a file; of a snapshot, that of card `device` (default: as in `tape_of`).

    `torch` is the version that made a snapshot, where that is known. Raises BadInput for anything that cannot be read.
    """
    try:
        data = pickled(path)
        if data is not None:
            return tape_of(data, device, torch)
        content = content_of(path)
        if device is not None:
            raise BadInput("only a snapshot has several devices", hint="leave --device out")
        return records.loads(content, path) if records.known(content) else tape_file.loads(content)
    except BadInput as error:
        raise BadInput(f"{path}: {error.message}", hint=error.hint or WANTED) from None


def pickled(path: Path) -> Any:
    """Return the data of a pickle, its events as TraceEntry; None for a file that is no pickle."""
    size = _size(path)
    with path.open("rb") as file:
        if file.peek(1).startswith(PICKLE):
            return pickles.load(file, size, Smaller())
    content = content_of(path)
    return pickles.loads(content, Smaller()) if content.startswith(PICKLE) else None


def _size(path: Path) -> int:
    """Return the bytes on disk. Raises BadInput for a file that is too large, or cannot be read."""
    try:
        size = path.stat().st_size
        if size > MAX_FILE:
            raise BadInput(f"{path} has more than {MAX_FILE >> 20} MiB", hint="record fewer events: max_entries=100000")
        path.open("rb").close()
    except OSError as error:
        raise BadInput(f"cannot read {path}: {error.strerror or error}", hint=WANTED) from None
    return size


def content_of(path: Path) -> bytes:
    """Return the bytes of a file, decompressed where it is gzipped."""
    _size(path)
    packed = path.read_bytes()
    if not packed:
        raise BadInput(f"{path} is empty", hint=WANTED)
    return _unpacked(packed, path) if packed.startswith(GZIP) else packed


def _unpacked(packed: bytes, path: Path) -> bytes:
    unzip = zlib.decompressobj(wbits=31)
    try:
        content = unzip.decompress(packed, MAX_CONTENT)
    except zlib.error as error:
        raise BadInput(f"{path} is damaged: {error}", hint="copy or record it again") from None
    if unzip.unconsumed_tail:
        raise BadInput(f"{path} unpacks to more than {MAX_CONTENT >> 20} MiB", hint=WANTED)
    if not unzip.eof:
        raise BadInput(f"{path} ends too early", hint="copy or record it again")
    return content


__all__ = ["pickled", "read"]
