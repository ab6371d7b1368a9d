"""The instant that made a peak, and what a run needs on its own card: by formula, traced, and on several streams."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any, Literal, get_args

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from memfit import Recipe, estimate, find_gpu, resolve_model
from memfit.allocator import Allocator, Block, OutOfMemory, PlainAllocator, quick
from memfit.allocator.capacity import capacity
from memfit.allocator.player import alive_at
from memfit.allocator.replay import replay
from memfit.closed_form.run import sharded_runs, timeline
from memfit.closed_form.run.account import Account
from memfit.closed_form.run.played_run import play
from memfit.closed_form.run.timeline import recorded
from memfit.closed_form.why import explain
from memfit.footprints.footprint_of_trace import footprint_of
from memfit.nouns.alloc_settings import AllocSettings
from memfit.nouns.footprint import Footprint, peak_maker
from memfit.nouns.gpu import Gpu
from memfit.nouns.job import Job, Method, Precision
from memfit.nouns.plan import judge, verdict_by_replay
from memfit.nouns.tape import STEPS, Alloc, Event, Free, Mark, Tape
from memfit.planner.search import Estimator
from memfit.report.words import peak_words
from memfit.report.words import room as room_words
from memfit.tables import combinations
from memfit.units import GIB, MIB, parse_size

H100, A100 = find_gpu("h100"), find_gpu("a100-80gb")
SMALL = resolve_model("qwen2.5-0.5b")
MISTRAL = Recipe(
    method="full", precision="bf16", micro_batch=8, sequence_length=4096, checkpointing="full", attention="flash",
    loss="full", optimizer="adamw-foreach", trainer="transformers",
)  # fmt: skip
slow = settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow]
)


def slack(footprint: Footprint) -> float:
    """The share of the reserved peak that is neither a tensor nor known to be cached since an earlier phase."""
    peak = footprint.peak
    cached = sum(line.bytes for line in peak.lines if line.label.startswith("cached since"))
    return 1 - (peak.tensors + cached) / peak.levels.reserved


# ---- the rule -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("moments", "made"),
    [
        ([(91, 88), (93, 89), (94, 10)], 1),  # what an evaluation adds is less than a prediction may be off by
        ([(91, 88), (93, 89), (120, 10)], 2),  # it raised the level
        ([(117, 61), (120, 114), (120, 115)], 1),  # nor is a moment named that did not raise it
        ([(50, 50), (100, 70), (100, 90)], 1),
        ([(0, 0)], 0),
    ],
)
def test_the_moment_that_made_a_level(moments: list[tuple[int, int]], made: int) -> None:
    assert peak_maker(moments) == made


def test_a_run_that_releases_its_cache_often_is_tight_and_one_that_needs_none_fits() -> None:
    needs = 100

    def on(capacity: int, retries: int) -> str:
        return verdict_by_replay(capacity, 10, lambda room: retries if room >= needs else None)

    assert [on(120, retries) for retries in (0, 1, 2)] == ["fits", "fits", "tight"]
    assert [on(room, 0) for room in (110, 109, 99, 90, 89)] == ["fits", "tight", "tight", "tight", "misfit"]


# ---- by formula -----------------------------------------------------------------------------------------------------


def test_offloaded_weights_without_checkpointing_peak_in_the_backward_not_in_the_evaluation() -> None:
    recipe = Recipe(
        method="full", precision="bf16-master", sequence_length=4096, offload="parameters", shard="parameters",
        num_gpus=8, trainer="transformers",
    )  # fmt: skip
    found = estimate(resolve_model("Qwen/Qwen2.5-Coder-32B-Instruct"), recipe, H100)
    peak = found.peak
    assert (peak.phase, peak.instant) == ("step", "backward of the loss")
    assert 89 * GIB < peak.tensors < 90 * GIB
    assert peak.by_role["activations"] > 80 * GIB
    assert peak.levels.reserved == max(p.levels.reserved for p in found.needed)


METHODS: tuple[tuple[Method, Precision], ...] = (
    ("full", "bf16-mixed"), ("full", "bf16-master"), ("lora", "bf16"), ("qlora", "bf16"),
)  # fmt: skip
SHARDED = [
    (name, cards, Recipe(method=method, precision=precision, shard="parameters", num_gpus=count, sequence_length=4096,
                         checkpointing=checkpointing, quantization="nf4-double" if method == "qlora" else "none"))
    for name, cards, count in (("llama-3.1-8b", "rtx-4090", 4), ("qwen3-32b", "a100-80gb", 8))
    for method, precision in METHODS
    for checkpointing in get_args(Literal["none", "full"])
]  # fmt: skip


@pytest.mark.parametrize(("name", "card", "recipe"), SHARDED)
def test_a_sharded_peak_is_made_of_tensors_and_adds_up(name: str, card: str, recipe: Recipe) -> None:
    model, gpu = resolve_model(name), find_gpu(card)
    found = estimate(model, recipe, gpu)
    assert found.peak.phase != "eval" and slack(found) < 0.35
    for peak in (found.peak, *found.phases):
        assert sum(line.bytes for line in peak.lines) == peak.levels.device
        assert 0 < peak.tensors <= peak.levels.requested
        reasons = explain(Account(model, recipe, gpu), peak).reasons
        assert sum(reason.bytes for reason in reasons) == peak.levels.device


def test_a_full_card_gives_cached_blocks_back() -> None:
    model = resolve_model("mistralai/Mistral-7B-v0.1")
    found = estimate(model, MISTRAL, A100)
    judgement, card = judge(found, A100), found.on_card
    assert card is not None and card.capacity == judgement.usable
    assert judgement.verdict == "fits"
    assert judgement.need <= judgement.usable < card.unlimited
    tape = recorded(Account(model, MISTRAL, A100))  # the same run on the allocator with every rule
    there, free = replay(tape.events, capacity=judgement.usable), replay(tape.events)
    assert (judgement.need, card.unlimited) == (there.peak.reserved, free.peak.reserved)
    assert there.retries and there.oom is None
    much_smaller = replace(A100, total_bytes=A100.context_bytes + 60 * GIB)
    assert judge(estimate(model, MISTRAL, much_smaller), much_smaller).verdict == "misfit"


@pytest.mark.parametrize("room", [0.7, 0.86, 0.94, 0.97, 1.0, 1.1])
@pytest.mark.parametrize("shard", ["none", "parameters"])
def test_what_is_said_of_a_card_belongs_together(shard: Any, room: float) -> None:
    recipe = Recipe(micro_batch=4, checkpointing="full", shard=shard, num_gpus=1 if shard == "none" else 4)
    free = estimate(SMALL, recipe, A100)
    gpu = sized(int((free.peak.levels.device - A100.context_bytes) * room))
    found = estimate(SMALL, recipe, gpu)
    judgement, card = judge(found, gpu), found.on_card
    assert card is not None
    nccl = judgement.usable - card.capacity
    assert judgement.need == found.peak.levels.reserved + nccl <= card.unlimited + nccl
    short, band = -judgement.headroom, judgement.band
    assert short == judgement.need - judgement.usable
    account = Account(SMALL, recipe, gpu)
    if judgement.verdict == "fits":
        assert play(account, capacity=card.capacity - band, evaluates=False, free=play(account)) is not None
    elif judgement.verdict == "tight":
        assert short <= band
    else:
        assert short > 0 and judgement.need == card.unlimited + nccl
    said = f"{peak_words(found, judgement)} {room_words(judgement)}"
    sizes = [parse_size(text.replace(" ", "")) for text in re.findall(r"[0-9.]+ [MG]iB", said)]
    assert abs(sizes[0] - judgement.need) < GIB // 16
    if short > 0:
        assert any(abs(size - short) < GIB // 16 for size in sizes[1:])


def test_what_is_kept_free_is_not_replayed_on() -> None:
    model, reserve = resolve_model("mistralai/Mistral-7B-v0.1"), 8 * GIB
    found = judge(estimate(model, MISTRAL, A100, reserve=reserve), A100, reserve)
    assert found.need <= found.usable == A100.usable_bytes(reserve)
    # a footprint of the whole card is judged without its replay, by what it takes without a limit
    assert judge(estimate(model, MISTRAL, A100), A100, reserve).need > found.usable


recipes = st.builds(
    Recipe,
    method=st.sampled_from(["full", "lora"]),
    precision=st.sampled_from(["bf16", "bf16-mixed", "bf16-master"]),
    optimizer=st.sampled_from(["adamw", "adamw-foreach", "adamw-8bit"]),
    micro_batch=st.integers(1, 6),
    accumulation=st.integers(1, 2),
    sequence_length=st.sampled_from([256, 1000, 3000]),
    checkpointing=st.sampled_from(["none", "full"]),
    loss=st.sampled_from(["full", "fused"]),
    num_gpus=st.sampled_from([1, 2, 4]),
    shard=st.sampled_from(["none", "parameters"]),
)


@slow
@given(recipe=recipes, room=st.floats(0.75, 1.25))
def test_the_quick_verdict_is_sound(recipe: Recipe, room: float) -> None:
    """No recipe fits by the quick estimate that a replay at the card's capacity refuses."""
    assume(combinations.refusal(recipe, SMALL, A100) is None)
    free = estimate(SMALL, recipe, A100)
    levels = free.peak.levels
    gpu = sized(int((levels.device - A100.context_bytes) * room))
    shown = estimate(SMALL, recipe, gpu)
    replayed = judge(shown, gpu)
    estimator = Estimator(Job(architecture=SMALL, gpu=gpu))
    quick = [judge(estimate(SMALL, recipe, gpu, replay=False), gpu), estimator.quick(recipe).judgement]
    unlimited = judge(estimate(SMALL, recipe, gpu, at_capacity=False), gpu)
    assert not (unlimited.verdict == "fits" and replayed.verdict != "fits")
    assert not (replayed.verdict == "misfit" and "fits" in [q.verdict for q in quick])
    if replayed.verdict == "fits":
        assert replayed.need <= replayed.usable
    assert sum(line.bytes for line in shown.peak.lines) == shown.peak.levels.device


