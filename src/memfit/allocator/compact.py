"""The compact form of a tape: one integer per event, for speed.

    n >= 0        allocates n bytes; allocations are numbered from 0 in their order
    ~k            frees allocation k, so -1 frees the first
    EMPTY_CACHE   empty_cache()
    use(k, s)     record_stream of allocation k on stream s

`streams` maps the numbers of allocations outside stream 0 to their streams. `to_ops` converts a tape's events,
`to_events` converts them back, `play_ops` plays them on an allocator.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from memfit.allocator.heap import EMPTY_CACHE as EMPTY_CACHE
from memfit.allocator.player import alive_at_start, bad_event
from memfit.nouns.tape import Alloc, EmptyCache, Event, Free, Mark, Oom, RecordStream, Segment

ONE_STREAM: Mapping[int, int] = {}
NOBODY = -1  # the key in `streams` that a tape with a `use` has even if all its allocations are on stream 0
_STREAM_BITS = 64  # bits of the stream in a `use`, so that every `use` is below EMPTY_CACHE


def use(number: int, stream: int) -> int:
    """Return the operation of a record_stream; `streams` must then have the key NOBODY."""
    return -((number + 1) << _STREAM_BITS | stream)


def used(op: int) -> tuple[int, int]:
    """Return (number of the allocation, stream) of a `use`."""
    number, stream = divmod(-op, 1 << _STREAM_BITS)
    return number - 1, stream


def to_ops(events: Iterable[Event], start: Sequence[Segment] = ()) -> tuple[list[int], dict[int, int]]:
    """Turn events into operations and `streams`.

    Allocations alive at the start get the first numbers, in the order of `start`. Raises BadInput as `replay` does.
    """
    ops: list[int] = []
    streams: dict[int, int] = {}
    number_of = {a.id: number for number, a in enumerate(alive_at_start(start))}
    count = len(number_of)
    for index, event in enumerate(events):
        if isinstance(event, Alloc):
            if event.id in number_of or event.size < 0:
                raise bad_event(index, event)
            ops.append(event.size)
            number_of[event.id] = count
            if event.stream:
                streams[count] = event.stream
            count += 1
        elif isinstance(event, Free):
            if event.id not in number_of:
                raise bad_event(index, event)
            ops.append(~number_of.pop(event.id))
        elif isinstance(event, Oom):
            ops += (event.size, ~count)
            count += 1
        elif isinstance(event, EmptyCache):
            ops.append(EMPTY_CACHE)
        elif isinstance(event, RecordStream):
            if event.id not in number_of:
                raise bad_event(index, event)
            ops.append(use(number_of[event.id], event.stream))
            streams[NOBODY] = 0
    return ops, streams


def to_events(
    ops: Sequence[int], allocation: Callable[[int, int], Alloc | Oom], marks: Iterable[tuple[int, Mark]] = ()
) -> Iterator[Event]:
    """Turn operations into the events of a tape, each mark before the operation at its position.

    `allocation` makes an event of the number and size of an allocation. Where it makes an Oom, the free is left out.
    """
    at: dict[int, list[Mark]] = {}
    for position, mark in marks:
        at.setdefault(position, []).append(mark)
    refused: set[int] = set()
    number = 0
    for position, op in enumerate(ops):
        yield from at.get(position, ())
        if op >= 0:
            event = allocation(number, op)
            if type(event) is Oom:
                refused.add(number)
            yield event
            number += 1
        elif op == EMPTY_CACHE:
            yield EmptyCache()
        elif op < EMPTY_CACHE:
            yield RecordStream(*used(op))
        elif ~op not in refused:
            yield Free(~op)
    yield from at.get(len(ops), ())


def play_ops(allocator: Any, ops: Sequence[int], streams: Mapping[int, int], blocks: list[Any]) -> None:
    """Play the operations on an allocator (a quick one needs empty `streams`), and append each new block to `blocks`.

    Raises OutOfMemory.
    """
    if not streams:
        allocator.play_ops(ops, blocks)
        return
    malloc, free, append = allocator.malloc, allocator.free, blocks.append
    for op in ops:
        if op >= 0:
            append(malloc(op, streams.get(len(blocks), 0)))
        elif op > EMPTY_CACHE:
            free(blocks[~op])
        elif op < EMPTY_CACHE:
            number, stream = used(op)
            allocator.record_stream(blocks[number], stream)
        else:
            allocator.empty_cache()
