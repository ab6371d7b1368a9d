"""Write a command's output files: all are checked first, and each is replaced atomically."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from memfit.cli import terminal
from memfit.errors import BadInput, Refused

if TYPE_CHECKING:
    from memfit.nouns.architecture import Architecture
    from memfit.nouns.gpu import Gpu
    from memfit.nouns.job import Recipe


def write_files(files: Mapping[Path, bytes], force: bool) -> None:
    """Write each file atomically. Raises Refused before anything is written when one exists and `force` is False."""
    check_free(files, force)
    for path, content in files.items():
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            _replace(path, content)
        except OSError as error:
            raise BadInput(f"cannot write {path}: {error.strerror or error}", hint="name another file") from None


def save_tape(path: str, force: bool, architecture: Architecture, recipe: Recipe, gpu: Gpu) -> None:
    """Write the tape of a recipe's run, computed by formula."""
    from memfit.closed_form.run.account import Account
    from memfit.closed_form.run.timeline import recorded
    from memfit.documents.tape_file import dumps

    write_files({Path(path): dumps(recorded(Account(architecture, recipe, gpu)))}, force)
    terminal.note(f"wrote {path} (see: memfit replay {path})")


def check_free(paths: Iterable[Path], force: bool) -> None:
    """Refuse folders, and files that exist unless `force`; commands call it before they compute anything."""
    paths = list(paths)
    for path in paths:
        if path.is_dir():
            raise BadInput(f"{path} is a folder", hint="name a file")
    taken = [str(path) for path in paths if os.path.lexists(path)]
    if taken and not force:
        raise Refused(f"{', '.join(taken)} exists already", hint="add --force to overwrite, or name another file")


def _replace(path: Path, content: bytes) -> None:
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(content)
        Path(temporary).chmod(0o644)  # mkstemp creates it readable by the owner alone
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
