"""Which of the packages that a recipe's train.py imports are not there."""

from __future__ import annotations

from importlib import metadata

from memfit.frameworks.process_layout import backend
from memfit.frameworks.script import packages
from memfit.nouns.job import Recipe


def missing(recipe: Recipe, target: str) -> tuple[str, ...]:
    """Names of distributions; `target`: "trl" or "transformers"."""
    return tuple(name for name in packages(recipe, target, backend(recipe)) if not installed(name))


def installed(name: str) -> bool:
    """A distribution of that name is there; nothing is imported."""
    try:
        metadata.distribution(name)
    except metadata.PackageNotFoundError:
        return False
    return True
