"""The quick allocators against the full one: the same levels after every operation."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memfit import Recipe, find_gpu, resolve_model
from memfit.allocator import Allocator, GrowingAllocator, OutOfMemory, PlainAllocator, allocator_for
from memfit.allocator.compact import to_ops
from memfit.closed_form.run.account import Account
from memfit.closed_form.run.timeline import recorded
from memfit.nouns.alloc_settings import AllocSettings, parse_alloc_conf
from memfit.nouns.tape import EmptyCache
from memfit.units import KIB, MIB

Quick = PlainAllocator | GrowingAllocator
SIZES = st.one_of(
    st.integers(0, 4 * KIB), st.integers(1, 2 * MIB), st.integers(MIB, 60 * MIB), st.sampled_from([512, MIB, 10 * MIB])
)
ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("malloc"), SIZES),
        st.tuples(st.just("free"), st.integers(0, 40)),
        st.tuples(st.sampled_from(("empty", "reset")), st.just(0)),
    ),
    max_size=120,
)


CAPACITIES = st.one_of(st.none(), st.integers(0, 150 * MIB))


def levels(allocator: Allocator | Quick) -> tuple[int, ...]:
    return (
        allocator.allocated, allocator.allocated_peak, allocator.reserved, allocator.reserved_peak,
        allocator.num_alloc_retries,
    )  # fmt: skip


def asked(allocator: Allocator | Quick, size: int) -> Any:
    """A block, or what the card says when it is full."""
    try:
        return allocator.malloc(size)
    except OutOfMemory as error:
        return vars(error)


def pair(kind: str, capacity: int | None) -> tuple[Allocator, Quick]:
    """The full allocator and the quick one that does the same."""
    if kind == "plain":
        return Allocator(capacity), PlainAllocator(capacity)
    return Allocator(capacity, AllocSettings(expandable_segments=True)), GrowingAllocator(capacity)


@pytest.mark.parametrize("kind", ["plain", "growing"])
@given(actions=ACTIONS, capacity=CAPACITIES)
def test_every_operation_leaves_the_same_levels(
    kind: str, actions: list[tuple[str, int]], capacity: int | None
) -> None:
    full, quick = pair(kind, capacity)
    live = []
    for action, number in actions:
        if action == "malloc":
            one, other = asked(full, number), asked(quick, number)
            if isinstance(one, dict):
                assert one == other
            else:
                live.append((one, other))
        elif action == "free" and live:
            one, other = live.pop(number % len(live))
            full.free(one)
            quick.free(other)
        elif action == "empty":
            full.empty_cache()
            quick.empty_cache()
        elif action == "reset":
            full.reset_peak_stats()
            quick.reset_peak_stats()
        assert levels(full) == levels(quick)


def test_the_least_refused_is_kept() -> None:
    full, plain = pair("plain", 30 * MIB)
    for size in (20 * MIB, 4 * MIB, 10 * MIB, 2 * MIB):
        asked(full, size), asked(plain, size)
    assert isinstance(plain, PlainAllocator)
    assert full.least_refused == plain.least_refused == 40 * MIB


def test_a_whole_run_leaves_the_same_levels() -> None:
    recipe = Recipe(method="lora", micro_batch=3, accumulation=2, checkpointing="full")
    full, plain = Allocator(), PlainAllocator()
    blocks = []
    events = recorded(Account(resolve_model("smollm2-135m"), recipe, find_gpu("t4"))).events
    ops, _ = to_ops([event for event in events if not isinstance(event, EmptyCache)])
    for op in ops:
        if op >= 0:
            blocks.append((full.malloc(op), plain.malloc(op)))
        else:
            one, other = blocks[~op]
            full.free(one)
            plain.free(other)
        assert levels(full) == levels(plain)
    assert full.reserved_peak > full.allocated_peak > 0


def test_other_settings_take_the_full_one() -> None:
    assert isinstance(allocator_for(AllocSettings()), PlainAllocator)
    assert isinstance(allocator_for(parse_alloc_conf("expandable_segments:True")), GrowingAllocator)
    assert isinstance(allocator_for(parse_alloc_conf("max_split_size_mb:32")), Allocator)
