"""Fused attention of Transformer Engine: which calls cuDNN takes, and what it returns, keeps and needs.

nvte_get_fused_attn_backend of fused_attn.cpp, and attention.cpp of 2.17.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from memfit.errors import Unsupported
from memfit.tables.cuda_kernels import CUDNN_FORWARD, cudnn_backward, cudnn_reproducible_backward
from memfit.virtual.device.dispatch import after_kernel, current
from memfit.virtual.libraries.transformer_engine.enums import ENUMS, layout_name
from memfit.virtual.libraries.transformer_engine.quantizers import create, empty, kind_of, shape_of

HOPPER = (9, 0)
CUDNN = 92100  # 9.21, which Transformer Engine 2.17 asks for where it makes a difference
_BACKENDS, _MASKS, _BIASES = (
    ENUMS[f"NVTE_{name}"] for name in ("Fused_Attn_Backend", "Mask_Type", "Bias_Type")
)  # fmt: skip
_NO_BIAS, _PLAIN_SOFTMAX = 0, 0
_FP8 = (7, 8)  # DType of E4M3 and E5M2


def get_cudnn_version() -> int:
    """Return cuDNN's version as one number."""
    return CUDNN


def get_fused_attn_backend(
    is_training: bool, q_dtype: int, kv_dtype: int, layout: int, bias: int, mask: int, softmax: int, dropout: float,
    heads: int, groups: int, queries: int, keys: int, width: int, value_width: int, left: int, right: int,
    return_max_logit: bool, cuda_graph: bool, deterministic: bool,
) -> Any:  # fmt: skip
    """Return cuDNN's backend for a call, or No_Backend."""
    ragged = layout_name(layout).startswith("T")
    arch = current().capability[0] * 10 + current().capability[1]
    widths = (is_training, arch, width, value_width)
    if int(q_dtype) in _FP8:
        fits = arch >= 90 and bias == _NO_BIAS and not ragged and not return_max_logit and _fp8_widths(*widths)
        return _BACKENDS.NVTE_FP8 if fits else _BACKENDS.NVTE_No_Backend
    windowed = (left, right) not in ((-1, -1), (-1, 0))
    padded = int(mask) in (_MASKS.NVTE_PADDING_MASK, _MASKS.NVTE_PADDING_CAUSAL_MASK)
    bias_fits = bias == _NO_BIAS or not (padded or windowed)
    reproducible = arch < 100 or not (is_training and deterministic) or (dropout == 0 and bias == _NO_BIAS)
    fits = (
        arch >= (90 if ragged else 80) and _widths(*widths) and bias_fits and reproducible
        and not (windowed and (dropout or queries > keys)) and not (padded and dropout)
    )  # fmt: skip
    return _BACKENDS.NVTE_F16_arbitrary_seqlen if fits else _BACKENDS.NVTE_No_Backend


def _widths(training: bool, arch: int, width: int, value_width: int) -> bool:
    """Return whether cuDNN takes heads of this width in half precision."""
    if width % 8 or value_width % 8:
        return False
    largest = max(width, value_width)
    if not training or largest <= 128:
        return True
    if (width, value_width) == (192, 128):
        return arch >= 90
    broken = min(width, value_width) >= 128 and width != value_width  # since cuDNN 9.11
    return arch == 90 and largest <= 256 and not broken


def _fp8_widths(training: bool, arch: int, width: int, value_width: int) -> bool:
    """Return whether cuDNN takes heads of this width in FP8."""
    if width % 16 or value_width % 16:
        return False
    if arch >= 100:
        return width <= 192 and value_width <= 128
    return width == value_width == 128 if training else max(width, value_width) <= 256


# --- shapes ---


def _formats(layout: int) -> tuple[str, str]:
    """Return the formats of queries and of keys and values, such as sbhd."""
    parts = [p.replace("3", "").replace("2", "").lower() for p in layout_name(layout).split("_")]
    return parts[0], parts[-1] if len(parts) > 1 else parts[0]


def _as(shape: Sequence[int], before: str, after: str) -> tuple[int, ...]:
    """Return a shape of format `before` in the order of format `after`."""
    if "t" in before or "t" in after:
        return tuple(shape)
    return tuple(dict(zip(before, shape, strict=True))[letter] for letter in after)


def _format(value: int) -> str:
    return str(ENUMS["NVTE_QKV_Format"](int(value)).name).removeprefix("NVTE_").lower()


