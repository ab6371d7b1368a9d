"""memfit's cache folder: the answers of traces, so that a recipe is traced once, and environments of lock files.

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
from memfit.documents.output_files import replace_file
from memfit.errors import BadInput
from memfit.nouns.footprint import Footprint
from memfit.nouns.plan import Judgement
from memfit.reading import bounds

LIMIT = 64 << 20  # bytes of all answers; one takes some 10 KB
_SUFFIX = ".json"


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
    file = folder() / f"{name}{_SUFFIX}"
    try:
        found = msgspec.json.decode(bounds.content_of(file, LIMIT, ""), type=kind)
        os.utime(file)  # the oldest go first
    except (OSError, msgspec.MsgspecError, RecursionError, BadInput):
        return None
    return found


def write(name: str, answer: object) -> None:
    """Keep an answer, and remove the oldest above LIMIT. A folder that cannot be written keeps nothing."""
    try:
        folder().mkdir(parents=True, exist_ok=True)
        replace_file(folder() / f"{name}{_SUFFIX}", msgspec.json.encode(answer))
        files = sorted(_files().items(), key=lambda item: item[1][1])
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
    """Return the number of answers and their bytes."""
    sizes = [size for size, _ in _files().values()]
    return {"answers": len(sizes), "bytes": sum(sizes)}


def held_environments() -> Mapping[str, int]:
    """Return the number of environments and their bytes; each has tens of thousands of files."""
    made = [one for one in environments().glob("*") if one.is_dir()]
    taken = sum(file.lstat().st_size for file in environments().rglob("*") if file.is_file())
    return {"environments": len(made), "environment_bytes": taken}


def clear() -> None:
    """Remove every answer and every environment, and nothing else in the folder."""
    for file in _files():
        file.unlink(missing_ok=True)
    shutil.rmtree(environments(), ignore_errors=True)


def _files() -> dict[Path, tuple[int, float]]:
    """Return the size and the last use of each answer."""
    named = (f for f in folder().glob(f"*{_SUFFIX}") if len(f.stem) == 64)
    return {file: (stat.st_size, stat.st_mtime) for file in named if (stat := file.stat())}
