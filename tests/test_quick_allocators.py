"""The quick allocators against the full one and against each other: the same levels after every operation.

There are two of each, in Python and compiled. The compiled ones are left out where memfit was installed without a
compiler, or MEMFIT_PURE_PYTHON is set.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memfit import Recipe, find_gpu, resolve_model
from memfit.allocator import UNLIMITED, Allocator, GrowingAllocator, OutOfMemory, PlainAllocator, allocator_for, quick
from memfit.allocator.compact import EMPTY_CACHE, to_ops
from memfit.closed_form.run.account import Account
from memfit.closed_form.run.timeline import recorded
from memfit.errors import BadInput
from memfit.nouns.alloc_settings import AllocSettings, parse_alloc_conf
from memfit.nouns.tape import EmptyCache
from memfit.units import KIB, MIB

try:
    from memfit.allocator import _native
except ImportError as error:
    _native, WHY = None, f"no compiled allocators: {error}"
else:
    WHY = ""
compiled = pytest.mark.skipif(_native is None, reason=WHY)
ENGINES = [pytest.param(quick, id="python"), pytest.param(_native, id="compiled", marks=compiled)]
KINDS = ["plain", "growing"]

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


def quick_one(engine: Any, kind: str, capacity: int | None) -> Quick:
    return (engine.PlainAllocator if kind == "plain" else engine.GrowingAllocator)(capacity)


def pair(engine: ModuleType, kind: str, capacity: int | None) -> tuple[Allocator, Quick]:
    """The full allocator and the quick one that does the same."""
    settings = AllocSettings(expandable_segments=kind == "growing")
    return Allocator(capacity, settings), quick_one(engine, kind, capacity)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("kind", KINDS)
@given(actions=ACTIONS, capacity=CAPACITIES)
def test_every_operation_leaves_the_same_levels(
    engine: ModuleType, kind: str, actions: list[tuple[str, int]], capacity: int | None
) -> None:
    full, quick = pair(engine, kind, capacity)
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


@pytest.mark.parametrize("engine", ENGINES)
def test_the_least_refused_is_kept(engine: ModuleType) -> None:
    full, plain = pair(engine, "plain", 30 * MIB)
    for size in (20 * MIB, 4 * MIB, 10 * MIB, 2 * MIB):
        asked(full, size), asked(plain, size)
    assert full.least_refused == plain.least_refused == 40 * MIB


@pytest.mark.parametrize("engine", ENGINES)
def test_a_whole_run_leaves_the_same_levels(engine: ModuleType) -> None:
    recipe = Recipe(method="lora", micro_batch=3, accumulation=2, checkpointing="full")
    full, plain = pair(engine, "plain", None)
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


# ---- compiled against Python ----------------------------------------------------------------------------------------


def state(allocator: Any) -> tuple[int, ...]:
    return (*levels(allocator), allocator.least_refused, allocator.capacity)


def tried(do: Callable[..., Any], *words: Any) -> tuple[Any, Any]:
    """What a call returns, and the error that it raises."""
    try:
        return do(*words), None
    except (OutOfMemory, BadInput, quick.Undecided) as error:
        return None, (type(error), str(error), vars(error))


MANY = st.lists(
    st.one_of(
        st.tuples(st.just("malloc"), SIZES, st.integers(0, 2)),
        st.tuples(st.just("free"), st.integers(0, 40), st.just(0)),
        st.tuples(st.sampled_from(("empty", "reset", "copies")), st.integers(0, 200 * MIB), st.integers(0, 2)),
    ),
    max_size=150,
)


@compiled
@given(actions=MANY, capacity=CAPACITIES)
def test_compiled_streams_of_a_card_do_as_those_in_python(
    actions: list[tuple[str, int, int]], capacity: int | None
) -> None:
    """After every operation all that can be seen of every stream is equal, also after going on from copies."""
    both = [[engine.PlainAllocator(capacity) for _ in range(3)] for engine in (quick, _native)]
    for streams in both:
        streams[0].share_card(*streams[1:])
    live: list[tuple[int, list[int]]] = []
    for action, number, stream in actions:
        if action == "malloc":
            (one, error), (other, same) = (tried(streams[stream].malloc, number) for streams in both)
            assert error == same and bool(one) == bool(other)
            if not error:
                live.append((stream, [one, other]))
        elif action == "free" and live:
            of, blocks = live.pop(number % len(live))
            for streams, block in zip(both, blocks, strict=True):
                streams[of].free(block)
        elif action == "empty":
            both[0][stream].empty_cache(), both[1][stream].empty_cache()
        elif action == "reset":
            both[0][stream].reset_peak_stats(), both[1][stream].reset_peak_stats()
        elif action == "copies":
            both = [streams[0].copies(number) for streams in both]
        assert [state(one) for one in both[0]] == [state(one) for one in both[1]]


OPS = st.lists(st.one_of(SIZES, st.just(EMPTY_CACHE), st.integers(-40, -1)), max_size=150)


def valid(ops: list[int]) -> list[int]:
    """Operations in which each free names an allocation that is alive."""
    alive: list[int] = []
    found, count = [], 0
    for op in ops:
        if op >= 0:
            alive.append(count)
            count += 1
        elif op != EMPTY_CACHE:
            if not alive:
                continue
            op = ~alive.pop(op % len(alive))
        found.append(op)
    return found


@compiled
@pytest.mark.parametrize("kind", KINDS)
@given(ops=OPS, capacity=CAPACITIES)
def test_tapes_and_programs_are_played_alike(kind: str, ops: list[int], capacity: int | None) -> None:
    ops = valid(ops)
    sizes = [0, *(op for op in ops if op >= 0)]
    numbers = iter(range(1, len(sizes)))
    events = [next(numbers) if op >= 0 else op for op in ops if op != EMPTY_CACHE]
    seen = []
    for engine in (quick, _native):
        taped, played = quick_one(engine, kind, capacity), quick_one(engine, kind, capacity)
        blocks: list[int] = []
        live: dict[int, int] = {}
        ends = [tried(taped.play_ops, ops, blocks), tried(played.play, events, sizes, live)]
        seen.append((ends, len(blocks), {n: bool(b) for n, b in live.items()}, state(taped), state(played)))
    assert seen[0] == seen[1]


@compiled
@pytest.mark.parametrize("kind", KINDS)
@given(ops=OPS, capacity=CAPACITIES, places=st.lists(st.integers(0, 2), min_size=1, max_size=9))
def test_tapes_of_several_streams_are_played_alike(
    kind: str, ops: list[int], capacity: int | None, places: list[int]
) -> None:
    seen = []
    for engine in (quick, _native):
        first, *others = (quick_one(engine, kind, capacity) for _ in range(3))
        first.share_card(*others)
        blocks: list[int] = []
        _, error = tried(first.play_ops, valid(ops), blocks, places * (len(ops) + 1))
        seen.append((error and error[0], len(blocks), *map(state, (first, *others))))  # whose bytes it states differs
    assert seen[0] == seen[1]


@compiled
@pytest.mark.parametrize("kind", KINDS)
@given(ops=OPS, lows=st.lists(st.integers(0, 150 * MIB), min_size=1, max_size=4), capacity=st.integers(0, 300 * MIB))
def test_beginnings_end_where_cards_differ(kind: str, ops: list[int], lows: list[int], capacity: int) -> None:
    """`lows`: capacities that exclude ever more cards; the run goes on from the same place, then on a card."""
    ops = valid(ops)
    allocations = [position for position, op in enumerate(ops) if op >= 0]
    seen = []
    for engine in (quick, _native):
        shared = engine.Beginning(expandable_segments=kind == "growing")
        blocks: list[int] = []
        at, found = 0, []
        for low in sorted(lows):
            shared.above(low)
            _, end = tried(shared.play_ops, ops[at:], blocks)
            at = allocations[len(blocks)] if end else len(ops)
            found.append((end, at, state(shared)))
        card = shared.copy(max(capacity, max(lows) + 1))
        found.append((tried(card.play_ops, ops[at:], blocks), len(blocks), state(card)))
        seen.append(found)
    assert seen[0] == seen[1]


@pytest.mark.parametrize("engine", ENGINES)
def test_a_program_stops_where_the_caller_has_to_act(engine: ModuleType) -> None:
    allocator, live = quick_one(engine, "plain", None), dict[int, Any]()
    events, sizes = [1, 2, 0, 3, -1, -9], [0, 512, 0, -1]
    assert allocator.play(events, sizes, live) == 2
    assert live.keys() == {1, 2} and live[1] and not live[2]
    assert allocator.play(events, sizes, live, 3) == 3
    live[3] = None
    assert allocator.play((*events, -3), sizes, live, 4) == 7
    assert live.keys() == {2} and allocator.allocated == 0


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("kind", KINDS)
def test_numbers_beyond_any_card_are_refused(engine: ModuleType, kind: str) -> None:
    allocator = quick_one(engine, kind, None)
    allocator.malloc(MIB)
    with pytest.raises(OutOfMemory) as error:
        allocator.malloc(1 << 70)
    assert (error.value.requested, error.value.device_total, error.value.allocated) == (1 << 70, UNLIMITED, MIB)
    many = quick_one(engine, "plain", 1 << 60)
    with pytest.raises(BadInput, match="512 TiB"):
        many.play_ops([1 << 48] * 3, [])


@compiled
def test_a_block_that_is_not_in_use_cannot_be_freed() -> None:
    """The compiled allocators check what Python's leave unchecked, because memory of the process hangs on it."""
    allocator = _native.PlainAllocator()
    block = allocator.malloc(512)
    allocator.free(block)
    for wrong in (block, block + 1, 1 << 31):
        with pytest.raises(ValueError):
            allocator.free(wrong)
    with pytest.raises(IndexError):
        allocator.play([5], [0, 1], {})
    with pytest.raises(TypeError):
        allocator.share_card(quick.PlainAllocator())
    with pytest.raises(TypeError):
        _native.QuickAllocator()


PLANS = {
    "one card": ("smollm2-135m", "--gpu", "t4", "--accumulation", "2"),
    "fsdp2": ("smollm2-135m", "--gpu", "2xt4", "--shard", "parameters"),
    "expandable segments": ("smollm2-135m", "--gpu", "t4", "--alloc-conf", "expandable_segments:True"),
}


@compiled
@pytest.mark.parametrize("words", PLANS.values(), ids=PLANS)
def test_plans_are_equal_to_the_byte(words: tuple[str, ...]) -> None:
    code = "import sys, memfit.allocator as a; print(a.engine.__name__);from memfit.cli import main; main(sys.argv[1:])"
    said = []
    for pure in ("", "1"):
        env = {**os.environ, "MEMFIT_PURE_PYTHON": pure}
        done = subprocess.run(
            [sys.executable, "-c", code, "plan", *words, "--json"], env=env, capture_output=True, text=True, check=True
        )
        engine, _, document = done.stdout.partition("\n")
        assert engine.endswith("quick" if pure else "_native")
        said.append(json.loads(document))
    assert said[0] == said[1] and said[0]
