"""What a watch reads at the end of a step, and at which steps.

A meter reads PyTorch's allocator and the card or, where there is no card, live tensors and resident memory. A
SamplingInterval leaves steps out where reading at each would take more than 1 % of their time.
"""

from __future__ import annotations

import math
import os
import time
from collections import deque
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple, Protocol

import torch

from memfit.holders.live_tensors import live_bytes
from memfit.live.watch.leak_test import FIRST_TEST, FLOOR, Series
from memfit.nouns.footprint import Levels
from memfit.nouns.sample import MeterName

DEVICE_EVERY = 1.0  # seconds between two calls of the driver, which cost more than the allocator's own counters
COUNT_SHARE = 0.005  # share of the run's time that counting live tensors on the host may take
EARLY = 0.01  # the share until tensors were counted as often as the leak test needs
RISING = 0.02  # the share once memory rises: resident memory beyond noise, or RISES counts in a row
AT_ONCE = 2.0  # seconds that counting may take in addition once memory rises
RISES = 4
FIRST = 2  # readings at which tensors are always counted: after loading and after the first step
STATM = Path("/proc/self/statm")


class Reading(NamedTuple):
    """Bytes now, and the highest since the last reading. Not `counted`: only `device` was read, other levels are 0."""

    now: Levels
    peak: Levels
    counted: bool


class Meter(Protocol):
    """One way to measure memory."""

    name: MeterName
    card: str
    total: int  # bytes of the card; 0: none

    def read(self, always: bool = False) -> Reading: ...


class CudaMeter:
    """Reads torch.cuda's counters, which a virtual card has too.

    The level `device` is what the whole card has in use, other processes included. It is read once a second, and
    follows the reserved bytes in between. reset: reset torch's peak counters at every reading, so that each step has
    a peak of its own; otherwise a peak is the highest value since the counters were last reset.
    """

    name: MeterName = "cuda"

    def __init__(self, device: torch.device, reset: bool = True, clock: Callable[[], float] = time.monotonic) -> None:
        self.device, self.reset, self.clock = device, reset, clock
        self.card = torch.cuda.get_device_name(device)
        self.total = int(torch.cuda.mem_get_info(device)[1])
        self._beside, self._read_at = 0, -DEVICE_EVERY

    def read(self, always: bool = False) -> Reading:
        stats = torch.cuda.memory_stats_as_nested_dict(self.device)
        requested, allocated, reserved = (
            stats[f"{level}_bytes"]["all"] for level in ("requested", "allocated", "reserved")
        )
        if self.clock() - self._read_at >= DEVICE_EVERY:
            free, total = torch.cuda.mem_get_info(self.device)
            self._beside = max(total - free - reserved["current"], 0)
            self._read_at = self.clock()
        if self.reset:
            torch.cuda.reset_peak_memory_stats(self.device)
        now, peak = (
            Levels(requested[when], allocated[when], reserved[when], reserved[when] + self._beside)
            for when in ("current", "peak")
        )
        return Reading(now, peak, counted=True)


class HostMeter:
    """Reads a run without a card: `device` is resident memory of the process, other levels are bytes of live tensors.

    Tensors are counted at the first readings, at readings with `always`, and whenever all counts including one more
    take no more than EARLY, later COUNT_SHARE, of the run's time so far; with `every`, at every so many readings
    instead. Resident memory costs nothing to read: once it has grown as a leak does, or counts only rise, counting may
    take AT_ONCE seconds and RISING of the time, so that few steps suffice to decide whether tensors grow.
    A peak is the highest value that was read: tensors that come and go within a step are missed.
    """

    name: MeterName = "tensors"
    card, total = "", 0

    def __init__(self, every: int | None = None, clock: Callable[[], float] = time.perf_counter) -> None:
        self.every, self.clock = every, clock
        self._began, self._spent, self._last, self._reads = clock(), 0.0, 0.0, 0
        self._counts: list[int] = []
        self._resident, self._rising = Series(), False

    def read(self, always: bool = False) -> Reading:
        resident = resident_bytes()
        self._rising = self._resident.add(self._reads, resident) is not None or self._rising
        counted = always or self._due()
        live = self._count() if counted else 0
        self._reads += 1
        now = Levels(live, live, live, max(resident, live))
        return Reading(now, now, counted)

    def _count(self) -> int:
        start = self.clock()
        live = live_bytes()
        self._last = self.clock() - start
        if self._reads >= FIRST:
            self._spent += self._last
            self._counts.append(live)
        last = self._counts[-RISES:]
        if len(last) == RISES and last[-1] - last[0] >= FLOOR:
            self._rising = self._rising or all(b > a for a, b in pairwise(last))
        return live

    def _due(self) -> bool:
        if self.every is not None:
            return self._reads % self.every == 0
        usual = EARLY if len(self._counts) < FIRST_TEST else COUNT_SHARE
        share, at_once = (RISING, AT_ONCE) if self._rising else (usual, 0.0)
        return self._reads < FIRST or self._spent + self._last <= at_once + share * (self.clock() - self._began)


def resident_bytes() -> int:
    """Return the resident memory of this process; 0 where the system does not report it."""
    try:
        return int(STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        try:
            import psutil  # type: ignore[import-untyped, unused-ignore]
        except ImportError:
            return 0
        return int(psutil.Process().memory_info().rss)


def meter_for(model: Any, reset: bool = True, every: int | None = None) -> Meter:
    """Return the meter of the model's device; without a model that of the card, if there is one."""
    parameters = model.parameters() if model is not None else ()
    device = next((p.device for p in parameters if p.device.type != "meta"), None)
    on_card = torch.cuda.is_available() and (device is None or device.type == "cuda")
    if not on_card:
        return HostMeter(every)
    return CudaMeter(device or torch.device("cuda", torch.cuda.current_device()), reset)


# --- the sampling interval ---

STEP_SHARE = 0.01  # share of the steps' time that samples may take
FULL = 128  # samples that are taken at every step when a run begins
RECENT = 16  # samples over which the medians of their cost and of a step's time are taken
MOST = 1000  # steps between two samples, at most
LONGEST = 1.0  # seconds between two samples, at most


class SamplingInterval:
    """Decides after which steps to sample. Call `due` after every step and, where it returns True, then `sampled`."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock, self.every = clock, 1
        self._steps = self._samples = 0
        self._start = self._end = clock()
        self._costs: deque[float] = deque(maxlen=RECENT)
        self._gaps: deque[float] = deque(maxlen=RECENT)  # seconds of one step, without samples

    def due(self, always: bool = False) -> bool:
        """Return whether to sample after this step."""
        self._steps += 1
        if self._steps < self.every and not always and self.clock() - self._end < LONGEST:
            return False
        self._start = self.clock()
        return True

    def sampled(self) -> None:
        """Note that a sample was taken, and adapt the interval to the time it took."""
        self._gaps.append((self._start - self._end) / self._steps)
        self._end, self._steps = self.clock(), 0
        self._costs.append(self._end - self._start)
        self._samples += 1
        if self._samples >= FULL and self._samples % RECENT == 0:
            allowed = STEP_SHARE * median(self._gaps)
            self.every = max(min(math.ceil(median(self._costs) / allowed), MOST), 1) if allowed > 0 else MOST
