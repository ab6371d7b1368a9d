"""Write a command's output files: all are checked first, and each is replaced atomically."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path

from memfit.errors import BadInput, Refused


def write_files(files: Mapping[Path, bytes], force: bool) -> None:
    """Write each file atomically. Raises Refused before anything is written when one exists and `force` is False."""
    check_free(files, force)
    for path, content in files.items():
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(path, content)
        except OSError as error:
            raise BadInput(f"cannot write {path}: {error.strerror or error}", hint="name another file") from None


def check_free(paths: Iterable[Path], force: bool) -> None:
    """Refuse folders, and files that exist unless `force`; commands call it before they compute anything.

    Devices and pipes are written to, and lose nothing.
    """
    paths = list(paths)
    for path in paths:
        if path.is_dir():
            raise BadInput(f"{path} is a folder", hint="name a file")
    taken = [str(path) for path in paths if os.path.lexists(path) and not is_stream(path)]
    if taken and not force:
        raise Refused(f"{', '.join(taken)} exists already", hint="add --force to overwrite, or name another file")


def is_stream(path: Path) -> bool:
    """Return whether something lies there that is neither a file nor a folder: a device, a pipe, a socket."""
    return path.exists() and not path.is_file() and not path.is_dir()


def replace_file(path: Path, content: bytes) -> None:
    """Write a file under a temporary name, then replace the file at `path` with it; write to a device or a pipe.

    A link is replaced, not what it names. A file that is replaced keeps its permissions.
    """
    if is_stream(path):
        with path.open("wb") as stream:
            stream.write(content)
        return
    temporary = path.with_name(f".{path.name[:200]}.{os.urandom(4).hex()}")
    try:
        with temporary.open("xb") as stream:
            stream.write(content)
        if path.exists() and not path.is_symlink():
            temporary.chmod(stat.S_IMODE(path.stat().st_mode))
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
