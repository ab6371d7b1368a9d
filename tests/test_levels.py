"""The levels of a whole run: the compiled allocators against the full one, event by event."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memfit.allocator import Allocator, engine
from memfit.allocator import levels as module
from memfit.allocator.levels import Levels, levels_of
from memfit.errors import BadInput
from memfit.nouns.alloc_settings import AllocSettings
from memfit.nouns.tape import Alloc, EmptyCache, Event, Free, Mark, Oom, Piece, RecordStream, Segment
from memfit.units import KIB, MIB

compiled = pytest.mark.skipif(not hasattr(engine.PlainAllocator, "follow"), reason="no compiled allocators")
SIZES = st.one_of(
    st.integers(0, 4 * KIB), st.integers(1, 2 * MIB), st.integers(MIB, 60 * MIB), st.sampled_from([512, MIB, 10 * MIB])
)
STREAMS = st.sampled_from((0, 0, 0, 7, 1 << 40))
ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("malloc"), SIZES, STREAMS),
        st.tuples(st.just("free"), st.integers(0, 40), st.just(0)),
        st.tuples(st.just("oom"), SIZES, st.just(0)),
        st.tuples(st.sampled_from(("empty", "mark")), st.just(0), st.just(0)),
    ),
    max_size=80,
)
PIECES = st.lists(st.tuples(st.integers(1, 2048), st.booleans()), min_size=1, max_size=5)
STARTS = st.lists(st.tuples(st.booleans(), STREAMS, PIECES), max_size=4)
PARTS = ("allocated", "reserved", "given", "capacity", "requested", "begins", "held", "segments")


def started(rows: list[tuple[bool, int, list[tuple[int, bool]]]]) -> tuple[Segment, ...]:
    made, number, address = [], 0, 0
    for small, stream, pieces in rows:
        lying = []
        for units, used in pieces:
            size = 512 * units if small else MIB + 512 * units
            lying.append(Piece(size, Alloc(number, size - 1, stream=stream) if used else None))
            number += used
        lying.append(Piece(2 * MIB - sum(piece.size for piece in lying) % (2 * MIB)))
        made.append(Segment(address, stream, small, expandable=False, pieces=tuple(lying)))
        address += sum(piece.size for piece in lying)
    return tuple(made)


def run_of(start: tuple[Segment, ...], actions: list[tuple[str, int, int]]) -> tuple[Event, ...]:
    alive = [piece.alloc.id for segment in start for piece in segment.pieces if piece.alloc]
    events: list[Event] = []
    for number, (action, value, stream) in enumerate(actions, len(alive)):
        if action == "malloc":
            events.append(Alloc(number, value, stream=stream))
            alive.append(number)
        elif action == "free" and alive:
            events.append(Free(alive.pop(value % len(alive))))
        elif action == "oom":
            events.append(Oom(value))
        elif action == "empty":
            events.append(EmptyCache())
        elif action == "mark":
            events.append(Mark("step", "forward"))
    return tuple(events)


def parts(levels: Levels) -> dict[str, Any]:
    return {name: getattr(levels, name) for name in PARTS} | {"oom": vars(levels.oom) if levels.oom else None}


def full(capacity: int | None, *words: Any, **more: Any) -> Levels:
    """The levels as the full allocator alone finds them."""
    return module._played(Allocator(capacity), *words, **more)


@compiled
@given(STARTS, ACTIONS, st.one_of(st.none(), st.integers(0, 200 * MIB)), st.integers(-1, 80), st.booleans())
def test_compiled_allocators_give_the_same_levels_and_segments(
    rows: list[Any], actions: list[tuple[str, int, int]], capacity: int | None, until: int, go_on: bool
) -> None:
    start = started(rows)
    events = run_of(start, actions)
    allocator = Allocator(capacity)
    at = min(until, len(events) - 1)
    if capacity is None or sum(p.size for s in start for p in s.pieces) <= capacity:  # else the full one plays it
        card = module._CompiledCard(allocator, start, events)  # and raises nothing
        assert parts(module._played(card, start, events, at, go_on)) == parts(full(capacity, start, events, at, go_on))
    assert parts(levels_of(allocator, start, events, until=at, go_on=go_on)) == parts(
        full(capacity, start, events, at, go_on)
    )


def test_a_refusal_counts_what_all_streams_hold() -> None:
    events = (Alloc(0, MIB, stream=7), Alloc(1, 5 * MIB), Oom(1 << 40), Alloc(2, MIB, stream=9))
    found = levels_of(Allocator(1 << 30), (), events, go_on=True)
    assert found.oom is not None
    assert (found.oom.allocated, found.oom.reserved) == (6 * MIB, 22 * MIB)
    assert parts(found) == parts(full(1 << 30, (), events, None, go_on=True))


def test_a_segment_of_the_start_is_released_once() -> None:
    start = (Segment(0, 0, False, False, (Piece(4 * MIB, Alloc(0, 4 * MIB)), Piece(16 * MIB))),)
    events = (Alloc(1, 16 * MIB), Free(0), Free(1), EmptyCache(), EmptyCache())
    assert list(full(None, start, events, None, go_on=False).reserved) == [20 * MIB] * 3 + [0, 0]
    assert parts(levels_of(Allocator(None), start, events)) == parts(full(None, start, events, None, go_on=False))


@pytest.mark.parametrize(
    "wrong",
    [
        (Free(1),),
        (Alloc(0, 8), Alloc(0, 8)),
        (Alloc(0, -1),),
        (Oom(-1),),
        (Alloc(0, 8), Free(0), Mark("step", "x"), Free(0)),
        (RecordStream(0, 1),),
    ],
)
def test_a_damaged_run_is_refused_in_the_same_words(wrong: tuple[Event, ...]) -> None:
    with pytest.raises(BadInput) as one:
        full(MIB << 10, (), wrong, None, go_on=True)
    with pytest.raises(BadInput) as other:
        levels_of(Allocator(MIB << 10), (), wrong, go_on=True)
    assert one.value.message == other.value.message


def test_other_settings_are_played_by_the_full_allocator() -> None:
    events = (Alloc(0, 3 * MIB), Free(0))
    found = levels_of(Allocator(None, AllocSettings(expandable_segments=True)), (), events, until=1)
    assert list(found.reserved) == [20 * MIB] * 2
    assert found.held == (0, 20 * MIB)
    assert found.segments[0].pieces[-1][2] is False  # the addresses behind are not mapped


@compiled
def test_a_run_that_takes_too_many_addresses_is_played_by_the_full_allocator() -> None:
    size = 1 << 45
    events = tuple(e for n in range(20) for e in (Alloc(n, size), Free(n), EmptyCache()))
    found = levels_of(Allocator(None), (), events)
    assert max(found.reserved) == size
    assert len(found.reserved) == 60


@compiled
@pytest.mark.parametrize(
    "call",
    [
        lambda one: one.restore(True, [0]),
        lambda one: one.restore(True, [2 * MIB]),
        lambda one: one.restore(False, [512, -512]),
        lambda one: one.restore(True, [513]),
        lambda one: one.restore(True, [1 << 63]),
        lambda one: one.restore(True, [-(1 << 63)]),
        lambda one: one.restore(True, [1 << 46, 1 << 46]),
        lambda one: one.follow((Alloc(0, 1),), -1, 1, {}, {0: 0}, module.KINDS),
        lambda one: one.follow((Alloc(0, 1),), 0, 1, {}, {0: 3}, module.KINDS),
        lambda one: one.follow((Free(0),), 0, 1, {0: 9 << 32 | 1}, {0: 0}, module.KINDS),
        lambda one: one.follow((Free(0),), 0, 1, {0: 77}, {0: 0}, module.KINDS),
        lambda one: one.follow((Free(0),), 0, 1, {0: -5}, {0: 0}, module.KINDS),
    ],
)  # fmt: skip
def test_what_is_out_of_range_is_refused(call: Any) -> None:
    with pytest.raises(ValueError):
        call(engine.PlainAllocator(None))
