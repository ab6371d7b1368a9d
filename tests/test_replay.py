"""Tapes through the allocator: spans and peaks, out-of-memory, and the smallest card a tape runs on."""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memfit.allocator import QUICK, Allocator, Block, OutOfMemory
from memfit.allocator.blocks import PRIVATE_POOLS
from memfit.allocator.compact import EMPTY_CACHE, ONE_STREAM, play_ops, to_ops
from memfit.allocator.player import alive_at
from memfit.allocator.replay import DEFAULTS, replay
from memfit.allocator.smallest_capacity import (
    Attempt,
    SharedBeginning,
    bisect,
    from_the_start,
    requested_peak,
    smallest_capacity,
)
from memfit.documents import tape_file
from memfit.errors import BadInput
from memfit.nouns.alloc_settings import LATEST_TORCH, AllocSettings, parse_alloc_conf
from memfit.nouns.footprint import Levels
from memfit.nouns.tape import Alloc, EmptyCache, Event, Free, Mark, RecordStream, SegmentAlloc, SegmentFree, Tape
from memfit.units import KIB, MIB

DATA = Path(__file__).parent / "data"
TAPE: tuple[Event, ...] = (
    Mark("load", "weights"),
    Alloc(1, 40 * MIB, "parameters"),
    Mark("first_step", "forward"),
    Alloc(2, 30 * MIB - 1, "activations"),
    Alloc(3, 10 * MIB, "temporaries"),
    Free(3),
    Mark("first_step", "backward"),
    Alloc(4, 20 * MIB, "gradients"),
    Free(2),
    Mark("step", "forward"),
    Alloc(5, 30 * MIB - 1, "activations"),
)


class Peaks(NamedTuple):
    requested: int
    allocated: int
    reserved: int


def run(
    ops: Sequence[int], *, capacity: int | None = None, settings: AllocSettings = DEFAULTS,
    streams: Mapping[int, int] = MappingProxyType({}),
) -> Peaks:  # fmt: skip
    """The peaks of operations, on a quick allocator where there is one."""
    if settings in QUICK and not streams:
        quick = QUICK[settings](capacity)
        play_ops(quick, ops, streams, [])
        return Peaks(requested_peak(ops), quick.allocated_peak, quick.reserved_peak)
    allocator = Allocator(capacity, settings)
    play_ops(allocator, ops, streams, [])
    return Peaks(allocator.requested_peak, allocator.allocated_peak, allocator.reserved_peak)


def levels(requested: int, allocated: int, reserved: int, context: int = 0) -> Levels:
    return Levels(requested, allocated, reserved, reserved + context)


def test_each_mark_begins_a_span_with_its_own_peaks() -> None:
    timeline = replay(TAPE)
    assert [(span.phase, span.instant, span.first, span.at) for span in timeline.spans] == [
        ("load", "weights", 0, 1),
        ("first_step", "forward", 2, 4),
        ("first_step", "backward", 6, 7),
        ("step", "forward", 9, 10),
    ]
    assert [span.peak for span in timeline.spans] == [
        levels(40 * MIB, 40 * MIB, 40 * MIB),
        levels(80 * MIB - 1, 80 * MIB, 80 * MIB),
        levels(90 * MIB - 1, 90 * MIB, 100 * MIB),  # 10 MiB stay cached
        levels(90 * MIB - 1, 90 * MIB, 100 * MIB),
    ]
    assert (timeline.peak, timeline.retries, timeline.oom) == (levels(90 * MIB - 1, 90 * MIB, 100 * MIB), 0, None)


def test_the_worst_span_and_the_phases() -> None:
    timeline = replay(TAPE)
    assert timeline.peak_of("first_step")[0] is timeline.spans[2]
    assert timeline.by_phase() == {
        "load": timeline.spans[0].peak,
        "first_step": timeline.spans[2].peak,
        "step": timeline.spans[3].peak,
    }


def test_a_span_carries_over_what_was_there_at_its_start() -> None:
    timeline = replay([Alloc(1, 40 * MIB), Mark("step", "a"), Free(1), Mark("step", "b"), Mark("step", "c")])
    assert [(span.phase, span.instant, span.peak.allocated) for span in timeline.spans] == [
        ("load", "start", 40 * MIB), ("step", "a", 40 * MIB), ("step", "b", 0), ("step", "c", 0)
    ]  # fmt: skip
    assert [span.at for span in timeline.spans] == [0, 1, 3, 4]


