"""Where a command's program lies: on the PATH, by its first line, in an environment of conda or of a project."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

_SHEBANG = 4096  # bytes that are read of a program; pip writes longer paths behind an exec in the second line
_EXEC = re.compile(r"^'''exec' ['\"]?(?P<python>[^'\"\n]+?)['\"]? \"\$0\"", re.MULTILINE)


def find_program(name: str, environment: Mapping[str, str], folder: str) -> Path | None:
    """Return the path of a program: as named, on the PATH, or beside the interpreter that runs memfit."""
    if os.sep in name:
        path = Path(os.path.normpath(Path(folder, Path(name).expanduser())))
        return path if path.is_file() else None
    found = shutil.which(name, path=environment.get("PATH", os.defpath))
    if found:
        return Path(found)
    beside = Path(sys.executable).parent / name
    return beside if beside.is_file() else None


def shebang(path: Path) -> str:
    """Return the interpreter that a program's first lines name; '' if they name none."""
    try:
        with path.open("rb") as file:
            text = file.read(_SHEBANG).decode(errors="replace")
    except OSError:
        return ""
    if not text.startswith("#!"):
        return ""
    words = text[2:].partition("\n")[0].split()
    if not words:
        return ""
    if Path(words[0]).name == "env":
        named = [word for word in words[1:] if not word.startswith("-") and "=" not in word]
        return named[0] if named else ""
    if Path(words[0]).name == "sh" and (match := _EXEC.search(text)):
        return match["python"]
    return words[0]


def project_environment(folder: str, environment: Mapping[str, str], active: bool) -> Path | None:
    """Return the virtual environment of a project that `uv run` and its like use in a folder."""
    if active and (named := environment.get("VIRTUAL_ENV")):
        return Path(folder, named)
    named = environment.get("UV_PROJECT_ENVIRONMENT", ".venv")
    start = Path(folder).resolve()
    return next((place / named for place in (start, *start.parents) if (place / named / "bin").is_dir()), None)


def conda_environment(name: str, environment: Mapping[str, str]) -> Path | None:
    """Return the folder of a conda environment, by its name, or by its path as `conda run -p` takes it."""
    home = Path(environment.get("HOME") or "~").expanduser()
    listed = home / ".conda" / "environments.txt"
    lines = listed.read_text(errors="replace").splitlines() if listed.is_file() else []
    roots = [Path(environment[key]).parents[up] for key, up in _CONDA.items() if environment.get(key)]
    roots += [home / folder for folder in _CONDA_FOLDERS] + [Path("/opt/conda")]
    places = [root if name == "base" else root / "envs" / name for root in roots]
    places += [Path(line) for line in lines if Path(line).name == name]
    if os.sep in name:
        places = [Path(name).expanduser()]
    return next((place for place in places if (place / "bin" / "python").exists()), None)


# variable -> how many folders above what it names conda's root is: bin/conda below it, or a file in it
_CONDA = {"CONDA_EXE": 1, "MAMBA_EXE": 1, "CONDA_PYTHON_EXE": 1}
_CONDA_FOLDERS = ("miniconda3", "anaconda3", "miniforge3", "mambaforge", "micromamba", ".conda")


def activate(environment: dict[str, str], folder: Path) -> None:
    """Put an environment's programs first, as its `activate` does."""
    environment["VIRTUAL_ENV"] = str(folder)
    environment["PATH"] = os.pathsep.join([str(folder / "bin"), environment.get("PATH", "")])
