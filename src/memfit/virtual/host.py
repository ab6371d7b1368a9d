"""Large floating-point tensors on the host keep their pages untouched: memory that nobody writes is not there.

A model is often built and initialised on the host and then moved. Its weights never matter to a trace, so writes to
host tensors of a mebibyte and more are left out, at the dispatcher: a mode would change how gradients are accumulated.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from memfit.virtual.native import operator
from memfit.virtual.patching import patched

LARGE = 1 << 20  # bytes of a floating-point tensor that are no longer written
_WRITERS = (
    "uniform_", "normal_", "bernoulli_.float", "exponential_", "fill_.Scalar", "fill_.Tensor", "zero_", "copy_", "clamp_",
    "mul_.Tensor", "add_.Tensor", "div_.Tensor", "sub_.Tensor", "erfinv_", "normal.out", "mul.out", "add.out",
)  # fmt: skip

_RANDOM = (
    "uniform_", "normal_", "xavier_uniform_", "xavier_normal_", "kaiming_uniform_", "kaiming_normal_"
)  # of torch.nn.init  # fmt: skip


def untouched(t: Tensor) -> bool:
    """Whether writes to a tensor are left out."""
    return t.is_floating_point() and t.numel() * t.element_size() >= LARGE and t.device.type == "cpu"


def _kernel(op: Any) -> Callable[..., Any]:
    """The operator's own kernel, left out where it would write to a large tensor."""
    real = torch.library.get_kernel(op, "CPU").call_boxed
    second = len(op._schema.arguments) > 1 and str(op._schema.arguments[1].type) == "Tensor"
    into = "out" if op._schema.arguments[-1].is_out else ""

    def kernel(keys: Any, *args: Any, **kwargs: Any) -> Any:
        written = kwargs[into] if into else args[0]
        if untouched(written):
            return written
        if second and not isinstance(args[1], Tensor):  # numbers arrive as themselves
            args = (args[0], torch.scalar_tensor(args[1], dtype=_dtype(args[1])), *args[2:])
        return real(keys, *args, **kwargs)

    return kernel


def _dtype(number: Any) -> torch.dtype:
    return {bool: torch.bool, int: torch.int64, complex: torch.complex128}.get(type(number), torch.float64)


@contextmanager
def no_random_weights() -> Iterator[None]:
    """Parameters on the host are not initialised at random: nothing reads them, and drawing numbers takes its time."""

    def left_out(real: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda tensor, *args, **kw: tensor if tensor.device.type == "cpu" else real(tensor, *args, **kw)

    with patched(torch.nn.init, {name: left_out(getattr(torch.nn.init, name)) for name in _RANDOM}):
        yield


@contextmanager
def hollow_host() -> Iterator[None]:
    """While the card is active."""
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch warns of every kernel that is replaced
        for name in _WRITERS:
            op = operator(name)
            library.impl(name, _kernel(op), "CPU", with_keyset=True)
    init = torch.nn.init._no_grad_trunc_normal_  # looks at what it has drawn
    words = {"_no_grad_trunc_normal_": lambda t, *args, **kwargs: t if untouched(t) else init(t, *args, **kwargs)}
    try:
        with patched(torch.nn.init, words):
            yield
    finally:
        library._destroy()
