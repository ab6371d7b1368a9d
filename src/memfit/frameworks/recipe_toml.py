"""memfit's own recipe.toml, read as a starting recipe, or as a plan that is judged again on a card."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from memfit.catalogue.cards import other_card, planned
from memfit.closed_form.run.estimate import estimate
from memfit.documents import recipe_file
from memfit.errors import BadInput
from memfit.frameworks.keys import Adopted
from memfit.models.hub import resolve_model
from memfit.nouns.gpu import Gpu
from memfit.nouns.job import RECIPE_FIELDS, Job
from memfit.nouns.plan import Plan, judge
from memfit.planner.host_memory import judged

NAME = "recipe"


def matches(data: dict[str, Any]) -> bool:
    return "schema" in data and "recipe" in data


def adopt(data: dict[str, Any], path: Path) -> Adopted:
    """Return the recipe as written. Raises BadInput for unknown keys."""
    try:
        file = recipe_file.from_dict(data)
    except BadInput as error:
        raise recipe_file.in_file(error, path) from None
    return Adopted(
        format=NAME,
        recipe=file.recipe,
        model=file.model,
        data=file.data or None,
        effective_batch=file.effective_batch or None,
        training=file.training,
        stated=RECIPE_FIELDS,
    )


def plan_of_file(path: Path, gpu: str) -> Plan:
    """Return the plan of a file, without a ladder, on `gpu` or the card it names. Raises BadInput without either."""
    file = recipe_file.read(path)
    card = other_card(gpu, file) if gpu else planned(file.gpu, file.gpu_memory)
    if card is None:
        raise BadInput(f"{path} names no GPU", hint="add --gpu rtx-4090")
    return plan_of(file, card)


def plan_of(file: recipe_file.RecipeFile, card: Gpu) -> Plan:
    """Return the plan of a recipe on a card."""
    architecture, recipe = resolve_model(file.model), file.recipe
    footprint = estimate(architecture, recipe, card)
    job = Job(
        architecture=architecture, gpu=card, num_gpus=recipe.num_gpus, sequence_length=recipe.sequence_length,
        effective_batch=file.effective_batch or recipe.effective_batch, method=recipe.method, trainer=recipe.trainer,
        longest_sample=file.longest_sample or None, dataset=file.data, training=file.training,
    )  # fmt: skip
    return Plan(job, recipe, footprint, judged(judge(footprint, card), architecture, recipe, card), ())
