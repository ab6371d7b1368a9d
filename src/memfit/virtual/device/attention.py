"""scaled_dot_product_attention on the virtual GPU: a composite operator that calls the kernel PyTorch would choose.

PyTorch's own composite takes the choice from a dispatch stub, which builds without CUDA lack. It is rewritten here from
aten/src/ATen/native/transformers/attention.cpp of PyTorch 2.13; tables.cuda_kernels.sdpa_kernel chooses the kernel.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from memfit.tables.cuda_kernels import SdpaCall, SdpaKernel, sdpa_kernel

aten = torch.ops.aten
_DTYPES: dict[torch.dtype, Literal["bf16", "fp16", "fp32"]] = {
    torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"
}  # fmt: skip

# SDPBackend -> kernel, and the order that PyTorch begins with (sdp_priority_order of Context.h)
_RANKED: dict[int, SdpaKernel] = {0: "math", 1: "flash", 2: "efficient", 3: "cudnn"}
_OWN_ORDER = [1, 2, 0, 3, 4]


def _kernel(
    capability: tuple[int, int], q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float, causal: bool,
    enable_gqa: bool,
) -> SdpaKernel:  # fmt: skip
    """Return the kernel for q: [B, N, S, H] and k, v: [B, K, S, H], of those that the program has left enabled."""
    flags = torch.backends.cuda
    enabled = {
        "cudnn": flags.cudnn_sdp_enabled(), "flash": flags.flash_sdp_enabled(),
        "efficient": flags.mem_efficient_sdp_enabled()
    }  # fmt: skip
    if q.dtype not in _DTYPES or not _dense(q, k, v, mask):
        return "math"
    fewer = q.shape[-3] != k.shape[-3]
    call = SdpaCall(
        capability=capability, dtype=_DTYPES[q.dtype], head_dim=q.shape[-1], value_dim=v.shape[-1],
        masked=mask is not None,
        grouped=enable_gqa and fewer, broadcast=fewer and not enable_gqa, dropout=dropout,
        needs_grad=torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, v)),
        fits_cudnn=mask is None or _takes_mask(mask, q, k), queries=q.shape[-2], keys=k.shape[-2], causal=causal,
    )  # fmt: skip
    return sdpa_kernel(call, [kernel for kernel, on in enabled.items() if on], _order())


def _order() -> list[SdpaKernel] | None:
    """Return the order that the program has set; None for PyTorch's own, which differs by card."""
    ranked = torch._C._get_sdp_priority_order()
    return None if ranked == _OWN_ORDER else [_RANKED[n] for n in ranked if n in _RANKED]


def _dense(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> bool:
    """Return whether any fused kernel can read the operands as they lie.

    Source: check_tensor_shapes, check_nonzero_sequence_lengths_dense, check_batch_size_and_num_heads_dense and
    check_last_dim_stride_equals_1_dense of sdp_utils_cpp.h. A mask that is expanded over the keys is none they read.
    """
    if not q.dim() == k.dim() == v.dim() == 4 or 0 in (q.shape[-2], k.shape[-2]):
        return False
    alike = q.shape[0] == k.shape[0] == v.shape[0] and k.shape[1] == v.shape[1]
    return alike and all(t is None or t.stride(-1) == 1 for t in (q, k, v, mask))


def _takes_mask(mask: Tensor, q: Tensor, k: Tensor) -> bool:
    """Return whether cuDNN takes a mask: one without gradient, of [Q, K] or [B, N, Q, K], each 1 or as the queries'.

    Source: check_attn_mask_shape of sdp_utils_cpp.h, which only cuDNN's constraints hold.
    """
    full = (*q.shape[:-1], k.shape[-2])
    fits = all(n in (1, most) for n, most in zip(mask.shape, full[-mask.dim() :], strict=True))
    return not mask.requires_grad and mask.dim() in (2, 4) and fits


def sdpa(
    capability: tuple[int, int], q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float, causal: bool,
    scale: float | None, grouped: bool,
) -> Tensor:  # fmt: skip
    """Return the output [B, N, S, Hv], through the autograd of the chosen kernel."""
    kernel = _kernel(capability, q, k, v, mask, dropout, causal, grouped)
    keep = torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, v))
    mask = _as_float(mask, q)
    if kernel == "flash":
        return _flash(q, k, v, dropout, causal, scale)
    if kernel == "cudnn":
        return aten._scaled_dot_product_cudnn_attention(q, k, v, mask, keep, dropout, causal, False, scale=scale)[0]
    if kernel == "efficient":
        bias = _padded_mask(mask, q, k)
        return aten._scaled_dot_product_efficient_attention(q, k, v, bias, keep, dropout, causal, scale=scale)[0]
    return aten._scaled_dot_product_attention_math(q, k, v, mask, dropout, causal, scale=scale, enable_gqa=grouped)[0]


def _as_float(mask: Tensor | None, q: Tensor) -> Tensor | None:
    """Make a boolean mask one of the queries' dtype, at each call, as convert_boolean_attn_mask does."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.where(mask, torch.scalar_tensor(0.0, dtype=q.dtype, device=q.device), -math.inf)


def _padded_mask(mask: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
    """Align the mask's rows to 8 elements and expand it, as preprocess_mask does."""
    if mask is None:
        return None
    align = 8
    if mask.stride(-1) != 1 or any(mask.stride(i) % align for i in range(mask.dim() - 1)):
        keys = mask.shape[-1]
        mask = pad(mask, (0, align - keys % align))[..., :keys]
    return mask.expand(q.shape[0], q.shape[1], q.shape[2], k.shape[2])


def _flash(q: Tensor, k: Tensor, v: Tensor, dropout: float, causal: bool, scale: float | None) -> Tensor:
    width = q.shape[-1]
    scale = width**-0.5 if scale is None else scale
    if width % 8:
        q, k, v = (pad(t, (0, 8 - width % 8)) for t in (q, k, v))
    out = aten._scaled_dot_product_flash_attention(q, k, v, dropout, causal, False, scale=scale)[0]
    return out[..., :width] if width % 8 else out
