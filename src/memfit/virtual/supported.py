"""Check whether this machine can trace, by its system, processor and installed versions, without importing torch."""

from __future__ import annotations

import platform

from memfit.errors import BadInput
from memfit.extras import install_command
from memfit.nouns.alloc_settings import Torch, torch_version

OLDEST: Torch = (2, 10)  # first version with torch._C._ensureCUDADeviceGuardSet, which installs a no-op device guard
PACKAGES = ("torch", "transformers", "peft", "trl", "accelerate", "bitsandbytes", "deepspeed")
_OPTIONAL = ("bitsandbytes", "deepspeed")


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


def check_trace() -> None:
    """Raise BadInput where `check_host` does, and where a training library is missing."""
    installed = versions()
    check_host(installed.get("torch", ".".join(map(str, OLDEST))))
    if missing := [name for name in PACKAGES if name not in installed and name not in _OPTIONAL]:
        raise BadInput(
            "a trace needs the training libraries", hint=f"{install_command('trace')} (missing: {', '.join(missing)})"
        )
