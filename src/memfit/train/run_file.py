"""run.json: a run's settings, the times memory ran out, and the files that decide what is trained.

It is kept twice, each with a checksum, so that damage to either is noticed and mended from the other; and as it holds
the text of recipe.toml, train.py and the launcher's files, those can be written again as they were. The functions at
the end write any file of a run so that a crash or a full disk never leaves half of it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import msgspec

from memfit.errors import BadInput
from memfit.reading import bounds
from memfit.train.outcome import Fall, Settings

RUN_FILE, RUN_COPY = "run.json", "run.copy.json"


@dataclass(frozen=True, slots=True)
class RunFile:
    """The contents of run.json. `files`: name -> text."""

    settings: Settings
    falls: tuple[Fall, ...]
    files: dict[str, str]
    written: bool  # the files are in the folder; False while one recipe replaces another


def there(folder: Path) -> bool:
    """Return whether a folder holds a run."""
    return any((folder / name).is_file() for name in (RUN_FILE, RUN_COPY))


def read(folder: Path) -> RunFile:
    """Return a run's file, or its copy where the file is missing or damaged. Raises BadInput if both are."""
    problems = []
    for path in (folder / RUN_FILE, folder / RUN_COPY):
        try:
            return _read(path)
        except (OSError, ValueError, TypeError, KeyError, RecursionError, msgspec.ValidationError) as error:
            problems.append(f"{path}: {getattr(error, 'strerror', None) or error}")
    raise BadInput(
        f"the settings of the run in {folder} cannot be read: {'; '.join(problems)}",
        hint="the checkpoints beside it are untouched: put either file back, or start anew with --out DIR",
    )


def damaged(folder: Path) -> bool:
    """Return whether either of the two copies is missing or damaged."""
    try:
        return _read(folder / RUN_FILE) != _read(folder / RUN_COPY)
    except (OSError, ValueError, TypeError, KeyError, RecursionError, msgspec.ValidationError):
        return True


def write(folder: Path, settings: Settings, falls: Iterable[Fall], files: dict[str, str], written: bool = True) -> None:
    """Write the copy, then the file, each in one step."""
    value = {"settings": asdict(settings), "falls": [asdict(f) for f in falls], "files": files, "written": written}
    for name in (RUN_COPY, RUN_FILE):
        write_json(folder / name, value | {"check": _check(value)})


def _read(path: Path) -> RunFile:
    value = bounds.json_of(path)
    if value.pop("check", None) != _check(value):
        raise ValueError("it is not as it was written")
    return msgspec.convert(value, RunFile)


def _check(value: dict[str, Any]) -> str:
    text = json.dumps(value, sort_keys=True)
    return blake2b(text.encode(errors="surrogatepass"), digest_size=16).hexdigest()


def write_json(path: Path, value: Any) -> None:
    """Write JSON, replacing the file in one step."""
    write_text(path, json.dumps(value, indent=1) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write text to a temporary file on the disk, then replace the file with it."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
