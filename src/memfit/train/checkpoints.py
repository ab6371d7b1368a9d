"""Whole checkpoints: on the disk before they count, with the size and digest of every file in their mark.

The trainer writes a checkpoint's files; `seal` flushes them and their folders, and only then writes the mark, so that
after a power cut a mark never stands before what it marks. `damage` compares the files with the mark before a run goes
on from them.
"""

from __future__ import annotations

import json
import mmap
import os
import re
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zlib import crc32

import msgspec

from memfit.reading import bounds

COMPLETE = "complete.json"  # the mark, written last: a checkpoint without it is half a checkpoint
NAMED = re.compile(r"checkpoint-(\d+)")  # folders of the trainer; others that begin alike are the user's
WEIGHTS = ("*model*.safetensors", "*model*.bin")  # save_model's: a model in one or several files, or adapters
PIECE = 1 << 18  # bytes that are read at a time: they stay in the cache of a core
MAPPED = 1 << 24  # bytes of a mapped file between two looks at signals


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A whole checkpoint. `optimizer`: the one its states belong to; `evaluate`: its evaluation has not ended.

    `by_process`: the samples that each process trained, whose sum is `samples`. `files`: name -> size, digest.
    """

    path: Path
    step: int
    samples: int
    by_process: tuple[int, ...]
    optimizer: str
    evaluate: bool
    files: dict[str, tuple[int, str]]

    def trained(self, rank: int, processes: int) -> int | None:
        """Return the samples that one of the run's processes trained; None if they were another number."""
        return self.by_process[rank] if len(self.by_process) == processes else None

    @property
    def size(self) -> int:
        """Return the bytes of its files."""
        return sum(size for size, _ in self.files.values())


def folders(output: Path) -> Iterator[Path]:
    """Yield the trainer's checkpoint folders, whole or not."""
    for path in sorted(output.glob("checkpoint-*")):
        if NAMED.fullmatch(path.name) and path.is_dir() and not path.is_symlink():
            yield path


def read(path: Path) -> Checkpoint | str:
    """Return the checkpoint in a folder, by its mark, or why the mark cannot be read."""
    try:
        stored = bounds.json_of(path / COMPLETE)
        if stored.pop("check", None) != _check(stored):
            return f"its {COMPLETE} is damaged"
        return msgspec.convert({**stored, "path": path}, Checkpoint)
    except OSError as error:
        return f"its {COMPLETE} cannot be read: {error.strerror or error}"
    except (ValueError, TypeError, AttributeError, msgspec.ValidationError):
        return f"its {COMPLETE} is damaged"


def seal(path: Path, marks: dict[str, Any], write: Any) -> None:
    """Flush a checkpoint's files to the disk, then mark it as whole. write(path, value): writes JSON in one step."""
    files = flushed(path, (p for p in path.rglob("*") if p.name != COMPLETE))
    mark = {**marks, "files": files}
    write(path / COMPLETE, mark | {"check": _check(mark)})
    for folder in (path, path.parent):
        _flush(folder)


def _check(mark: dict[str, Any]) -> str:
    """Return the checksum of a mark."""
    return f"{crc32(json.dumps(mark, sort_keys=True).encode(errors='replace')):08x}"


def flushed(folder: Path, among: Iterable[Path]) -> dict[str, tuple[int, str]]:
    """Flush the regular files in a folder and the folders they lie in; return name -> size, digest.

    The disk writes while the digests are computed, which then take next to no time of their own.
    """
    files = sorted(p for p in among if p.is_file() and not p.is_symlink())
    with ThreadPoolExecutor(1) as pool:
        flushing = [pool.submit(_flush, file) for file in files]
        found = {str(file.relative_to(folder)): (file.stat().st_size, digest(file, mapped=True)) for file in files}
        for file in flushing:
            file.result()
    for one in sorted({folder, *(file.parent for file in files)}, key=lambda p: -len(p.parts)):
        _flush(one)
    return found


def damage(found: Checkpoint, thorough: bool = True) -> str:
    """Return why a checkpoint is not what was written; "" if it is. thorough: compare the digests too, not only sizes.

    The states of an optimizer that the run no longer has may lie under another name.
    """
    return difference(found.path, found.files, thorough, lambda place: renamed(place, found.optimizer))


def difference(
    folder: Path, files: dict[str, tuple[int, str]], thorough: bool = True,
    other: Callable[[Path], Path] = lambda place: place,
) -> str:  # fmt: skip
    """Return how files differ from their sizes and digests; "" if they do not. other: the second place of a file."""
    places = {}
    for name, (size, _) in files.items():
        place = next((p for p in (folder / name, other(folder / name)) if p.is_file()), None)
        if place is None:
            return f"{name} is missing"
        if place.stat().st_size != size:
            return f"{name} has {place.stat().st_size:,} bytes of {size:,}"
        places[name] = place
    for name, place in places.items() if thorough else ():
        try:
            same = digest(place) == files[name][1]
        except OSError as error:
            return f"{name} cannot be read: {error.strerror or error}"
        if not same:
            return f"{name} has other bytes than were written"
    return ""


def renamed(states: Path, optimizer: str) -> Path:
    """Return the name of states that belong to an optimizer which the run no longer has."""
    return states.with_stem(f"{states.stem}.{optimizer}")


def set_aside(path: Path, aside: Path) -> Path:
    """Move a damaged checkpoint or file out of the trainer's way, and return where it lies."""
    aside.mkdir(exist_ok=True)
    number, place = 0, aside / path.name
    while place.exists():
        number += 1
        place = aside / f"{path.name}.{number}"
    return path.replace(place)


def digest(path: Path, mapped: bool = False) -> str:
    """Return the digest of a file, with the name of its algorithm; it is to find damage, not forgery.

    mapped: the file was just written and lies in memory, so that it need not be copied (half the time). Other files are
    read, because an error of the disk would end a process that maps them.
    """
    import xxhash  # of the training environment; as fast as the disk is read

    found = xxhash.xxh3_128()
    with path.open("rb", buffering=0) as file:
        if mapped and os.fstat(file.fileno()).st_size:
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content, memoryview(content) as view:
                for begin in range(0, len(view), MAPPED):
                    found.update(view[begin : begin + MAPPED])
        else:
            piece = memoryview(bytearray(PIECE))
            while size := file.readinto(piece):
                found.update(piece[:size])
    return f"xxh3:{found.hexdigest()}"


def _flush(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk. A file system that cannot is left as it is."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError:
        pass
    finally:
        os.close(handle)
