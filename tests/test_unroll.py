"""The two readings of a trace agree: folding it into peaks and unrolling it into a tape see the same bytes."""

from __future__ import annotations

from itertools import accumulate

import pytest

from memfit import Recipe, find_gpu, resolve_model
from memfit.closed_form.run.account import Account
from memfit.closed_form.run.estimate import tape_of

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


def live(ops: list[int]) -> list[int]:
    """Requested bytes after every event."""
    sizes: list[int] = []
    changes = []
    for op in ops:
        if op > 0:
            sizes.append(op)
            changes.append(op)
        else:
            changes.append(-sizes[-op - 1])
    return list(accumulate(changes))


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
@pytest.mark.parametrize("name", ["smollm2-135m", "qwen2.5-0.5b", "pythia-160m"])
def test_the_tape_reaches_the_level_the_fold_names(name: str, recipe: Recipe) -> None:
    account = Account(resolve_model(name), recipe.but(trainer="transformers"), GPU)
    sections = tape_of(account)
    levels = live([op for _, ops in sections for op in ops])
    counts = list(accumulate(len(ops) for _, ops in sections))
    step = levels[counts[1] : counts[2]]
    predicted = max(i.requested for i in [*account.passes("step", states=True), account.optimizer_step("step")])
    # the tape holds two batches of token ids for a moment, the account one
    assert max(step) == pytest.approx(predicted, abs=2 * account.batch + 4096)


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_a_step_leaves_nothing_behind(recipe: Recipe) -> None:
    account = Account(resolve_model("smollm2-135m"), recipe.but(trainer="transformers"), GPU)
    sections = tape_of(account)
    levels = live([op for _, ops in sections for op in ops])
    first, second = (levels[n - 1] for n in list(accumulate(len(ops) for _, ops in sections))[1:])
    assert second == first


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_every_free_names_something_alive_once(recipe: Recipe) -> None:
    account = Account(resolve_model("smollm2-135m"), recipe.but(trainer="transformers"), GPU)
    alive: set[int] = set()
    count = 0
    for _, ops in tape_of(account):
        for op in ops:
            if op > 0:
                count += 1
                alive.add(count)
            else:
                alive.remove(-op)
    assert alive  # weights and states stay
