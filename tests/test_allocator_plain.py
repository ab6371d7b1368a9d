"""The plain allocator against the full one: the same levels after every operation, whatever is asked."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from memfit import Recipe, find_gpu, resolve_model
from memfit.alloc_conf import AllocSettings, parse_alloc_conf
from memfit.allocator import Allocator, OutOfMemory, PlainAllocator, allocator_for
from memfit.formula.account import Account
from memfit.formula.estimate import tape_of
from memfit.units import KIB, MIB

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


def levels(allocator: Allocator | PlainAllocator) -> tuple[int, ...]:
    return (
        allocator.allocated, allocator.allocated_peak, allocator.reserved, allocator.reserved_peak,
        allocator.num_alloc_retries, allocator.least_refused,
    )  # fmt: skip


def asked(allocator: Allocator | PlainAllocator, size: int) -> Any:
    """A block, or what the card says when it is full."""
    try:
        return allocator.malloc(size)
    except OutOfMemory as error:
        return vars(error)


@given(ACTIONS, CAPACITIES)
def test_every_operation_leaves_the_same_levels(actions: list[tuple[str, int]], capacity: int | None) -> None:
    full, plain = Allocator(capacity), PlainAllocator(capacity)
    live = []
    for action, number in actions:
        if action == "malloc":
            one, other = asked(full, number), asked(plain, number)
            if isinstance(one, dict):
                assert one == other
            else:
                live.append((one, other))
        elif action == "free" and live:
            one, other = live.pop(number % len(live))
            full.free(one)
            plain.free(other)
        elif action == "empty":
            full.empty_cache()
            plain.empty_cache()
        else:
            full.reset_peak_stats()
            plain.reset_peak_stats()
        assert levels(full) == levels(plain)


def test_a_whole_run_leaves_the_same_levels() -> None:
    recipe = Recipe(method="lora", micro_batch=3, accumulation=2, checkpointing="full")
    full, plain = Allocator(), PlainAllocator()
    blocks = []
    for _, ops in tape_of(Account(resolve_model("smollm2-135m"), recipe, find_gpu("t4"))):
        for op in ops:
            if op > 0:
                blocks.append((full.malloc(op), plain.malloc(op)))
            else:
                one, other = blocks[-op - 1]
                full.free(one)
                plain.free(other)
            assert levels(full) == levels(plain)
    assert full.reserved_peak > full.allocated_peak > 0


def test_only_the_default_settings_take_the_plain_one() -> None:
    assert isinstance(allocator_for(AllocSettings()), PlainAllocator)
    assert isinstance(allocator_for(parse_alloc_conf("expandable_segments:True")), Allocator)
