"""The tape of a recipe: every event has the name of a tensor of its size, and the levels are those of the account."""

from __future__ import annotations

from collections import Counter

import pytest

from memfit import Recipe, find_gpu, resolve_model
from memfit.allocator.heap import Heap
from memfit.allocator.player import alive_at
from memfit.allocator.replay import replay
from memfit.closed_form.run.account import Account
from memfit.closed_form.run.estimate import estimate
from memfit.closed_form.run.timeline import played, recorded
from memfit.errors import Unsupported
from memfit.nouns.tape import Alloc, EmptyCache, Free, Mark, Role

GPU = find_gpu("a100-80gb")
RECIPES = {
    "full": Recipe(precision="bf16"),
    "mixed": Recipe(precision="bf16-mixed", checkpointing="full", loss="fused"),
    "accumulated": Recipe(precision="bf16", accumulation=3, optimizer="adamw-8bit"),
    "lora": Recipe(method="lora", micro_batch=2, checkpointing="full"),
    "qlora": Recipe(method="qlora", quantization="nf4-double", checkpointing="full"),
    "in-backward": Recipe(precision="bf16", optimizer="adamw-in-backward"),
}


class Sizes(Heap):
    """An allocator that writes down sizes, and frees as negative numbers of allocations from 1 on."""

    def __init__(self) -> None:
        self.ops: list[int] = []
        self.count = 0

    def malloc(self, size: int) -> int:
        if size <= 0:
            return 0
        self.count += 1
        self.ops.append(size)
        return self.count

    def free(self, block: int | None) -> None:
        if block:
            self.ops.append(-block)

    def empty_cache(self) -> None:
        """It keeps nothing cached."""


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
@pytest.mark.parametrize("trainer", ["trl", "transformers", "torch"])
def test_an_allocator_is_given_the_same_sizes_as_the_tape(recipe: Recipe, trainer: str) -> None:
    account = Account(resolve_model("smollm2-135m"), recipe.but(trainer=trainer), GPU)
    tape = recorded(account)
    heap = Sizes()
    assert list(played(account, heap)) == ["load", "first_step", "step", "step"]
    trained = tape.events[: tape.events.index(Mark("save", "saving a checkpoint"))]
    assert [e.size if isinstance(e, Alloc) else -e.id for e in trained if isinstance(e, Alloc | Free)] == heap.ops
    assert all(event.label for event in tape.events if isinstance(event, Alloc))


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_what_stays_has_the_roles_of_the_account(recipe: Recipe) -> None:
    account = Account(resolve_model("smollm2-135m"), recipe, GPU)
    tape = recorded(account)
    left: Counter[Role] = Counter()
    for alloc in alive_at(tape.events, len(tape.events)):
        left[alloc.role] += alloc.size
    assert left["parameters"] == account.static.weights
    assert left["optimizer_states"] == account.static.states
    assert set(left) <= {"parameters", "optimizer_states", "workspace", "temporaries", "activations"}


def test_a_weight_has_its_own_name_and_size() -> None:
    model = resolve_model("smollm2-135m")
    tape = recorded(Account(model, RECIPES["full"], GPU))
    sizes = {
        event.label: event.size for event in tape.events if isinstance(event, Alloc) and event.role == "parameters"
    }
    layer = model.layers[6]
    for weight in layer.weights:
        assert sizes[f"model.layers.6.{weight.name}"] == 2 * weight.numel
    states = {e.label for e in tape.events if isinstance(e, Alloc) and e.role == "optimizer_states"}
    assert f"model.layers.6.{layer.weights[0].name} state 1" in states


