"""Quantised tensors of Transformer Engine: the buffers that quantizer.cpp and cast.cpp allocate for each recipe.

A quantizer (a Python object) says whether a tensor is kept row by row, column by column or both. The tensors themselves
are Transformer Engine's Python classes, filled here with buffers.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from memfit.errors import Unsupported
from memfit.virtual.device.dispatch import after_kernel, current
from memfit.virtual.libraries.transformer_engine.enums import torch_dtype

Shape = Sequence[int]
_TENSORS = "transformer_engine.pytorch.tensor"


def empty(shape: Shape, dtype: Any, device: Any = "cuda", pin_memory: bool = False) -> Tensor:
    """Return a new tensor of a dtype of PyTorch's or Transformer Engine's."""
    return torch.empty(tuple(shape), dtype=torch_dtype(dtype), device=device, pin_memory=pin_memory)


def shape_of(x: Any) -> tuple[int, ...]:
    """Return the logical shape of a tensor or of one that is quantised, of which only the transpose may be there."""
    if isinstance(x, Tensor):
        return tuple(x.shape)
    transpose = getattr(x, "_transpose", None)
    if transpose is not None and x._data is None:
        return (*transpose.shape[1:], transpose.shape[0])
    return tuple(x.size())


def _up(number: int, step: int) -> int:
    return -(-number // step) * step


def _turned(shape: Shape) -> tuple[int, ...]:
    """Return the shape of the transpose, whose leading dimensions are taken as one."""
    return (*shape[-1:], *shape[:-1])


def _reads_any_layout() -> bool:
    """Return whether FP8 matrices need no transposed copy (nvte_is_non_tn_fp8_gemm_supported): Blackwell's do not."""
    return (10, 0) <= current().capability < (11, 0) or current().capability >= (13, 0)


# --- one function a recipe: shape -> the buffers of a quantised tensor, by the names of its Python class ---

Words = dict[str, Any]


def _per_tensor(quantizer: Any, shape: Shape, words: Words) -> Words:
    """Float8Quantizer, Float8CurrentScalingQuantizer: one scale, and before Blackwell a transposed copy."""
    either = _reads_any_layout()
    scale = empty((1,), torch.float32, **words)
    return {
        "fp8_scale_inv": scale,
        "data": empty(shape, torch.uint8, **words) if quantizer.rowwise_usage or either else None,
        "data_transpose": empty(_turned(shape), torch.uint8, **words)
        if quantizer.columnwise_usage and not either
        else None,
    }


def _by_row_and_column(
    quantizer: Any, shape: Shape, words: Words, scales: Callable[[bool], Shape], dtype: torch.dtype, turned: bool
) -> Words:
    """Return data and scales for both directions, as far as they are used."""
    made: Words = {}
    for direction, used in (("rowwise", quantizer.rowwise_usage), ("columnwise", quantizer.columnwise_usage)):
        columns = direction == "columnwise"
        found = _turned(shape) if columns and turned else shape
        made[f"{direction}_data"] = empty(found, torch.uint8, **words) if used else None
        made[f"{direction}_scale_inv"] = empty(scales(columns), dtype, **words) if used else None
    return made


