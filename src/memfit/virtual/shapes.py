"""Output shapes of an operator: PyTorch's own shape functions on the meta device, asked once per set of shapes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, empty  # by value: DeepSpeed puts its own in torch's place

from memfit.errors import BadInput

Blueprint = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]  # shape, stride (elements), dtype
_META = torch.device("meta")


def describe(x: Any) -> Any:
    """A hashable description of an argument, tensors by their shape."""
    if isinstance(x, Tensor):
        return (x.shape, x.stride(), x.dtype, x.is_cuda)
    if isinstance(x, list | tuple):
        return tuple(describe(i) for i in x)
    return x


def to_meta(x: Any) -> Any:
    """The argument, with tensors of the card replaced by ones on the meta device."""
    if isinstance(x, Tensor):
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=_META) if x.is_cuda else x
    if isinstance(x, list | tuple):
        return type(x)(map(to_meta, x)) if type(x) in (list, tuple) else x
    return x


def blueprint(x: Any) -> Any:
    """A result with Blueprints in the place of tensors."""
    if isinstance(x, Tensor):
        return (tuple(x.shape), x.stride(), x.dtype)
    if isinstance(x, list | tuple):
        return [blueprint(i) for i in x]
    return x


def _depthwise(
    x: Tensor, weight: Tensor, _: Any, bias: Tensor | None, stride: Any, padding: Any, dilation: Any
) -> Tensor:
    return torch.ops.aten.convolution(x, weight, bias, stride, padding, dilation, False, [0, 0], x.shape[1])


def _wider(*args: Any, **words: Any) -> Tensor:
    """`mm`, `bmm`, `addmm` and `baddbmm` with the dtype of the result as last argument."""
    (*_, a, b), dtype = (x for x in args if isinstance(x, Tensor)), next(x for x in args if isinstance(x, torch.dtype))
    return empty((*a.shape[:-1], b.shape[-1]), dtype=dtype, device=_META)


def _grouped(a: Tensor, b: Tensor, offs: Tensor | None = None, bias: Any = None, out_dtype: Any = None) -> Tensor:
    """`_grouped_mm`, whose own shape function refuses what its CUDA kernel computes in other dtypes than bf16."""
    from torch._meta_registrations import _create_grouped_mm_output_tensor

    return _create_grouped_mm_output_tensor(a, b, offs, out_dtype)


def _per_channel(count: int) -> Any:
    """SyncBatchNorm's sums: one number per channel, in the 32 bits that they are taken in, or more."""

    def sums(x: Tensor, *_: Any, **__: Any) -> tuple[Tensor, ...]:
        wide = torch.promote_types(x.dtype, torch.float32)
        return tuple(empty(x.shape[1], dtype=wide, device=_META) for _ in range(count))

    return sums


def _alike(x: Tensor, *_: Any, **__: Any) -> Tensor:
    return torch.empty_like(x)


# operators of CUDA alone that have no shape function, or a stricter one, in some version at least, by one that returns the same
_TWINS: dict[str, Any] = {
    "aten._conv_depthwise2d.default": _depthwise,
    "aten._grouped_mm.default": _grouped,
    "aten.batch_norm_stats.default": _per_channel(2),
    "aten.batch_norm_gather_stats_with_counts.default": _per_channel(2),
    "aten.batch_norm_backward_reduce.default": _per_channel(4),
    "aten.batch_norm_elemt.default": _alike,
    "aten.batch_norm_backward_elemt.default": _alike,
    **{f"aten.{name}.dtype{out}": _wider for name in ("mm", "bmm", "addmm", "baddbmm") for out in ("", "_out")},
}


class Shapes:
    """Remembers what each operator returned for each set of argument shapes."""

    def __init__(self) -> None:
        self._known: dict[Any, Any] = {}

    def __call__(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What `op` returns: Blueprints in the place of tensors, in lists as it returns them."""
        try:
            key = (op, describe(args), tuple((k, describe(v)) for k, v in kwargs.items()))
            found = self._known.get(key)
        except TypeError:  # an argument that cannot be hashed, such as a generator
            key, found = None, None
        if found is None:
            found = self._ask(op, args, kwargs)
            if key is not None:
                self._known[key] = found
        return found

    def _ask(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        words = {k: to_meta(v) for k, v in kwargs.items() if not isinstance(v, torch.Generator)}
        if words.get("device") is not None:
            words["device"] = _META
        try:
            return blueprint(_TWINS.get(str(op), op)(*to_meta(args), **words))
        except NotImplementedError as error:
            raise BadInput(
                f"the virtual GPU does not know what {op} returns",
                hint="register a meta kernel for it (torch.library.register_fake), or leave it out of the traced step",
            ) from error
