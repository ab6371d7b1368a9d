"""Norms, activations, softmax, dropout and rotary embeddings of Transformer Engine: outputs and workspaces.

normalization.cpp, activation.cpp, bias.cpp, softmax.cpp, dropout.cpp and apply_rope.cpp of 2.17.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from memfit.virtual.device.dispatch import current
from memfit.virtual.libraries.transformer_engine.quantizers import create, empty, kind_of, written

_NORMS = ("Float8Quantizer",)  # recipes whose cast is part of the norm's kernel
_ACTIVATIONS = ("Float8Quantizer", "MXFP8Quantizer")
# Blocks of a norm's backward kernel that a multiprocessor holds: from the registers that the compiler gave it, which
# the source does not say. Each block sums the gradients of weight and bias in fp32.
_BLOCKS = 2
_ROWS = 4  # rows a block of the general kernels takes (WARPS_M)


# --- norms ---


def layernorm_fwd(
    input: Tensor, weight: Tensor, bias: Tensor | None, eps: float, ln_out: Any, quantizer: Any, otype: Any,
    sm_margin: int, zero_centered_gamma: bool,
) -> list[Any]:  # fmt: skip
    """Return the output, and means and inverse deviations of all rows."""
    rows = input.numel() // input.shape[-1]
    mean, deviation = (empty((rows,), torch.float32) for _ in range(2))
    return [_normed(input, ln_out, quantizer, otype), mean, deviation]


def rmsnorm_fwd(
    input: Tensor, weight: Tensor, eps: float, ln_out: Any, quantizer: Any, otype: Any, sm_margin: int,
    zero_centered_gamma: bool,
) -> list[Any]:  # fmt: skip
    """Return the output, None, and inverse deviations of all rows."""
    deviation = empty((input.numel() // input.shape[-1],), torch.float32)
    return [_normed(input, ln_out, quantizer, otype), None, deviation]


def _normed(input: Tensor, out: Any, quantizer: Any, dtype: Any) -> Any:
    if quantizer is not None and kind_of(quantizer) in _NORMS:
        quantizer.optimize_for_gemm = False
    return written(quantizer, input.shape, dtype, _NORMS, out)


def layernorm_bwd(
    dz: Tensor, x: Tensor, mu: Tensor, rsigma: Tensor, gamma: Tensor, sm_margin: int, zero_centered_gamma: bool
) -> list[Tensor]:
    """Return gradients of input, weight and bias."""
    return _norm_gradients(dz, x, gamma, sm_margin, parameters=2)


def rmsnorm_bwd(
    dz: Tensor, x: Tensor, rsigma: Tensor, gamma: Tensor, sm_margin: int, zero_centered_gamma: bool
) -> list[Tensor]:
    """Return gradients of input and weight."""
    return _norm_gradients(dz, x, gamma, sm_margin, parameters=1)


def rmsnorm_bwd_add(
    dz: Tensor, x: Tensor, add: Tensor, rsigma: Tensor, gamma: Tensor, sm_margin: int, zero_centered_gamma: bool
) -> list[Tensor]:
    """Return gradients of input and weight, with another gradient added to the first."""
    return _norm_gradients(dz, x, gamma, sm_margin, 1, add)


def _norm_gradients(dz: Tensor, x: Tensor, gamma: Tensor, margin: int, parameters: int, *more: Tensor) -> list[Tensor]:
    """Return the gradients; parts of those of the parameters are summed in a workspace."""
    read = [t.contiguous() for t in (dz, x, *more)]
    made = [torch.empty_like(read[1]), *(torch.empty_like(gamma) for _ in range(parameters))]
    width = x.shape[-1]
    blocks = min((current().multiprocessors - margin) * _BLOCKS, -(-(x.numel() // width) // _ROWS))
    workspace = empty((parameters * blocks * width,), torch.float32)
    del read, workspace
    return made


# --- activations ---


def _activation(divisor: int) -> Callable[..., Any]:
    """Return an activation; a gated one halves the last dimension."""

    def function(input: Tensor, quantizer: Any, *_: Any, **__: Any) -> Any:
        input = input.contiguous()
        return written(quantizer, (*input.shape[:-1], input.shape[-1] // divisor), input.dtype, _ACTIVATIONS)

    return function


def _activation_gradient(grad: Tensor, fwd_input: Tensor, quantizer: Any, *_: Any, **__: Any) -> Any:
    read = grad.contiguous(), fwd_input.contiguous()
    return written(quantizer, read[1].shape, read[1].dtype, _ACTIVATIONS)


def _with_bias_gradient(grad: Tensor, fwd_input: Tensor, quantizer: Any) -> list[Any]:
    """Return the gradient of a bias, and that of the activation's input."""
    read = grad.contiguous(), fwd_input.contiguous()
    out = create(quantizer, read[1].shape, read[0].dtype)
    bias = empty(read[1].shape[-1:], read[0].dtype)
    if kind_of(quantizer) not in _ACTIVATIONS:
        full = empty(read[1].shape, read[0].dtype)
        torch.sum(full.reshape(-1, full.shape[-1]), 0, out=bias)
    return [bias, out]


