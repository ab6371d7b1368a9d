"""Meters of a command's memory from outside: the driver's count for its processes, or their resident memory."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from memfit.errors import BadInput
from memfit.extras import install_command
from memfit.nouns.footprint import Levels
from memfit.nouns.sample import MeterName
from memfit.units import KIB

PROC = Path("/proc")
DRIVER = Path("/proc/driver/nvidia")  # Linux; elsewhere nvidia-smi comes with the driver
RSS_HINT = "without a card: memfit watch --measure rss -- ..."


def _nvml_hint() -> str:
    return f"{install_command('watch')}; {RSS_HINT}"


def family(pid: int) -> set[int]:
    """Return a process and all its descendants."""
    children: dict[int, list[int]] = {}
    for child, parent in _parents():
        children.setdefault(parent, []).append(child)
    found, todo = {pid}, [pid]
    while todo:
        for child in children.get(todo.pop(), ()):
            if child not in found:
                found.add(child)
                todo.append(child)
    return found


def _parents() -> Iterable[tuple[int, int]]:
    """Yield (process, its parent) for every process of the machine."""
    if not PROC.is_dir():
        import psutil  # type: ignore[import-untyped, unused-ignore]

        for process in psutil.process_iter(["ppid"]):
            yield process.pid, process.info["ppid"] or 0
        return
    for entry in PROC.iterdir():
        if entry.name.isdigit():
            try:
                text = (entry / "stat").read_text()
            except OSError:  # it has ended
                continue
            yield int(entry.name), int(text.rpartition(")")[2].split()[1])


class RssMeter:
    """Reads the resident memory of the command and its children, added up; pages they share count for each."""

    name: MeterName = "rss"
    card, total, whole_card = "", 0, False

    def __init__(self) -> None:
        self._before = _largest_child()

    def read(self, pid: int) -> Levels:
        size = sum(_resident(member) for member in family(pid))
        return Levels(0, 0, 0, size)

    def ended(self) -> Levels | None:
        """Return the most that a process of the ended command ever had, also between readings; None where unknown.

        A child begins as a copy of this process, so its peak is the command's only where it exceeds this process.
        """
        most = _largest_child()
        return Levels(0, 0, 0, most) if most > max(self._before, _own_highest()) else None


def _largest_child() -> int:
    """Return the most bytes that any ended child of this process ever had. Source: getrusage(2)."""
    try:
        import resource
    except ImportError:  # Windows
        return 0
    most = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    return most if sys.platform == "darwin" else most * KIB


def _own_highest() -> int:
    """Return the most bytes that this process had since it began to run this program. Source: proc(5), VmHWM."""
    try:
        text = (PROC / "self" / "status").read_text()
        return next(int(line.split()[1]) * KIB for line in text.splitlines() if line.startswith("VmHWM:"))
    except (OSError, StopIteration):
        return _resident(os.getpid())


def _resident(pid: int) -> int:
    try:
        if PROC.is_dir():
            return int((PROC / str(pid) / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        import psutil

        return int(psutil.Process(pid).memory_info().rss)
    except Exception:  # it has ended, or belongs to somebody else
        return 0


class NvmlMeter:
    """Reads what the driver counts for the command and its children, on the card where that is most.

    Inside a container the driver's process numbers are not ours: then what the whole card holds more than when the
    command began is read, other processes included, and `whole_card` is set.
    """

    name: MeterName = "nvml"

    def __init__(
        self, library: Any, members: Callable[[int], set[int]] = family, numbered: bool | None = None
    ) -> None:  # fmt: skip
        """numbered: whether the driver's process numbers are ours; None: look."""
        self.nvml, self.members = library, members
        self._numbered = _numbered_by_driver() if numbered is None else numbered
        self.cards = [library.nvmlDeviceGetHandleByIndex(i) for i in range(library.nvmlDeviceGetCount())]
        if not self.cards:
            raise BadInput("the driver lists no card", hint=_nvml_hint())
        self.whole_card = False
        # vGPU, MIG and restricted drivers list no processes to anybody
        unlisted = ("NVMLError_NotSupported", "NVMLError_NoPermission")
        self._unlisted = tuple(getattr(library, name) for name in unlisted if hasattr(library, name))
        for card in self.cards:  # a driver that refuses raises here, before the command runs
            self._listed(card, set())
        self._before = [self._in_use(card) for card in self.cards]
        self._choose(0)

    def _choose(self, index: int) -> None:
        name = self.nvml.nvmlDeviceGetName(self.cards[index])
        self.card = name.decode() if isinstance(name, bytes) else str(name)
        self.total = int(self.nvml.nvmlDeviceGetMemoryInfo(self.cards[index]).total)

    def _in_use(self, card: Any) -> int:
        return int(self.nvml.nvmlDeviceGetMemoryInfo(card).used)

    def _listed(self, card: Any, ours: set[int]) -> int:
        """Return the bytes that the driver counts for these processes; 0 where it lists none."""
        try:
            running = self.nvml.nvmlDeviceGetComputeRunningProcesses(card)
        except self._unlisted:
            self._numbered = False
            return 0
        return sum(int(p.usedGpuMemory or 0) for p in running if p.pid in ours)

    def read(self, pid: int) -> Levels:
        ours = self.members(pid)
        sizes = [self._listed(card, ours) for card in self.cards]
        self._numbered = self._numbered or any(sizes)
        self.whole_card = False
        if not self._numbered:  # take the card whose use has grown most
            grown = [self._in_use(card) - before for card, before in zip(self.cards, self._before, strict=True)]
            self.whole_card = max(grown) > 0
            best = max(range(len(grown)), key=grown.__getitem__)
            sizes = [0] * len(grown)
            sizes[best] = max(grown[best], 0)
        index = max(range(len(sizes)), key=sizes.__getitem__)
        self._choose(index)
        return Levels(0, 0, 0, sizes[index])


INITIAL = 0xEFFFFFFC  # inode of the first process namespace. Source: include/linux/proc_ns.h, PROC_PID_INIT_INO


def _numbered_by_driver() -> bool:
    """Return whether processes have the numbers here that the driver gives them: outside of every container."""
    try:
        return (PROC / "self" / "ns" / "pid").stat().st_ino == INITIAL
    except OSError:
        return not PROC.is_dir()  # Windows has no namespaces


def nvml() -> NvmlMeter:
    """Return the meter of this machine's driver. Raises BadInput that names what is missing."""
    try:
        import pynvml  # type: ignore[import-not-found, import-untyped, unused-ignore]
    except ImportError:
        if not (DRIVER.exists() or shutil.which("nvidia-smi")):
            raise BadInput("there is no NVIDIA driver in this machine", hint=RSS_HINT) from None
        raise BadInput("watching a card from outside needs the package nvidia-ml-py", hint=_nvml_hint()) from None
    try:
        pynvml.nvmlInit()
        return NvmlMeter(pynvml)
    except pynvml.NVMLError as error:
        raise BadInput(f"the NVIDIA driver does not answer: {error}", hint=_nvml_hint()) from None


def outside_meter(measure: str) -> tuple[RssMeter | NvmlMeter, str]:
    """Return (the meter, a note about the choice). auto: the card where there is one, else resident memory."""
    if measure == "rss":
        return RssMeter(), ""
    try:
        return nvml(), ""
    except BadInput as error:
        if measure == "nvml":
            raise
        return RssMeter(), f"{error.message}: resident memory of the processes is measured instead"