def fused_attn_fwd(
    max_seqlen_q: int, max_seqlen_kv: int, is_training: bool, attn_scale: float, p_dropout: float, set_zero: bool,
    qkv_layout: int, o_format: int, qkv_scale_inv_format: int, bias_type: int, attn_mask_type: int, softmax_type: int,
    window_size: Any, bottom_right_diagonal: bool, cu_seqlens_q: Tensor, cu_seqlens_kv: Tensor, query: Any, key: Any,
    value: Any, fake_dtype: torch.dtype, cu_seqlens_q_padded: Any, cu_seqlens_kv_padded: Any, page_table_k: Any,
    page_table_v: Any, s_quantizer: Any, o_quantizer: Any, given_bias: Tensor | None, softmax_offset: Tensor | None,
    rng_gen: Any, rng_elts_per_thread: int, return_max_logit: bool, cuda_graph: bool,
) -> list[Any]:  # fmt: skip
    """Return the output, the softmax's statistics, their maxima if asked, the random state, and the given bias."""
    layout, _ = _formats(qkv_layout)
    shape = (*shape_of(query)[:-1], shape_of(value)[-1])
    out = _output(o_quantizer, _as(shape, layout, _format(o_format)), fake_dtype)
    state = empty((2,), torch.int64)
    workspace = empty((CUDNN_FORWARD,), torch.uint8)
    if "t" in layout:
        statistics: tuple[int, ...] = (shape[0], shape[1], 1)
    else:
        sizes = dict(zip(layout, shape, strict=True))
        statistics = (sizes["b"], sizes["h"], max_seqlen_q, 1)
    made = [out, *(empty(statistics, torch.float32) for _ in range(1 + return_max_logit)), state]
    if int(bias_type) not in (_BIASES.NVTE_NO_BIAS, _BIASES.NVTE_ALIBI) and given_bias is not None:
        made.append(given_bias)
    if int(softmax_type) != _PLAIN_SOFTMAX and softmax_offset is not None:
        made.append(softmax_offset)
    del workspace
    return made


def _output(quantizer: Any, shape: Sequence[int], dtype: torch.dtype) -> Any:
    """quantizer_helper: only delayed scaling writes FP8; the others write in full, and Python quantises it."""
    return create(quantizer if kind_of(quantizer) == "Float8Quantizer" else None, shape, dtype)


def fused_attn_bwd(
    max_seqlen_q: int, max_seqlen_kv: int, attn_scale: float, p_dropout: float, set_zero: bool, qkv_layout: int,
    o_format: int, do_format: int, dqkv_layout: int, qkv_scale_inv_format: int, do_scale_inv_format: int,
    bias_type: int, attn_mask_type: int, softmax_type: int, window_size: Any, bottom_right_diagonal: bool,
    deterministic: bool, cu_seqlens_q: Tensor, cu_seqlens_kv: Tensor, query: Any, key: Any, value: Any, out: Any,
    d_out: Any, fake_dtype: torch.dtype, saved: Sequence[Tensor], cu_seqlens_q_padded: Any, cu_seqlens_kv_padded: Any,
    s_quantizer: Any, dp_quantizer: Any, dqkv_quantizer: Any, cuda_graph: bool,
) -> list[Any]:  # fmt: skip
    """Return gradients of queries, keys, values, the bias and the softmax's offset."""
    kind = kind_of(dqkv_quantizer)
    if kind == "Float8Quantizer":
        raise Unsupported(
            "attention in FP8 with delayed scaling is not stood in for", hint="leave out --fp8-dot-product-attention"
        )
    before, after = _formats(qkv_layout), _formats(dqkv_layout)
    q, k, v = (
        _as(shape_of(x), *formats)
        for x, formats in zip((query, key, value), ((before[0], after[0]), *[(before[1], after[1])] * 2), strict=True)
    )
    gradients = _gradients(layout_name(dqkv_layout), q, k, v, fake_dtype)
    heads, width = q[-2], q[-1]
    bias = None
    if int(bias_type) not in (_BIASES.NVTE_NO_BIAS, _BIASES.NVTE_ALIBI):
        shape = saved[-1].shape if len(saved) > 1 else (1, heads, max_seqlen_q, max_seqlen_kv)
        bias = empty(shape, fake_dtype)
    offset = empty((1, heads, 1, 1), torch.float32) if int(softmax_type) != _PLAIN_SOFTMAX else None
    ragged = "t" in before[0]
    batch = _most_sequences(cu_seqlens_q.numel() - 1) if ragged else cu_seqlens_q.numel() - 1
    queries, keys = (_most_tokens(q[0]), _most_tokens(k[0])) if ragged else (max_seqlen_q, max_seqlen_kv)
    rows = heads * (queries if ragged else math.prod(q[:-2]))
    tokens, itemsize = (keys, torch.float32.itemsize) if ragged else (math.prod(k[:-2]), fake_dtype.itemsize)
    expanded = tokens * heads * (k[-1] + v[-1]) * itemsize if k[-2] != heads else 0
    if deterministic and current().capability == HOPPER:
        size = cudnn_reproducible_backward(batch, heads, queries, keys, rows) + expanded
    else:
        size = cudnn_backward(rows, width, expanded)
    workspace = empty((size,), torch.uint8)
    after_kernel(*gradients)
    del workspace
    return [*gradients, bias, offset]


