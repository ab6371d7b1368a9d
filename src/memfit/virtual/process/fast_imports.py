"""Imports of the training libraries at less cost: what they read twice is read once, and the compiler is put off."""

from __future__ import annotations

import functools
import importlib
import importlib.abc
import importlib.machinery
import importlib.metadata
import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from memfit.virtual.imports import finding, when_imported
from memfit.virtual.patching import patched

COMPILER = "torch._dynamo"
LIGHT = ("config", "_trace_wrapped_higher_order_op")  # modules of it that eager code imports, which need no other


@contextmanager
def lean_imports() -> Iterator[None]:
    """For a process that traces one recipe and compiles nothing."""
    distributions = {"packages_distributions": functools.cache(importlib.metadata.packages_distributions)}
    with (
        patched(importlib.metadata, distributions),
        when_imported({"transformers.utils.import_utils": _read_once}),
        _compiler_put_off(),
    ):
        yield


def _read_once(module: ModuleType) -> AbstractContextManager[None]:
    """transformers reads `__all__` of 1,600 files twice: its cache has room for 128 of their 550 folders."""
    name = "create_import_structure_from_path"
    read = getattr(getattr(module, name, None), "__wrapped__", None)
    return patched(module, {name: functools.cache(read)} if read else {})


class _Compiled:
    """No module is one: nothing here was compiled."""


def _undecorated(function: Callable[..., Any] | None = None, *_: Any, **__: Any) -> Any:
    return _undecorated if function is None else function


_EAGER: dict[str, Any] = {
    "disable": _undecorated, "assume_constant_result": _undecorated, "allow_in_graph": _undecorated, "graph_break": lambda *_, **__: None,
    "eval_frame": SimpleNamespace(OptimizedModule=_Compiled),
}  # fmt: skip


class _PutOff(ModuleType):
    """The compiler's package, which is imported when somebody asks for a name that it has not got yet."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        _complete(self)
        return getattr(self, name)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports the package before any further module of it is."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: Any = None) -> Any:
        package = sys.modules.get(COMPILER)
        if not name.startswith(f"{COMPILER}.") or not isinstance(package, _PutOff):
            return None
        _complete(package)
        if found := sys.modules.get(name):  # Python has looked for it there before, and would execute it again
            self._spec, found.__spec__ = found.__spec__, importlib.machinery.ModuleSpec(name, self)
            return found.__spec__
        return None

    def create_module(self, spec: Any) -> ModuleType:
        return sys.modules[spec.name]

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec


def _complete(module: ModuleType) -> None:
    for name in _EAGER:
        delattr(module, name)
    module.__class__ = ModuleType
    assert module.__spec__ is not None and module.__spec__.loader is not None
    module.__spec__.loader.exec_module(module)


@contextmanager
def _compiler_put_off() -> Iterator[None]:
    """Eager code asks the compiler only to leave it alone, which needs none of its 400 modules (0.7 s)."""
    if COMPILER in sys.modules or (spec := importlib.util.find_spec(COMPILER)) is None:
        yield
        return
    module = sys.modules[COMPILER] = torch._dynamo = importlib.util.module_from_spec(spec)
    for name in LIGHT:
        with suppress(ImportError):
            importlib.import_module(f"{COMPILER}.{name}")
    vars(module).update(_EAGER)
    module.__class__ = _PutOff
    try:
        with finding(_Finder()):
            yield
    finally:
        if isinstance(module, _PutOff):
            del torch._dynamo
            for name in (COMPILER, *(f"{COMPILER}.{light}" for light in LIGHT)):
                sys.modules.pop(name, None)
