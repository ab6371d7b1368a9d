"""The Python interpreter that owns a command: where it is, what it has, and how memfit is called in it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memfit._package import FOLDER
from memfit.errors import BadInput
from memfit.virtual.supported import PACKAGES, versions


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
