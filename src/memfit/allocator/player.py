"""The tape player: apply a tape's events to an allocator one by one, and yield after each.

Replay, explain, figures and snapshots loop over `play`, so that all treat an out-of-memory, caught or not, and a
damaged tape alike. `begun` restores the blocks that the allocator held when the recording began.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from memfit.allocator.blocks import ALLOCATED, Block
from memfit.allocator.machine import Allocator
from memfit.allocator.reserve import UNLIMITED, OutOfMemory
from memfit.errors import BadInput
from memfit.nouns.tape import Alloc, EmptyCache, Event, Free, Oom, RecordStream, Segment

Live = dict[int, Block | None]  # the block of each allocation by its id; None for one of 0 bytes
Played = Iterator[tuple[int, Event, Block | OutOfMemory | None]]  # what `play` yields


def play(
    allocator: Allocator, live: Live, events: Iterable[Event], *, go_on: bool = False, first: int = 0
) -> Played:  # fmt: skip
    """Apply each event to the allocator, then yield it with its index, from `first` on, and its block.

    `live` holds the blocks in use and is kept up to date. The request of an Oom is made again; if it succeeds,
    its block is yielded and then freed. For a request that fails the OutOfMemory is yielded instead, and the generator
    ends. With `go_on` it continues after a failed Oom, because the recorded program caught it, and skips the
    request on a card without a limit, where it would not fail. Raises BadInput for a Free of an unknown id, an id that
    is allocated twice, or a negative size.
    """
    malloc, free = allocator.malloc, allocator.free
    skips = go_on and allocator.capacity >= UNLIMITED
    for index, event in enumerate(events, first):
        block: Block | None = None
        try:
            if type(event) is Alloc:
                if event.id in live or event.size < 0:
                    raise bad_event(index, event)
                live[event.id] = block = malloc(event.size, event.stream)
            elif type(event) is Free:
                if event.id not in live:
                    raise bad_event(index, event)
                block = live.pop(event.id)
                free(block)
            elif type(event) is EmptyCache:
                allocator.empty_cache()
            elif type(event) is RecordStream:
                if event.id not in live:
                    raise bad_event(index, event)
                allocator.record_stream(live[event.id], event.stream)
            elif type(event) is Oom and not skips:
                if event.size < 0:
                    raise bad_event(index, event)
                block = malloc(event.size)
                yield index, event, block
                free(block)
                continue
        except OutOfMemory as error:
            yield index, event, error
            if go_on and type(event) is Oom:
                continue
            return
        yield index, event, block


def begun(allocator: Allocator, start: Sequence[Segment]) -> Live:
    """Bring an empty allocator to the start of a tape, and return the blocks in use by id.

    If `expandable_segments` is set as in the recording, the segments are restored, and cached ones are released if the
    card is too small for all. Otherwise the live tensors are allocated anew, segment by segment. Raises OutOfMemory.
    """
    if all(segment.expandable == allocator.settings.expandable_segments for segment in start):
        live: Live = dict(restore(allocator, start))
        if allocator.reserved > allocator.capacity:
            allocator.least_refused = allocator.reserved
            allocator.empty_cache()
            allocator.reset_peak_stats()
        if allocator.reserved <= allocator.capacity:
            return live
        raise allocator.out_of_memory(0, 0)
    return {alloc.id: allocator.malloc(alloc.size, alloc.stream) for alloc in alive_at_start(start)}


def restore(allocator: Allocator, segments: Iterable[Segment]) -> dict[int, Block]:
    """Put these segments into an empty allocator, and return the block of each allocation by its id.

    Segments are created in the order given, which decides ties from torch 2.13 on. Blocks in use count as allocated
    now; whether the driver has the memory is not checked.
    """
    held: dict[int, Block] = {}
    for segment in segments:
        pool = allocator.pools_of(segment.stream)[not segment.small]
        sizes = sum(piece.size for piece in segment.pieces)
        length = sizes
        if segment.expandable:  # its range of addresses continues after the mapped pieces
            room = allocator.total_memory + allocator.total_memory // 8
            length = max(sizes, -(-room // pool.granule) * pool.granule)
        address = allocator.reserve_address(length, pool.granule if segment.expandable else 1)
        last: Block | None = None
        for piece in segment.pieces:
            block = last = allocator.new_block(piece.size, address, pool, last)
            address += piece.size
            if not piece.mapped:
                pool.insert_unmapped(block)
                continue
            allocator.charge(block.addr, piece.size)
            if piece.alloc is None:
                pool.insert(block)
                if segment.expandable or len(segment.pieces) == 1:
                    allocator.note_releasable(block)
                continue
            block.state, block.requested = ALLOCATED, piece.alloc.size
            held[piece.alloc.id] = block
            allocator.requested += piece.alloc.size
            allocator.allocated += piece.size
        if length > sizes:
            pool.insert_unmapped(allocator.new_block(length - sizes, address, pool, last))
        allocator.segments += not segment.expandable
        allocator.inactive_split += _inactive(segment)
    allocator.driver_calls.clear()
    allocator.num_device_alloc = 0
    allocator.reset_peak_stats()
    return held


def _inactive(segment: Segment) -> int:
    """Return the free bytes of a segment that is partly in use."""
    split = len(segment.pieces) > 1
    return sum(piece.size for piece in segment.pieces if piece.alloc is None and piece.mapped) if split else 0


def alive_at_start(start: Sequence[Segment]) -> list[Alloc]:
    """Return the allocations that a tape began with, in the order of its segments and pieces."""
    return [piece.alloc for segment in start for piece in segment.pieces if piece.alloc is not None]


def alive_at(events: Iterable[Event], index: int, start: Sequence[Segment] = ()) -> tuple[Alloc, ...]:
    """Return the allocations alive after event `index`, oldest first; their sizes sum to `requested`."""
    live = {alloc.id: alloc for alloc in alive_at_start(start)}
    for position, event in enumerate(events):
        if position > index:
            break
        if isinstance(event, Alloc):
            live[event.id] = event
        elif isinstance(event, Free):
            live.pop(event.id, None)
    return tuple(live.values())


def bad_event(index: int, event: Alloc | Free | RecordStream | Oom) -> BadInput:
    """Return the error for an event that contradicts those before it."""
    if isinstance(event, RecordStream):
        wrong = f"uses {event.id}, which is not allocated"
    elif isinstance(event, Free):
        wrong = f"frees {event.id}, which is not allocated"
    elif isinstance(event, Oom) or event.size < 0:
        wrong = f"allocates {event.size} bytes"
    else:
        wrong = f"allocates {event.id} a second time"
    return BadInput(f"event {index} of the tape {wrong}", hint="the tape is incomplete or damaged; record it again")
