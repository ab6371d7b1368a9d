"""The Python environments in which `memfit diff` runs a job: how a command is started in one, and what it has."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from memfit.check import lock_files
from memfit.errors import BadInput

_PATIENCE = 60  # seconds that an interpreter has to list what is installed
_LISTED = """
import importlib.metadata, json, os, sys
found = {}
for one in importlib.metadata.distributions():
    name = (one.metadata["Name"] or "").lower().replace("_", "-")
    if name and name not in found:
        tops = (one.read_text("top_level.txt") or "").split()
        found[name] = [one.version, tops]
print(json.dumps([found, [os.path.realpath(p) for p in sys.path if p and os.path.isdir(p)]]))
"""
_PYTHON = re.compile(r"python[\d.]*")


@dataclass(frozen=True, slots=True)
class Environment:
    """An environment as it was named.

    variables: what starts a command in it. packages: distribution -> (version, its top-level modules). path: the
    folders in which it looks for modules.
    """

    name: str
    python: str
    variables: dict[str, str]
    packages: dict[str, tuple[str, tuple[str, ...]]]
    path: tuple[str, ...]

    def command(self, words: tuple[str, ...]) -> tuple[str, ...]:
        """Return a command line that runs `words` in this environment."""
        settings = [f"{name}={value}" for name, value in self.variables.items()]
        first = [self.python, *words] if words[0].endswith(".py") else list(words)
        if _PYTHON.fullmatch(first[0]):
            first[0] = self.python
        return ("env", *settings, *first) if settings else tuple(first)

    def version(self, library: str) -> str:
        """Return the version of a distribution; "" if it is not installed."""
        return self.packages.get(library, ("", ()))[0]

    def library_of(self, file: str) -> str:
        """Return the distribution that a file, relative to site-packages, is of."""
        top = file.partition("/")[0].removesuffix(".py")
        for name, (_, tops) in self.packages.items():
            if top in tops:
                return name
        return top.lower().replace("_", "-")

    def relative(self, file: str) -> str:
        """Return a file relative to the folder of the path that holds it; "" if none does."""
        inside = [os.path.relpath(file, place) for place in self.path if file.startswith(place.rstrip("/") + "/")]
        return min(inside, key=len, default="")

    def find(self, relative: str) -> Path | None:
        """Return the file that this environment has of that name, in the first package of its name on the path."""
        top = relative.partition("/")[0]
        place = next((place for place in self.path if Path(place, top).exists()), None)
        file = Path(place, relative) if place else None
        return file if file and file.is_file() else None


def environment(named: str, tell: Callable[[str], None] = lambda _: None) -> Environment:
    """Find an environment: a virtual environment's folder, its python, a folder of `pip install --target`, a lock file.

    That of a lock file is made in memfit's cache folder, which `tell` says. Raises BadInput for anything else.
    """
    path = Path(named).expanduser()
    if _is_lock(path):
        path = lock_files.installed(path, tell)
    python, variables = _started(named, path)
    packages, places = _listed(named, str(python), variables)
    return Environment(named, str(python), variables, packages, places)


def _is_lock(path: Path) -> bool:
    """Return whether a path is a lock file."""
    return path.is_file() and lock_files.is_lock(path)


def refuse_unknown(named: str) -> None:
    """Raise BadInput for what is no environment; nothing is installed, which takes minutes."""
    path = Path(named).expanduser()
    if _is_lock(path):
        lock_files.pins_of(path)
    else:
        _started(named, path)


def _started(named: str, path: Path) -> tuple[Path, dict[str, str]]:
    """Return the python of an environment, and the variables that start a command in it."""
    variables: dict[str, str] = {}
    folder = path.absolute()
    if path.is_file() and os.access(path, os.X_OK):
        python = folder
    elif (folder / "bin" / "python").is_file():
        python = folder / "bin" / "python"
    elif path.is_dir() and any(path.glob("*.dist-info")):  # installed by pip install --target
        python = Path(sys.executable)
        before = os.environ.get("PYTHONPATH", "")
        variables["PYTHONPATH"] = os.pathsep.join(filter(None, (str(folder), before)))
    else:
        raise BadInput(
            f"{named} is no environment",
            hint="give a virtual environment's folder, its python, a folder of pip install --target, or a lock file",
        )
    if not variables and python.parent.name == "bin":
        variables["PATH"] = os.pathsep.join((str(python.parent), os.environ.get("PATH", os.defpath)))
        variables["VIRTUAL_ENV"] = str(python.parent.parent)
    return python, variables


def _listed(
    named: str, python: str, variables: dict[str, str]
) -> tuple[dict[str, tuple[str, tuple[str, ...]]], tuple[str, ...]]:
    try:
        done = subprocess.run(
            [python, "-c", _LISTED], env={**os.environ, **variables}, capture_output=True, text=True, timeout=_PATIENCE
        )
        found, places = json.loads(done.stdout.splitlines()[-1])
    except (OSError, subprocess.TimeoutExpired, ValueError, IndexError) as error:
        raise BadInput(f"{named}: its python does not run", hint=f"try {python} -c 'import sys'") from error
    return {name: (version, tuple(tops)) for name, (version, tops) in found.items()}, tuple(places)
