"""A recipe.toml as a plan again: its recipe is the answer, judged once more on its card."""

from __future__ import annotations

from pathlib import Path

from memfit.catalogue.cards import other_card, planned
from memfit.closed_form.run.estimate import estimate
from memfit.documents import recipe_file
from memfit.errors import BadInput
from memfit.models.hub import resolve_model
from memfit.nouns.gpu import Gpu
from memfit.nouns.job import Job
from memfit.nouns.plan import Plan, judge


def plan_of_file(path: Path, gpu: str) -> Plan:
    """The plan of a file, without a ladder, on the card it names or on another. Raises BadInput where there is none."""
    file = recipe_file.read(path)
    card = other_card(gpu, file) if gpu else planned(file.gpu, file.gpu_memory)
    if card is None:
        raise BadInput(f"{path} names no GPU", hint="add --gpu rtx-4090")
    return plan_of(file, card)


def plan_of(file: recipe_file.RecipeFile, card: Gpu) -> Plan:
    """The plan of a recipe on a card."""
    architecture, recipe = resolve_model(file.model), file.recipe
    footprint = estimate(architecture, recipe, card)
    job = Job(
        architecture=architecture, gpu=card, num_gpus=recipe.num_gpus, sequence_length=recipe.sequence_length,
        effective_batch=file.effective_batch or recipe.effective_batch, method=recipe.method, trainer=recipe.trainer,
        longest_sample=file.longest_sample or None, dataset=file.data, training=file.training,
    )  # fmt: skip
    return Plan(job, recipe, footprint, judge(footprint, card), ())
