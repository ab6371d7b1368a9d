"""Adopts memfit's own recipe.toml."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from memfit.documents import recipe_file
from memfit.errors import BadInput
from memfit.frameworks.adopted import Adopted
from memfit.nouns.job import RECIPE_FIELDS

NAME = "recipe"


def matches(data: dict[str, Any]) -> bool:
    return "schema" in data and "recipe" in data


def adopt(data: dict[str, Any], path: Path) -> Adopted:
    """The recipe as written; every key is known, or the file is refused."""
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
