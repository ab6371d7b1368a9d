"""torch.cuda.FloatTensor and its like: constructors older than `device="cuda"`, which need a build with CUDA."""

from __future__ import annotations

import functools
from collections.abc import Callable
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

_NAMES = tuple(name for name in vars(torch.cuda) if name.endswith("Tensor"))


class _OldType(type):
    """A tensor type of torch.cuda that constructs tensors; `real` is PyTorch's own, which answers everything else."""

    real: Any

    def __call__(cls, *args: Any, device: Any = "cuda") -> Tensor:
        """Return a tensor: of sizes, of the values of a sequence, or one that shares the memory of another."""
        where: dict[str, Any] = {"dtype": cls.real.dtype, "device": device}
        first = args[0] if args else 0
        if isinstance(first, Tensor):
            if not isinstance(first, cls.real):
                raise TypeError(f"expected torch.cuda.{cls.__name__} (got {first.type()})")
            return first.detach()
        if isinstance(first, int | torch.Size):
            return torch.empty(*args or (0,), **where)
        return torch.tensor(first, **where)

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, cls.real)

    def __getattr__(cls, name: str) -> Any:
        return getattr(cls.real, name)


def _real(kind: Any) -> Any:
    return kind.real if isinstance(kind, _OldType) else kind


def _in_old_words(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return Tensor.type, which takes PyTorch's own types only."""

    @functools.wraps(method)
    def convert(self: Tensor, dtype: Any = None, *args: Any, **words: Any) -> Any:
        return method(self, _real(dtype), *args, **words)

    return convert


def _set_default_tensor_type(kind: Any, /) -> None:
    """Replace torch.set_default_tensor_type, which sets the type and the device of new tensors."""
    chosen = _real(attrgetter(kind.removeprefix("torch."))(torch) if isinstance(kind, str) else kind)
    if not chosen.is_cuda:
        torch._C._set_default_tensor_type(chosen)
    torch.set_default_dtype(chosen.dtype)
    torch.set_default_device("cuda" if chosen.is_cuda else None)


def old_types() -> list[tuple[Any, dict[str, Any]]]:
    """Return what to replace: owner and its attributes."""
    types = {name: _OldType(name, (), {"real": _real(getattr(torch.cuda, name))}) for name in _NAMES}
    return [
        (torch.cuda, types),
        (torch.Tensor, {"type": _in_old_words(torch.Tensor.type)}),
        (torch, {"set_default_tensor_type": _set_default_tensor_type}),
    ]
