"""Output shapes of operators, from PyTorch's own meta kernels, computed once per set of argument shapes."""

from __future__ import annotations

import gc
import sys
from typing import Any

import torch
from torch import Tensor, empty  # by value: DeepSpeed puts its own in torch's place
from torch._prims_common import suggest_memory_format

from memfit.errors import BadInput

Blueprint = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]  # shape, stride (elements), dtype
_META = torch.device("meta")
MOST_ON_HOST = 1 << 24  # elements in the arguments of an operator that may be run on the host for its output shapes


def describe(x: Any) -> Any:
    """Return a hashable description of an argument, with tensors described by their shape."""
    if isinstance(x, Tensor):
        return (x.shape, x.stride(), x.dtype, x.is_cuda)
    if isinstance(x, list | tuple):
        return tuple(describe(i) for i in x)
    return x


def to_meta(x: Any) -> Any:
    """Return the argument with the card's tensors replaced by tensors on the meta device."""
    if isinstance(x, Tensor):
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=_META) if x.is_cuda else x
    if isinstance(x, list | tuple):
        return type(x)(map(to_meta, x)) if type(x) in (list, tuple) else x
    return x


def blueprint(x: Any) -> Any:
    """Return a result with Blueprints in the place of tensors."""
    if isinstance(x, Tensor):
        return (tuple(x.shape), x.stride(), x.dtype)
    if isinstance(x, list | tuple):
        return [blueprint(i) for i in x]
    return x


def _depthwise(
    x: Tensor, weight: Tensor, _: Any, bias: Tensor | None, stride: Any, padding: Any, dilation: Any
) -> Tensor:
    return torch.ops.aten.convolution(x, weight, bias, stride, padding, dilation, False, [0, 0], x.shape[1])


def conv_layout(x: Tensor, weight: Tensor) -> torch.memory_format:
    """Return the memory format of cuDNN's results, its input's or its weight's (cudnn_conv_suggest_memory_format)."""
    lasts = {4: torch.channels_last, 5: torch.channels_last_3d}
    found = {suggest_memory_format(t) for t in (x, weight) if t.dim() == x.dim() and t.dtype != torch.float64}
    last = lasts.get(x.dim())
    return last if last is not None and last in found else torch.contiguous_format


def _convolution(x: Tensor, weight: Tensor, *args: Any, **words: Any) -> Tensor:
    made = torch.ops.aten.convolution(x, weight, *args, **words)
    return made.contiguous(memory_format=conv_layout(x, weight))


def _convolution_backward(
    grad: Tensor, x: Tensor, weight: Tensor, *args: Any, **words: Any
) -> tuple[Tensor | None, ...]:
    layout = conv_layout(x, weight)
    *made, bias = torch.ops.aten.convolution_backward(grad, x, weight, *args, **words)
    return (*(t if t is None else t.contiguous(memory_format=layout) for t in made), bias)


