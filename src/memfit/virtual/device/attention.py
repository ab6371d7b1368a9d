"""scaled_dot_product_attention on the card: which kernel PyTorch would choose, and the composite code above it.

The C++ composite asks a dispatch stub for the choice that builds without CUDA lack, so it is written again here, from
aten/src/ATen/native/transformers/attention.cpp and cuda/sdp_utils.cpp of PyTorch 2.13.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import pad

aten = torch.ops.aten
_HALF = (torch.float16, torch.bfloat16)


def choose(
    capability: tuple[int, int], q: Tensor, k: Tensor, v: Tensor, masked: bool, dropout: float, grouped: bool
) -> str:
    """flash, efficient, cudnn or math, as the default order of PyTorch 2.13 settles it.

    q: [B, N, S, H]; k, v: [B, K, S, H]; grouped: enable_gqa with fewer heads of keys than of queries.
    """
    width, widest = q.shape[-1], max(q.shape[-1], v.shape[-1])
    if q.shape[-3] != k.shape[-3] and not grouped:  # check_batch_size_and_num_heads_dense: no fused kernel broadcasts
        return "math"
    enabled = torch.backends.cuda
    half, aligned = q.dtype in _HALF, width % 8 == 0 and v.shape[-1] % 8 == 0
    if capability[0] in (9, 10) and half and aligned and enabled.cudnn_sdp_enabled():
        whole = dropout == 0 or (dropout * 16) % 1 == 0
        if whole and widest <= (256 if capability[0] == 9 else 128) and not _needs_grad_beyond(capability, q, k, v):
            return "cudnn"
    if half and capability >= (8, 0) and not masked and widest <= 256 and enabled.flash_sdp_enabled():
        consumer = capability not in ((8, 0), (9, 0), (10, 0))
        needs_grad = any(t.requires_grad for t in (q, k, v))
        # consumer cards lack the shared memory for the backward of wide heads with dropout
        if width == v.shape[-1] and not (consumer and widest > 224 and dropout and needs_grad):
            return "flash"
    dtypes = (torch.float16, torch.float32) if capability < (8, 0) else (*_HALF, torch.float32)
    if q.dtype in dtypes and not grouped and enabled.mem_efficient_sdp_enabled():
        step = 4 if q.dtype == torch.float32 else 8
        if width % step == 0 and v.shape[-1] % step == 0:
            return "efficient"
    return "math"


def _needs_grad_beyond(capability: tuple[int, int], q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Heads above 128 have a cuDNN backward on Hopper only."""
    return capability[0] != 9 and max(q.shape[-1], v.shape[-1]) > 128 and any(t.requires_grad for t in (q, k, v))


def sdpa(
    capability: tuple[int, int], q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float, causal: bool,
    scale: float | None, grouped: bool,
) -> Tensor:  # fmt: skip
    """The output [B, N, S, Hv], through the autograd of the chosen kernel."""
    kernel = choose(capability, q, k, v, mask is not None, dropout, grouped and q.shape[-3] != k.shape[-3])
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
    """convert_boolean_attn_mask: a mask of the queries' dtype, made at each call."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.where(mask, torch.scalar_tensor(0.0, dtype=q.dtype, device=q.device), -math.inf)


def _padded_mask(mask: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
    """preprocess_mask: the last dimension aligned to 16 elements where the mask is not, then expanded."""
    if mask is None:
        return None
    align = 16
    if mask.stride(-1) != 1 or mask.shape[-1] % align or any(mask.stride(i) % align for i in range(mask.dim() - 1)):
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
