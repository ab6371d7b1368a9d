"""Replace attributes, or environment variables, for the length of a block."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_MISSING = object()


@contextmanager
def patched(target: Any, values: dict[str, Any]) -> Iterator[None]:
    """`target` has these attributes inside the block, and what it had before after it.

    A class gets back what it had itself: what it inherited is inherited again, and its class methods bind to subclasses.
    """
    before = {name: _own(target, name) for name in values}
    for name, value in values.items():
        setattr(target, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            delattr(target, name) if value is _MISSING else setattr(target, name, value)


def _own(target: Any, name: str) -> Any:
    return vars(target).get(name, _MISSING) if isinstance(target, type) else getattr(target, name, _MISSING)


@contextmanager
def environment(values: dict[str, str]) -> Iterator[None]:
    """What libraries write there inside the block (ACCELERATE_USE_FSDP, say) is forgotten as well."""
    before = dict(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
