"""Triton on a card without data: launching a kernel does nothing, as kernels allocate nothing.

Builds of PyTorch without CUDA come without Triton; then a stand-in for the package is importable while the card is
active, so that libraries take the same code path as on a real card. It must be in place before they are imported.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch

from memfit.virtual.device.dispatch import after_kernel
from memfit.virtual.patching import patched

VERSION = "3.7.0"  # of Triton in PyTorch 2.13


class _Anything(type):
    """A name of Triton that is never executed: it can be called, subscripted and has every attribute."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything

    def __getitem__(cls, _: Any) -> Any:
        return cls

    def __add__(cls, _: Any) -> Any:  # lists of types that a library joins
        return cls

    def __iter__(cls) -> Any:  # else iteration by __getitem__ would never end
        return iter(())


class Anything(metaclass=_Anything):
    """Stands for any name of Triton."""

    def __init__(self, *_: Any, **__: Any) -> None:
        """Take any arguments."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything

    def __call__(self, *_: Any, **__: Any) -> Any:
        return self

    def __getitem__(self, _: Any) -> Any:
        return self

    def __iter__(self) -> Any:
        return iter(())


class Kernel:
    """A jitted function: `kernel[grid](...)` launches nothing."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.fn, self.__name__, self.__doc__ = function, getattr(function, "__name__", "kernel"), function.__doc__
        self.__module__ = function.__module__

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return self.run

    def run(self, *args: Any, **words: Any) -> None:
        """Launch nothing."""
        after_kernel(*args, *words.values())

    def __call__(self, *_: Any, **__: Any) -> Any:
        return Anything


class Config:
    """Block sizes of a kernel launch; Inductor reads those of its templates."""

    def __init__(
        self, kwargs: dict[str, Any], num_warps: int = 4, num_stages: int = 3, pre_hook: Any = None, **more: Any
    ) -> None:
        self.kwargs, self.num_warps, self.num_stages, self.pre_hook = kwargs, num_warps, num_stages, pre_hook
        self.__dict__.update(more)

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)

    def all_kwargs(self) -> dict[str, Any]:
        """Return everything a kernel is launched with."""
        return {**self.kwargs, "num_warps": self.num_warps, "num_stages": self.num_stages}


def _jit(function: Callable[..., Any] | None = None, **_: Any) -> Any:
    return Kernel(function) if function is not None else Kernel


def _around(*_: Any, **__: Any) -> Callable[[Any], Any]:
    """Replace autotune and heuristics: return the kernel as it is."""
    return lambda kernel: kernel


_REAL: dict[str, Any] = {
    "jit": _jit, "autotune": _around, "heuristics": _around, "__version__": VERSION, "triton_key": lambda: VERSION,
    "Config": Config, "cdiv": lambda a, b: -(-a // b),
    "next_power_of_2": lambda n: 1 << (n - 1).bit_length() if n > 0 else 1,
}  # fmt: skip
_wrap = torch.library.wrap_triton


def _wrap_triton(kernel: Any) -> Any:
    """Return a stand-in's kernel as it is: nothing traces what it launches. Others are wrapped by PyTorch."""
    return kernel if isinstance(kernel, Kernel) else _wrap(kernel)


_GONE = ("AttrsDescriptor",)  # removed in Triton 3.3; the compiler detects the version by its absence


class _Module(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name in _REAL:
            return _REAL[name]
        if name.startswith("__") or name in _GONE:
            raise AttributeError(name)
        return Anything


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: Sequence[str] | None, target: Any = None) -> Any:
        package, _, module = name.partition(".")
        if package != "triton" or (module.startswith("_") and not module.startswith("_C")):
            return None  # libraries that import private modules work without them
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: Any) -> ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing: there is no code."""


_USERS = ("trl", "liger_kernel")  # libraries that look for Triton once, when they are imported


def _drop_users() -> None:
    """Drop libraries that were imported before Triton was available, so that they are imported again."""
    kernels = sys.modules.get("trl.kernels.chunked_logprob")
    if kernels is None or getattr(kernels, "_TRITON_AVAILABLE", True):
        return
    for name in [n for n in sys.modules if n.partition(".")[0] in _USERS]:
        del sys.modules[name]
    available: Any = getattr(sys.modules.get("transformers.utils.import_utils"), "is_triton_available", None)
    if available is not None:
        available.cache_clear()


@contextmanager
def launches_nothing() -> Iterator[None]:
    """Make Triton importable and its kernels do nothing for the length of the block, unless it is so already."""
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        yield
        return
    if importlib.util.find_spec("triton") is None:
        finder = _Finder()
        sys.meta_path.append(finder)
        _drop_users()
        try:
            with patched(torch.library, {"wrap_triton": _wrap_triton}):
                yield
        finally:
            sys.meta_path.remove(finder)
            for name in [n for n, m in sys.modules.items() if isinstance(m, _Module)]:
                del sys.modules[name]
        return
    from triton.runtime.autotuner import Autotuner, Heuristics
    from triton.runtime.jit import JITFunction

    nothing = {"run": lambda self, *args, **words: after_kernel(*args, *words.values())}
    with patched(JITFunction, nothing), patched(Autotuner, nothing), patched(Heuristics, nothing):
        yield
