"""Choose which cases of a long grid run with every `make test`, and leave the others to `make nightly`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def smoke(cases: Iterable[Any], kinds: Callable[[Any], Iterable[Any]]) -> list[Any]:
    """Return the cases as parameters, marked `nightly` but for a few that show every kind the grid has.

    `kinds` names what a case is one of: a trainer, a method with its precision, a way of sharding.
    """
    listed = list(cases)
    kinds_of = [set(kinds(case)) for case in listed]
    chosen: set[int] = set()
    while missing := set().union(*kinds_of) - set().union(*(kinds_of[i] for i in chosen)):
        chosen.add(max(range(len(listed)), key=lambda i: len(kinds_of[i] & missing)))
    rows = [case if isinstance(case, tuple) else (case,) for case in listed]
    return [pytest.param(*row, marks=() if i in chosen else pytest.mark.nightly) for i, row in enumerate(rows)]


def kinds_of_recipe(recipe: Any) -> list[Any]:
    """Return trainer x method x precision x sharding, and quantisation, checkpointing and optimizer, of a recipe."""
    return [
        (recipe.trainer, recipe.method, recipe.precision, recipe.shard),
        ("quantization", recipe.quantization),
        ("checkpointing", recipe.checkpointing),
        ("optimizer", recipe.optimizer),
    ]
