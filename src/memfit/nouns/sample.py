"""The nouns of a watched run: Sample (memory at one instant), Leak and LeakHolder (growth and its cause), Watched."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from memfit.nouns.footprint import Footprint, Levels
from memfit.nouns.tape import Phase, Role

MeterName = Literal["cuda", "tensors", "nvml", "rss"]


@dataclass(frozen=True, slots=True)
class MeterFacts:
    """What a meter measures. `compared` is the level to compare with a prediction; None: the run is on no card."""

    title: str
    compared: Literal["reserved", "device"] | None
    roles: bool  # whether it reads tensors, so that parameters and states can be distinguished from the rest


METERS: dict[MeterName, MeterFacts] = {
    "cuda": MeterFacts("PyTorch's allocator and the card", "reserved", True),
    "tensors": MeterFacts("no card: bytes of live tensors, and resident memory of the process", None, True),
    "nvml": MeterFacts("the card's driver (NVML), this command and its children", "device", False),
    "rss": MeterFacts("no card: resident memory of the command and its children", None, False),
}


@dataclass(frozen=True, slots=True)
class Header:
    """The facts of a watch at its start. `total` is bytes of the card, 0 without one; `started` is ISO 8601."""

    name: str  # the script
    meter: MeterName
    card: str = ""
    total: int = 0
    started: str = ""
    torch: str = ""
    predicted: Footprint | None = None


@dataclass(frozen=True, slots=True)
class Sample:
    """Bytes at one instant (`now`), and the highest of each level since the sample before (`peak`).

    `step` counts finished optimizer steps, `phase` is the phase since the sample before. `peak.device` is the
    highest that was seen, at most one second old: the driver keeps no maximum. Where tensors were not `counted` only
    `device` was read: the other levels are 0 here and absent from the log. `whole_card`: the driver listed none of the
    command's processes (as in a container), and `device` is what the card has in use, other processes included.
    """

    seconds: float  # since the watch began
    step: int
    phase: Phase
    now: Levels
    peak: Levels
    counted: bool = True
    every: int = 1  # steps per sample: more than one where steps are very short
    whole_card: bool = False


@dataclass(frozen=True, slots=True)
class LeakHolder:
    """What keeps tensors alive. `place` is "file.py:12" of the line that stores them or binds `name`."""

    kind: Literal["graph", "container", "variable", "cycle", "unknown"]
    name: str  # as the program writes it: history, self.cache[...], total
    place: str
    code: str  # that line's text; "" where the source is missing
    count: int  # tensors kept, or nodes of the graph, per step
    bytes: int  # per step; 0: unknown


@dataclass(frozen=True, slots=True)
class Leak:
    """Live bytes that grew from step `since` to `until`, beyond noise, by `per_step` bytes each `unit`."""

    per_step: int
    since: int
    until: int
    bytes: int
    holders: tuple[LeakHolder, ...] = ()
    unit: Literal["step", "run"] = "step"


AlarmKind = Literal["card", "band", "leak", "unsure", "failed"]


@dataclass(frozen=True, slots=True)
class Alarm:
    """A warning during a run.

    The card is nearly full, memory is outside the predicted band, memory leaks or may leak, or the run ended in an
    error; then `bytes` is the size of the failed request.
    """

    kind: AlarmKind
    step: int
    phase: Phase
    bytes: int
    limit: int
    text: str


@dataclass(frozen=True, slots=True)
class Watched:
    """A whole watched run. `shares` are the counted bytes of roles that lie on the card between steps."""

    header: Header
    samples: tuple[Sample, ...]
    alarms: tuple[Alarm, ...] = ()
    leaks: tuple[Leak, ...] = ()
    shares: tuple[tuple[Role, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Status:
    """A run under way, as a screen shows it: its last sample, and the peak of every phase so far."""

    header: Header
    last: Sample
    peaks: dict[Phase, Levels]
    alarms: tuple[Alarm, ...]
    leaks: tuple[Leak, ...]
