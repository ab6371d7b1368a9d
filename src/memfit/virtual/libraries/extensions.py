"""C++ and CUDA extensions that a script builds when it runs: refused by name before anything is compiled."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any, NoReturn

from memfit.errors import Unsupported
from memfit.virtual.patching import patched

HINT = (
    "a trace launches no kernels: take the path in plain PyTorch, or declare its operators in Python "
    "(torch.library.custom_op with register_fake), which gives their shapes"
)


@contextmanager
def extensions_refused(module: ModuleType) -> Iterator[None]:
    """Refuse what `torch.utils.cpp_extension` would compile: load, load_inline, and builds of setuptools."""

    def refused(function: str) -> Callable[..., NoReturn]:
        def refuse(name: Any = "", *_: Any, **__: Any) -> NoReturn:
            which = f" {name}" if isinstance(name, str) and name else ""
            raise Unsupported(f"the extension{which} is compiled at run time ({function}), for a real card", hint=HINT)

        return refuse

    with (
        patched(module, {name: refused(name) for name in ("load", "load_inline")}),
        patched(module.BuildExtension, {"build_extensions": lambda self: refused("BuildExtension")()}),
    ):
        yield
