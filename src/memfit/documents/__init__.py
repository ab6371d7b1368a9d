"""The file formats memfit reads and writes: JSON documents, tapes, snapshots, recipe.toml, the log of a watch."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, TypeVar

T = TypeVar("T")


def filled(shape: type[T], *sources: object, **own: Any) -> T:
    """Make a `shape` of the values in `own`, and each other field of the first source that has one of its name."""
    names: Any = getattr(shape, "__struct_fields__", None) or [field.name for field in fields(shape)]  # type: ignore[arg-type]
    for name in names:
        source = next((one for one in sources if hasattr(one, name)), None)
        if name not in own and source is not None:
            own[name] = getattr(source, name)
    return shape(**own)