def test_context_counts_only_towards_the_device() -> None:
    timeline = replay(TAPE, capacity=100 * MIB, context=500 * MIB)
    assert timeline.peak == levels(90 * MIB - 1, 90 * MIB, 100 * MIB, 500 * MIB)


def test_an_empty_tape_has_no_spans() -> None:
    timeline = replay([])
    assert (timeline.spans, timeline.peak) == ((), levels(0, 0, 0))
    assert smallest_capacity([]) == 0


def test_the_replay_ends_where_memory_runs_out() -> None:
    timeline = replay(TAPE, capacity=88 * MIB)
    assert timeline.oom is not None and timeline.oom_at == 7
    assert (timeline.oom.requested, timeline.oom.device_free) == (20 * MIB, 18 * MIB)
    assert timeline.spans[-1].instant == "backward" and timeline.retries == 1
    assert timeline.peak.reserved == 80 * MIB


def test_a_card_that_is_tight_costs_retries() -> None:
    timeline = replay(TAPE, capacity=90 * MIB)
    assert (timeline.oom, timeline.retries, timeline.peak.reserved) == (None, 1, 90 * MIB)


def test_what_a_tape_says_of_segments_is_not_read() -> None:
    noise: list[Event] = [SegmentAlloc(0, 2 * MIB), SegmentFree(0, 2 * MIB)]
    assert replay([*TAPE[:5], *noise, *TAPE[5:]]).peak == replay(TAPE).peak


def test_the_living_at_a_span_s_peak_add_up_to_it() -> None:
    for span in replay(TAPE).spans:
        assert sum(alloc.size for alloc in alive_at(TAPE, span.at)) == span.peak.requested
    assert [alloc.role for alloc in alive_at(TAPE, 7)] == ["parameters", "activations", "gradients"]


@pytest.mark.parametrize(
    ("events", "message"),
    [
        ([Free(3)], "event 0 of the tape frees 3, which is not allocated"),
        ([Alloc(1, 5), Free(1), Free(1)], "event 2 of the tape frees 1"),
        ([Alloc(1, 5), Alloc(1, 5)], "event 1 of the tape allocates 1 a second time"),
        ([Alloc(1, -5)], "event 0 of the tape allocates -5 bytes"),
    ],
)
def test_a_damaged_tape_is_refused(events: list[Event], message: str) -> None:
    for reader in (replay, to_ops):
        with pytest.raises(BadInput, match=message) as caught:
            reader(events)
        assert caught.value.hint


def test_ops_number_allocations_and_name_their_streams() -> None:
    events = [Alloc(70, 100), Alloc(71, 200, stream=5), Free(70), Alloc(70, 300), Free(70), Free(71)]
    assert to_ops(events) == ([100, 200, ~0, 300, ~2, ~1], {1: 5})


def test_no_card_is_large_enough_for_a_fraction_of_nothing() -> None:
    with pytest.raises(BadInput, match="no card is large enough"):
        smallest_capacity(*to_ops(TAPE), parse_alloc_conf("per_process_memory_fraction:0"))


def test_run_heeds_streams() -> None:
    ops = [20 * MIB, ~0, 20 * MIB, ~1, 20 * MIB]
    assert run(ops).reserved == 20 * MIB
    assert run(ops, streams={1: 3}).reserved == 40 * MIB


@pytest.mark.parametrize("conf", ["", "expandable_segments:True"])
@pytest.mark.parametrize("capacity", [None, 90 * MIB], ids=["plain", "limited"])
def test_a_second_free_is_refused(capacity: int | None, conf: str) -> None:
    settings = parse_alloc_conf(conf)
    assert run([20 * MIB, ~0, EMPTY_CACHE, 10 * MIB], capacity=capacity, settings=settings).reserved == 20 * MIB
    for ops, error in (([20 * MIB, ~0, ~0], ValueError), ([20 * MIB, ~1], IndexError)):
        with pytest.raises(error):
            play_ops(Allocator(capacity, settings), ops, {}, [])


def test_run_raises_out_of_memory() -> None:
    with pytest.raises(OutOfMemory):
        run([20 * MIB, 20 * MIB], capacity=39 * MIB)


# --- properties ------------------------------------------------------------------------------------------------------

