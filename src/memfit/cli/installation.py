"""Look at what memfit stands on: libraries, PyTorch's build, card, driver, cache; nothing heavy is imported."""

from __future__ import annotations

import os
import platform
import re
import shutil
import tempfile
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, distribution, requires, version
from pathlib import Path
from typing import Literal, NamedTuple

from packaging.requirements import Requirement

from memfit._package import __version__
from memfit.allocator import engine
from memfit.catalogue.cards import list_gpus, local_gpu
from memfit.documents import traced_answers
from memfit.documents.snapshot import pickles
from memfit.errors import MemfitError
from memfit.extras import EXTRAS, cpu_torch, install_command, installer
from memfit.nouns.alloc_settings import LATEST_TORCH, torch_version
from memfit.units import gib, human, several
from memfit.virtual import supported

State = Literal["ok", "note", "fault"]  # note: works, and something could be added or is worth knowing
_TORCH_CUDA = re.compile(r"^(?P<kind>cuda|hip)\b[^=]*= *'(?P<version>[^']+)'", re.MULTILINE)  # torch/version.py
_DRIVER = Path("/proc/driver/nvidia/version")


class Finding(NamedTuple):
    """What was found of one thing, and what to type where it can be bettered."""

    about: str
    state: State
    text: str
    type_next: str = ""


def versions() -> dict[str, str]:
    """Return the versions that answers depend on, from the metadata of the installed packages."""
    return {"memfit": __version__, "Python": platform.python_version(), **supported.versions()}


def findings() -> list[Finding]:
    """Return everything that `memfit doctor` looks at, in the order in which it shows it."""
    has_card, *card = _card()
    return [_host(), *_compiled(), *_extras(), *_torch(has_card.state == "ok"), has_card, *card, _cache()]


def _host() -> Finding:
    reason = supported.obstacle()
    if reason:
        return Finding("machine", "note", f"{reason}; plans and estimates by formula work")
    return Finding("machine", "ok", f"{platform.system()} {platform.machine()}, which a virtual GPU runs on")


def _compiled() -> Iterator[Finding]:
    """Yield what is compiled, and what its lack costs."""
    rows = (
        ("replays", engine.__name__.endswith("_native"), "a plan takes up to two and a half times as long"),
        ("snapshots", pickles.engine is not None, "one is parsed in four to five times the time"),
    )
    for about, there, costs in rows:
        text = f"in Python, not compiled: {costs}; install a C++ compiler and Python's headers, then memfit again"
        yield Finding(about, "ok", "compiled") if there else Finding(about, "note", text)


# ---- libraries -------------------------------------------------------------------------------------------------------


def requirements(extra: str) -> list[Requirement]:
    """Return what an extra adds, from the metadata of the installed memfit."""
    every = map(Requirement, requires("memfit") or ())
    return [r for r in every if r.marker and r.marker.evaluate({"extra": extra})]


def _installed(requirement: Requirement) -> str:
    """Return the installed version of a package; "" without one."""
    try:
        return version(requirement.name)
    except PackageNotFoundError:
        return ""


def _extras() -> Iterator[Finding]:
    """Yield a finding for each extra: complete, with versions that do not go together, or what it would add."""
    for extra in EXTRAS:
        found = [(row, _installed(row)) for row in requirements(extra.name)]
        missing = [row.name for row, there in found if not there]
        other = [f"{there} of {row.name} is not {row.name}{row.specifier}" for row, there in found
                 if there and not row.specifier.contains(there, prereleases=True)]  # fmt: skip
        cpu = f"{cpu_torch()} && " if "torch" in missing and platform.system() == "Linux" else ""
        command = f"{cpu if extra.name == 'trace' else ''}{install_command(extra.name)}"
        about, where = f"memfit[{extra.name}]", ", ".join(f"memfit {name}" for name in extra.commands)
        if missing:
            text = f"not installed ({', '.join(missing)}); would open {extra.opens} ({where})"
            yield Finding(about, "note", text, command)
        elif other:
            yield Finding(about, "fault", f"{'; '.join(other)} ({where})", command)
        else:
            held = ", ".join(f"{row.name} {there}" for row, there in found)
            yield Finding(about, "ok", f"{held}: {extra.opens} ({where})")


