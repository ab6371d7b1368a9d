"""Matrix products of Transformer Engine (gemm.cpp), in workspaces that its Python allocates."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from memfit.errors import Unsupported
from memfit.virtual.device.dispatch import after_kernel
from memfit.virtual.libraries.transformer_engine.quantizers import create, empty, kind_of, shape_of


def _product(a: Any, turn_a: bool, b: Any, turn_b: bool) -> tuple[int, ...]:
    """getGemmOutputShape: the product's rows are b's, its columns a's."""
    of_a, of_b = shape_of(a), shape_of(b)
    rows = of_b[-1:] if turn_b else of_b[:-1]
    return (*rows, math.prod(of_a[:-1]) if turn_a else of_a[-1])


def _swizzled(*sides: tuple[Any, bool]) -> list[Tensor]:
    """swizzle_scales_for_gemm: copies of MXFP8 scales that are not yet laid out as cuBLAS reads them."""
    copies = []
    for tensor, rowwise in sides:
        if getattr(tensor, "_with_gemm_swizzled_scales", True):
            continue
        scales = tensor._rowwise_scale_inv if rowwise else tensor._columnwise_scale_inv
        if scales is not None:
            copies.append(empty(scales.shape, scales.dtype))
    return copies


def _fused(a: Any, b: Any, quantizer: Any) -> bool:
    """Return whether the product is quantised as it is written: with delayed scaling and FP8 operands."""
    return kind_of(quantizer) == "Float8Quantizer" and any(hasattr(x, "_fp8_dtype") for x in (a, b))


def generic_gemm(
    a: Any, transa: bool, b: Any, transb: bool, d: Any, quantizer: Any, output_dtype: Any, bias: Tensor | None,
    bias_type: Any, gelu: bool, gelu_in: Tensor | None, grad: bool, workspace: Tensor, workspace_size: int,
    accumulate: bool, use_split_accumulator: bool, comm_overlap: Any = None, comm_type: Any = None,
    extra_output: Tensor | None = None, bulk_overlap: bool = False, alpha: float = 1.0, beta: float | None = None,
) -> list[Any]:  # fmt: skip
    """Multiply; return the product, the bias' gradient, the activation's input, and extra_output."""
    if comm_overlap is not None:
        raise Unsupported(
            "products that overlap with communication (user buffers) are not stood in for",
            hint="leave out --tp-comm-overlap",
        )
    shape = _product(a, transa, b, transb)
    dtype = a.dtype if output_dtype is None else output_dtype
    out = create(quantizer, shape, dtype) if d is None else d
    unfused = quantizer is not None and not _fused(a, b, quantizer)
    full = empty(shape, dtype) if unfused else out
    wide = full.dtype if isinstance(full, Tensor) else dtype
    bias_gradient = empty(shape_of(b)[-1:], wide) if bias is not None and grad else None
    given = bias.contiguous() if bias is not None and not grad else None
    activation = empty(shape, bias_type if hasattr(a, "_fp8_dtype") else wide) if gelu and not grad else None
    copies = _swizzled((a, transa), (b, not transb))
    if isinstance(out, Tensor):
        after_kernel(out)
    del full, given, copies
    return [out, bias_gradient, activation, extra_output]


def te_general_grouped_gemm(
    a: Sequence[Any], transa: bool, b: Sequence[Any], transb: bool, d: Sequence[Tensor] | None, d_type: Any,
    m_splits: Sequence[int] | None, bias: Sequence[Tensor], bias_type: Any, single_output: bool,
    pre_gelu_out: Sequence[Tensor], grad: bool, workspace: Sequence[Tensor], workspace_size: int, accumulate: bool,
    use_split_accumulator: bool, math_sm_count: int,
) -> Sequence[Tensor]:  # fmt: skip
    """Multiply every pair into its output, which Transformer Engine's Python made before."""
    copies = _swizzled(*((x, transa) for x in a), *((x, not transb) for x in b))
    after_kernel(list(d or ()), list(bias))
    del copies
    return bias


def get_num_cublas_streams() -> int:
    """Return over how many streams grouped products are spread; each has a workspace."""
    return 4
