"""What a watch reads: PyTorch's allocator and the card, or, where there is no card, live tensors and resident memory."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from memfit.live.holders.live_tensors import live_bytes
from memfit.live.watch.leak_test import FIRST_LOOK, FLOOR, Series
from memfit.nouns.footprint import Levels
from memfit.nouns.sample import MeterName

DEVICE_EVERY = 1.0  # seconds between questions to the driver, which costs more than the allocator's own counters
SHARE = 0.005  # of the run's time that counting live tensors on the host may take
EARLY = 0.01  # of it until they were counted as often as a test for leaks needs
RISING = 0.02  # of it, once resident memory has grown beyond noise, or counts only rise
RISES = 4  # counts that rose one after the other
AT_ONCE = 2.0  # seconds that may be taken besides, from then on
FIRST = 2  # readings: loading, the first step
STATM = Path("/proc/self/statm")


class Reading(NamedTuple):
    """Bytes now, and the highest since the last reading. Not `counted`: only `device` was read, the other levels are 0."""

    now: Levels
    peak: Levels
    counted: bool


class Meter(Protocol):
    """One way to measure."""

    name: MeterName
    card: str
    total: int  # bytes of the card; 0: none

    def read(self, always: bool = False) -> Reading: ...


class CudaMeter:
    """torch.cuda's counters; a virtual card answers them too.

    The level `device` is what the whole card has in use, other processes included, asked for once a second; between two
    questions it follows what is reserved. reset: set torch's peak counters back at every reading, so that each step has
    a peak of its own; without it a peak is the highest since the counters were last reset by anybody.
    """

    name: MeterName = "cuda"

    def __init__(self, device: torch.device, reset: bool = True, clock: Callable[[], float] = time.monotonic) -> None:
        self.device, self.reset, self.clock = device, reset, clock
        self.card = torch.cuda.get_device_name(device)
        self.total = int(torch.cuda.mem_get_info(device)[1])
        self._beside, self._asked = 0, -DEVICE_EVERY

    def read(self, always: bool = False) -> Reading:
        stats = torch.cuda.memory_stats_as_nested_dict(self.device)
        requested, allocated, reserved = (
            stats[f"{level}_bytes"]["all"] for level in ("requested", "allocated", "reserved")
        )
        if self.clock() - self._asked >= DEVICE_EVERY:
            free, total = torch.cuda.mem_get_info(self.device)
            self._beside = max(total - free - reserved["current"], 0)
            self._asked = self.clock()
        if self.reset:
            torch.cuda.reset_peak_memory_stats(self.device)
        now, peak = (
            Levels(requested[when], allocated[when], reserved[when], reserved[when] + self._beside)
            for when in ("current", "peak")
        )
        return Reading(now, peak, counted=True)


class HostMeter:
    """A run without a card: `reserved` too are the bytes of live tensors, `device` what the process has resident.

    Tensors are counted at the first readings and where one must be exact (`always`), else when that, with one more such
    count, takes no more than EARLY, later SHARE of the run's time so far (every: at each such reading instead). Resident memory costs nothing to
    read: once it has grown as a leak does, or counts only rise, counting may take AT_ONCE seconds and RISING of the time,
    so that few steps tell whether it is tensors. Peaks are the highest of what was read: what came and went inside a step is not seen.
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
        usual = EARLY if len(self._counts) < FIRST_LOOK else SHARE
        share, at_once = (RISING, AT_ONCE) if self._rising else (usual, 0.0)
        return self._reads < FIRST or self._spent + self._last <= at_once + share * (self.clock() - self._began)


def resident_bytes() -> int:
    """Resident memory of this process; 0 where the system does not say."""
    try:
        return int(STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        try:
            import psutil  # type: ignore[import-untyped, unused-ignore]
        except ImportError:
            return 0
        return int(psutil.Process().memory_info().rss)


def meter_for(model: Any, reset: bool = True, every: int | None = None) -> Meter:
    """The meter of the device that the model is on; without a model that of the card, if there is one."""
    device = (
        next((p.device for p in model.parameters() if p.device.type != "meta"), None) if model is not None else None
    )
    on_card = torch.cuda.is_available() and (device is None or device.type == "cuda")
    if not on_card:
        return HostMeter(every)
    return CudaMeter(device or torch.device("cuda", torch.cuda.current_device()), reset)
