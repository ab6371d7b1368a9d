"""What must hold for the allocator whatever it is asked: blocks tile segments, sums are counters, nothing leaks."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from memfit.allocator import Allocator, Block, OutOfMemory
from memfit.allocator.blocks import ALLOCATED, FREE, PENDING, UNMAPPED
from memfit.nouns.alloc_settings import parse_alloc_conf
from memfit.nouns.tape import SegmentAlloc
from memfit.units import KIB, MIB

SETTINGS = st.sampled_from(
    [
        "", "max_split_size_mb:32", "max_split_size_mb:32,max_non_split_rounding_mb:24", "roundup_power2_divisions:4",
        "expandable_segments:True", "expandable_segments:True,large_segment_size_mb:34",
        "garbage_collection_threshold:0.4,per_process_memory_fraction:0.7", "large_segment_size_mb:12",
        "expandable_segments:True,max_split_size_mb:40,per_process_memory_fraction:0.9",
    ]
)  # fmt: skip
SIZES = st.one_of(
    st.integers(1, 4 * KIB), st.integers(1, 2 * MIB), st.integers(MIB, 60 * MIB), st.sampled_from([512, MIB, 10 * MIB])
)
ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("malloc"), SIZES, st.integers(0, 2)),
        st.tuples(st.just("free"), st.integers(0, 40), st.just(0)),
        st.tuples(st.just("free"), st.integers(0, 40), st.just(0)),
        st.tuples(st.just("record"), st.integers(0, 40), st.integers(0, 2)),
        st.tuples(st.just("empty"), st.just(0), st.just(0)),
    ),
    max_size=60,
)


def _act(allocator: Allocator, actions: list[tuple[str, int, int]]) -> list[Block]:
    live: list[Block] = []
    for action, number, stream in actions:
        if action == "malloc":
            try:
                block = allocator.malloc(number, stream)
            except OutOfMemory:
                continue
            assert block is not None and block.size >= number and block.addr % 512 == 0
            live.append(block)
        elif action == "empty":
            allocator.empty_cache()
        elif live and action == "free":
            allocator.free(live.pop(number % len(live)))
        elif live:
            allocator.record_stream(live[number % len(live)], stream)
        _check_levels(allocator)
    return live


def _check_levels(allocator: Allocator) -> None:
    stats = allocator.stats
    assert stats.requested <= stats.active <= stats.reserved <= allocator.capacity
    assert 0 <= stats.allocated <= stats.active and 0 <= stats.inactive_split <= stats.reserved
    for name in ("requested", "allocated", "active", "reserved", "inactive_split"):
        assert getattr(stats, name) <= getattr(stats, name + "_peak")
    taken = sum(call.size if type(call) is SegmentAlloc else -call.size for call in allocator.driver_calls)
    assert stats.reserved == taken


def _check_blocks(allocator: Allocator, live: list[Block]) -> None:
    """Blocks tile their segments, no two free neighbours are left unmerged, and the sums are the counters."""
    sums = dict.fromkeys((ALLOCATED, PENDING, FREE, UNMAPPED), 0)
    split = requested = 0
    for segment in allocator.blocks():
        for block, after in zip(segment, (*segment[1:], None), strict=True):
            assert block.next is after and block.size > 0
            if after is not None:
                assert after.prev is block and after.addr == block.addr + block.size
                assert not (block.state == after.state and block.state in (FREE, UNMAPPED))
            sums[block.state] += block.size
            requested += block.requested if block.state in (ALLOCATED, PENDING) else 0
            split += block.size if block.state == FREE and len(segment) > 1 else 0
    assert _pools_hold_the_free_blocks(allocator)
    assert sums[ALLOCATED] == allocator.allocated == sum(block.size for block in live)
    assert sums[PENDING] == allocator.pending
    assert sums[ALLOCATED] + sums[PENDING] + sums[FREE] == allocator.reserved
    assert allocator.requested == requested
    if not allocator.settings.expandable_segments:
        assert split == allocator.stats.inactive_split


def _pools_hold_the_free_blocks(allocator: Allocator) -> bool:
    """Is every free block in its pool, once, and nothing else?"""
    pooled = {id(block) for pools in allocator._pools.values() for pool in pools for block in pool.blocks.values()}
    free = {id(block) for segment in allocator.blocks() for block in segment if block.state == FREE}
    keys = sum(len(pool.keys) for pools in allocator._pools.values() for pool in pools)
    return pooled == free and keys == len(free)


@given(conf=SETTINGS, actions=ACTIONS, torch=st.sampled_from([(2, 6), (2, 12), (2, 13)]))
def test_blocks_tile_segments_and_sums_agree(
    conf: str, actions: list[tuple[str, int, int]], torch: tuple[int, int]
) -> None:
    allocator = Allocator(200 * MIB, parse_alloc_conf(conf), torch)
    live = _act(allocator, actions)
    _check_blocks(allocator, live)


@given(conf=SETTINGS, actions=ACTIONS)
def test_freeing_all_leaves_one_block_per_segment_and_an_empty_cache_nothing(
    conf: str, actions: list[tuple[str, int, int]]
) -> None:
    allocator = Allocator(200 * MIB, parse_alloc_conf(conf))
    for block in _act(allocator, [action for action in actions if action[0] != "record"]):
        allocator.free(block)
    for segment in allocator.blocks():
        assert all(block.state in (FREE, UNMAPPED) for block in segment)
        assert allocator.settings.expandable_segments or len(segment) == 1
    assert (allocator.requested, allocator.allocated, allocator.stats.inactive_split) == (0, 0, 0)
    allocator.empty_cache()
    assert (allocator.reserved, allocator.stats.segments, list(allocator.blocks())) == (0, 0, [])


@given(actions=ACTIONS)
def test_a_card_with_room_for_the_peak_behaves_like_one_without_limit(actions: list[tuple[str, int, int]]) -> None:
    unlimited = Allocator()
    _act(unlimited, actions)
    limited = Allocator(unlimited.reserved_peak)
    _act(limited, actions)
    assert limited.stats == unlimited.stats and limited.driver_calls == unlimited.driver_calls
