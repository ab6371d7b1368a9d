"""Look at what memfit stands on: libraries, PyTorch's build, card, driver, cache; nothing heavy is imported."""

from __future__ import annotations

import os
import platform
import re
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal, NamedTuple

from memfit._package import __version__
from memfit.errors import MemfitError
from memfit.extras import EXTRAS, cpu_torch, install_command, installer
from memfit.nouns.alloc_settings import LATEST_TORCH, torch_version
from memfit.units import gib, human
from memfit.virtual import supported

State = Literal["ok", "note", "fault"]  # note: works, and something could be added or is worth knowing
_REQUIREMENT = re.compile(r"(?P<name>[\w-]+)>=(?P<oldest>[\d.]+)(?:,<(?P<below>[\d.]+))?")
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
    return [_host(), *_extras(), *_torch(has_card.state == "ok"), has_card, *card, _cache()]


def _host() -> Finding:
    reason = supported.obstacle()
    if reason:
        return Finding("machine", "note", f"{reason}; plans and estimates by formula work")
    return Finding("machine", "ok", f"{platform.system()} {platform.machine()}, which a virtual GPU runs on")


# ---- libraries -------------------------------------------------------------------------------------------------------


def _numbers(version: str) -> tuple[int, ...]:
    """Return the release of a version without trailing zeros: '2.10.0+cpu' -> (2, 10)."""
    numbers = [int(part) for part in re.findall(r"\d+", version.partition("+")[0])[:3]]
    while numbers and not numbers[-1]:
        numbers.pop()
    return tuple(numbers)


def judged(requirement: str, installed: Mapping[str, str]) -> Literal["", "missing", "other"]:
    """Return '' where the requirement is met, else whether the package is missing or installed in another version."""
    row = _REQUIREMENT.fullmatch(requirement)
    assert row, requirement
    if row["name"] not in installed:
        return "missing"
    found, below = _numbers(installed[row["name"]]), row["below"]
    return "" if _numbers(row["oldest"]) <= found and not (below and found >= _numbers(below)) else "other"


def _installed() -> dict[str, str]:
    """Return the versions of the packages of all extras that are installed."""
    from importlib.metadata import PackageNotFoundError, version

    found = {}
    for name in {r.partition(">=")[0] for extra in EXTRAS for r in extra.requirements}:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _extras() -> Iterator[Finding]:
    """Yield a finding for each extra: complete, with versions that do not go together, or what it would add."""
    installed = _installed()
    cpu = f"{cpu_torch()} && " if "torch" not in installed and platform.system() == "Linux" else ""
    for extra in EXTRAS:
        command = f"{cpu if extra.name == 'trace' else ''}{install_command(extra.name)}"
        states = {requirement: judged(requirement, installed) for requirement in extra.requirements}
        about, where = f"memfit[{extra.name}]", ", ".join(f"memfit {name}" for name in extra.commands)
        missing = [r.partition(">=")[0] for r, state in states.items() if state == "missing"]
        other = [f"{installed[n]} of {n} is not {r}" for r, s in states.items() if s == "other"
                 for n in (r.partition(">=")[0],)]  # fmt: skip
        if missing:
            text = f"not installed ({', '.join(missing)}); would open {extra.opens} ({where})"
            yield Finding(about, "note", text, command)
        elif other:
            yield Finding(about, "fault", f"{'; '.join(other)} ({where})", command)
        else:
            held = ", ".join(f"{n} {installed[n]}" for r in extra.requirements for n in (r.partition(">=")[0],))
            yield Finding(about, "ok", f"{held}: {extra.opens} ({where})")


def torch_build() -> str:
    """Return 'CUDA 13.0', 'HIP 7.0' or 'CPU' of the installed PyTorch, as its version.py says, without importing it."""
    from importlib.metadata import distribution

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
    import shutil

    from memfit.catalogue.cards import list_gpus, local_gpu

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
    from memfit.documents import traced_answers

    folder = traced_answers.folder()
    existing = next((place for place in (folder, *folder.parents) if place.exists()), folder)
    try:
        with tempfile.TemporaryFile(dir=existing):
            held = traced_answers.held()
    except OSError as error:
        text = f"{folder}: no answer is kept: {os.strerror(error.errno or 0)}"
        return Finding("cache", "fault", text, "export MEMFIT_CACHE=FOLDER, one that can be written")
    count = held["answers"]
    text = (
        f"{folder}: {count} answer{'s' * (count != 1)}, {human(held['bytes'])} of at most {human(traced_answers.LIMIT)}"
    )
    return Finding("cache", "ok", text)
