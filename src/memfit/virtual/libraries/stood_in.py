"""Packages that need a CUDA compiler to install, made importable: a table gives their modules' functions."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from memfit.virtual.patching import finding

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
