"""The answers of traces that the cache keeps, and what is asked before a trace."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

from memfit.models import hub
from memfit.nouns.task import Images, Shape
from memfit.virtual.supported import versions

Found = TypeVar("Found")


def kept(make: Callable[[], Found], kind: type[Found], name: str, task: str, shape: Shape, **about: Any) -> Found:
    """Return what the cache has of a model and a task, else make it and keep it."""
    from memfit.documents import traced_answers

    digest = key(kind, name, task, shape, **about)
    found = traced_answers.read(digest, kind)
    if found is None:
        found = make()
        traced_answers.write(digest, found)
    return found


def key(kind: type[Any], name: str, task: str, shape: Shape, **about: Any) -> str:
    """Return the digest of what an answer of a kind depends on."""
    from memfit.documents import traced_answers

    config = hub.resolve_config(name)
    return traced_answers.key(kind=kind.__name__, config=config, task=task, shape=shape, versions=versions(), **about)


def trained_size(name: str, shape: Shape) -> Shape:
    """Return the shape with the size of an image that a text-to-image model was trained for, where none is given."""
    side = hub.resolve_config(name).get("vae", {}).get("sample_size", 0)
    return shape if all(shape.image) else replace(shape, image=(side, side))


def pictured(name: str, task: str, shape: Shape) -> Images:
    """Return the size and the tokens of a sample's images, by the model's own processor."""

    def count() -> Images:
        from memfit.virtual.jobs.recipe import Setup
        from memfit.virtual.tracing import counted

        return counted(Setup(config=hub.resolve_config(name), task=task, shape=shape))

    return kept(count, Images, name, task, shape)
