"""Replace attributes or environment variables for the length of a block, also in modules that are imported later."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from types import ModuleType
from typing import Any

_MISSING = object()


@contextmanager
def patched(target: Any, values: dict[str, Any]) -> Iterator[None]:
    """Give `target` these attributes inside the block, and restore what it had afterwards.

    A class or an object gets back only what it held itself: inherited attributes are inherited again, and class methods
    bind to subclasses.
    """
    before = {name: _before(target, name) for name in values}
    try:
        for name, value in values.items():
            setattr(target, name, value)
        yield
    finally:
        for name, value in before.items():
            if value is not _MISSING:
                setattr(target, name, value)
            elif name in _own(target):
                delattr(target, name)


def _own(target: Any) -> Mapping[str, Any]:
    return getattr(target, "__dict__", {})


def _before(target: Any, name: str) -> Any:
    """Return what `target` holds itself, also in a property of its class; _MISSING for what it inherits or lacks."""
    if name in (own := _own(target)):
        return own[name]
    kind = getattr(type(target), name, None)
    return getattr(target, name, _MISSING) if hasattr(kind, "__set__") else _MISSING


@contextmanager
def no_log_warnings() -> Iterator[None]:
    """Silence log messages up to warnings for the length of the block."""
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(level)


@contextmanager
def environment(values: dict[str, str]) -> Iterator[None]:
    """Set environment variables; afterwards restore all, also those that libraries set (ACCELERATE_USE_FSDP)."""
    before = dict(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


Change = Callable[[ModuleType], AbstractContextManager[Any]]


class ImportHook(importlib.abc.MetaPathFinder):
    """Finds modules as Python does; once one is imported, applies the change that `change_of` returns for its name."""

    def __init__(self, change_of: Callable[[str], Change | None], stack: ExitStack) -> None:
        self._change_of, self._stack = change_of, stack

    def find_spec(self, name: str, path: Sequence[str] | None, target: Any = None) -> Any:
        change = self._change_of(name)
        spec = importlib.machinery.PathFinder.find_spec(name, path) if change else None
        if change is None or spec is None or spec.loader is None:
            return None
        execute, stack = spec.loader.exec_module, self._stack

        def exec_module(module: ModuleType) -> None:
            execute(module)
            stack.enter_context(change(module))

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


@contextmanager
def finding(finder: importlib.abc.MetaPathFinder) -> Iterator[None]:
    """Let a finder come first on sys.meta_path for the length of the block."""
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


@contextmanager
def when_imported(changes: Mapping[str, Change]) -> Iterator[None]:
    """Change modules by name: at once if imported already, else right after their import; undo it after the block."""
    with ExitStack() as stack:
        for name, change in changes.items():
            if sys.modules.get(name) is not None:
                stack.enter_context(change(sys.modules[name]))
        later = {name: change for name, change in changes.items() if sys.modules.get(name) is None}
        with finding(ImportHook(later.get, stack)):
            yield


def combined(*tables: Mapping[str, Change]) -> dict[str, Change]:
    """Return the changes of several tables, all of them for a module that is in more than one."""

    def after(first: Change, second: Change) -> Change:
        @contextmanager
        def both(module: ModuleType) -> Iterator[None]:
            with first(module), second(module):
                yield

        return both

    found: dict[str, Change] = {}
    for table in tables:
        for name, change in table.items():
            found[name] = after(found[name], change) if name in found else change
    return found


# --- packages that need a CUDA compiler to install: a table gives their modules' functions ---

Modules = Mapping[str, Mapping[str, Any]]  # module -> its names


class TableFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the modules of a table while `asked()` holds, and calls `found()` at each import of one."""

    def __init__(
        self, modules: Modules, asked: Callable[[], bool] = lambda: True, found: Callable[[], None] = lambda: None
    ) -> None:
        self.modules, self._asked, self.found = modules, asked, found

    def find_spec(self, name: str, path: Sequence[str] | None, target: Any = None) -> Any:
        if name not in self.modules or not self._asked():
            return None
        package = any(other.startswith(f"{name}.") for other in self.modules)
        return importlib.machinery.ModuleSpec(name, self, is_package=package)

    def create_module(self, spec: Any) -> ModuleType | None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        vars(module).update(self.modules[module.__name__])
        self.found()


@contextmanager
def importable(finder: TableFinder) -> Iterator[None]:
    """Let the modules of the finder's table stand in for the installed packages, for the length of the block."""
    packages = {name.partition(".")[0] for name in finder.modules}
    before = {name: module for name, module in sys.modules.items() if name.partition(".")[0] in packages}
    for name, module in before.items():
        if not isinstance(getattr(module, "__loader__", None), TableFinder):
            del sys.modules[name]
        else:  # a library that was imported ahead has found it
            finder.found()
    try:
        with finding(finder):
            yield
    finally:
        for name in finder.modules:
            sys.modules.pop(name, None)
        sys.modules.update(before)