def torch_build() -> str:
    """Return 'CUDA 13.0', 'HIP 7.0' or 'CPU' of the installed PyTorch, as its version.py says, without importing it."""
    file = Path(str(distribution("torch").locate_file("torch/version.py")))
    try:
        row = _TORCH_CUDA.search(file.read_text(encoding="utf-8"))
    except OSError:
        row = None
    return f"{row['kind'].upper()} {row['version']}" if row else "CPU"


def _torch(has_card: bool) -> Iterator[Finding]:
    """Yield whether PyTorch can host a virtual GPU, and whether its build suits this machine."""
    version = supported.versions().get("torch")
    if not version:
        yield Finding("PyTorch", "note", "not installed; for planning the build without CUDA is enough", cpu_torch())
        return
    oldest, latest = (".".join(map(str, v)) for v in (supported.OLDEST, LATEST_TORCH))
    found = torch_version(version)
    if found < supported.OLDEST:
        text = f"{version} is too old to be traced: {oldest} to {latest} are known"
        yield Finding("PyTorch", "fault", text, f"{installer()} 'torch>={oldest}'")
    elif found > LATEST_TORCH:
        yield Finding("PyTorch", "note", f"{version} is newer than {latest}, the last whose allocator was compared")
    else:
        yield Finding("PyTorch", "ok", f"{version}, of the versions {oldest} to {latest} that are known")
    build, reinstall = torch_build(), "--reinstall" if installer().startswith("uv ") else "--force-reinstall"
    if build == "CPU" and has_card:
        text = "without CUDA: plans and traces; memfit train and memfit.watch on this card need a build with CUDA"
        yield Finding("its build", "note", text, f"{installer()} {reinstall} torch")
    elif build != "CPU" and not has_card:
        text = f"{build}, and no card: for planning the build without CUDA answers the same and is gigabytes smaller"
        yield Finding("its build", "note", text, cpu_torch(reinstall))
    else:
        yield Finding("its build", "ok", "without CUDA: all that planning needs" if build == "CPU" else build)


# ---- card and cache --------------------------------------------------------------------------------------------------


def driver() -> str:
    """Return the version of NVIDIA's driver, as the kernel reports it; '' without one."""
    try:
        row = re.search(r"NVRM version:.*?(\d+\.\d+(?:\.\d+)?)", _DRIVER.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError):
        return ""
    return row[1] if row else ""


def _card() -> list[Finding]:
    """Return whether there is a card, and whether driver and catalogue agree on its memory."""
    version = driver()
    try:
        gpu = local_gpu()
    except MemfitError as error:
        if version or shutil.which("nvidia-smi"):
            hidden = "CUDA_VISIBLE_DEVICES" in error.message
            text = f"NVIDIA's driver is installed, and {error.message}"
            return [Finding("card", "fault", text, "unset CUDA_VISIBLE_DEVICES" if hidden else "nvidia-smi")]
        return [Finding("card", "note", "none in this machine, and none is needed", "memfit gpus")]
    found = [Finding("card", "ok", f"{gpu.name}, {gib(gpu.total_bytes)} GiB{f', driver {version}' if version else ''}")]
    row = next((row for row in list_gpus() if row.short == gpu.short), None)
    if row is None:
        text = "no card of this name and memory; --gpu local plans with what the driver reports, without times"
        return [*found, Finding("catalogue", "note", text, "memfit gpus")]
    apart = gpu.total_bytes - row.total_bytes
    text = "agrees with the driver" if not apart else f"differs from the driver by {human(abs(apart))}, which is used"
    return [*found, Finding("catalogue", "ok", f"{row.short}: {text}")]


def _cache() -> Finding:
    """Return whether answers of traces can be kept, by keeping a file."""
    folder = traced_answers.folder()
    existing = next((place for place in (folder, *folder.parents) if place.exists()), folder)
    try:
        with tempfile.TemporaryFile(dir=existing):
            held = traced_answers.held()
    except OSError as error:
        text = f"{folder}: no answer is kept: {os.strerror(error.errno or 0)}"
        return Finding("cache", "fault", text, "export MEMFIT_CACHE=FOLDER, one that can be written")
    count = held["answers"]
    text = f"{folder}: {several(count, 'answer')}, {human(held['bytes'])} of at most {human(traced_answers.LIMIT)}"
    return Finding("cache", "ok", text)
