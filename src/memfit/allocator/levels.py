"""What an allocator held after each event of a run, and its segments after one, for whoever explains or draws the run.

`levels_of` plays a tape whole. With default settings the compiled allocators do it where there are any: they take a
tenth of the time of `play`, whose events they leave to it but for allocations and releases.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from memfit.allocator import UNLIMITED, Allocator, OutOfMemory, engine
from memfit.allocator.blocks import PRIVATE_POOLS, UNMAPPED
from memfit.allocator.player import Live, alive_at_start, begun, play
from memfit.allocator.quick import refuse
from memfit.allocator.reserve import DRIVER_PAGE
from memfit.errors import BadInput
from memfit.nouns.alloc_settings import AllocSettings
from memfit.nouns.tape import Alloc, EmptyCache, Event, Free, Mark, Oom, Segment, SegmentAlloc, SegmentFree

KINDS = (Alloc, Free, Mark, SegmentAlloc, SegmentFree)  # what the compiled allocators play; the last three do nothing
MOST_STREAMS = 64  # with compiled allocators, which look at each stream after each event
BY_ORDER = (2, 12)  # the version whose tie-break they do not have


class HeldSegment(NamedTuple):
    """A segment at some instant. `pieces`: (bytes, id of the allocation that holds them, whether they are mapped)."""

    address: int
    stream: int
    small: bool
    pieces: list[tuple[int, int | None, bool]]


class Levels:
    """What an allocator held after each event of a run, in bytes: `allocated` and `reserved`, by the event's index.

    They end before the request that ended the run. `oom` is the last request that failed, and `capacity` that of the
    card. At the events in `given` a request that failed when it was recorded was given, and given back. `requested`
    are the bytes that were requested before the first event; `begins` is False where the card had no room for them.
    `held` is what was allocated and reserved after the event that was asked for, or at the end of a run that ended
    before, and `segments` are those at that instant.
    """

    def __init__(self, capacity: int = UNLIMITED) -> None:
        self.allocated, self.reserved = array("q"), array("q")
        self.given: set[int] = set()
        self.oom: OutOfMemory | None = None
        self.capacity = capacity
        self.requested = 0
        self.begins = True
        self.held = (0, 0)
        self.segments: list[HeldSegment] = []

    def _play(self, allocator: Any, live: Any, events: Sequence[Event], stop: int, go_on: bool) -> bool:
        """Play the events from the first that has no levels up to `stop`. Return whether the run goes on."""
        follow = getattr(allocator, "follow", None)
        at = len(self.allocated)
        while at < stop:
            if follow:
                at, allocated, reserved = follow(events, at, stop, live)
                self.allocated.frombytes(allocated)
                self.reserved.frombytes(reserved)
            end = min(at + 1, stop) if follow else stop
            for _, event, block in play(allocator, live, events[at:end], go_on=go_on, first=at):
                if isinstance(block, OutOfMemory):
                    self.oom = block
                    if not (go_on and type(event) is Oom):
                        return False
                elif type(event) is Oom and block is not None:
                    self.given.add(len(self.allocated))
                self.allocated.append(allocator.allocated)
                self.reserved.append(allocator.reserved)
            at = end
        return True


def levels_of(
    allocator: Allocator, start: Sequence[Segment], events: tuple[Event, ...], *, until: int | None = None,
    go_on: bool = False,
) -> Levels:  # fmt: skip
    """Play a run from its start on an empty allocator, and return its levels, and its segments after event `until`.

    `go_on` is that of `play`. Raises BadInput as `play` does.
    """
    with suppress(_Unsuited, BadInput):  # of what is wrong with a tape, the other allocator tells
        return _played(_CompiledCard(allocator, start, events), start, events, until, go_on)
    return _played(allocator, start, events, until, go_on)


def _played(
    allocator: Allocator | _CompiledCard, start: Sequence[Segment], events: tuple[Event, ...], until: int | None,
    go_on: bool,
) -> Levels:  # fmt: skip
    levels = Levels(allocator.capacity)
    live: Any = {}
    try:
        live = begun(allocator, start) if isinstance(allocator, Allocator) else allocator.begun(start)
    except OutOfMemory as error:
        levels.oom, levels.begins = error, False
    levels.requested = allocator.requested
    goes_on = levels.begins
    if until is not None:
        goes_on = goes_on and levels._play(allocator, live, events, until + 1, go_on)
        made = _segments(allocator, live) if isinstance(allocator, Allocator) else allocator.segments(live)
        levels.held, levels.segments = (allocator.allocated, allocator.reserved), made
    if goes_on:
        levels._play(allocator, live, events, len(events), go_on)
    return levels


def _segments(allocator: Allocator, live: Live) -> list[HeldSegment]:
    owners = {id(block): number for number, block in live.items()}
    return [
        HeldSegment(
            chain[0].addr, chain[0].pool.stream, chain[0].pool.small,
            [(block.size, owners.get(id(block)), block.state != UNMAPPED) for block in chain],
        )
        for chain in allocator.blocks()
    ]  # fmt: skip


class _Unsuited(Exception):
    """Raised for a run that the compiled allocators cannot play."""


class _CompiledCard:
    """The compiled allocators of a card's streams, as `play` uses an allocator.

    A block is (the place of its stream) << 32 | (its number there).
    """

    def __init__(self, allocator: Allocator, start: Sequence[Segment], events: tuple[Event, ...]) -> None:
        """Raise _Unsuited where the run has to be played on `allocator` itself."""
        streams = {0, *(segment.stream for segment in start), *{e.stream for e in events if type(e) is Alloc}}
        suited = (
            hasattr(engine.PlainAllocator, "follow")
            and allocator.settings == AllocSettings()
            and allocator.torch != BY_ORDER
            and allocator.capacity == allocator.total_memory
            and len(streams) <= MOST_STREAMS
            and max(streams) < PRIVATE_POOLS
            and {type(event) for event in events} <= {*KINDS, Oom, EmptyCache}
            and sum(piece.size for segment in start for piece in segment.pieces) <= allocator.capacity
        )
        if not suited:
            raise _Unsuited
        self.capacity = allocator.capacity
        self.requested = 0  # at the start
        self.places = {stream: place for place, stream in enumerate(sorted(streams, key=bool))}
        self.streams: list[Any] = [engine.PlainAllocator(self.capacity) for _ in streams]
        self.streams[0].share_card(*self.streams[1:])

    def begun(self, start: Sequence[Segment]) -> dict[int, int]:
        """Return the blocks in use at the start, by id. Raises _Unsuited for a start that no real run has."""
        live: dict[int, int] = {}
        for segment in start:
            place = self.places[segment.stream]
            held = [piece.alloc for piece in segment.pieces if piece.alloc is not None]
            sizes = [-piece.size if piece.alloc is None else piece.size for piece in segment.pieces]
            whole = not sum(map(abs, sizes)) % DRIVER_PAGE and all(p.mapped and p.size > 0 for p in segment.pieces)
            if segment.expandable or not whole:
                raise _Unsuited
            try:
                blocks = self.streams[place].restore(segment.small, sizes)
            except ValueError:
                raise _Unsuited from None
            live |= {alloc.id: place << 32 | block for alloc, block in zip(held, blocks, strict=True)}
        started = alive_at_start(start)
        if len(live) < len(started):
            raise _Unsuited
        self.requested = sum(alloc.size for alloc in started)
        return live

    @property
    def allocated(self) -> int:
        return sum(one.allocated for one in self.streams)

    @property
    def reserved(self) -> int:
        return int(self.streams[0].reserved)

    def malloc(self, size: int, stream: int = 0) -> int | None:
        """Return a block; None for 0 bytes. Raises OutOfMemory."""
        place = self.places[stream]
        try:
            block = self.streams[place].malloc(size)
        except OutOfMemory:
            refuse(self, size)  # with what all streams hold
        return place << 32 | block if block else None

    def free(self, block: int | None) -> None:
        """Free a block."""
        if block:
            self.streams[block >> 32].free(block & 0xFFFF_FFFF)

    def empty_cache(self) -> None:
        """Release every wholly free segment to the driver."""
        self.streams[0].empty_cache()

    def follow(self, events: tuple[Event, ...], at: int, stop: int, live: dict[int, int]) -> tuple[int, bytes, bytes]:
        """Play events from `at` on, and return where it stopped, and the levels after each event, as 64-bit numbers.

        It stops at `stop`, or before an event that `play` has to play, such as a request that fails.
        """
        found: tuple[int, bytes, bytes] = self.streams[0].follow(events, at, stop, live, self.places, KINDS)
        return found

    def segments(self, live: dict[int, int]) -> list[HeldSegment]:
        """Return the segments, oldest first, with the ids of what is in them."""
        owners = {block: number for number, block in live.items() if block}
        return sorted(
            HeldSegment(address, stream, small, [
                (size, owners[place << 32 | block] if block else None, True) for size, block in pieces
            ])
            for stream, place in self.places.items()
            for address, small, pieces in self.streams[place].segments()
        )  # fmt: skip