def _most_sequences(count: int) -> int:
    """Return for how many sequences laid end to end a graph of cuDNN is made (get_max_batch_size of utils.cu)."""
    return max(32, 1 << (count - 1).bit_length()) if count <= 512 else -(-count // 512) * 512


def _most_tokens(count: int) -> int:
    """Return for how many tokens of such sequences a graph is made (get_max_tokens)."""
    return max(1024, 1 << (count - 1).bit_length()) if count <= 1 << 15 else -(-count // (1 << 15)) * (1 << 15)


def _gradients(layout: str, q: Sequence[int], k: Sequence[int], v: Sequence[int], dtype: torch.dtype) -> list[Tensor]:
    """Return the gradients, side by side in one buffer where the layout packs them."""
    packed = 3 if "3" in layout else 2 if "2" in layout else 0
    if not packed:
        return [empty(shape, dtype) for shape in (q, k, v)]
    of = q if packed == 3 else k
    by_head = layout.endswith(f"{packed}D")
    at = len(of) - 1 if by_head else len(of) - 2
    whole = empty((*of[:at], packed, *of[at:]), dtype)
    parts = list(whole.unbind(at))
    return parts if packed == 3 else [empty(q, dtype), *parts]


# --- sequences laid end to end, split over ranks of context parallelism ---


def thd_read_half_tensor(tensor: Tensor, cu_seqlens: Tensor, half_idx: int) -> Tensor:
    """Return one half of every sequence [T, ...]; keys and values [2, T, ...] keep their first dimension."""
    shape = list(tensor.shape)
    shape[0 if len(shape) == 3 else 1] //= 2
    return empty(shape, tensor.dtype)


def thd_read_second_half_lse(lse: Tensor, cu_seqlens: Tensor, lse_packed: bool, second_half_lse_seqlen: int) -> Tensor:
    """Return the statistics of the second halves."""
    shape = (lse.shape[0], second_half_lse_seqlen) if lse_packed else (*lse.shape[:2], lse.shape[2] // 2)
    return torch.zeros(shape, dtype=lse.dtype, device="cuda")


def thd_get_partitioned_indices(cu_seqlens: Tensor, total_tokens: int, world_size: int, rank: int) -> Tensor:
    """Return which tokens a rank has."""
    return empty((total_tokens // world_size,), torch.int32)


def convert_thd_to_bshd(tensor: Tensor, cu_seqlens: Tensor, b: int, max_seq_len: int) -> Tensor:
    """Pad sequences that are laid end to end."""
    return torch.zeros((b, max_seq_len, *tensor.shape[1:]), dtype=tensor.dtype, device="cuda")


def convert_bshd_to_thd(tensor: Tensor, cu_seqlens: Tensor, t: int) -> Tensor:
    """Lay padded sequences end to end."""
    return torch.zeros((t, *tensor.shape[2:]), dtype=tensor.dtype, device="cuda")


def fa_prepare_fwd(qkvi: Tensor) -> Tensor:
    """Return interleaved queries, keys and values [S, B, N, H] as [3, B, S, N, H]."""
    return empty((3, qkvi.shape[1], qkvi.shape[0], *qkvi.shape[2:]), qkvi.dtype)


def fa_prepare_bwd(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return the gradients [S, B, N, H] interleaved as [B, S, N, 3 H]."""
    return empty((q.shape[1], q.shape[0], q.shape[2], 3 * q.shape[3]), q.dtype)
