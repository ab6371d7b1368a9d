"""The cache folder: answers of traces and their tapes, so that a recipe is traced once; environments of lock files.

An answer is kept under a digest of everything that it depends on: the model's config, the recipe, the task, the card,
the versions of the libraries, and memfit's own code.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from memfit._package import FOLDER, __version__
from memfit.documents import tape_file
from memfit.documents.output_files import replace_file
from memfit.errors import BadInput
from memfit.nouns.footprint import Footprint
from memfit.nouns.job import Recipe
from memfit.nouns.plan import Judgement
from memfit.nouns.tape import Tape
from memfit.reading import bounds

LIMIT = 64 << 20  # bytes of all files; an answer takes some 10 KB, its tape some 100 KB
LONGEST = LIMIT // 8  # bytes of a tape that is kept
_ANSWER, _TAPE = ".json", ".tape"


Kept = TypeVar("Kept")


class Answer(msgspec.Struct, frozen=True):
    """What a trace said of a recipe on a card."""

    footprint: Footprint
    judgement: Judgement


def folder() -> Path:
    """Return the folder of the answers: MEMFIT_CACHE, else memfit/ in the platform's cache folder."""
    if own := os.environ.get("MEMFIT_CACHE"):
        return Path(own)
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "memfit"
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA", Path.home() / "AppData" / "Local")) / "memfit" / "cache"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "memfit"


def key(**about: Any) -> str:
    """Return the digest of what an answer depends on, and of memfit's version and newest file."""
    newest = max(file.stat().st_mtime_ns for file in Path(FOLDER).rglob("*.py"))
    text = msgspec.json.encode({**about, "memfit": (__version__, newest)}, order="deterministic")
    return hashlib.sha256(text).hexdigest()


def read(name: str, kind: type[Kept]) -> Kept | None:
    """Return the answer under a digest; None where there is none, or none that can be read."""
    try:
        return msgspec.json.decode(_content(f"{name}{_ANSWER}"), type=kind)
    except (OSError, msgspec.MsgspecError, RecursionError, BadInput):
        return None


def write(name: str, answer: object) -> None:
    """Keep an answer. A folder that cannot be written keeps nothing."""
    _keep(f"{name}{_ANSWER}", msgspec.json.encode(answer))


def tape_of(recipe: Recipe, footprint: Footprint) -> Tape | None:
    """Return the tape that a trace of a recipe was answered from; None where it is not kept, or cannot be read."""
    try:
        return tape_file.loads(_content(_tape_name(recipe, footprint)))
    except (OSError, BadInput):
        return None


def write_tape(recipe: Recipe, footprint: Footprint, tape: Tape) -> None:
    """Keep the tape of a trace, unless it is longer than LONGEST: its picture is not worth that many answers."""
    content = tape_file.dumps(tape)
    if len(content) <= LONGEST:
        _keep(_tape_name(recipe, footprint), content)


def _tape_name(recipe: Recipe, footprint: Footprint) -> str:
    """Return the file of a tape. A plan names it: that is all a notebook has."""
    return f"{key(recipe=recipe, phases=footprint.phases)}{_TAPE}"


def _content(name: str) -> bytes:
    file = folder() / name
    found = bounds.content_of(file, LIMIT, "")
    os.utime(file)  # what was not read for longest goes first
    return found


def _keep(name: str, content: bytes) -> None:
    """Write a file, and above LIMIT remove tapes, then answers, the oldest first."""
    try:
        folder().mkdir(parents=True, exist_ok=True)
        replace_file(folder() / name, content)
        files = sorted(_files().items(), key=lambda item: (item[0].suffix == _ANSWER, item[1][1]))
        total = sum(size for _, (size, _) in files)
        for file, (size, _) in files:
            if total <= LIMIT:
                break
            file.unlink(missing_ok=True)
            total -= size
    except OSError:
        return


def environments() -> Path:
    """Return the folder of the environments that are made of lock files."""
    return folder() / "environments"


def held() -> Mapping[str, int]:
    """Return the number of answers, and the bytes of them and of their tapes."""
    files = _files()
    return {"answers": sum(f.suffix == _ANSWER for f in files), "bytes": sum(size for size, _ in files.values())}


def held_environments() -> Mapping[str, int]:
    """Return the number of environments and their bytes; each has tens of thousands of files."""
    made = [one for one in environments().glob("*") if one.is_dir()]
    taken = sum(file.lstat().st_size for file in environments().rglob("*") if file.is_file())
    return {"environments": len(made), "environment_bytes": taken}


def clear() -> None:
    """Remove every answer, tape and environment, and nothing else in the folder."""
    for file in _files():
        file.unlink(missing_ok=True)
    shutil.rmtree(environments(), ignore_errors=True)


def _files() -> dict[Path, tuple[int, float]]:
    """Return the size and the last use of each answer and tape."""
    named = (f for kind in (_ANSWER, _TAPE) for f in folder().glob(f"*{kind}") if len(f.stem) == 64)
    return {file: (stat.st_size, stat.st_mtime) for file in named if (stat := file.stat())}
