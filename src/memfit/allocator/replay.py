"""Tape x allocator -> Timeline: what a run reserves, phase by phase, and where it runs out of memory.

`replay` plays a tape on any card. `retrace` and `as_recorded` play it on the card it was recorded on: one compares the
model of the allocator with PyTorch's own, the other returns the timeline of the recorded run.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from itertools import zip_longest
from typing import NamedTuple

from memfit.allocator import UNLIMITED, Allocator, Block, OutOfMemory
from memfit.allocator.player import begun, play
from memfit.errors import BadInput
from memfit.nouns.alloc_settings import LATEST_TORCH, AllocSettings, Torch, parse_alloc_conf
from memfit.nouns.footprint import SAME_LEVEL, Levels, peak_maker
from memfit.nouns.tape import OPTIMIZER_STEP, Alloc, Event, Mark, Oom, Phase, Segment, SegmentAlloc, SegmentFree, Tape

DEFAULTS = AllocSettings()
BY_ADDRESS: Torch = (2, 11)  # up to this version the driver's addresses decide between blocks of equal size
_START = Mark("load", "start")  # the mark of events before the first one


class LevelRaise(NamedTuple):
    """An event that raised the reserved level above all that was reserved before in its span."""

    at: int  # index of the event
    reserved: int
    requested: int


@dataclass(frozen=True, slots=True)
class Span:
    """The events from one Mark to the next. `peak` is the maximum of each level, bytes from before included.

    `first` is the index of its first event, `at` that of the event after which most was allocated. `growths` are the
    events that raised the reserved level to within SAME_LEVEL of its peak, `retries` the requests that were served
    after a release of the cache, `held` the reserved bytes at its beginning.
    """

    phase: Phase
    instant: str
    first: int
    at: int
    peak: Levels
    growths: tuple[LevelRaise, ...] = ()
    retries: int = 0
    held: int = 0


@dataclass(frozen=True, slots=True)
class Timeline:
    """A replayed tape, span by span. `peak` holds each level's own maximum, which need not coincide.

    `retries` counts how often the cache was released to serve a request. An out-of-memory ends the replay in the last
    span: `oom` holds its numbers, `oom_at` the index of the event.
    """

    spans: tuple[Span, ...]
    peak: Levels
    retries: int
    oom: OutOfMemory | None = None
    oom_at: int | None = None

    def beside(self, context: int) -> Timeline:
        """Return the timeline with `context` bytes of the card added to the level `device`."""

        def with_context(peak: Levels) -> Levels:
            return replace(peak, device=peak.reserved + context)

        spans = tuple(replace(span, peak=with_context(span.peak)) for span in self.spans)
        return replace(self, spans=spans, peak=with_context(self.peak))

    def until(self, index: int) -> Timeline:
        """Return the part before event `index`, where a span must begin; only for a replay without retries."""
        spans = tuple(span for span in self.spans if span.first < index)
        return replace(self, spans=spans, peak=reduce(highest, (span.peak for span in spans), Levels(0, 0, 0, 0)))

    def followed_by(self, whole: Timeline) -> Timeline:
        """Return this timeline of a tape's beginning, and then that of the whole tape from the first later span on."""
        last = self.spans[-1].first if self.spans else -1
        later = tuple(span for span in whole.spans if span.first > last)
        return replace(whole, spans=(*self.spans, *later))

    @property
    def oom_span(self) -> Span | None:
        """Return the span in which memory ran out."""
        return self.spans[-1] if self.oom is not None and self.spans else None

    def peak_of(self, phase: Phase) -> tuple[Span, int]:
        """Return the span of a phase, and the index of the event in it, that made the highest reserved level.

        Where the level did not rise in the phase, they are those at which most was allocated. The timeline must have a
        span of that phase.
        """
        spans = [span for span in self.spans if span.phase == phase]
        grown = [(span, growth) for span in spans for growth in span.growths]
        if grown:
            span, growth = grown[peak_maker((growth.reserved, growth.requested) for _, growth in grown)]
            return span, growth.at
        span = max(spans, key=lambda span: (span.peak.allocated, span.peak.reserved))
        return span, span.at

    @property
    def retries_per_step(self) -> int:
        """Return how often a later optimizer step releases the cache, rounded up; 0 without marks of steps."""
        later = [span for span in self.spans if span.phase == "step"]
        steps = sum(span.instant == OPTIMIZER_STEP for span in later)
        return -(-sum(span.retries for span in later) // max(steps, 1))

    def by_phase(self) -> dict[Phase, Levels]:
        """Return each level's maximum within each phase, in the order the phases first came."""
        peaks: dict[Phase, Levels] = {}
        for span in self.spans:
            peaks[span.phase] = highest(peaks.get(span.phase, span.peak), span.peak)
        return peaks


def timeline_of(
    allocator: Allocator, events: Iterable[Event], start: Sequence[Segment] = (), context: int = 0, *,
    go_on: bool = False,
) -> Timeline:  # fmt: skip
    """Play a tape on an empty allocator to its end or an out-of-memory; `go_on`: see `play`."""
    spans: list[Span] = []
    mark, first, at, top = _START, 0, 0, -1
    grown: list[LevelRaise] = []
    index, held, level, retries = -1, 0, 0, 0
    event: Event = _START
    block: Block | OutOfMemory | None = None
    oom: OutOfMemory | None = None

    def end() -> None:
        reserved = allocator.reserved_peak
        peak = Levels(allocator.requested_peak, allocator.allocated_peak, reserved, device=reserved + context)
        telling = tuple(growth for growth in grown if growth.reserved >= reserved - int(reserved * SAME_LEVEL))
        tried = allocator.num_alloc_retries - retries
        spans.append(Span(mark.phase, mark.instant, first, at, peak, telling, tried, held))

    try:
        live = begun(allocator, start)
        held = level = allocator.reserved
        for index, event, block in play(allocator, live, events, go_on=go_on):  # noqa: B007
            if type(event) is Alloc:
                if allocator.allocated > top:
                    top, at = allocator.allocated, index
                if allocator.reserved > level:
                    level = allocator.reserved
                    grown.append(LevelRaise(index, level, allocator.requested))
            elif type(event) is Mark:
                if index > first:
                    end()
                mark, first, at, top = event, index, index, allocator.allocated
                grown, retries = [], allocator.num_alloc_retries
                held = level = allocator.reserved
                allocator.reset_peak_stats()
        if isinstance(block, OutOfMemory) and not (go_on and isinstance(event, Oom)):  # the last event ended the play
            oom = block
    except OutOfMemory as error:  # the tape's start does not fit
        oom, index = error, 0
    if index >= first:
        end()
    peak = reduce(highest, (span.peak for span in spans), Levels(0, 0, 0, context))
    return Timeline(tuple(spans), peak, allocator.num_alloc_retries, oom, None if oom is None else index)


def replay(
    events: Iterable[Event], *, capacity: int | None = None, settings: AllocSettings = DEFAULTS,
    torch: Torch = LATEST_TORCH, context: int = 0, total_memory: int | None = None, start: Sequence[Segment] = (),
) -> Timeline:  # fmt: skip
    """Replay a tape's events on a card whose driver can give `capacity` bytes (None: any number).

    `context` bytes are added to `reserved` to give the level `device`; they are not taken from the capacity.
    `total_memory` is the card's total in the message of an out-of-memory, `start` the tape's start (see `begun`). The
    tape's own segments are not read. Raises BadInput for a damaged tape, as `play` does.
    """
    allocator = Allocator(capacity, settings, torch, total_memory=total_memory)
    return timeline_of(allocator, events, start, context)


def retrace(tape: Tape, settings: AllocSettings = DEFAULTS, torch: Torch = LATEST_TORCH) -> tuple[str, Allocator]:
    """Replay a recorded run on a card of the recorded capacity, and compare the segments with the recorded ones.

    Return the first difference ("" if all agree) and the allocator at the end. Raises BadInput as `replay` does.
    """
    allocator = allocator_of(tape, settings, torch)
    recorded = [event for event in tape.events if isinstance(event, SegmentAlloc | SegmentFree)]
    failed_at = timeline_of(allocator, tape.events, tape.start, go_on=True).oom_at
    if failed_at is not None:
        return f"event {failed_at} runs out of memory, the recorded run did not", allocator
    for number, (call, replayed) in enumerate(zip_longest(recorded, allocator.driver_calls)):
        if call is None or replayed is None or (type(call), call.size) != (type(replayed), replayed.size):
            return f"segment call {number}: recorded {call}, here {replayed}", allocator
    return "", allocator


def as_recorded(tape: Tape) -> Timeline:
    """Replay a run on the card it was recorded on, so that requests that failed there fail again and raise no peak.

    If the model runs out of memory where the recorded run did not, it is replayed on a card without a limit. Raises
    BadInput as `replay` does, and for invalid settings.
    """
    torch, _ = made_with(tape)
    settings = parse_alloc_conf(tape.about.get("alloc_conf", ""), torch)
    for allocator in (allocator_of(tape, settings, torch), Allocator(None, settings, torch)):
        timeline = timeline_of(allocator, tape.events, tape.start, go_on=True)
        if timeline.oom is None:
            break
    return timeline


def made_with(tape: Tape) -> tuple[Torch, AllocSettings]:
    """Return the PyTorch version and the settings of a tape; the latest and the defaults if not recorded."""
    version = re.match(r"(\d{1,4})\.(\d{1,4})(?!\d)", tape.about.get("torch", ""))
    torch = (int(version[1]), int(version[2])) if version else LATEST_TORCH
    try:
        return torch, parse_alloc_conf(tape.about.get("alloc_conf", ""), torch)
    except BadInput:
        return torch, AllocSettings()


def room_of(tape: Tape) -> int | None:
    """Return the recorded capacity in bytes; None if it was not recorded."""
    capacity = tape.about.get("capacity", "")
    return int(capacity) if capacity.isdecimal() else None


def allocator_of(tape: Tape, settings: AllocSettings, torch: Torch) -> Allocator:
    """Return an empty allocator on the card of a tape's recording, with the recorded addresses if they decide ties.

    The card's total memory sets the length of expandable segments; if it is not known, they have no end.
    """
    total = tape.about.get("total_memory", "")
    allocator = Allocator(
        room_of(tape), settings, torch,
        total_memory=int(total) if total.isdecimal() else None if settings.per_process_memory_fraction else UNLIMITED,
    )  # fmt: skip
    if torch <= BY_ADDRESS:
        held = [SegmentAlloc(s.address, sum(p.size for p in s.pieces)) for s in tape.start]
        allocator.use_addresses([*held, *(event for event in tape.events if isinstance(event, SegmentAlloc))])
    return allocator


def highest(one: Levels, other: Levels) -> Levels:
    """Return each level's own maximum."""
    return Levels(
        max(one.requested, other.requested), max(one.allocated, other.allocated), max(one.reserved, other.reserved),
        max(one.device, other.device),
    )  # fmt: skip
