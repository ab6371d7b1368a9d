"""Tape x allocator -> Timeline: what a run's events reserve on a card, and where they run out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any, NamedTuple

from memfit.allocator import QUICK, UNLIMITED, Allocator, Block, OutOfMemory, QuickAllocator, restore
from memfit.errors import BadInput
from memfit.nouns.alloc_settings import LATEST_TORCH, AllocSettings, Torch
from memfit.nouns.footprint import Levels
from memfit.nouns.tape import Alloc, EmptyCache, Event, Free, Mark, Oom, Phase, RecordStream, Segment

DEFAULTS = AllocSettings()
ONE_STREAM: Mapping[int, int] = {}
NOBODY = -1  # the allocation in `streams` of a tape on whose stream 0 others only use what is there
EMPTY_CACHE = -(1 << 62)  # among the integers that `run` takes: empty_cache(), which frees no allocation
_STREAM_BITS = 64  # of the number of a stream within a `use`, which so lies below EMPTY_CACHE
_START = Mark("load", "start")  # where events before the first mark belong


@dataclass(frozen=True, slots=True)
class Span:
    """The events from one Mark to the next; `peak` is the highest of each level, what was there at its start included.

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
        """The same beside `context` bytes of the card that are not the allocator's."""

        def whole(peak: Levels) -> Levels:
            return replace(peak, device=peak.reserved + context)

        spans = tuple(replace(span, peak=whole(span.peak)) for span in self.spans)
        return replace(self, spans=spans, peak=whole(self.peak))

    def until(self, index: int) -> Timeline:
        """The part before event `index`, at which a span begins, of a replay that never had to give its cache back."""
        spans = tuple(span for span in self.spans if span.first < index)
        return replace(self, spans=spans, peak=reduce(_higher, (span.peak for span in spans), Levels(0, 0, 0, 0)))

    @property
    def oom_span(self) -> Span | None:
        """Where memory ran out."""
        return self.spans[-1] if self.oom is not None and self.spans else None

    def worst_of(self, phase: Phase) -> Span:
        """The span of a phase (which there must be) that allocates most: what is reserved stays so long after."""
        spans = (span for span in self.spans if span.phase == phase)
        return max(spans, key=lambda span: (span.peak.allocated, span.peak.reserved))

    def by_phase(self) -> dict[Phase, Levels]:
        """Each level's maximum within each phase, in the order the phases first came."""
        peaks: dict[Phase, Levels] = {}
        for span in self.spans:
            peaks[span.phase] = _higher(peaks.get(span.phase, span.peak), span.peak)
        return peaks


class Peaks(NamedTuple):
    """The highest of each level over a run, in bytes."""

    requested: int
    allocated: int
    reserved: int


