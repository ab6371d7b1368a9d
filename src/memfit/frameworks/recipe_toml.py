"""memfit's own recipe.toml, read as a starting recipe, or as a plan that is judged again on a card."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from memfit.catalogue.cards import other_card, planned
from memfit.closed_form.judged_run import judged_run
from memfit.documents import recipe_file
from memfit.errors import BadInput
from memfit.frameworks.keys import Adopted
from memfit.frameworks.schemas import named, reasons
from memfit.nouns.architecture import Architecture
from memfit.nouns.gpu import Gpu
from memfit.nouns.job import RECIPE_FIELDS, Job, Recipe
from memfit.nouns.plan import Plan, withheld

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
        task=file.task,
        shape=file.shape,
        training=file.training,
        stated=RECIPE_FIELDS,
        assumed=_other_batch(file),
        unknown=file.not_understood,
        reserve=file.reserve,
        host_memory=file.host_memory,
        workers=file.workers,
    )


def plan_of_file(path: Path, gpu: str, ignore: Sequence[str] = ()) -> Plan:
    """Return the plan of a file, without a ladder, on `gpu` or the card it names. Raises BadInput without either.

    `ignore`: keys that were not understood and that the user wants to be judged without.
    """
    file = recipe_file.read(path)
    file = replace(file, not_understood=tuple(x for x in file.not_understood if not named(x, ignore)))
    card = other_card(gpu, file) if gpu else planned(file.gpu, file.gpu_memory)
    if card is None:
        raise BadInput(f"{path} names no GPU", hint="add --gpu rtx-4090")
    return plan_of(file, card)


def plan_of(file: recipe_file.RecipeFile, card: Gpu) -> Plan:
    """Return the plan of a recipe on a card, by formula. Raises Unsupported where none counts its task or model."""
    architecture, recipe = recipe_file.architecture_of(file), file.recipe
    job = Job(
        architecture=architecture, gpu=card, num_gpus=recipe.num_gpus, sequence_length=recipe.sequence_length,
        effective_batch=file.effective_batch or recipe.effective_batch, method=recipe.method, trainer=recipe.trainer,
        longest_sample=file.longest_sample or None, dataset=file.data, training=file.training,
        reserve=file.reserve, host_memory=file.host_memory, workers=file.workers, task=file.task,
        shape=file.shape,
    )  # fmt: skip
    plan = _planned(job, recipe)
    judgement = withheld(plan.judgement, reasons(file.not_understood, NAME))
    return replace(plan, judgement=judgement, notes=_other_batch(file))


def _other_batch(file: recipe_file.RecipeFile) -> tuple[str, ...]:
    """Return a note where the batch that was asked for is not the product that is trained."""
    recipe, asked = file.recipe, file.effective_batch
    if asked in (0, recipe.effective_batch):
        return ()
    product = f"micro-batch {recipe.micro_batch} x accumulation {recipe.accumulation} x {recipe.replicas} GPU"
    return (f"effective_batch is {asked}, but {product} trains {recipe.effective_batch} sequences a step",)


def plan_of_recipe(recipe: Recipe, architecture: Architecture, card: Gpu, adopted: Adopted) -> Plan:
    """Return the plan of the recipe of another framework's file, as it is."""
    job = Job(
        architecture=architecture, gpu=card, num_gpus=recipe.num_gpus, sequence_length=recipe.sequence_length,
        effective_batch=recipe.effective_batch, method=recipe.method, trainer=recipe.trainer,
        dataset=adopted.data or "", training=adopted.training, workers=adopted.workers,
    )  # fmt: skip
    return _planned(job, recipe)


def _planned(job: Job, recipe: Recipe) -> Plan:
    room = {"reserve": job.reserve, "host_memory": job.host_memory, "workers": job.workers}
    return Plan(job, recipe, *judged_run(job.architecture, recipe, job.gpu, **room), ())
