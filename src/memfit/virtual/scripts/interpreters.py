"""The Python interpreter that owns a command: where it is, what it has, and how memfit is called in it."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memfit._package import FOLDER
from memfit.errors import BadInput
from memfit.virtual.supported import PACKAGES, versions

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


@dataclass(frozen=True, slots=True)
class Interpreter:
    """A Python with the versions of the training libraries that it has."""

    path: str
    version: tuple[int, int]
    packages: dict[str, str]


_ASKED = """
import json, sys
from importlib.metadata import PackageNotFoundError, version
found = {}
for name in sys.argv[1:]:
    try:
        found[name] = version(name)
    except PackageNotFoundError:
        pass
print(json.dumps([sys.executable, sys.version_info[:2], found]))
"""
# Puts memfit into sys.modules by its folder, so that sys.path and with it the interpreter's own libraries stay as they
# are; -c has put the current folder first on the path, which a script does not have there.
_BEGIN = """
import importlib, sys, importlib.util as util
if sys.path and not sys.path[0]:
    del sys.path[0]
folder, call = sys.argv[1:3]
del sys.argv[1:3]
spec = util.spec_from_file_location("memfit", folder + "__init__.py", submodule_search_locations=[folder])
sys.modules["memfit"] = module = util.module_from_spec(spec)
spec.loader.exec_module(module)
module, _, function = call.partition(":")
getattr(importlib.import_module(module), function)()
"""
_PATIENCE = 60  # seconds that an interpreter has to say what it has


def interpreter(path: str, environment: Mapping[str, str]) -> Interpreter:
    """Ask an interpreter what it has. Raises BadInput for one that does not answer."""
    if os.path.abspath(path) == os.path.abspath(sys.executable):  # noqa: PTH100  # resolving a venv's link leaves it
        return Interpreter(path, sys.version_info[:2], versions())
    try:
        done = subprocess.run(
            [path, "-c", _ASKED, *PACKAGES], env=dict(environment), capture_output=True, text=True, timeout=_PATIENCE
        )
        where, version, packages = json.loads(done.stdout.splitlines()[-1])
    except (OSError, subprocess.TimeoutExpired, ValueError, IndexError) as error:
        raise BadInput(f"{path} is not a Python that runs", hint="give the path of a Python interpreter") from error
    return Interpreter(where, (version[0], version[1]), packages)


def memfit_in(python: str, call: str, *arguments: str, options: Sequence[str] = ()) -> list[str]:
    """Return the command that calls a function of memfit ("module:function") in another interpreter.

    It finds `arguments` in sys.argv[1:]. That interpreter needs neither memfit nor its dependencies.
    """
    return [python, *options, "-c", _BEGIN, FOLDER, call, *arguments]


def module_file(name: str) -> Path:
    """Return the file that `python -m name` runs here, without importing its package, which would run code of it.

    Raises BadInput if there is none.
    """
    places: list[str] | None = [str(Path.cwd()), *sys.path]
    parts = name.split(".")
    for number in range(len(parts)):
        spec = _found(".".join(parts[: number + 1]), places)
        if spec is None:
            raise BadInput(f"there is no module {name}", hint="python -m is looked up from the current folder")
        places = spec.submodule_search_locations and list(spec.submodule_search_locations)
    if places:  # a package runs its __main__
        spec = _found(f"{name}.__main__", places)
        if spec is None:
            raise BadInput(f"{name} is a package without a __main__", hint=f"python -m {name}.train")
    assert spec is not None
    return Path(spec.origin or "")


def _found(name: str, places: list[str] | None) -> Any:
    found = (finder.find_spec(name, places) for finder in sys.meta_path)
    return next((spec for spec in found if spec is not None), None)