STEADY = [
    (SMALL, Recipe(precision="bf16-mixed", sequence_length=512, optimizer="adamw-foreach"), True),
    (resolve_model("qwen3-0.6b"), Recipe(sequence_length=2048, micro_batch=2), True),
    (SMALL, Recipe(micro_batch=4, checkpointing="full", shard="parameters", num_gpus=4), False),
]


@pytest.mark.parametrize(("model", "recipe", "rises"), STEADY)
def test_further_steps_reserve_no_more(
    model: Any, recipe: Recipe, rises: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`rises`: the third step reserves more than the second."""

    def reserved(steps: int) -> int:
        for module in (timeline, sharded_runs):
            monkeypatch.setattr(module, "STEPS", steps)
        played = play(Account(model, recipe, H100))
        assert played is not None
        return played.reserved

    assert reserved(6) == reserved(STEPS)
    assert (reserved(2) < reserved(STEPS)) == rises


def test_what_stays_cached_was_reserved_before_the_peak() -> None:
    found = estimate(SMALL, Recipe(precision="bf16-mixed", micro_batch=2, accumulation=8, sequence_length=2048), H100)
    later = [
        p.phase.replace("_", " ") for p in found.phases[[p.phase for p in found.phases].index(found.peak.phase) + 1 :]
    ]
    assert not [line for line in found.peak.lines if line.label.startswith(tuple(f"cached since {p}" for p in later))]


@pytest.mark.parametrize("room", [0.88, 0.95])
def test_a_sharded_run_goes_on_from_its_first_step_as_if_played_whole(room: float) -> None:
    recipe = Recipe(method="full", micro_batch=4, checkpointing="full", shard="parameters", num_gpus=4)
    account = Account(SMALL, recipe, A100)
    free = play(account)
    assert free is not None and free.stepped is not None
    capacity = int(free.reserved * room)
    whole = play(account, evaluates=False, capacity=capacity, free=replace(free, stepped=None))
    assert whole is not None and whole.retries
    assert play(account, evaluates=False, capacity=capacity, free=free) == whole


def sized(usable: int) -> Gpu:
    return replace(A100, total_bytes=A100.context_bytes + max(usable, 1))


# ---- traced ---------------------------------------------------------------------------------------------------------

# a step that needs 90 MiB, then an evaluation that finds its 40 MiB in the cache
EVENTS: tuple[Event, ...] = (
    Mark("load", "weights"), Alloc(1, 40 * MIB, "parameters"), Mark("step", "forward"), Alloc(2, 20 * MIB),
    Mark("step", "backward"), Alloc(3, 30 * MIB, "activations"), Free(2), Free(3), Alloc(4, 40 * MIB), Free(4),
    Mark("eval", "forward"), Alloc(5, 12 * MIB), Free(5),
)  # fmt: skip


def test_a_traced_peak_is_the_event_that_raised_the_level() -> None:
    tape = Tape(EVENTS, "traced")
    found = footprint_of(tape, replay(EVENTS), (), (), context=MIB, nccl=2 * MIB)
    by_phase = {p.phase: p for p in found.phases}
    assert by_phase["step"].levels.reserved == by_phase["eval"].levels.reserved == 130 * MIB
    assert found.peak.phase == "step" and found.peak.instant == "backward"
    assert found.peak.tensors == 80 * MIB  # not the 90 MiB of an instant at which the level was 90
    assert sum(line.bytes for line in found.peak.lines) == found.peak.levels.device == 133 * MIB


def test_a_traced_run_on_a_full_card_shows_the_run_there() -> None:
    tape = Tape(EVENTS, "traced")
    gpu = Gpu(name="X", short="x", sold_bytes=GIB, total_bytes=GIB + 100 * MIB, context_bytes=GIB)
    answer = capacity(tape, AllocSettings(), gpu=gpu)
    found = footprint_of(tape, answer.free, (), (), gpu.context_bytes, answer=answer)
    assert answer.judgement is not None and found.on_card is not None
    assert answer.judgement.need == found.peak.levels.reserved == 90 * MIB
    assert found.on_card.unlimited == 130 * MIB
    smaller = capacity(tape, AllocSettings(), gpu=replace(gpu, total_bytes=GIB + 80 * MIB))
    short = footprint_of(tape, smaller.free, (), (), gpu.context_bytes, answer=smaller)
    assert smaller.judgement is not None and smaller.timeline.oom is not None
    assert smaller.smallest == 90 * MIB  # its verdict is that of a card with a band more, where it has the same room
    assert smaller.judgement.need == short.peak.levels.reserved == 130 * MIB
    for span in answer.timeline.spans:
        for growth in span.growths:
            assert sum(alloc.size for alloc in alive_at(EVENTS, growth.at)) == growth.requested


# ---- streams --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("plain", [PlainAllocator, quick.PlainAllocator], ids=["as installed", "python"])
@settings(max_examples=60, deadline=None)
@given(
    requests=st.lists(st.tuples(st.integers(0, 2), st.integers(1, 60 * MIB), st.booleans()), max_size=60),
    capacity=st.sampled_from([None, 100 * MIB, 200 * MIB]),
)
def test_quick_allocators_share_a_card_as_streams_do(
    plain: type[PlainAllocator], requests: list[tuple[int, int, bool]], capacity: int | None
) -> None:
    whole, streams = Allocator(capacity), [plain(capacity), plain(), plain()]
    streams[0].share_card(*streams[1:])
    live: list[tuple[int, Block | None, int]] = []
    for stream, size, keep in requests:
        try:
            block = whole.malloc(size, stream)
        except OutOfMemory:
            with pytest.raises(OutOfMemory):
                streams[stream].malloc(size)
            break
        live.append((stream, block, streams[stream].malloc(size)))
        if not keep:
            of_stream, block, number = live.pop(0)
            whole.free(block)
            streams[of_stream].free(number)
        assert (streams[0].reserved, streams[0].reserved_peak) == (whole.reserved, whole.reserved_peak)
    assert streams[0].num_alloc_retries == whole.num_alloc_retries
