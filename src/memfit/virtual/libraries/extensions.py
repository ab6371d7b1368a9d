"""C++ and CUDA extensions that a script builds when it runs: known ones are stood in for, others refused by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

from torch import Tensor

from memfit.errors import Unsupported
from memfit.virtual.patching import patched

HINT = (
    "a trace launches no kernels: take the path in plain PyTorch, or declare its operators in Python "
    "(torch.library.custom_op with register_fake), which gives their shapes"
)


def _share_storage(dst: Tensor, src: Tensor) -> None:
    """Give the bytes of a recomputed output to the tensor whose own were freed, as Megatron-LM's extension does."""
    into, given = dst.untyped_storage(), src.untyped_storage()
    size = given.nbytes()
    given.resize_(0)
    into.resize_(size)


_KNOWN = {"share_storage_ext": SimpleNamespace(share_storage=_share_storage)}  # Megatron-LM's CheckpointWithoutOutput


@contextmanager
def extensions_refused(module: ModuleType) -> Iterator[None]:
    """Refuse what `torch.utils.cpp_extension` would compile: load, load_inline, and builds of setuptools."""

    def refused(function: str) -> Callable[..., Any]:
        def refuse(name: Any = "", *_: Any, **__: Any) -> Any:
            if isinstance(name, str) and name in _KNOWN:
                return _KNOWN[name]
            which = f" {name}" if isinstance(name, str) and name else ""
            raise Unsupported(f"the extension{which} is compiled at run time ({function}), for a real card", hint=HINT)

        return refuse

    with (
        patched(module, {name: refused(name) for name in ("load", "load_inline")}),
        patched(module.BuildExtension, {"build_extensions": lambda self: refused("BuildExtension")()}),
    ):
        yield
