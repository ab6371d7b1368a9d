"""Files that were dropped on the page: streamed to a folder of their own, a few at a time, gone when the page ends."""

from __future__ import annotations

import asyncio
import secrets
import shutil
import tempfile
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from starlette.requests import ClientDisconnect

LONGEST_NAME = 120  # bytes
KEPT = 32  # files; the oldest goes when another comes
SPARE = 1 << 30  # bytes that stay free on the disk
PIECE = 4 << 20  # bytes written at a time; the network brings some 64 KiB
PICKLE = b"\x80"  # how a snapshot begins, which takes long to read


class DropError(Exception):
    """A file that is not taken; its text is shown."""


class Drops:
    """The dropped files of one page."""

    def __init__(self, largest: int, slowest: float) -> None:
        self._largest, self._slowest = largest, slowest
        self._folder = Path(tempfile.mkdtemp(prefix="memfit-page-"))
        self._files: OrderedDict[str, Path] = OrderedDict()

    async def take(self, name: str, pieces: AsyncIterator[bytes], large: Callable[[Path, Path], None]) -> str:
        """Store a file as it comes, and return the key to it. Raises DropError; nothing of such a file is left.

        large: called of a large snapshot as soon as its beginning is here, with the file's path and that of the file
        which is written, and renamed when it is whole.
        """
        key = secrets.token_urlsafe(12)
        folder = self._folder / key
        folder.mkdir()
        path = folder / plain(name)
        try:
            await self._write(path, pieces, large)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        self._files[key] = path
        while len(self._files) > KEPT:
            _, old = self._files.popitem(last=False)
            shutil.rmtree(old.parent, ignore_errors=True)
        return key

    async def _write(self, path: Path, pieces: AsyncIterator[bytes], large: Callable[[Path, Path], None]) -> None:
        size, room = 0, shutil.disk_usage(self._folder).free - SPARE
        most = min(self._largest, room)
        loop, came, waiting = asyncio.get_running_loop(), list[bytes](), 0
        part = path.with_name(f"{path.name}.part")
        try:
            with part.open("wb") as file:
                async with asyncio.timeout(self._slowest) as limit:
                    async for piece in pieces:
                        size += len(piece)
                        if size > most:
                            what = "the file is too large for this page" if most < room else "the disk is full"
                            raise DropError(what)
                        came.append(piece)
                        waiting += len(piece)
                        if waiting >= PIECE:
                            await asyncio.to_thread(file.writelines, came)
                            if waiting == size and came[0].startswith(PICKLE):
                                large(path, part)
                            came, waiting = [], 0
                        limit.reschedule(loop.time() + self._slowest)
                await asyncio.to_thread(file.writelines, came)
            part.rename(path)
        except TimeoutError:
            raise DropError("the file comes too slowly") from None
        except ClientDisconnect:
            raise DropError("the file broke off") from None

    def path(self, key: str) -> Path | None:
        """Return where a file lies; None where there is none of that key."""
        return self._files.get(key)

    def close(self) -> None:
        """Remove all files."""
        shutil.rmtree(self._folder, ignore_errors=True)


def plain(name: str) -> str:
    """Return a file's own name as one part of a path: without control characters, and not longer than names may be."""
    kept = "".join(c if c.isprintable() and c not in "/\\" else "-" for c in name)
    return kept.encode()[-LONGEST_NAME:].decode(errors="ignore").lstrip(".- ") or "dropped"