def _mxfp8(quantizer: Any, shape: Shape, words: Words) -> Words:
    """MXFP8Quantizer: a scale of one byte for 32 elements, in tiles of 128 by 4."""
    rows, columns = math.prod(shape[:-1]), shape[-1]

    def scales(columnwise: bool) -> Shape:
        if columnwise:
            return _up(rows // 32, 4), _up(columns, 128)
        return _up(rows, 128), _up(columns // 32, 4)

    made = _by_row_and_column(quantizer, shape, words, scales, torch.uint8, turned=False)
    return {**made, "with_gemm_swizzled_scales": quantizer.optimize_for_gemm}


def _blockwise(quantizer: Any, shape: Shape, words: Words) -> Words:
    """Float8BlockQuantizer: an fp32 scale for 128 elements of a row or column, or for 128 by 128."""
    rows, columns, square = math.prod(shape[:-1]), shape[-1], quantizer.block_scaling_dim == 2

    def scales(columnwise: bool) -> Shape:
        across, along = (columns, rows) if columnwise else (rows, columns)
        if square:
            return -(-across // 128), _up(-(-along // 128), 4)
        return -(-along // 128), _up(across, 4)

    made = _by_row_and_column(quantizer, shape, words, scales, torch.float32, turned=True)
    return {**made, "is_2D_scaled": square}


# quantizer -> (buffers, module of its tensors, class of a tensor, class of its storage)
_RECIPES: dict[str, tuple[Callable[[Any, Shape, Words], Words], str, str, str]] = {
    "Float8Quantizer": (_per_tensor, "float8_tensor", "Float8Tensor", "Float8TensorStorage"),
    "Float8CurrentScalingQuantizer": (_per_tensor, "float8_tensor", "Float8Tensor", "Float8TensorStorage"),
    "MXFP8Quantizer": (_mxfp8, "mxfp8_tensor", "MXFP8Tensor", "MXFP8TensorStorage"),
    "Float8BlockQuantizer": (
        _blockwise, "float8_blockwise_tensor", "Float8BlockwiseQTensor", "Float8BlockwiseQTensorStorage",
    ),
}  # fmt: skip


def kind_of(quantizer: Any) -> str:
    """Return the name of a quantizer's class, '' without one. Raises Unsupported for one that is not stood in for."""
    if quantizer is None:
        return ""
    for cls in type(quantizer).__mro__:
        if cls.__name__ in _RECIPES:
            return cls.__name__
    raise Unsupported(
        f"Transformer Engine's {type(quantizer).__name__} is not stood in for",
        hint=f"its stand-in knows {', '.join(_RECIPES)}",
    )


def create(quantizer: Any, shape: Shape, dtype: Any, device: Any = "cuda", pin_memory: bool = False) -> Any:
    """Return a new tensor: as the quantizer keeps it, or of `dtype` without one."""
    shape, kind = tuple(shape), kind_of(quantizer)
    if not kind:
        return empty(shape, dtype, device, pin_memory)
    buffers, module, tensor, storage = _RECIPES[kind]
    words = buffers(quantizer, shape, {"device": device, "pin_memory": pin_memory})
    words |= {"fp8_dtype": quantizer.dtype, "quantizer": quantizer}
    if quantizer.internal:
        made = getattr(importlib.import_module(f"{_TENSORS}.storage.{module}_storage"), storage)
        return made(**words, fake_dtype=torch_dtype(dtype))
    made = getattr(importlib.import_module(f"{_TENSORS}.{module}"), tensor)
    strides = torch.empty(shape, device="meta").stride()
    return made(
        **words, shape=shape, stride=strides, dtype=torch_dtype(dtype), device=torch.device(device),
    )  # fmt: skip


def written(quantizer: Any, shape: Shape, dtype: Any, fused: Sequence[str], out: Any = None) -> Any:
    """Return what a kernel writes through a quantizer: straight if its kind is `fused`, else by way of a full copy."""
    kind = kind_of(quantizer)
    out = create(quantizer, shape, dtype) if out is None else out
    if kind and kind not in fused:
        largest = torch.zeros(1, device="cuda") if kind == "Float8CurrentScalingQuantizer" else None
        full = empty(shape, dtype)
        _scale_of(kind)
        del largest, full
    return out


def _scale_of(kind: str) -> None:
    """Allocate, and free, what casting needs: the largest magnitude and the scale of Float8CurrentScalingQuantizer."""
    if kind == "Float8CurrentScalingQuantizer":
        empty((2,), torch.float32)


def quantize(tensor: Tensor, quantizer: Any, output: Any = None, noop: Tensor | None = None) -> Any:
    """Cast a tensor into a new quantised one, or into `output`, whose missing buffers are made."""
    tensor = tensor.contiguous()
    kind = kind_of(quantizer)
    if output is None:
        output = create(quantizer, tensor.shape, tensor.dtype)
    else:
        _completed(output, quantizer)
    _scale_of(kind)
    return output


# names of a quantised tensor's buffers: (those of rows, those of columns)
_BUFFERS = {
    "fp8": ((("_data", "data"),), (("_transpose", "data_transpose"),)),
    "blocks": (
        (("_rowwise_data", "rowwise_data"), ("_rowwise_scale_inv", "rowwise_scale_inv")),
        (("_columnwise_data", "columnwise_data"), ("_columnwise_scale_inv", "columnwise_scale_inv")),
    ),
}


def _completed(output: Any, quantizer: Any) -> None:
    """convert_and_update_tensor: drop the buffers that the quantizer does not use, make those that are missing."""
    per_tensor = kind_of(quantizer).startswith("Float8") and hasattr(output, "_transpose")
    either = per_tensor and _reads_any_layout()
    rows, columns = _BUFFERS["fp8" if per_tensor else "blocks"]
    used = (quantizer.rowwise_usage or either, quantizer.columnwise_usage and not either)
    missing = [names for names, needed in zip((rows, columns), used, strict=True) if needed
               and getattr(output, names[0][0]) is None]  # fmt: skip
    if missing:
        buffers = _RECIPES[kind_of(quantizer)][0](quantizer, shape_of(output), {"device": "cuda"})
        for attribute, name in (pair for names in missing for pair in names):
            setattr(output, attribute, buffers[name])
    for names, needed in zip((rows, columns), used, strict=True):
        if not needed:
            for attribute, _ in names:
                setattr(output, attribute, None)
    if per_tensor:
        output._transpose_invalid = not used[1]


def dequantize(input: Any, otype: Any) -> Tensor:
    """Return the tensor in full."""
    return empty(shape_of(input), otype)


def multi_tensor_quantize(tensor_list: Sequence[Tensor], quantizer_list: Sequence[Any]) -> list[Any]:
    """Cast several tensors."""
    return [quantize(t, q) for t, q in zip(tensor_list, quantizer_list, strict=True)]


def split_quantize(
    tensor: Tensor, split_sections: Sequence[int], quantizer_list: Sequence[Any], disable_bulk_allocation: bool = False
) -> list[Any]:
    """Cast the parts of a tensor. Block-scaled parts share two buffers, one for rows and one for columns."""
    tensor = tensor.contiguous()
    shapes = [(rows, *tensor.shape[1:]) for rows in split_sections]
    kinds = {kind_of(q) for q in quantizer_list}
    if disable_bulk_allocation or len(kinds) != 1 or not kinds & {"MXFP8Quantizer", "Float8BlockQuantizer"}:
        return [create(q, shape, tensor.dtype) for q, shape in zip(quantizer_list, shapes, strict=True)]
    buffers, module, _, storage = _RECIPES[kinds.pop()]
    plans = [buffers(q, shape, {"device": "meta"}) for q, shape in zip(quantizer_list, shapes, strict=True)]
    for direction in ("rowwise", "columnwise"):
        names = [f"{direction}_data", f"{direction}_scale_inv"]
        if plans[0][names[0]] is not None:
            parts = [plan[name] for name in names for plan in plans]
            steps = [256] * len(plans) + [16] * len(plans)
            made = bulk_allocate([p.shape for p in parts], [p.dtype for p in parts], None, steps)
            for i, part in enumerate(made):
                plans[i % len(plans)][names[i // len(plans)]] = part
    made_class = getattr(importlib.import_module(f"{_TENSORS}.storage.{module}_storage"), storage)
    return [
        made_class(**plan, fp8_dtype=q.dtype, quantizer=q, fake_dtype=tensor.dtype)
        for plan, q in zip(plans, quantizer_list, strict=True)
    ]


def bulk_allocate(
    shapes: Sequence[Shape], dtypes: Sequence[torch.dtype], device: Any = None, alignments: Sequence[int] | None = None
) -> list[Tensor]:
    """Return tensors that lie in one buffer, each at a multiple of its alignment."""
    starts, end = [], 0
    for i, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=True)):
        start = _up(end, alignments[i] if alignments else dtype.itemsize)
        starts.append(start)
        end = start + math.prod(shape) * dtype.itemsize
    whole = empty((end,), torch.uint8, device or "cuda")
    return [
        whole[start : start + math.prod(shape) * dtype.itemsize].view(dtype).view(tuple(shape))
        for start, shape, dtype in zip(starts, shapes, dtypes, strict=True)
    ]


def fp8_transpose(input: Tensor, dtype: Any, *, out: Tensor | None = None) -> Tensor:
    """Return the transpose of FP8 data."""
    return empty(_turned(input.shape), torch.uint8) if out is None else out


def bgrad_quantize(input: Tensor, quantizer: Any) -> tuple[Tensor, Any]:
    """Return the gradient of a bias and the gradient itself, quantised."""
    gradient = input.contiguous()
    bias = empty(gradient.shape[-1:], gradient.dtype)
    kind = kind_of(quantizer)
    out = create(quantizer, gradient.shape, gradient.dtype) if kind else gradient
    if kind in ("", "Float8CurrentScalingQuantizer", "Float8BlockQuantizer"):
        torch.sum(gradient.reshape(-1, gradient.shape[-1]), 0, out=bias)
        _scale_of(kind)
    return bias, out


def no_output(*arguments: Any) -> None:
    """Write into tensors that are given, which become unknown."""
    after_kernel(*arguments)
