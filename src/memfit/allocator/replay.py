"""Tape x allocator -> Timeline: what a run's events reserve on a card, where they run out, and on the recorded card.

`replay` asks what would happen on some card. `retrace` and `as_recorded` play a recorded run on the card it ran on, to
see whether the model does what PyTorch's allocator did, and what the run peaked at.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from itertools import zip_longest

from memfit.allocator import UNLIMITED, Allocator, Block, OutOfMemory
from memfit.allocator.player import begun, play
from memfit.errors import BadInput
from memfit.nouns.alloc_settings import LATEST_TORCH, AllocSettings, Torch, parse_alloc_conf
from memfit.nouns.footprint import Levels
from memfit.nouns.tape import Alloc, Event, Mark, Oom, Phase, Segment, SegmentAlloc, SegmentFree, Tape

DEFAULTS = AllocSettings()
BY_ADDRESS: Torch = (2, 11)  # up to this version the driver's addresses decide between blocks of equal size
_START = Mark("load", "start")  # where events before the first mark belong


@dataclass(frozen=True, slots=True)
class Span:
    """The events from one Mark to the next; `peak` is the highest of each level, including what was there before.

    `first` is the index of its first event, `at` that of the event after which most was allocated.
    """

    phase: Phase
    instant: str
    first: int
    at: int
    peak: Levels


@dataclass(frozen=True, slots=True)
class Timeline:
    """A replayed tape, span by span. `peak` holds each level's own maximum; they need not fall together.

    `retries` counts how often the cache had to be given back to go on. At an out-of-memory the replay ends: `oom`
    holds its numbers, `oom_at` the index of the event; it happened in the last span.
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
        """Return the part before event `index`, at which a span begins; only for a replay without retries."""
        spans = tuple(span for span in self.spans if span.first < index)
        return replace(self, spans=spans, peak=reduce(highest, (span.peak for span in spans), Levels(0, 0, 0, 0)))

    @property
    def oom_span(self) -> Span | None:
        """Return the span in which memory ran out."""
        return self.spans[-1] if self.oom is not None and self.spans else None

    def worst_of(self, phase: Phase) -> Span:
        """Return the span of a phase (which there must be) that allocates most; reserved bytes stay high long after."""
        spans = (span for span in self.spans if span.phase == phase)
        return max(spans, key=lambda span: (span.peak.allocated, span.peak.reserved))

    def by_phase(self) -> dict[Phase, Levels]:
        """Return each level's maximum within each phase, in the order the phases first came."""
        peaks: dict[Phase, Levels] = {}
        for span in self.spans:
            peaks[span.phase] = highest(peaks.get(span.phase, span.peak), span.peak)
        return peaks


def timeline_of(
    allocator: Allocator,
    events: Iterable[Event],
    start: Sequence[Segment] = (),
    context: int = 0,
    *,
    go_on: bool = False,
) -> Timeline:
    """Play a tape on an empty allocator to its end, or to the out-of-memory that ends it; `go_on`: see `play`."""
    spans: list[Span] = []
    mark, first, at, top = _START, 0, 0, -1
    index = -1
    event: Event = _START
    block: Block | OutOfMemory | None = None
    oom: OutOfMemory | None = None

    def end() -> None:
        reserved = allocator.reserved_peak
        peak = Levels(allocator.requested_peak, allocator.allocated_peak, reserved, device=reserved + context)
        spans.append(Span(mark.phase, mark.instant, first, at, peak))

    try:
        for index, event, block in play(allocator, begun(allocator, start), events, go_on=go_on):  # noqa: B007
            if type(event) is Alloc:
                if allocator.allocated > top:
                    top, at = allocator.allocated, index
            elif type(event) is Mark:
                if index > first:
                    end()
                mark, first, at, top = event, index, index, allocator.allocated
                allocator.reset_peak_stats()
        if isinstance(block, OutOfMemory) and not (go_on and isinstance(event, Oom)):  # the last one, which ended it
            oom = block
    except OutOfMemory as error:  # what was there at the start does not fit
        oom, index = error, 0
    if index >= first:
        end()
    peak = reduce(highest, (span.peak for span in spans), Levels(0, 0, 0, context))
    return Timeline(tuple(spans), peak, allocator.num_alloc_retries, oom, None if oom is None else index)