class Walk:
    """A replay under way: the allocator, what is alive, and the span being filled."""

    def __init__(self, allocator: Allocator, context: int, live: dict[int, Block | None]) -> None:
        self.allocator = allocator
        self.context = context
        self.live = live
        self.spans: list[Span] = []
        self.mark, self.first, self.at, self.top = _START, 0, 0, -1

    def through(self, events: Iterable[Event], *, go_on: bool = False) -> tuple[OutOfMemory | None, int]:
        """Play the events; the out-of-memory that ended it, if any, and the index of the last event played.

        go_on: an out-of-memory that the tape has too does not end it: the program caught it. Without a limit, where it
        would not fail again, its request is not made.
        """
        allocator, live, index = self.allocator, self.live, -1
        malloc, free = allocator.malloc, allocator.free
        for index, event in enumerate(events):
            try:
                if isinstance(event, Alloc):
                    if event.id in live or event.size < 0:
                        raise _bad_event(index, event)
                    live[event.id] = malloc(event.size, event.stream)
                    if allocator.allocated > self.top:
                        self.top, self.at = allocator.allocated, index
                elif isinstance(event, Free):
                    if event.id not in live:
                        raise _bad_event(index, event)
                    free(live.pop(event.id))
                elif isinstance(event, Mark):
                    self.begin(event, index)
                elif isinstance(event, EmptyCache):
                    allocator.empty_cache()
                elif isinstance(event, RecordStream):
                    if event.id not in live:
                        raise _bad_event(index, event)
                    allocator.record_stream(live[event.id], event.stream)
                elif isinstance(event, Oom) and not (go_on and allocator.capacity >= UNLIMITED):
                    free(malloc(event.size))
            except OutOfMemory as error:
                if not (go_on and isinstance(event, Oom)):
                    return error, index
        return None, index

    def begin(self, mark: Mark, index: int) -> None:
        """A new span begins at event `index`."""
        if index > self.first:
            self.end()
        self.mark, self.first, self.at, self.top = mark, index, index, self.allocator.allocated
        self.allocator.reset_peak_stats()

    def end(self) -> None:
        """The span is complete."""
        peak = self.allocator
        levels = Levels(
            peak.requested_peak, peak.allocated_peak, peak.reserved_peak, device=peak.reserved_peak + self.context
        )
        self.spans.append(Span(self.mark.phase, self.mark.instant, self.first, self.at, levels))

    def timeline(self, oom: OutOfMemory | None, last: int) -> Timeline:
        """The whole, played to event `last`."""
        if last >= self.first:
            self.end()
        peak = reduce(_higher, (span.peak for span in self.spans), Levels(0, 0, 0, self.context))
        retries = self.allocator.num_alloc_retries
        return Timeline(tuple(self.spans), peak, retries, oom, None if oom is None else last)


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
    `total_memory` is what the card is said to have where it runs out, `start` what the tape began with (`begun`). What
    the tape says of segments is not read, the allocator finds it again; of an Oom the request is made, and given back
    at once where it succeeds. Raises BadInput for a Free of an unknown id, an id born twice, or a negative size.
    """
    allocator = Allocator(capacity, settings, torch, total_memory=total_memory)
    try:
        walk = Walk(allocator, context, begun(allocator, start))
        oom, last = walk.through(events)
    except OutOfMemory as error:  # what was there at the start does not fit
        walk, oom, last = Walk(allocator, context, {}), error, 0
    return walk.timeline(oom, last)


def begun(allocator: Allocator, start: Sequence[Segment]) -> dict[int, Block | None]:
    """Bring an empty allocator to the start of a tape; returns the blocks in use by id.

    With the setting it was recorded under the segments lie as they lay; if the card is too small for them, cached ones
    are given back. With or without expandable segments where the recording was the other way, what was alive is
    allocated anew, in the order it lay. Raises OutOfMemory.
    """
    if all(segment.expandable == allocator.settings.expandable_segments for segment in start):
        live: dict[int, Block | None] = dict(restore(allocator, start))
        if allocator.reserved > allocator.capacity:
            allocator.least_refused = allocator.reserved
            allocator.empty_cache()
            allocator.reset_peak_stats()
        if allocator.reserved <= allocator.capacity:
            return live
        raise allocator.out_of_memory(0, 0)
    return {alloc.id: allocator.malloc(alloc.size, alloc.stream) for alloc in alive_at_start(start)}


def alive_at_start(start: Sequence[Segment]) -> list[Alloc]:
    """The allocations a tape began with, in the order they lay."""
    return [piece.alloc for segment in start for piece in segment.pieces if piece.alloc is not None]


def alive_at(events: Iterable[Event], index: int, start: Sequence[Segment] = ()) -> tuple[Alloc, ...]:
    """The allocations alive after event `index` (a span's `at`, say), oldest first; their sizes sum to `requested`."""
    live = {alloc.id: alloc for alloc in alive_at_start(start)}
    for position, event in enumerate(events):
        if position > index:
            break
        if isinstance(event, Alloc):
            live[event.id] = event
        elif isinstance(event, Free):
            live.pop(event.id, None)
    return tuple(live.values())


def use(number: int, stream: int) -> int:
    """The operation for `run` that record_stream was called for an allocation; then `streams` must not be empty."""
    return -((number + 1) << _STREAM_BITS | stream)


def used(op: int) -> tuple[int, int]:
    """(number of the allocation, stream) of a `use`."""
    number, stream = divmod(-op, 1 << _STREAM_BITS)
    return number - 1, stream


def to_ops(events: Iterable[Event], start: Sequence[Segment] = ()) -> tuple[list[int], dict[int, int]]:
    """Events -> what `run` takes: sizes and frees, and the streams of the allocations that are not on stream 0.

    What was alive at the start has the first numbers, in the order it lay. Raises BadInput as `replay` does.
    """
    ops: list[int] = []
    streams: dict[int, int] = {}
    number_of = {a.id: number for number, a in enumerate(alive_at_start(start))}
    born = len(number_of)
    for index, event in enumerate(events):
        if isinstance(event, Alloc):
            if event.id in number_of or event.size < 0:
                raise _bad_event(index, event)
            ops.append(event.size)
            number_of[event.id] = born
            if event.stream:
                streams[born] = event.stream
            born += 1
        elif isinstance(event, Free):
            if event.id not in number_of:
                raise _bad_event(index, event)
            ops.append(~number_of.pop(event.id))
        elif isinstance(event, Oom):
            ops += (event.size, ~born)
            born += 1
        elif isinstance(event, EmptyCache):
            ops.append(EMPTY_CACHE)
        elif isinstance(event, RecordStream):
            if event.id not in number_of:
                raise _bad_event(index, event)
            ops.append(use(number_of[event.id], event.stream))
            streams[NOBODY] = 0
    return ops, streams


def run(
    ops: Sequence[int],
    *,
    capacity: int | None = None,
    settings: AllocSettings = DEFAULTS,
    torch: Torch = LATEST_TORCH,
    streams: Mapping[int, int] = ONE_STREAM,
) -> Peaks:
    """The fast road for planners: `op >= 0` allocates that many bytes, `op < 0` frees allocation number `~op`.

    Allocations are numbered from 0 in their order, so -1 frees the first; `streams` names those not on stream 0;
    EMPTY_CACHE stands for empty_cache(), `use` for record_stream.
    Raises OutOfMemory where the card would; IndexError or ValueError for a free of what is not allocated.
    """
    if settings in QUICK and torch == LATEST_TORCH and not streams:
        return _run_quick(ops, QUICK[settings](capacity))
    allocator = Allocator(capacity, settings, torch)
    play(allocator, ops, streams, [])
    return Peaks(allocator.requested_peak, allocator.allocated_peak, allocator.reserved_peak)


def _run_quick(ops: Sequence[int], allocator: QuickAllocator) -> Peaks:
    """`run` on an allocator that counts no requests and would not notice a second free."""
    malloc, free = allocator.malloc, allocator.free
    blocks: list[int | None] = []
    sizes: list[int] = []
    requested = peak = 0
    for op in ops:
        if op >= 0:
            blocks.append(malloc(op))
            sizes.append(op)
            requested += op
            if requested > peak:
                peak = requested
        elif op != EMPTY_CACHE:
            block = blocks[~op]
            if block is None:
                raise ValueError(f"allocation {~op} is not allocated")
            free(block)
            blocks[~op] = None
            requested -= sizes[~op]
        else:
            allocator.empty_cache()
    return Peaks(peak, allocator.allocated_peak, allocator.reserved_peak)


def play(allocator: Any, ops: Sequence[int], streams: Mapping[int, int], blocks: list[Any]) -> None:
    """What `run` does on any allocator (a quick one has no streams); adds to `blocks`, those of the first allocations.

    Raises OutOfMemory.
    """
    malloc, free = allocator.malloc, allocator.free
    born = blocks.append
    if not streams:
        for op in ops:
            if op >= 0:
                born(malloc(op))
            elif op != EMPTY_CACHE:
                free(blocks[~op])
            else:
                allocator.empty_cache()
        return
    for op in ops:
        if op >= 0:
            born(malloc(op, streams.get(len(blocks), 0)))
        elif op > EMPTY_CACHE:
            free(blocks[~op])
        elif op < EMPTY_CACHE:
            number, stream = used(op)
            allocator.record_stream(blocks[number], stream)
        else:
            allocator.empty_cache()


def _higher(one: Levels, other: Levels) -> Levels:
    return Levels(
        max(one.requested, other.requested),
        max(one.allocated, other.allocated),
        max(one.reserved, other.reserved),
        max(one.device, other.device),
    )


def _bad_event(index: int, event: Alloc | Free | RecordStream) -> BadInput:
    if isinstance(event, RecordStream):
        wrong = f"uses {event.id}, which is not allocated"
    elif isinstance(event, Free):
        wrong = f"frees {event.id}, which is not allocated"
    elif event.size < 0:
        wrong = f"allocates {event.size} bytes"
    else:
        wrong = f"allocates {event.id} a second time"
    return BadInput(f"event {index} of the tape {wrong}", hint="the tape is incomplete or damaged; record it again")
