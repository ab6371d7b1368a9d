"""Do something to a module as soon as it has been imported, and undo it when the block ends."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from types import ModuleType
from typing import Any

Change = Callable[[ModuleType], AbstractContextManager[Any]]


class _Finder(importlib.abc.MetaPathFinder):
    """Finds modules as Python does; those of the table are changed after they were executed."""

    def __init__(self, changes: Mapping[str, Change], stack: ExitStack) -> None:
        self._changes, self._stack = changes, stack

    def find_spec(self, name: str, path: Sequence[str] | None, target: Any = None) -> Any:
        if name not in self._changes:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is None or spec.loader is None:
            return None
        execute, change, stack = spec.loader.exec_module, self._changes[name], self._stack

        def exec_module(module: ModuleType) -> None:
            execute(module)
            stack.enter_context(change(module))

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


@contextmanager
def finding(finder: importlib.abc.MetaPathFinder) -> Iterator[None]:
    """While the block is open the finder is asked first."""
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


@contextmanager
def when_imported(changes: Mapping[str, Change]) -> Iterator[None]:
    """Module -> what to do to it: at once where it is imported already, else right after its import."""
    with ExitStack() as stack:
        for name, change in changes.items():
            if sys.modules.get(name) is not None:
                stack.enter_context(change(sys.modules[name]))
        with finding(_Finder({n: c for n, c in changes.items() if sys.modules.get(n) is None}, stack)):
            yield
