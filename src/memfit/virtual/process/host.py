"""Leave large floating-point tensors on the host unwritten: pages that nobody writes take no memory.

A model is often built and initialised on the host and then moved. Its weights never matter to a trace, so writes to
host tensors of a mebibyte and more are left out, at the dispatcher: a mode would change how gradients are accumulated.
"""

from __future__ import annotations

import math
import mmap
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor

from memfit.virtual.device.host_copies import blank
from memfit.virtual.device.native_functions import operator
from memfit.virtual.device.shapes import as_tensors
from memfit.virtual.patching import patched

HUGE = 1 << 30  # bytes from which a tensor's memory is not reserved on the host
_NO_RESERVE = 0x4000  # MAP_NORESERVE of Linux, which Python's mmap lacks
_CAT = torch.library.get_kernel(operator("cat"), "CPU")
LARGE = 1 << 20  # bytes from which a floating-point tensor is not written
_WRITERS = (
    "uniform_", "normal_", "bernoulli_.float", "exponential_", "fill_.Scalar", "fill_.Tensor", "zero_", "copy_",
    "clamp_", "mul_.Tensor", "add_.Tensor", "div_.Tensor", "sub_.Tensor", "erfinv_", "normal.out", "mul.out", "add.out",
)  # fmt: skip

LONG = 1 << 32  # multiplications from which a product of matrices on the host takes seconds
_PRODUCTS = {"mm": 0, "addmm": 1, "bmm": 0, "baddbmm": 1}  # operator -> position of the first matrix
# decompositions of matrices: of large ones they take minutes, of weights that nobody initialised they may not exist
_DECOMPOSED = ("_linalg_svd", "linalg_qr", "_linalg_eigh", "linalg_inv_ex", "_linalg_solve_ex")
_OVERWRITERS = ("uniform_", "normal_", "bernoulli_", "exponential_", "fill_", "zero_", "copy_")  # read nothing before

# functions of torch.nn.init
_RANDOM = ("uniform_", "normal_", "xavier_uniform_", "xavier_normal_", "kaiming_uniform_", "kaiming_normal_")


def untouched(t: Tensor) -> bool:
    """Return whether writes to a tensor are left out."""
    return t.is_floating_point() and t.numel() * t.element_size() >= LARGE and t.device.type == "cpu"


def _kernel(op: Any) -> Callable[..., Any]:
    """Return the operator's own kernel, skipped where it would write to a large tensor."""
    real = torch.library.get_kernel(op, "CPU").call_boxed
    operands = [i for i, argument in enumerate(op._schema.arguments[:2]) if str(argument.type) == "Tensor"]
    into = "out" if op._schema.arguments[-1].is_out else ""
    overwrites = bool(into) or op._schema.name.removeprefix("aten::") in _OVERWRITERS

    def kernel(keys: Any, *args: Any, **kwargs: Any) -> Any:
        written = kwargs[into] if into else args[0]
        if untouched(written):
            if overwrites:
                blank(written)
            return written
        if not all(isinstance(args[i], Tensor) for i in operands):  # numbers stand in the place of tensors
            args = as_tensors(op, args)
        return real(keys, *args, **kwargs)

    return kernel


def _product(op: Any, first: int) -> Callable[..., Any]:
    """Return the kernel of a product of matrices that gives zeros where it would take long, of weights most often."""
    real = torch.library.get_kernel(op, "CPU").call_boxed

    def kernel(keys: Any, *args: Any, **kwargs: Any) -> Any:
        one, other = args[first], args[first + 1]
        if one.numel() * other.shape[-1] < LONG or not one.is_floating_point():
            return real(keys, *args, **kwargs)
        return room((*one.shape[:-1], other.shape[-1]), one.dtype)

    return kernel


def _decomposition(op: Any) -> Callable[..., Any]:
    """Return the kernel of a decomposition that gives zeros where it would take long, or where there is none."""
    real = torch.library.get_kernel(op, "CPU").call_boxed

    def kernel(keys: Any, matrix: Tensor, *args: Any, **kwargs: Any) -> Any:
        if matrix.numel() * matrix.shape[-1] < LONG // 16:
            with suppress(torch.linalg.LinAlgError):  # type: ignore[attr-defined]
                found = real(keys, matrix, *args, **kwargs)
                if not any(t.any() for t in found if t.dtype == torch.int32):  # the codes of what failed
                    return found
        shapes = op(*(a.to("meta") if isinstance(a, Tensor) else a for a in (matrix, *args)), **kwargs)
        return tuple(room(t.shape, t.dtype) for t in shapes)

    return kernel


def _joined(keys: Any, *args: Any, **kwargs: Any) -> Any:
    """Concatenate large tensors without data, as where DeepSpeed flattens all weights of a model."""
    tensors = list(args[0])
    dtypes = {t.dtype for t in tensors}
    if len(dtypes) > 1 or sum(t.numel() * t.element_size() for t in tensors if t.is_floating_point()) < HUGE:
        return _CAT.call_boxed(keys, *args, **kwargs)
    return room(torch.cat([t.to("meta") for t in tensors], *args[1:], **kwargs).shape, *dtypes)


def room(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return a host tensor of zeros; a huge one reserves no memory, however little the host has."""
    size = math.prod(shape) * dtype.itemsize
    if size < HUGE or sys.platform != "linux":
        made = torch.empty(shape, dtype=dtype, device="cpu")
        blank(made)
        return made
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE)
    return torch.frombuffer(pages, dtype=dtype).view(shape)


@contextmanager
def no_random_weights() -> Iterator[None]:
    """Skip random initialisation of host parameters, which nothing reads and which takes time."""

    def left_out(real: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda tensor, *args, **kw: tensor if tensor.device.type == "cpu" else real(tensor, *args, **kw)

    with patched(torch.nn.init, {name: left_out(getattr(torch.nn.init, name)) for name in _RANDOM}):
        yield


def _look_up_again(ops: Sequence[Any]) -> None:
    """Clear the Python dispatch cache of operators, which would call a kernel that no longer exists, and crash."""
    for op in ops:
        op._dispatch_cache.clear()


@contextmanager
def hollow_host() -> Iterator[None]:
    """Leave large host tensors unwritten for the length of the block."""
    library = torch.library.Library("aten", "IMPL")
    replaced = [operator(name) for name in (*_WRITERS, *_PRODUCTS, *_DECOMPOSED, "cat")]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch warns of every kernel that is replaced
        for name, op in zip(_WRITERS, replaced, strict=False):
            library.impl(name, _kernel(op), "CPU", with_keyset=True)
        for name, first in _PRODUCTS.items():
            library.impl(name, _product(operator(name), first), "CPU", with_keyset=True)
        for name in _DECOMPOSED:
            library.impl(name, _decomposition(operator(name)), "CPU", with_keyset=True)
        library.impl("cat", _joined, "CPU", with_keyset=True)
    init = torch.nn.init._no_grad_trunc_normal_  # reads the numbers it has drawn
    words = {"_no_grad_trunc_normal_": lambda t, *args, **kwargs: t if untouched(t) else init(t, *args, **kwargs)}
    try:
        _look_up_again(replaced)
        with patched(torch.nn.init, words):
            yield
    finally:
        library._destroy()
        _look_up_again(replaced)
