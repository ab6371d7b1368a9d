"""Play a history forwards on the model to find what it does not record: calls of empty_cache() and ages of segments.

The allocator gives segments back by itself only to make room: when no cached block fits the next request and the driver
has not got what it asks for. What was given back without need was a call. From torch 2.13 on the older segment wins
between free blocks of one size; which of those at the start is older shows when one of them is chosen.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from memfit.allocator import Allocator, Block, OutOfMemory
from memfit.allocator.player import begun, play
from memfit.allocator.replay import allocator_of
from memfit.nouns.alloc_settings import AllocSettings, Torch
from memfit.nouns.tape import Alloc, EmptyCache, Event, Oom, Segment, SegmentAlloc, SegmentFree, Tape

BY_AGE: Torch = (2, 13)  # from this version on the age of segments decides between blocks of equal size
MAX_SWAPS = 500  # rounds of learning ages; each plays the history up to the next surprise
MOST_PLAYED = 1_000_000  # events of those rounds in all; then the ages that are still unknown stay so


def completed(tape: Tape, addresses: Sequence[int], settings: AllocSettings, torch: Torch) -> Tape:
    """Return the tape with an EmptyCache wherever the program must have called it, and its start ordered by age.

    `addresses` are those of the allocations by id. A memory fraction is not recorded, so what garbage
    collection gave back is read as a call.
    """
    learns = bool(tape.start) and torch >= BY_AGE and not settings.expandable_segments
    if not learns and not any(type(event) is SegmentFree for event in tape.events):
        return tape
    order, played = list(tape.start), 0
    for swap in range(1, MAX_SWAPS + 1):
        round_ = _Round(replace(tape, start=tuple(order)), addresses if learns else (), settings, torch)
        round_.play()
        if round_.surprise is None:
            break
        older, younger = round_.surprise
        played += len(round_.events)
        known = order.index(older) < order.index(younger)  # it was older already: something else is not known
        if known or played > MOST_PLAYED or swap == MAX_SWAPS:
            round_ = _Round(replace(tape, start=tuple(order)), (), settings, torch)
            round_.play()
            break
        order.remove(older)
        order.insert(order.index(younger), older)
    return replace(tape, start=tuple(order), events=tuple(round_.events))


@dataclass
class _Round:
    """One play of the history, which stops at a `surprise`: (the segment that was chosen, the one the model took)."""

    tape: Tape
    addresses: Sequence[int]
    settings: AllocSettings
    torch: Torch
    events: list[Event] = field(default_factory=list)
    surprise: tuple[Segment, Segment] | None = None

    def play(self) -> None:
        """Play the events, and write them to `events` with the calls of empty_cache() between them."""
        tape = self.tape
        allocator = allocator_of(tape, self.settings, self.torch)
        live = begun(allocator, tape.start)
        heads = [chain[0].addr for chain in allocator.blocks()]
        requests = [index for index, event in enumerate(tape.events) if type(event) is Alloc]
        for index, event, block in play(allocator, live, tape.events, go_on=True):
            starts = type(event) is SegmentFree and (index == 0 or type(tape.events[index - 1]) is not SegmentFree)
            if starts and _is_call(allocator, tape.events, index, requests):
                self.events.append(EmptyCache())
                allocator.empty_cache()
            self.events.append(event)
            if type(event) is Alloc and isinstance(block, OutOfMemory):  # the model went another way: no more calls
                self.events += tape.events[index + 1 :]
            elif type(event) is Alloc and isinstance(block, Block) and self.addresses:
                self.surprise = self._surprised(block, self.addresses[event.id], heads, allocator)
                if self.surprise:
                    break

    def _surprised(
        self, block: Block, recorded: int, heads: list[int], allocator: Allocator
    ) -> tuple[Segment, Segment] | None:
        """Return the start's segments with the `recorded` address and with the model's block, where they differ."""
        chosen = bisect_right(heads, block.addr) - 1
        start = self.tape.start
        if chosen == len(heads) - 1 and block.addr >= heads[-1] + _size(start[-1]):
            return None  # a segment taken since
        for index, segment in enumerate(start):
            inside = segment.address <= recorded < segment.address + _size(segment)
            if inside and index != chosen and allocator.holds(heads[index]):
                return segment, start[chosen]
        return None


def _size(segment: Segment) -> int:
    return sum(piece.size for piece in segment.pieces)


def _is_call(allocator: Allocator, events: tuple[Event, ...], index: int, requests: list[int]) -> bool:
    """Were the segments from `index` on given back without need? `requests`: the indices of all allocations."""
    first = events[index]
    while index < len(events) and type(events[index]) is SegmentFree:
        index += 1
    after = events[index] if index < len(events) else None
    if type(after) is Oom:
        return False
    if type(after) is not SegmentAlloc:
        return True
    place = bisect_left(requests, index)
    request = events[requests[place]] if place < len(requests) else None
    if not isinstance(request, Alloc) or allocator.is_cached(request.size, request.stream):
        return True
    oversize = allocator.settings.max_split_size  # to make room, blocks of this size and more go first
    if oversize and isinstance(first, SegmentFree) and first.size < oversize:
        large = allocator.free_blocks(request.stream, small=False)
        if large and large[-1].size >= oversize:
            return True
    return allocator.reserved + after.size <= allocator.capacity