def _gru_cell(input_gates: Tensor, hidden_gates: Tensor, hx: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    """Return the state, and the five numbers per cell that the backward pass reads."""
    return torch.empty_like(hx), empty((hx.shape[0], hx.shape[1] * 5), dtype=hx.dtype, device=_META)


def _gru_cell_backward(grad: Tensor, workspace: Tensor, has_bias: bool) -> tuple[Tensor | None, ...]:
    count, hidden = grad.shape
    gates = [empty((count, 3 * hidden), dtype=grad.dtype, device=_META) for _ in range(2)]
    bias = [empty(3 * hidden, dtype=grad.dtype, device=_META) if has_bias else None for _ in range(2)]
    return (*gates, torch.empty_like(grad), *bias)


def _wider(*args: Any, **words: Any) -> Tensor:
    """Return the result of `mm`, `bmm`, `addmm` and `baddbmm` that are called with its dtype."""
    (*_, a, b), dtype = (x for x in args if isinstance(x, Tensor)), next(x for x in args if isinstance(x, torch.dtype))
    return empty((*a.shape[:-1], b.shape[-1]), dtype=dtype, device=_META)


def _grouped(a: Tensor, b: Tensor, offs: Tensor | None = None, bias: Any = None, out_dtype: Any = None) -> Tensor:
    """Return the result of `_grouped_mm`, whose own shape function refuses dtypes that the CUDA kernel takes."""
    from torch._meta_registrations import _create_grouped_mm_output_tensor

    return _create_grouped_mm_output_tensor(a, b, offs, out_dtype)


def _per_channel(count: int) -> Any:
    """Return a shape function for SyncBatchNorm's sums: one number per channel in fp32 or wider."""

    def sums(x: Tensor, *_: Any, **__: Any) -> tuple[Tensor, ...]:
        wide = torch.promote_types(x.dtype, torch.float32)
        return tuple(empty(x.shape[1], dtype=wide, device=_META) for _ in range(count))

    return sums


def by_cudnn(x: Tensor, weight: Tensor | None, training: bool) -> bool:
    """Return whether batch_norm is cuDNN's: images in fp32 or fp16 with fp32 weights (_select_batch_norm_backend)."""
    if weight is None or x.dim() < 3 or x.shape[0] > (880801 if training else 65535):
        return False
    return x.dtype == torch.float32 or (x.dtype == torch.float16 and weight.dtype == torch.float32)


def _batch_norm_backward(
    grad: Tensor, x: Tensor, weight: Tensor | None, mean: Any, var: Any, saved: Any, inverse: Any, train: bool,
    eps: float, mask: list[bool],
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Return the gradients that are asked for; cuDNN makes all of them."""
    dtype = x.dtype if weight is None else weight.dtype
    sums = [empty(x.shape[1], dtype=dtype, device=_META) for _ in range(2)]
    every = by_cudnn(x, weight, train)
    return tuple(t if every or asked else None for t, asked in zip((torch.empty_like(x), *sums), mask, strict=True))


def _log_sigmoid(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the result and a buffer that only the host's kernel fills (log_sigmoid_forward_cuda)."""
    return torch.empty_like(x), empty(0, dtype=x.dtype, device=_META)


def _alike(x: Tensor, *_: Any, **__: Any) -> Tensor:
    return torch.empty_like(x)


def _ctc_backward(_: Tensor, log_probs: Tensor, *__: Any, **___: Any) -> Tensor:
    return torch.empty_like(log_probs, memory_format=torch.contiguous_format)


def _svd(a: Tensor, full: bool = False, compute_uv: bool = True, **_: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return U by columns, and V's transpose by rows as cuSOLVER writes it; the host's LAPACK writes both by columns.

    A slice of its first rows is so contiguous, and keeps the whole alive (PEFT's PSOFT: 2 GiB of a model of 1B).
    """
    *batch, m, n = a.shape
    k = min(m, n)
    dtype = a.real.dtype if a.is_complex() else a.dtype
    values = empty((*batch, k), dtype=dtype, device=_META)
    if not compute_uv:
        return empty(0, dtype=a.dtype, device=_META), values, empty(0, dtype=a.dtype, device=_META)
    columns = m if full else k
    u = empty((*batch, columns, m), dtype=a.dtype, device=_META).mT
    return u, values, empty((*batch, n if full else k, n), dtype=a.dtype, device=_META)


# operators that lack a shape function in some version of PyTorch, or have a stricter one -> the function to use
_SHAPE_FUNCTIONS: dict[str, Any] = {
    "aten.convolution.default": _convolution,
    "aten.convolution_backward.default": _convolution_backward,
    "aten._conv_depthwise2d.default": _depthwise,
    "aten._thnn_fused_gru_cell.default": _gru_cell,
    "aten._thnn_fused_gru_cell_backward.default": _gru_cell_backward,
    "aten._grouped_mm.default": _grouped,
    "aten._linalg_svd.default": _svd,
    "aten.native_batch_norm_backward.default": _batch_norm_backward,
    "aten.log_sigmoid_forward.default": _log_sigmoid,
    "aten.batch_norm_stats.default": _per_channel(2),
    "aten.batch_norm_gather_stats_with_counts.default": _per_channel(2),
    "aten.batch_norm_backward_reduce.default": _per_channel(4),
    **{f"aten.{name}.default": _alike for name in (
        "_logcumsumexp", "logcumsumexp", "_standard_gamma", "_sample_dirichlet", "_standard_gamma_grad",
        "_dirichlet_grad", "batch_norm_elemt", "batch_norm_backward_elemt",
    )},
    **{f"aten._ctc_loss_backward.{overload}": _ctc_backward for overload in ("default", "Tensor")},
    **{f"aten.{name}.dtype{out}": _wider for name in ("mm", "bmm", "addmm", "baddbmm") for out in ("", "_out")},
}  # fmt: skip


def as_tensors(op: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Wrap numbers in the place of tensors: kernels receive plain numbers there, which few operators take."""
    wanted = [str(argument.type) == "Tensor" for argument in op._schema.arguments]
    numbers = (tensor and not isinstance(x, Tensor) and x is not None for x, tensor in zip(args, wanted, strict=False))
    dtypes = {bool: torch.bool, int: torch.int64, complex: torch.complex128}
    return tuple(
        torch.scalar_tensor(x, dtype=dtypes.get(type(x), torch.float64)) if number else x
        for x, number in zip(args, numbers, strict=True)
    )


def is_number_for_tensor(error: RuntimeError) -> bool:
    """Return whether an operator failed because it was given a number in the place of a tensor."""
    return "to Tensor" in str(error) or "of type 'Tensor'" in str(error)


def _on_host(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return what the host's kernel makes of zeros of these shapes; None if there is none or they are too large."""

    def zeros(x: Any) -> Any:
        if isinstance(x, Tensor):
            return torch.zeros(x.shape, dtype=x.dtype, device="cpu") if x.is_cuda else x
        return type(x)(map(zeros, x)) if type(x) in (list, tuple) else x

    if torch.Tag.dynamic_output_shape in op.tags:
        return None
    tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
    if sum(t.numel() for t in tensors) > MOST_ON_HOST or not all(t.is_contiguous() for t in tensors):
        return None
    try:
        made = op(*zeros(args), **{k: zeros(v) for k, v in kwargs.items() if not isinstance(v, torch.Generator)})
        parts = made if isinstance(made, list | tuple) else [made]
        return made if all(not isinstance(t, Tensor) or t.layout == torch.strided for t in parts) else None
    except (RuntimeError, NotImplementedError):
        return None


class Shapes:
    """A cache of what each operator returns for each set of argument shapes."""

    def __init__(self) -> None:
        self._known: dict[Any, Any] = {}

    def __call__(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return what `op` returns with Blueprints in the place of tensors, in lists as it returns them."""
        try:
            key = (op, describe(args), tuple((k, describe(v)) for k, v in kwargs.items()))
            found = self._known.get(key)
        except TypeError:  # an argument that cannot be hashed, such as a generator
            key, found = None, None
        if found is None:
            modules = len(sys.modules)
            found = self._computed(op, args, kwargs)
            if len(sys.modules) > modules:  # cycles of torch.fx.wrap's frames hold the whole stack with its tensors
                gc.collect(1)
            if key is not None:
                self._known[key] = found
        return found

    def _computed(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        words = {k: to_meta(v) for k, v in kwargs.items() if not isinstance(v, torch.Generator)}
        if words.get("device") is not None:
            words["device"] = _META
        function = _SHAPE_FUNCTIONS.get(str(op), op)
        try:
            return blueprint(function(*to_meta(args), **words))
        except RuntimeError as error:
            if not isinstance(error, NotImplementedError):
                if not is_number_for_tensor(error):
                    raise
                return blueprint(function(*to_meta(as_tensors(op, args)), **words))
            made = _on_host(op, args, kwargs)
            if made is not None:
                return blueprint(made)
            raise BadInput(
                f"the virtual GPU has no shape function for the outputs of {op}",
                hint="register a meta kernel for it (torch.library.register_fake), or leave it out of the traced step",
            ) from error
