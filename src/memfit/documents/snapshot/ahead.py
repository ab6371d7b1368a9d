"""Read a snapshot while it is still being written, so that who asks about it then waits for less."""

from __future__ import annotations

import io
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memfit.documents.snapshot import pickles
from memfit.errors import BadInput

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

WAIT = 0.02  # seconds between two looks at whether more was written
_READ: dict[Path, Any] = {}


def read(path: Path, part: Path, size: int) -> None:
    """Read the pickle of `size` bytes that is written as `part` and will be `path`, and keep it for `taken`.

    Raises BadInput for what is no snapshot, and for one that is given up.
    """
    with io.BufferedReader(_Growing(path, part), pickles.CHUNK) as file:
        _READ[path] = pickles.load(file, size)


def taken(path: Path) -> Any:
    """Return what was read ahead of a file, once; None where nothing was."""
    return _READ.pop(path, None)


class _Growing(io.RawIOBase):
    """A file that ends where `part` has been renamed to `path`."""

    def __init__(self, path: Path, part: Path) -> None:
        self.path, self.part = path, part
        try:
            self.file = part.open("rb", buffering=0)
        except FileNotFoundError:  # it is whole by now
            self.file = path.open("rb", buffering=0)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: WriteableBuffer) -> int:
        while True:
            whole = self.path.exists()
            if (count := self.file.readinto(buffer)) or whole:
                return count
            if not self.part.exists() and not self.path.exists():
                raise BadInput("the file is not written any more", hint="drop it again")
            time.sleep(WAIT)

    def close(self) -> None:
        self.file.close()
        super().close()