@pytest.mark.parametrize("recipe", [RECIPES["full"], RECIPES["lora"], RECIPES["qlora"]], ids=["full", "lora", "qlora"])
def test_replaying_the_tape_gives_the_estimate_s_levels(recipe: Recipe) -> None:
    model = resolve_model("smollm2-135m")
    tape = recorded(Account(model, recipe, GPU))
    levels = replay(tape.events).by_phase()
    for phase in estimate(model, recipe, GPU).phases:
        if phase.phase in ("eval", "save"):
            assert phase.levels.reserved == levels[phase.phase].reserved
            assert phase.levels.requested == pytest.approx(levels[phase.phase].requested, rel=0.01)
        if phase.phase in ("first_step", "step"):
            assert phase.levels.reserved == levels[phase.phase].reserved
            assert phase.levels.allocated == max(levels[phase.phase].allocated, phase.levels.requested)
    assert tape.events.count(EmptyCache()) == 1  # when Trainer.train begins


def test_instants_are_named() -> None:
    tape = recorded(Account(resolve_model("smollm2-135m"), RECIPES["accumulated"], GPU))
    instants = [mark.instant for mark in tape.events if isinstance(mark, Mark) and mark.phase == "step"]
    assert instants[:3] == ["start", "forward", "loss"]
    assert Mark("first_step", "optimizer step") in tape.events
    assert "backward of block 7" in instants and "forward, later micro-batch" in instants


def test_what_is_not_unrolled_is_refused() -> None:
    with pytest.raises(Unsupported) as caught:
        recorded(Account(resolve_model("smollm2-135m"), Recipe(shard="parameters", num_gpus=2), GPU))
    assert caught.value.hint


# --- folding a trace into peaks and unrolling it into a tape see the same bytes --------------------------------------

MORE_RECIPES = {
    "full": Recipe(precision="bf16"),
    "full-mixed": Recipe(precision="bf16-mixed"),
    "full-checkpointed": Recipe(precision="bf16", checkpointing="full", loss="fused"),
    "full-accumulated": Recipe(precision="bf16", accumulation=3, checkpointing="full"),
    "lora": Recipe(method="lora", micro_batch=2),
    "lora-checkpointed": Recipe(method="lora", checkpointing="full", loss="fused"),
    "qlora": Recipe(method="qlora", quantization="nf4-double", checkpointing="full"),
    "eager": Recipe(attention="eager", sequence_length=256),
    "offloaded-checkpoints": Recipe(checkpointing="offload", method="lora"),
}


@pytest.mark.parametrize("recipe", MORE_RECIPES.values(), ids=MORE_RECIPES)
@pytest.mark.parametrize("name", ["smollm2-135m", "qwen2.5-0.5b", "pythia-160m"])
def test_the_tape_reaches_the_level_the_fold_names(name: str, recipe: Recipe) -> None:
    account = Account(resolve_model(name), recipe.but(trainer="transformers"), GPU)
    step = replay(recorded(account).events).by_phase()["step"]
    predicted = max(i.requested for i in [*account.passes("step", states=True), account.optimizer_step("step")])
    # the tape holds two batches of token ids for a moment, the account one
    assert step.requested == pytest.approx(predicted, abs=2 * sum(account.batch) + 4096)


@pytest.mark.parametrize("recipe", MORE_RECIPES.values(), ids=MORE_RECIPES)
def test_a_step_leaves_nothing_behind(recipe: Recipe) -> None:
    account = Account(resolve_model("smollm2-135m"), recipe.but(trainer="transformers"), GPU)
    events = recorded(account).events
    first, second = (
        sum(alloc.size for alloc in alive_at(events, end)) for end in (events.index(Mark("step", "start")), len(events))
    )
    assert second == first > 0


@pytest.mark.parametrize("recipe", MORE_RECIPES.values(), ids=MORE_RECIPES)
def test_every_free_names_something_alive_once(recipe: Recipe) -> None:
    account = Account(resolve_model("smollm2-135m"), recipe.but(trainer="transformers"), GPU)
    alive: set[int] = set()
    count = 0
    for event in recorded(account).events:
        if isinstance(event, Alloc):
            count += 1
            assert event.id == count
            alive.add(count)
        elif isinstance(event, Free):
            alive.remove(event.id)
    assert alive  # weights and states stay
