"""The two readings of a trace agree: folding it into peaks and unrolling it into a tape see the same bytes."""

from __future__ import annotations

import pytest

from memfit import Recipe, find_gpu, resolve_model
from memfit.allocator.player import alive_at
from memfit.allocator.replay import replay
from memfit.closed_form.run.account import Account
from memfit.closed_form.run.timeline import recorded
from memfit.nouns.tape import Alloc, Free, Mark

GPU = find_gpu("a100-80gb")
RECIPES = {
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


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
@pytest.mark.parametrize("name", ["smollm2-135m", "qwen2.5-0.5b", "pythia-160m"])
def test_the_tape_reaches_the_level_the_fold_names(name: str, recipe: Recipe) -> None:
    account = Account(resolve_model(name), recipe.but(trainer="transformers"), GPU)
    step = replay(recorded(account).events).by_phase()["step"]
    predicted = max(i.requested for i in [*account.passes("step", states=True), account.optimizer_step("step")])
    # the tape holds two batches of token ids for a moment, the account one
    assert step.requested == pytest.approx(predicted, abs=2 * account.batch + 4096)


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_a_step_leaves_nothing_behind(recipe: Recipe) -> None:
    account = Account(resolve_model("smollm2-135m"), recipe.but(trainer="transformers"), GPU)
    events = recorded(account).events
    first, second = (
        sum(alloc.size for alloc in alive_at(events, end)) for end in (events.index(Mark("step", "start")), len(events))
    )
    assert second == first > 0


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
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