_PLAIN, _GATED = ("gelu", "qgelu", "relu", "srelu", "silu"), ("glu", "geglu", "qgeglu", "reglu", "sreglu", "swiglu")
ACTIVATIONS: dict[str, Callable[..., Any]] = {
    **{name: _activation(1) for name in _PLAIN},
    **{name: _activation(2) for name in (*_GATED, "clamped_swiglu")},
    **{f"d{name}": _activation_gradient for name in (*_PLAIN, *_GATED)},
    **{f"dbias_d{name}": _with_bias_gradient for name in _PLAIN},
    "clamped_dswiglu": _activation_gradient,
}


# --- softmax: the gradient is written over the one that comes in ---


def _softmax(input: Tensor, *_: Any) -> Tensor:
    read = input.contiguous()
    return empty(read.shape, read.dtype)


def _softmax_gradient(output_grad: Tensor, softmax_results: Tensor, *_: Any) -> Tensor:
    softmax_results.contiguous()
    return output_grad.contiguous()


_SOFTMAXES = ("scaled", "scaled_masked", "scaled_upper_triang_masked", "scaled_aligned_causal_masked")
SOFTMAXES: dict[str, Callable[..., Tensor]] = {
    **{f"{name}_softmax_forward": _softmax for name in _SOFTMAXES},
    **{f"{name}_softmax_backward": _softmax_gradient for name in _SOFTMAXES},
}


# --- dropout ---


def dropout_fwd(input: Tensor, dropout_probability: float, out: Tensor | None = None) -> list[Tensor]:
    """Return the output and a mask of one bit an element."""
    out = empty(input.shape, input.dtype) if out is None else out
    mask = empty((input.numel() // 8,), torch.uint8)
    empty((2,), torch.int64)
    return [out, mask]


def dropout_bwd(
    grad_output: Tensor, mask: Tensor, dropout_probability: float, grad_input: Tensor | None = None
) -> Tensor:
    """Return the gradient of the input."""
    return torch.empty_like(grad_output) if grad_input is None else grad_input


# --- rotary embeddings ---


def rotated(input: Tensor, *_: Any) -> Tensor:
    """fused_rope_forward, fused_rope_backward: a contiguous tensor of the same shape."""
    return empty(input.shape, input.dtype)


def fused_qkv_rope_forward(
    qkv_input: Tensor, q_freqs: Tensor, k_freqs: Tensor, start_positions: Any, qkv_split_arg_list: Sequence[int],
    *_: Any,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return queries, keys and values of the projection [.., groups, their widths together]."""
    first, second, groups = qkv_input.shape[:3]
    of_q, of_k, of_v = qkv_split_arg_list
    heads = groups * of_q // of_k
    q, k, v = (
        empty((first, second, *shape), qkv_input.dtype) for shape in ((heads, of_k), (groups, of_k), (groups, of_v))
    )
    return q, k, v


def fused_qkv_rope_backward(
    q_grad_out: Tensor, k_grad_out: Tensor, v_grad_out: Tensor, q_freqs: Tensor, k_freqs: Tensor,
    qkv_split_arg_list: Sequence[int], *_: Any,
) -> Tensor:  # fmt: skip
    """Return the gradient of the projection."""
    heads = sum(t.shape[2] for t in (q_grad_out, k_grad_out, v_grad_out))
    width = sum(qkv_split_arg_list)
    shape = (*q_grad_out.shape[:2], heads * q_grad_out.shape[3] // width, width)
    return empty(shape, q_grad_out.dtype)


def swap_first_dims(tensor: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Return a copy with the first two dimensions exchanged."""
    shape = (tensor.shape[1], tensor.shape[0], *tensor.shape[2:])
    tensor = tensor.contiguous()
    assert math.prod(shape) == tensor.numel()
    return empty(shape, tensor.dtype) if out is None else out