SIZES = st.one_of(st.integers(0, 4 * KIB), st.integers(MIB // 2, 12 * MIB), st.integers(10 * MIB, 90 * MIB))
CONFS = st.sampled_from(
    ["", "expandable_segments:True", "max_split_size_mb:32", "per_process_memory_fraction:0.5",
     "garbage_collection_threshold:0.5,per_process_memory_fraction:0.8", "throw_on_cudamalloc_oom:True"]
)  # fmt: skip


@st.composite
def tapes(draw: st.DrawFn) -> list[Event]:
    events: list[Event] = []
    live: list[int] = []
    for number, (size, dies) in enumerate(draw(st.lists(st.tuples(SIZES, st.integers(0, 3)), max_size=40))):
        events.append(Alloc(number, size, stream=number % 7 == 6))
        live.append(number)
        for _ in range(min(dies, len(live)) if dies > 1 else 0):
            events.append(Free(live.pop(draw(st.integers(0, len(live) - 1)))))
    return events


@st.composite
def programs(draw: st.DrawFn) -> list[Event]:
    """Storages of three streams, which others may use."""
    events: list[Event] = []
    live: list[int] = []
    kinds = st.sampled_from(["alloc"] * 5 + ["free"] * 3 + ["use"] * 3 + ["empty"])
    steps = st.lists(st.tuples(kinds, SIZES, st.integers(0, 2), st.integers(0, 40)), max_size=80)
    for number, (kind, size, stream, which) in enumerate(draw(steps)):
        if kind == "alloc":
            events.append(Alloc(number, size, stream=stream))
            live.append(number)
        elif kind == "empty":
            events.append(EmptyCache())
        elif live and kind == "use":
            events.append(RecordStream(live[which % len(live)], stream))
        elif live:
            events.append(Free(live.pop(which % len(live))))
    return events


@given(events=tapes(), conf=CONFS)
def test_run_and_replay_agree(events: list[Event], conf: str) -> None:
    settings = parse_alloc_conf(conf)
    ops, streams = to_ops(events)
    peak = replay(events, settings=settings).peak
    assert run(ops, streams=streams, settings=settings) == Peaks(peak.requested, peak.allocated, peak.reserved)
    assert peak.requested <= peak.allocated <= peak.reserved


def fits(ops: list[int], capacity: int, settings: AllocSettings, streams: dict[int, int]) -> bool:
    try:
        run(ops, capacity=capacity, settings=settings, streams=streams)
    except OutOfMemory:
        return False
    return True


@given(events=tapes(), marks=st.lists(st.integers(0, 60), max_size=4))
def test_the_part_before_a_mark_is_what_its_events_alone_give(events: list[Event], marks: list[int]) -> None:
    for position in marks:
        events.insert(min(position, len(events)), Mark("step", "another"))
    whole = replay(events)
    for index, event in enumerate(events):
        if isinstance(event, Mark):
            assert whole.until(index) == replay(events[:index])
    assert whole.until(len(events)) == whole


@given(events=tapes(), conf=CONFS, granularity=st.sampled_from([2 * MIB, 7 * MIB, 64 * MIB]))
def test_the_smallest_capacity_fits_and_one_granule_less_does_not(
    events: list[Event], conf: str, granularity: int
) -> None:
    settings = parse_alloc_conf(conf)
    ops, streams = to_ops(events)
    capacity = smallest_capacity(ops, streams, settings, granularity)
    assert capacity % granularity == 0
    assert fits(ops, capacity, settings, streams)
    assert capacity == 0 or not fits(ops, capacity - granularity, settings, streams)


@given(events=tapes())
def test_the_smallest_capacity_is_between_the_requests_and_what_is_reserved_without_limit(events: list[Event]) -> None:
    ops, streams = to_ops(events)
    peaks = run(ops, streams=streams)
    assert peaks.requested <= smallest_capacity(ops, streams) <= peaks.reserved


def compared(
    ops: list[int], granularity: int = 2 * MIB, streams: Mapping[int, int] = ONE_STREAM, *, expandable: bool
) -> int:
    """The smallest capacity, by attempts that share their beginning; each ends as one that begins at the start."""
    settings = AllocSettings(expandable_segments=expandable)
    shared = SharedBeginning(ops, streams, expandable_segments=expandable)
    full = from_the_start(ops, streams, settings, LATEST_TORCH, ())

    def both(capacity: int | None, low: int) -> Attempt:
        one, other = shared(capacity, low), full(capacity, low)
        assert (one.fits, one.reserved) == (other.fits, other.reserved)
        assert capacity is not None or one.requested == other.requested
        assert expandable or one.refused == other.refused
        return other

    return bisect(both, granularity, only_compared=not expandable)


@pytest.mark.parametrize("expandable", [False, True])
@given(events=tapes(), granularity=st.sampled_from([2 * MIB, 7 * MIB]))
def test_attempts_on_random_tapes_share_their_beginning(
    expandable: bool, events: list[Event], granularity: int
) -> None:
    ops, _ = to_ops([replace(event, stream=0) if isinstance(event, Alloc) else event for event in events])
    born = sum(op >= 0 for op in ops)
    ops = [*ops, EMPTY_CACHE, *(op - born if op < 0 else op for op in ops)]  # what it did, a second time
    settings = AllocSettings(expandable_segments=expandable)
    found = smallest_capacity(ops, settings=settings, granularity=granularity)
    assert compared(ops, granularity, expandable=expandable) == found


@pytest.mark.parametrize("expandable", [False, True])
@given(events=programs(), granularity=st.sampled_from([2 * MIB, 7 * MIB]))
def test_attempts_on_several_streams_share_their_beginning(
    expandable: bool, events: list[Event], granularity: int
) -> None:
    ops, streams = to_ops(events)
    settings = AllocSettings(expandable_segments=expandable)
    found = smallest_capacity(ops, streams, settings, granularity)
    assert compared(ops, granularity, streams, expandable=expandable) == found


def test_private_pools_keep_their_memory_on_the_smallest_card() -> None:
    """Nothing but the end of a CUDA graph releases them."""
    ops = [100 * MIB, ~0, 100 * MIB]
    assert smallest_capacity(ops, {0: 1}) == 100 * MIB
    assert smallest_capacity(ops, {0: PRIVATE_POOLS}) == 200 * MIB


@pytest.mark.parametrize("expandable", [False, True])
@pytest.mark.parametrize("path", sorted((DATA / "tapes").glob("*.tape.json.gz")), ids=lambda path: path.name[:-13])
def test_attempts_on_recorded_tapes_share_their_beginning(path: Path, expandable: bool) -> None:
    tape = json.loads(gzip.decompress(path.read_bytes()))
    ops, born, live = list[int](), 0, dict[int, int]()
    for op, size, address in zip(tape["op"], tape["size"], tape["addr"], strict=True):
        if op == "A":
            ops.append(size)
            live[address], born = born, born + 1
        elif op == "f":
            ops.append(~live.pop(address))
    settings = AllocSettings(expandable_segments=expandable)
    assert compared(ops, expandable=expandable) == smallest_capacity(ops, settings=settings)


@pytest.mark.parametrize(
    "ops",
    [
        [60, 20, 2, ~2, ~0, 2, 30, 39],  # how far the last block can grow decides which one is taken
        [180, 2, ~0, EMPTY_CACHE, 190],  # a hole at the beginning: the end comes before the card is full
    ],
)
def test_attempts_part_where_the_length_of_an_expandable_segment_matters(ops: list[int]) -> None:
    ops = [op * MIB if op > 0 else op for op in ops]
    assert compared(ops, expandable=True) == smallest_capacity(ops, settings=AllocSettings(expandable_segments=True))


@given(st.lists(st.tuples(st.sampled_from("afru"), st.integers(0, 40 << 20), st.integers(0, 2)), max_size=60))
def test_storages_used_on_other_streams_are_free_again_when_the_allocator_says(
    program: list[tuple[str, int, int]],
) -> None:
    real, live, events = Allocator(), dict[int, Block | None](), list[Event]()
    for number, (what, size, stream) in enumerate(program):
        one = sorted(live)[size % len(live)] if live else None
        if what == "a":
            live[number] = real.malloc(size, stream)
            events.append(Alloc(number, size, stream=stream))
        elif one is not None and what == "f":
            real.free(live.pop(one))
            events.append(Free(one))
        elif one is not None:
            real.record_stream(live[one], stream)
            events.append(RecordStream(one, stream))
    peaks = (real.requested_peak, real.allocated_peak, real.reserved_peak)
    ops, streams = to_ops(events)
    assert tuple(run(ops, streams=streams)) == peaks
    peak = replay(events).peak
    assert (peak.requested, peak.allocated, peak.reserved) == peaks
    assert list(replay(tape_file.loads(tape_file.dumps(Tape(tuple(events), "traced"))).events).spans) == list(
        replay(events).spans
    )