def replay(
    events: Iterable[Event],
    *,
    capacity: int | None = None,
    settings: AllocSettings = DEFAULTS,
    torch: Torch = LATEST_TORCH,
    context: int = 0,
    total_memory: int | None = None,
    start: Sequence[Segment] = (),
) -> Timeline:
    """Run a tape's events on a card whose driver can hand out `capacity` bytes (None: any number).

    `context` bytes are added to `reserved` to give the level `device`; they are not taken from the capacity.
    `total_memory` is what an out-of-memory says the card has in all, `start` what the tape began with (`begun`). What
    the tape has of segments is not read, because the allocator takes its own; the request of an Oom is made, and given
    back at once where it succeeds. Raises BadInput for a damaged tape, as `play` does.
    """
    allocator = Allocator(capacity, settings, torch, total_memory=total_memory)
    return timeline_of(allocator, events, start, context)


def retrace(tape: Tape, settings: AllocSettings = DEFAULTS, torch: Torch = LATEST_TORCH) -> tuple[str, Allocator]:
    """Do to the allocator what a recorded run did to PyTorch's own, on a card of the recorded capacity.

    Returns what differs first ("" when every segment was taken and given back as recorded) and the allocator at the
    end. Raises BadInput as `replay` does.
    """
    allocator = allocator_of(tape, settings, torch)
    recorded = [event for event in tape.events if isinstance(event, SegmentAlloc | SegmentFree)]
    failed_at = timeline_of(allocator, tape.events, tape.start, go_on=True).oom_at
    if failed_at is not None:
        return f"event {failed_at} runs out of memory, the recorded run did not", allocator
    for number, (there, here) in enumerate(zip_longest(recorded, allocator.driver_calls)):
        if there is None or here is None or (type(there), there.size) != (type(here), here.size):
            return f"segment call {number}: recorded {there}, here {here}", allocator
    return "", allocator


def as_recorded(tape: Tape, context: int = 0) -> Timeline:
    """Play a run once more on the card it was recorded on: what failed there fails again, and is no part of its peaks.

    Where the model runs out of memory and the recorded run did not, a card without a limit is taken instead. Raises
    BadInput as `replay` does, and for settings that are none.
    """
    torch, _ = made_with(tape)
    settings = parse_alloc_conf(tape.about.get("alloc_conf", ""), torch)
    for allocator in (allocator_of(tape, settings, torch), Allocator(None, settings, torch)):
        timeline = timeline_of(allocator, tape.events, tape.start, context, go_on=True)
        if timeline.oom is None:
            break
    return timeline


def made_with(tape: Tape) -> tuple[Torch, AllocSettings]:
    """Return the PyTorch version and the settings of a tape; the latest and the defaults if not recorded."""
    found = re.match(r"(\d+)\.(\d+)", tape.about.get("torch", ""))
    torch = (int(found[1]), int(found[2])) if found else LATEST_TORCH
    try:
        return torch, parse_alloc_conf(tape.about.get("alloc_conf", ""), torch)
    except BadInput:
        return torch, AllocSettings()


def room_of(tape: Tape) -> int | None:
    """Return the bytes the allocator had at its disposal, where they were recorded."""
    capacity = tape.about.get("capacity", "")
    return int(capacity) if capacity.isdecimal() else None


def allocator_of(tape: Tape, settings: AllocSettings, torch: Torch) -> Allocator:
    """Return an empty allocator on the card a tape was recorded on, with the recorded addresses where they decide ties.

    The card's total memory sets the length of expandable segments; where it is not known they never end.
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
        max(one.requested, other.requested),
        max(one.allocated, other.allocated),
        max(one.reserved, other.reserved),
        max(one.device, other.device),
    )
