"""Saved memory histories as a Tape: torch's own snapshots, memfit's tapes and recorded runs, recognised by content.

A new format is one module and one branch of `read`. No file is trusted: nothing in it is executed, its size is bounded.
"""

from __future__ import annotations

import io
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from memfit.documents import tape_file
from memfit.documents.snapshot import ahead, pickles, records
from memfit.documents.snapshot.frames import Stacks, stacks_of
from memfit.documents.snapshot.history import tape_of
from memfit.errors import BadInput
from memfit.nouns.alloc_settings import Torch
from memfit.nouns.tape import Tape
from memfit.reading import bounds

MAX_FILE = 4 << 30  # bytes on disk; a history of a million events with stacks has some hundred megabytes
PICKLE = b"\x80"
UNPACK = "if it is what you recorded, unpack it first (gunzip FILE): what a file may take grows with its size on disk"
WANTED = "give a pickle of torch.cuda.memory._dump_snapshot, or a tape written by memfit"


def read(
    path: Path, device: int | None = None, torch: Torch | None = None, stacks: Stacks | None = None
) -> Tape:  # fmt: skip
    """Return the tape in a file; of a snapshot, that of card `device` (default: as in `tape_of`).

    `torch` is the version that made a snapshot, where that is known. `stacks` is filled with the bytes that a snapshot
    has in use at its end, by call stack. Raises BadInput for anything that cannot be read.
    """
    try:
        with memory(path):
            data = pickled(path)
            if data is not None:
                tape = tape_of(data, device, torch)
                if stacks is not None:
                    stacks.update(stacks_of(data, tape.device or 0))
                return tape
            content = content_of(path)
            if device is not None:
                raise BadInput("only a snapshot has several devices", hint="leave --device out")
            return records.loads(content, path) if records.known(content) else tape_file.loads(content)
    except BadInput as error:
        if str(path) in error.message:
            raise
        raise BadInput(f"{path}: {error.message}", hint=error.hint or WANTED) from None


def memory(path: Path) -> AbstractContextManager[None]:
    """Bound the memory of what is computed from a history; `read` does so itself. Raises BadInput."""
    size, packed = bounds.size_of(path, MAX_FILE, WANTED), is_packed(path)
    return bounds.memory(size, str(path), UNPACK if packed else WANTED)


def is_packed(path: Path) -> bool:
    """Return whether a regular file begins as gzip does."""
    try:
        with path.open("rb") as file:
            return file.read(len(bounds.GZIP)) == bounds.GZIP
    except OSError as error:
        raise BadInput(f"cannot read {path}: {error.strerror or error}", hint=WANTED) from None


def pickled(path: Path) -> Any:
    """Return the data of a pickle, with TraceEntry in place of its events; None for a file that is no pickle."""
    if (found := ahead.taken(path)) is not None:
        return found
    size = bounds.size_of(path, MAX_FILE, WANTED)
    with path.open("rb") as file:
        if file.peek(1).startswith(PICKLE):
            return pickles.load(file, size)
    content = content_of(path)
    return pickles.load(io.BytesIO(content), size) if content.startswith(PICKLE) else None


def content_of(path: Path) -> bytes:
    """Return the bytes of a file, decompressed where it is gzipped."""
    content = bounds.content_of(path, MAX_FILE, WANTED)
    if not content:
        raise BadInput(f"{path} is empty", hint=WANTED)
    return bounds.unpacked(content, str(path), UNPACK) if content.startswith(bounds.GZIP) else content


__all__ = ["is_packed", "memory", "pickled", "read"]
