"""What can be traced: the oldest versions, this machine's system and processor, the installed libraries; no torch."""

from __future__ import annotations

import platform
import re
import sys

from memfit.errors import BadInput
from memfit.extras import cpu_torch, install_command
from memfit.nouns.alloc_settings import Torch, torch_version

OLDEST: Torch = (2, 10)  # first version with torch._C._ensureCUDADeviceGuardSet, which installs a no-op device guard
PACKAGES = (
    "torch", "transformers", "peft", "trl", "accelerate", "bitsandbytes", "deepspeed", "sentence-transformers",
    "diffusers",
)  # fmt: skip
_OPTIONAL = ("bitsandbytes", "deepspeed", "sentence-transformers", "diffusers")
# said of a run, whose verdict it withholds
MOVED = "torch.compile: a CUDA graph was recorded beside outputs of others, which lie elsewhere than on a card"
GRAPHS_KEY = "cuda-graphs"  # with which --ignore names it
OLDEST_PYTHON = (3, 11)  # memfit's own
OLDEST_FOR_SCRIPTS = {"transformers": (4, 37)}  # of libraries that a script uses: the oldest that was run
OLDEST_FOR_STAND_INS = {"transformers": (4, 57)}  # where it loads a model by name; before 4.56 config.dtype is missing
OLDEST_FOR_RECIPES = {"transformers": (5, 0)}  # of the trainers that memfit starts itself; as in pyproject.toml


def versions() -> dict[str, str]:
    """Return the versions of the training libraries that are installed."""
    from importlib.metadata import PackageNotFoundError, version  # slow to import

    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def obstacle() -> str:
    """Return why this machine cannot have a virtual GPU, whatever is installed; '' if it can."""
    system, machine = platform.system(), platform.machine()
    return "" if (system, machine) == ("Linux", "x86_64") else f"no virtual GPU on {system} {machine}"


def check_host(torch: str) -> None:
    """Raise BadInput for a machine or a version of PyTorch that cannot have a virtual GPU."""
    if reason := obstacle():
        raise BadInput(reason, hint="trace needs Linux on x86-64; memfit estimate answers everywhere")
    if torch_version(torch) < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise BadInput(
            f"PyTorch {torch} cannot host a virtual GPU",
            hint=f"pip install 'torch>={oldest}'; memfit estimate answers without PyTorch",
        )


def check_python(path: str, version: tuple[int, int], packages: dict[str, str]) -> None:
    """Raise BadInput for an interpreter that cannot run a traced script: it needs PyTorch, and nothing else."""
    if version < OLDEST_PYTHON:
        needed = ".".join(map(str, OLDEST_PYTHON))
        raise BadInput(
            f"{path} is Python {version[0]}.{version[1]}, and a trace needs {needed}", hint=f"uv venv --python {needed}"
        )
    if "torch" not in packages:
        raise BadInput(f"{path} has no PyTorch", hint=f"{path} -m pip install torch")
    check_host(packages["torch"])


def check_library(name: str, version: str, oldest: dict[str, tuple[int, int]] = OLDEST_FOR_SCRIPTS) -> None:
    """Raise BadInput for a version of a library that is too old to be traced."""
    if tuple(map(int, re.findall(r"\d+", version)[:2])) < oldest[name]:
        needed = ".".join(map(str, oldest[name]))
        raise BadInput(f"{name} {version} is too old to be traced", hint=f"pip install '{name}>={needed}'")


def check_script() -> None:
    """Raise BadInput where this interpreter cannot run a traced script."""
    check_python(sys.executable, sys.version_info[:2], versions())


def check_trace() -> None:
    """Raise BadInput where `check_host` does, and where a library that traces a recipe is missing or too old."""
    installed = versions()
    check_host(installed.get("torch", ".".join(map(str, OLDEST))))
    if missing := [name for name in PACKAGES if name not in installed and name not in _OPTIONAL]:
        raise BadInput(
            "a trace of a recipe needs the training libraries",
            hint=f"{cpu_torch() + ' && ' if 'torch' in missing else ''}{install_command('trace')} "
            f"(missing: {', '.join(missing)})",
        )
    for name in OLDEST_FOR_RECIPES:
        check_library(name, installed[name], OLDEST_FOR_RECIPES)
