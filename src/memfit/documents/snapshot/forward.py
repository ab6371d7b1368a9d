"""A history played forwards on the model, for what it does not record: calls of empty_cache() and ages of segments.

The allocator gives segments back by itself only to make room: when no cached block fits the next request and the driver
has not got what it asks for. What was given back without need was a call. From torch 2.13 on the older segment wins
between free blocks of one size; which of those at the start is older shows when one of them is chosen.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from memfit.allocator import Allocator, Block, OutOfMemory
from memfit.allocator.recorded_card import allocator_of
from memfit.allocator.replay import begun
from memfit.nouns.alloc_settings import AllocSettings, Torch
from memfit.nouns.tape import Alloc, EmptyCache, Event, Free, Oom, Segment, SegmentAlloc, SegmentFree, Tape

BY_AGE: Torch = (2, 13)  # from this version on the age of segments decides between blocks of equal size
MAX_SWAPS = 500  # rounds of learning ages; each plays the history up to the next surprise


def completed(tape: Tape, addresses: Mapping[int, int], settings: AllocSettings, torch: Torch) -> Tape:
    """The tape with an EmptyCache wherever the program must have called it, and its start ordered by age.

    `addresses` are where the recorded allocator put each allocation, by id. (A memory fraction is not recorded, so what
    garbage collection gave back reads as a call.)
    """
    learns = bool(tape.start) and torch >= BY_AGE and not settings.expandable_segments
    if not learns and not any(type(event) is SegmentFree for event in tape.events):
        return tape
    order = list(tape.start)
    for _ in range(MAX_SWAPS):
        play = _Play(replace(tape, start=tuple(order)), addresses if learns else {}, settings, torch)
        play.through()
        if play.surprise is None:
            break
        older, younger = play.surprise
        if order.index(older) < order.index(younger):  # it was older already: something else is not known
            return _Play(replace(tape, start=tuple(order)), {}, settings, torch).through()
        order.remove(older)
        order.insert(order.index(younger), older)
    return replace(tape, start=tuple(order), events=tuple(play.events))


@dataclass
class _Play:
    """One round; it stops at a `surprise`: (the segment that was chosen, the one the model took instead)."""

    tape: Tape
    addresses: Mapping[int, int]
    settings: AllocSettings
    torch: Torch
    events: list[Event] = field(default_factory=list)
    surprise: tuple[Segment, Segment] | None = None

    def through(self) -> Tape:
        """Play all events; the tape with the calls."""
        tape = self.tape
        allocator = allocator_of(tape, self.settings, self.torch)
        live = begun(allocator, tape.start)
        heads = [chain[0].addr for chain in allocator.blocks()]
        for index, event in enumerate(tape.events):
            starts = type(event) is SegmentFree and (index == 0 or type(tape.events[index - 1]) is not SegmentFree)
            if starts and _is_call(allocator, tape.events, index):
                self.events.append(EmptyCache())
                allocator.empty_cache()
            self.events.append(event)
            try:
                if type(event) is Alloc:
                    live[event.id] = block = allocator.malloc(event.size, event.stream)
                    if block and event.id in self.addresses and self._surprised(block, event.id, heads, allocator):
                        break
                elif type(event) is Free:
                    allocator.free(live.pop(event.id))
                elif type(event) is Oom:
                    allocator.free(allocator.malloc(event.size))
            except OutOfMemory:
                if type(event) is Alloc:  # the model has lost its way, so it cannot tell any more
                    self.events += tape.events[index + 1 :]
                    break
        return replace(tape, events=tuple(self.events))

    def _surprised(self, block: Block, number: int, heads: list[int], allocator: Allocator) -> bool:
        """Did the recorded allocator take another of the start's segments than the model?"""
        here = bisect_right(heads, block.addr) - 1
        address = self.addresses[number]
        start = self.tape.start
        if here == len(heads) - 1 and block.addr >= heads[-1] + _size(start[-1]):
            return False  # a segment taken since
        for there, segment in enumerate(start):
            lies = segment.address <= address < segment.address + _size(segment)
            if lies and there != here and allocator.holds(heads[there]):
                self.surprise = segment, start[here]
                return True
        return False


def _size(segment: Segment) -> int:
    return sum(piece.size for piece in segment.pieces)


def _is_call(allocator: Allocator, events: tuple[Event, ...], index: int) -> bool:
    """Were the segments from `index` on given back without need?"""
    first = events[index]
    while index < len(events) and type(events[index]) is SegmentFree:
        index += 1
    after = events[index] if index < len(events) else None
    if type(after) is Oom:
        return False
    if type(after) is not SegmentAlloc:
        return True
    request = next((event for event in events[index:] if type(event) is Alloc), None)
    if request is None or allocator.is_cached(request.size, request.stream):
        return True
    oversize = allocator.settings.max_split_size  # to make room, blocks of this size and more go first
    if oversize and isinstance(first, SegmentFree) and first.size < oversize:
        large = allocator.free_blocks(request.stream, small=False)
        if large and large[-1].size >= oversize:
            return True
    return allocator.reserved + after.size <= allocator.capacity
