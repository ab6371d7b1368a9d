"""Libraries that bring CUDA kernels of their own: how each is made to run on the card, once it is imported."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch

from memfit.virtual.imports import finding
from memfit.virtual.patching import patched


class Kernels:
    """A native library whose functions can be declared and called, and do nothing."""

    def __getattr__(self, name: str) -> Callable[..., int]:
        function = lambda *_: 0  # noqa: E731
        self.__dict__[name] = function
        return function


def _bitsandbytes(module: ModuleType) -> None:
    """Its own code for CUDA, above kernels that do nothing; paged states lie in memory shared with the host."""
    with patched(importlib.import_module("bitsandbytes.cextension"), {"lib": Kernels()}):
        importlib.import_module("bitsandbytes.backends.cuda.ops")

    def get_paged(*shape: int, dtype: torch.dtype = torch.float32, device: Any = None) -> torch.Tensor:
        out = torch.empty(shape, dtype=dtype)
        out.is_paged, out.page_deviceid = True, 0  # type: ignore[attr-defined]
        return out

    functional = importlib.import_module("bitsandbytes.functional")
    functional.lib = Kernels()  # type: ignore[attr-defined]
    functional.get_paged = get_paged  # type: ignore[attr-defined]
    functional.prefetch_tensor = lambda *_, **__: None  # type: ignore[attr-defined]


@contextmanager
def _unheard() -> Iterator[None]:
    """What a library says of a machine without a GPU is not true of the card."""
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(level)


_DONE: set[str] = set()
LIBRARIES: dict[str, Callable[[ModuleType], None]] = {"bitsandbytes": _bitsandbytes}


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports a library of the table as on a machine without a GPU, then makes it run on the card."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: Any = None) -> Any:
        if name not in LIBRARIES or name in _DONE:
            return None
        found = importlib.machinery.PathFinder.find_spec(name, path)
        return None if found is None else importlib.machinery.ModuleSpec(name, self)

    def create_module(self, spec: Any) -> ModuleType | None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        name = module.__name__
        _DONE.add(name)
        del sys.modules[name]
        with patched(torch.cuda, {"is_available": lambda: False, "device_count": lambda: 1}), _unheard():
            real = importlib.import_module(name)
        LIBRARIES[name](real)
        sys.modules[name] = real


@contextmanager
def installed() -> Iterator[None]:
    """While the card is active: libraries that are imported already, and those that will be."""
    for name, prepare in LIBRARIES.items():
        if sys.modules.get(name) is not None and name not in _DONE:
            _DONE.add(name)
            prepare(sys.modules[name])
    try:
        with finding(_Finder()):
            yield
    finally:
        _forget()


def _forget() -> None:
    """What bitsandbytes keeps until the process ends: which parameters, by id(), have 32-bit states, and maps on the card."""
    if "bitsandbytes.optim" in sys.modules:
        sys.modules["bitsandbytes.optim"].GlobalOptimManager._instance = None
        sys.modules["bitsandbytes.functional"].name2qmap.clear()
