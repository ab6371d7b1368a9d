"""Read one recipe of any task as its trainer runs it, for the commands that answer by formula."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from memfit.cli.request import Request, same_file
from memfit.cli.task_flags import as_run, check_flags, length_with, needs_trace, notes_on, shape_of, sized
from memfit.errors import SOME_CARD, Unsupported
from memfit.models import families, hub
from memfit.models.families.towers import images_of
from memfit.nouns.architecture import Architecture
from memfit.nouns.task import Task
from memfit.tables.tasks import usual

PLANNED_TASKS = ("causal-lm", "multimodal")  # multimodal models are planned on text


def without_images(flags: Mapping[str, Any], architecture: Architecture) -> Mapping[str, Any]:
    """Return the flags with which one recipe of a vision-language model is counted without images, unless asked."""
    said = flags.get("task") or flags.get("images") is not None
    return flags if said or architecture.task != "multimodal" else {**flags, "images": 0}


def counted(
    request: Request, row: Task, name: str, flags: Mapping[str, Any], trained: Architecture | None = None
) -> Request:  # fmt: skip
    """Return the request with model and recipe as the task's trainer runs them, for one recipe's answer by formula.

    `trained`: the model that an earlier call returned for the same flags.

    Raises Unsupported where only a trace answers, BadInput for flags that the task does not have.
    """
    architecture, recipe = request.architecture, request.recipe
    if needs_trace(row, architecture, recipe):
        what = row.title if not row.language or architecture.trainable_memory else f"--adapter {recipe.adapter}"
        why = f": {architecture.trainable_memory}" if architecture.trainable_memory else " with this recipe"
        typed = same_file(flags, request) if flags.get("from_") else [name]
        named = " ".join([*typed, *([] if row == usual(architecture) else ["--task", row.key]), SOME_CARD])
        hint = f"a trace does: memfit trace {named}, or memfit plan {named}"
        raise Unsupported(f"no formula counts {what} of {name}{why}", hint=hint)
    if row.language:
        return request
    check_flags(flags, row, architecture, recipe, by_trace=False)
    config, stated = hub.resolve_config(name), shape_of(flags, row, request.adopted)
    shape = sized(stated, row, name, request.dataset, flags, request.notes)
    recipe = as_run(recipe, row, shape).but(**{k: v for k, v in request.wanted.items() if k in ("loss", "padding")})
    if row.sample == "pictures":
        images = images_of(config, architecture.name, shape)
        given = {*request.wanted, *(request.adopted.stated if request.adopted else ())}
        length = length_with(images, recipe.sequence_length, "sequence_length" in given)
        shape, recipe = replace(shape, image=images.size), recipe.but(sequence_length=length)
    model = trained or families.trained_for(config, architecture.name, row, shape)
    recipe = recipe.but(sequence_length=model.fixed_length or recipe.sequence_length)
    notes = [*request.notes, *notes_on(row, request.adopted)]
    wanted = {**request.wanted, "loss": recipe.loss}
    return replace(request, architecture=model, recipe=recipe, wanted=wanted, notes=notes)
