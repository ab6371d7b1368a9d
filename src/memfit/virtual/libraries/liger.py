"""What Liger puts in the place of PyTorch's and transformers' own for the life of a process ends with the card here."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any

from memfit.virtual.imports import finding, when_imported

LIBRARY = "liger_kernel"
_MODELS = "transformers.models."
_SHARED = ("torch.nn", "torch.nn.functional")  # LayerNorm and cross_entropy are replaced for everybody
Namespace = ModuleType | type


class _Finder(importlib.abc.MetaPathFinder):
    """Finds models' modules as Python does, and has each remembered as soon as it has been executed."""

    def __init__(self, remember: Callable[[ModuleType], None]) -> None:
        self._remember = remember

    def find_spec(self, name: str, path: Sequence[str] | None, target: Any = None) -> Any:
        spec = importlib.machinery.PathFinder.find_spec(name, path) if name.startswith(_MODELS) else None
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            self._remember(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


@contextmanager
def undone() -> Iterator[None]:
    """While the card is active Liger may replace what it likes."""
    with when_imported({f"{LIBRARY}.transformers.monkey_patch": _remembering}):
        yield


@contextmanager
def _remembering(_: ModuleType) -> Iterator[None]:
    with ExitStack() as stack:

        def remember(module: ModuleType) -> None:
            spaces: list[Namespace] = [module, *_classes(module)]
            for space in spaces:
                stack.callback(_restore, space, dict(vars(space)))

        for name, module in list(sys.modules.items()):
            if name in _SHARED or name.startswith(_MODELS):
                remember(module)
        with finding(_Finder(remember)):
            yield


def _classes(module: ModuleType) -> list[type]:
    """Those that the module defines."""
    return [v for v in list(vars(module).values()) if isinstance(v, type) and v.__module__ == module.__name__]


def _restore(space: Namespace, before: dict[str, Any]) -> None:
    for name, value in list(vars(space).items()):
        if value is not before.get(name, value) and str(getattr(value, "__module__", "")).startswith(LIBRARY):
            setattr(space, name, before[name])
