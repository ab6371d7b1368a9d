"""A tape on a card: the verdict and its borders, the smallest cards, the slack in parts, what a tape began with."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from memfit.allocator import Allocator, PlainAllocator, restore
from memfit.allocator.capacity import CONTEXT_BAND, Capacity, capacity
from memfit.allocator.compact import play_ops, to_ops
from memfit.allocator.player import alive_at, begun
from memfit.allocator.replay import replay, retrace
from memfit.allocator.smallest_capacity import smallest_capacity
from memfit.documents.snapshot import read
from memfit.nouns.alloc_settings import AllocSettings, parse_alloc_conf
from memfit.nouns.gpu import Gpu
from memfit.nouns.tape import Alloc, EmptyCache, Event, Free, Mark, Oom, Piece, Segment, SegmentAlloc, Tape
from memfit.report.replay import facts
from memfit.units import GIB, MIB

DATA = Path(__file__).parent / "data"
PLAIN = AllocSettings()
EXPANDABLE = AllocSettings(expandable_segments=True)
# three tensors of 40 MiB, of which the outer two die: 80 MiB are cached in pieces no request of 70 MiB fits in
TAPE = Tape(
    (Mark("load", "weights"), Alloc(1, 40 * MIB), Alloc(2, 40 * MIB), Alloc(3, 40 * MIB), Mark("step", "forward"),
     Free(1), Free(3), Alloc(4, 70 * MIB)),
    "measured",
)  # fmt: skip


def card(usable: int) -> Gpu:
    return Gpu(name="X", short="x", sold_bytes=usable, total_bytes=usable + GIB, context_bytes=GIB)


def asked(tape: Tape, usable: int, settings: AllocSettings = PLAIN) -> Capacity:
    return capacity(tape, settings, gpu=card(usable))


def test_the_verdict_turns_at_the_band_around_the_smallest_card() -> None:
    band, smallest = CONTEXT_BAND[False], asked(TAPE, GIB).smallest
    assert smallest == 120 * MIB
    expected = {
        smallest - band - 1: "misfit",
        smallest - 1: "tight",
        smallest + band - 1: "tight",
        smallest + band: "fits",
    }
    for usable, verdict in expected.items():
        found = asked(TAPE, usable)
        assert found.judgement is not None and found.judgement.verdict == verdict, usable
        assert (found.timeline.oom is None) == (usable >= smallest)


def test_a_misfit_needs_what_it_reserves_without_a_limit_and_the_smallest_card_is_told_beside_it() -> None:
    answer = asked(TAPE, 1 * MIB)
    assert answer.judgement is not None and answer.judgement.verdict == "misfit"
    assert answer.smallest < answer.free.peak.reserved
    free = answer.free.peak.reserved
    assert (answer.judgement.need, answer.judgement.headroom) == (free, 1 * MIB - free)
    assert dict(facts(answer, PLAIN))["smallest:"].startswith("0.12 GiB")


def test_a_predicted_tape_has_the_band_of_a_prediction() -> None:
    big = tuple(replace(e, size=e.size * 100) if isinstance(e, Alloc) else e for e in TAPE.events)
    measured, predicted = (
        asked(replace(TAPE, events=big, source=s), 100 * GIB).judgement for s in ("measured", "formula")
    )  # type: ignore[arg-type]
    assert measured is not None and predicted is not None
    assert measured.band == CONTEXT_BAND[False]
    assert predicted.band == predicted.need // 20


def test_slack_is_told_in_parts_that_add_up() -> None:
    found = asked(TAPE, GIB)
    slack, peak = found.slack, found.free.peak
    assert (slack.tensors, slack.rounding, slack.fragmentation, slack.cache) == (120 * MIB, 0, 0, 70 * MIB)
    assert sum((slack.tensors, slack.rounding, slack.fragmentation, slack.cache)) == peak.reserved == 190 * MIB


def test_fragmentation_is_what_no_retry_wins_back() -> None:
    """Two halves of one segment: the lower lives on, so the upper cannot hold more and cannot be given back."""
    events = (Alloc(1, 9 * MIB), Alloc(2, 10 * MIB - 1), Free(2), Alloc(3, 30 * MIB))
    found = capacity(Tape(events, "measured"), PLAIN)
    assert (found.smallest, found.slack.fragmentation, found.slack.cache) == (50 * MIB, 11 * MIB, 0)
    assert found.other == 40 * MIB  # expandable segments grow in place: two granules


def test_a_card_with_room_does_what_one_without_a_limit_does() -> None:
    for usable in (190 * MIB, 190 * MIB - 1, GIB):
        gpu = card(usable)
        expected = replay(TAPE.events, capacity=usable, context=gpu.context_bytes, total_memory=gpu.total_bytes)
        assert asked(TAPE, usable).timeline == expected


def test_without_a_card_there_is_no_verdict() -> None:
    found = capacity(TAPE, PLAIN)
    assert found.judgement is None and found.timeline is found.free and found.reproduced is None


def test_no_card_is_large_enough_for_a_fraction_of_nothing() -> None:
    found = capacity(TAPE, parse_alloc_conf("per_process_memory_fraction:0"))
    assert found.smallest == 0 and found.free.oom is not None


def test_a_recording_says_whether_the_model_agrees() -> None:
    tape = read(DATA / "snapshots" / "plain-full.pickle.gz")
    assert capacity(tape, PLAIN).reproduced == ""
    assert capacity(tape, parse_alloc_conf("large_segment_size_mb:40")).reproduced is None  # it was not recorded so
    at, first = next((i, e) for i, e in enumerate(tape.events) if isinstance(e, SegmentAlloc))
    changed = (*tape.events[:at], replace(first, size=2 * first.size), *tape.events[at + 1 :])
    differs = capacity(replace(tape, events=changed), PLAIN).reproduced
    assert differs is not None and differs.startswith("segment call")


@pytest.mark.parametrize(
    ("after", "died"),
    [((), True), ((Free(1),), True), ((Mark("step", "b"), Free(1)), True), ((Alloc(2, 1 * MIB),), False)],
)
def test_a_run_that_died_of_an_out_of_memory_promises_no_card(after: tuple[Event, ...], died: bool) -> None:
    tape = Tape((Mark("step", "a"), Alloc(1, 40 * MIB), Oom(60 * MIB), *after), "traced")
    for usable, verdict in ((GIB, "tight" if died else "fits"), (0, "misfit")):
        found = asked(tape, usable)
        assert found.died is died and found.judgement is not None and found.judgement.verdict == verdict
    said = dict(facts(found, PLAIN))
    assert ("at least" in said["smallest:"], bool(said["note:"])) == (died, died)


# --- events besides births and deaths --------------------------------------------------------------------------------


def test_empty_cache_gives_back_what_is_free() -> None:
    events: list[Event] = [Alloc(1, 40 * MIB), Free(1), EmptyCache(), Mark("step", "a"), Alloc(2, 30 * MIB)]
    timeline = replay(events)
    assert [span.peak.reserved for span in timeline.spans] == [40 * MIB, 30 * MIB]
    ops, streams = to_ops(events)
    for ops_, streams_, kind, peak in (
        (ops, streams, PlainAllocator, 40 * MIB),
        ([*ops[:3], 50 * MIB], {}, PlainAllocator, 50 * MIB),
        ([*ops[:3], 50 * MIB], {1: 3}, Allocator, 50 * MIB),
    ):
        allocator = kind()
        play_ops(allocator, ops_, streams_, [])
        assert allocator.reserved_peak == peak


def test_a_recorded_out_of_memory_is_asked_for_again() -> None:
    events: list[Event] = [Alloc(1, 40 * MIB), Oom(60 * MIB), Alloc(2, 20 * MIB)]
    short = replay(events, capacity=80 * MIB)
    assert short.oom is not None and short.oom_at == 1 and short.oom.requested == 60 * MIB
    enough = replay(events, capacity=100 * MIB)
    assert enough.oom is None and enough.peak.requested == 100 * MIB
    assert smallest_capacity(*to_ops(events)) == 100 * MIB


def test_the_recorded_program_went_on_after_its_out_of_memory() -> None:
    events = (Alloc(1, 40 * MIB), Oom(60 * MIB), Alloc(2, 20 * MIB))
    _, allocator = retrace(Tape(events, "measured", {"capacity": str(80 * MIB)}))
    assert (allocator.num_ooms, allocator.allocated) == (1, 60 * MIB)


# --- what a tape began with ------------------------------------------------------------------------------------------

START = (
    Segment(
        2 * MIB,
        0,
        small=True,
        expandable=False,
        pieces=(Piece(512), Piece(1024, Alloc(10, 600)), Piece(2 * MIB - 1536)),
    ),
    Segment(64 * MIB, 0, small=False, expandable=False, pieces=(Piece(30 * MIB, Alloc(11, 30 * MIB - 7)),)),
    Segment(128 * MIB, 0, small=False, expandable=False, pieces=(Piece(20 * MIB),)),
)


def test_a_start_is_laid_out_as_it_was() -> None:
    allocator = Allocator()
    held = restore(allocator, START)
    stats = allocator.stats
    assert (stats.requested, stats.allocated, stats.reserved) == (600 + 30 * MIB - 7, 1024 + 30 * MIB, 52 * MIB)
    assert (stats.segments, stats.inactive_split, stats.num_device_alloc) == (3, 2 * MIB - 1024, 0)
    assert allocator.malloc(20 * MIB) is not None and allocator.reserved == 52 * MIB
    for block in held.values():
        allocator.free(block)
    assert all(len(chain) == 1 for chain in allocator.blocks() if chain[0].pool.small)


def test_a_start_on_a_smaller_card_gives_its_cache_back_or_does_not_fit() -> None:
    assert begun(small := Allocator(40 * MIB), START) and small.reserved == 32 * MIB
    timeline = replay([Free(10)], capacity=30 * MIB, start=START)
    assert timeline.oom is not None and timeline.oom_at == 0
    assert smallest_capacity(*to_ops([Free(10)], START), start=START) == 32 * MIB


def test_under_the_other_kind_of_segments_a_start_is_allocated_anew() -> None:
    allocator = Allocator(None, EXPANDABLE)
    begun(allocator, START)
    assert (allocator.requested, allocator.reserved) == (600 + 30 * MIB - 7, 42 * MIB)


def test_what_was_alive_at_the_start_counts_and_can_be_freed() -> None:
    events = [Free(11), Alloc(12, 25 * MIB)]
    assert [alloc.id for alloc in alive_at(events, 1, START)] == [10, 12]
    assert replay(events, start=START).peak.requested == 600 + 30 * MIB - 7
    assert to_ops(events, START) == ([~1, 25 * MIB], {})


@pytest.mark.parametrize("settings", [PLAIN, EXPANDABLE], ids=["plain", "expandable"])
@pytest.mark.parametrize("name", ["plain-full", "expandable-full", "streams-full"])
def test_the_smallest_card_of_a_recording_fits_and_one_granule_less_does_not(
    name: str, settings: AllocSettings
) -> None:
    tape = read(DATA / "snapshots" / f"{name}.pickle.gz")
    found = capacity(tape, settings)

    def fits(room: int) -> bool:
        return replay(tape.events, capacity=room, settings=settings, start=tape.start).oom is None

    assert fits(found.smallest) and not fits(found.smallest - 2 * MIB)
