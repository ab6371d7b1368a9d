"""What CUDA kernels allocate internally, and in which order relative to their outputs: one row per operator.

A row is a function from the call to a script: n >= 0 allocates n bytes that are freed when the kernel returns, ~i makes
the i-th output, a tuple allocates its sizes and frees them at once; outputs that the script does not name are made
first, in their order. Each row names its source in the launch code of PyTorch 2.13, checked against recorded tapes of
the CUDA build.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import ceil, prod, sqrt
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from memfit.tables.cuda_kernels import CUDNN_FORWARD, cudnn_backward, key_splits, reduction
from memfit.virtual.device import convolutions

if TYPE_CHECKING:
    from memfit.virtual.device.card import Card

Call = tuple[Any, ...]
Words = dict[str, Any]
Script = Sequence[int | tuple[int, ...]]
ScriptOf = Callable[["Card", Call, Words], Script]


def _up(a: int, b: int) -> int:
    return -(-a // b)


def _bytes(t: Tensor) -> int:
    return t.numel() * t.element_size()


# --- reductions ---


def _reduce(card: Card, args: Call, kwargs: Words) -> Script:
    """make_reduction: cast integers to the dtype of the result, then allocate the staging buffers."""
    x, out = args[0], kwargs.get("out")
    first: Script = ()
    if isinstance(out, Tensor) and out.dtype not in (x.dtype, torch.bool) and not x.is_floating_point():
        first = (x.numel() * out.element_size(),)
    return (*first, *_staging(card, args))


def _staging(card: Card, args: Call) -> Script:
    """Return the staging buffers of sums over leading dimensions (bias gradients), trailing ones, or all.

    Other sums need none in practice.
    """
    x, dims = args[0], None
    for a in args[1:]:
        if isinstance(a, list | tuple):
            dims = a
    kept = [i for i in range(x.dim()) if dims and i not in {d % x.dim() for d in dims}]
    outputs, leading = prod(x.shape[i] for i in kept), list(range(len(kept)))
    words = {"multiprocessors": card.multiprocessors, "threads": card.threads}
    if not x.numel() or outputs == 1:
        return reduction(x.numel(), 1, fastest=True, **words)
    if kept == leading:
        return reduction(x.numel() // outputs, outputs, fastest=True, **words)
    if kept == [x.dim() - len(kept) + i for i in leading]:
        return reduction(x.numel() // outputs, outputs, fastest=False, **words)
    return ()


# --- attention ---


def flash_splits(blocks: int, multiprocessors: int, key_blocks: int) -> int:
    """num_splits_heuristic of flash_api.cpp: into how many parts the keys are split when the card would idle."""
    if blocks >= 0.8 * multiprocessors:
        return 1
    most = min(128, multiprocessors, key_blocks)
    efficiency = []
    for n in range(1, most + 1):
        if n > 1 and _up(key_blocks, n) == _up(key_blocks, n - 1):
            efficiency.append(0.0)
            continue
        waves = blocks * n / multiprocessors
        efficiency.append(waves / ceil(waves))
    best = max(efficiency)
    return next((n for n, e in enumerate(efficiency, 1) if e and e >= 0.85 * best), 1)


def _flash(card: Card, args: Call, kwargs: Words) -> Script:
    """mha_fwd: accumulators of split keys come before the random state; with dropout there is a second random state."""
    q, k = args[0], args[1]
    (batch, heads, queries, width), dropout = q.shape, args[3] if len(args) > 3 else 0.0
    if dropout:
        return (~0, ~1, ~6, ~7, 16)
    return (~0, ~1, *_split_keys(card, batch * heads, queries, k.shape[2], width), ~6, ~7)


def _split_keys(card: Card, rows: int, queries: int, keys: int, width: int) -> Script:
    """set_params_splitkv: log-sum-exp and output of every part of the keys, in fp32. rows: heads of all samples."""
    block = 256 if width <= 64 else 128 if width <= 128 else 64
    splits = flash_splits(rows * _up(queries, 64), 2 * card.multiprocessors, _up(keys, block))
    if splits == 1:
        return ()
    size = 4 * splits * rows * queries
    return (size, size * _flash_width(width))


def _flash_width(width: int) -> int:
    """Return the columns that a head of `width` elements takes in FlashAttention's accumulators."""
    step = 32 if width <= 128 else 64
    return _up(width, step) * step


def _flash_backward(card: Card, args: Call, kwargs: Words) -> Script:
    """mha_bwd: row sums, the dq accumulator, and dk and dv for every query head when heads are grouped."""
    q, k = args[1], args[2]
    batch, heads, queries, _ = q.shape
    return _flash_gradients(q, heads, batch * _up(queries, 128) * 128, k.shape[1] != heads and batch * k.shape[2])


def _flash_gradients(q: Tensor, heads: int, rows: int, keys: int, splits: int = 1) -> Script:
    """Return a backward's script. rows: positions of the accumulators; keys: positions of grouped heads' keys, or 0."""
    width = q.shape[-1]
    script = [4 * heads * rows, 4 * splits * rows * heads * _flash_width(width)]
    return script + [q.element_size() * keys * heads * width] * 2 if keys else script


# the flash-attn package 2.8: [B, S, N, H], or [T, N, H] for sequences laid end to end (csrc/flash_attn/flash_api.cpp)


def _package(card: Card, args: Call, kwargs: Words) -> Script:
    """mha_fwd of the package: the random state comes last here too."""
    q, k, _, dropout = args
    batch, queries, heads, width = q.shape
    return (~0, ~1, *(() if dropout else _split_keys(card, batch * heads, queries, k.shape[1], width)), ~2)


def _package_backward(card: Card, args: Call, kwargs: Words) -> Script:
    """mha_bwd of the package."""
    q, k, deterministic = args[3:]
    batch, queries, heads, _ = q.shape
    splits = _up(card.multiprocessors, batch * heads) if deterministic else 1
    keys = batch * k.shape[1] if k.shape[2] != heads else 0
    return _flash_gradients(q, heads, batch * _up(queries, 128) * 128, keys, splits)


def _package_varlen_backward(card: Card, args: Call, kwargs: Words) -> Script:
    """mha_varlen_bwd: 128 rows more for every sequence."""
    q, k, starts, deterministic = args[3:]
    (tokens, heads, _), sequences = q.shape, starts.numel() - 1
    splits = _up(card.multiprocessors, sequences * heads) if deterministic else 1
    return _flash_gradients(q, heads, tokens + 128 * sequences, k.shape[0] if k.shape[1] != heads else 0, splits)


def _cudnn(card: Card, args: Call, kwargs: Words) -> Script:
    """_cudnn_attention: seed and offset come first, cuDNN's workspace last."""
    return (~6, ~7, ~0, ~1, CUDNN_FORWARD)


def _cudnn_backward(card: Card, args: Call, kwargs: Words) -> Script:
    """MHA.cpp: one workspace."""
    q, k, v = args[1:4]
    batch, heads, queries, width = q.shape
    return (cudnn_backward(batch * heads * queries, width, _expanded(k, v, heads)),)


def _expanded(k: Tensor, v: Tensor, heads: int) -> int:
    """Return the bytes of dk and dv with a copy for every query head, where heads are grouped."""
    batch, groups, keys, width = k.shape
    return batch * heads * keys * (width + v.shape[3]) * k.element_size() if groups != heads else 0


def _unless_kept(args: Call) -> tuple[int, ...]:
    """_cudnn_attention: makes the log-sum-exp only where a backward will read it."""
    return () if args[4] else (1,)


# operator -> outputs that take no memory of the card: efficient attention's random state lies on the host unless a CUDA
# graph is captured (attention.cu)
HOST_OUTPUTS: dict[str, Callable[[Call], tuple[int, ...]]] = {
    "aten._scaled_dot_product_efficient_attention.default": lambda _: (2, 3),
    "aten._scaled_dot_product_cudnn_attention.default": _unless_kept,
}


def _efficient(card: Card, args: Call, kwargs: Words) -> Script:
    """attention.cu: an fp32 output accumulator for heads wider than one tile."""
    q, v = args[0], args[2]
    if max(q.shape[-1], v.shape[-1]) <= 128 or q.element_size() == 4:
        return ()
    return (~0, ~1, 4 * prod(q.shape[:-1]) * v.shape[-1])


def _efficient_backward(card: Card, args: Call, kwargs: Words) -> Script:
    """attention_backward.cu: row sums, and the workspace of AttentionBackwardKernel."""
    q, k, v = args[1], args[2], args[3]
    (batch, heads, queries, width), value_width, keys = q.shape, v.shape[-1], k.shape[2]
    rows, fp32 = batch * heads, q.element_size() == 4
    delta = 4 * rows * queries
    script = [delta * value_width, delta] if fp32 else [delta]
    tile = 64 if max(width, value_width) <= 64 else 128
    columns = 64 if tile == 64 else (128 if width <= 128 else _up(width, 64) * 64)
    blocks = _up(queries, tile)
    size = rows * (blocks * tile * columns + 4 * (blocks if tile == 64 else blocks * columns // 64))
    if width > 128 and not fp32:
        size += rows * key_splits(rows, keys) * 64 * sum(_up(h, 128) * 128 for h in (width, value_width))
    return [*script, 4 * size]


# --- matrices, tables, norms ---


def _ready(t: Tensor) -> bool:
    """Return whether cuBLAS can read a matrix as it lies: its rows or columns are contiguous and do not overlap."""
    rows, columns = t.shape[-2:]
    down, across = t.stride()[-2:]
    return (across == 1 and down >= max(1, columns)) or (down == 1 and across >= max(1, rows))


def _matrices(card: Card, args: Call, kwargs: Words) -> Script:
    """prepare_matrix_for_cublas: copy operands that cuBLAS cannot read as they lie."""
    return [_bytes(t) for t in args[:3] if isinstance(t, Tensor) and t.dim() > 1 and not _ready(t)]


def _embedding_backward(card: Card, args: Call, kwargs: Words) -> Script:
    """embedding_backward_cuda_kernel: more than 3072 indices are sorted (CUB), and partial sums are kept in fp32."""
    gradient, indices = args[0], args[1]
    n, width = indices.numel(), gradient.shape[-1]
    if n <= 3072:
        return ()
    eight = 8 * n
    scan = 1279 if n <= 8192 else 767 + 512 * _up(n, 8192)
    segments = n // 10 + args[2] if args[2] < n else n + n // 10
    segments = min(segments, n)
    return (~0, eight, eight, eight, 2 * eight + eight // 8 + 1535, eight, 8, eight, scan, eight, eight, scan, 8,
            8 * (segments + n // 10), 4 * width * (n // 10 + n))  # fmt: skip


_CHUNK = 65536  # elements of a tensor that one block of a multi-tensor kernel takes (MultiTensorApply.cuh)


def _foreach_norm(card: Card, args: Call, kwargs: Words) -> Script:
    """ForeachReduceOp.cu: one partial result per chunk of the longest tensor, for every tensor, in fp32."""
    chunks = max((_up(t.numel(), _CHUNK) for t in args[0]), default=0)
    return (4 * chunks * len(args[0]), *(~i for i in range(len(args[0]))))


_TILE = 2048  # bytes that one block copies at a time (TensorShape.cu)


def _split_copy(card: Card, args: Call, kwargs: Words) -> Script:
    """split_with_sizes_copy_out_cuda: addresses, sizes and the split of every block, as int64 on the card."""
    source, sizes = args[0], args[1]
    dim = kwargs.get("dim", args[2] if len(args) > 2 else 0)
    parts = [size * source.stride(dim) * source.element_size() for size in sizes]
    chunks = prod(source.shape[:dim])
    turns = _up(sum(_up(part, _TILE) for part in parts) * chunks, card.multiprocessors * (card.threads // 128) * 2)
    repeats = _up(turns, min(ceil(sqrt(turns)), chunks)) if turns else 1
    return (8 * (4 * len(parts) + 1 + sum(_up(part, _TILE * repeats) for part in parts)),)


def _chunk_cat(card: Card, args: Call, kwargs: Words) -> Script:
    """_chunk_cat_out_cuda: six lists by tensor and the tensor of every block, as int64 on the card."""
    parts, (dim, chunks) = args[0], args[1:3]
    size = kwargs["out"].element_size()
    blocks = sum(_up(_up(t.shape[dim], chunks) * prod(t.shape[dim + 1 :]) * size, _TILE) for t in parts)
    return (8 * (6 * len(parts) + 2 + blocks),)


def _softmax_backward(card: Card, args: Call, kwargs: Words) -> Script:
    """SoftMax.cu: gradient * output, written out."""
    return (_bytes(args[0]),)


def _cumsum(card: Card, args: Call, kwargs: Words) -> Script:
    """ReduceOps.cpp impl_func_cum_ops: the input is first cast to the dtype of the sums."""
    out = kwargs["out"]
    return () if out.dtype == args[0].dtype else (_bytes(out),)


def _ctc_backward(card: Card, args: Call, kwargs: Words) -> Script:
    """LossCTC.cu: log_beta, as large as the log_alpha that the forward pass kept, before the gradient."""
    return (_bytes(args[6]), ~0)


def _second_first(card: Card, args: Call, kwargs: Words) -> Script:
    """Dropout.cu, bitsandbytes: the mask, or the scales of the blocks, come before the result."""
    return (~1, ~0)


GEMMS = frozenset({
    "aten.mm.out", "aten.addmm.out", "aten.bmm.out", "aten.baddbmm.out", "aten._addmm_activation.out", "aten.addmv.out",
    "aten._grouped_mm.default", "aten.addmm_.default", "aten.baddbmm_.default", "aten.dot.default",
})  # fmt: skip

SCRIPTS: dict[str, ScriptOf] = {
    "aten._scaled_dot_product_flash_attention.default": _flash,
    "aten._scaled_dot_product_flash_attention_backward.default": _flash_backward,
    "flash_attn_2.forward.default": _package,
    "flash_attn_2.backward.default": _package_backward,
    "flash_attn_2.varlen_backward.default": _package_varlen_backward,
    "aten._scaled_dot_product_cudnn_attention.default": _cudnn,
    "aten._scaled_dot_product_cudnn_attention_backward.default": _cudnn_backward,
    "aten._scaled_dot_product_efficient_attention.default": _efficient,
    "aten._scaled_dot_product_efficient_attention_backward.default": _efficient_backward,
    "aten.native_dropout.default": _second_first,
    "bitsandbytes.quantize_4bit.default": _second_first,
    "bitsandbytes.quantize_blockwise.default": _second_first,
    "aten.embedding_dense_backward.default": _embedding_backward,
    "aten.convolution.default": convolutions.forward, "aten.convolution_backward.default": convolutions.backward,
    **{f"aten._ctc_loss_backward.{overload}": _ctc_backward for overload in ("default", "Tensor")},
    "aten._foreach_norm.Scalar": _foreach_norm,
    "aten.split_with_sizes_copy.out": _split_copy,
    "aten._chunk_cat.out": _chunk_cat,
    "aten.cumsum.out": _cumsum,
    "aten._softmax_backward_data.out": _softmax_backward,
    **dict.fromkeys(("aten.mm.out", "aten.bmm.out", "aten.baddbmm.out"), _matrices),
    **dict.fromkeys((
        "aten.sum.IntList_out", "aten.mean.out", "aten.sum.default", "aten.linalg_vector_norm.out", "aten.all.all_out",
        "aten.any.all_out", "aten.max.unary_out", "aten.min.unary_out", "aten.amax.out", "aten.any.out", "aten.all.out",
    ), _reduce),
}  # fmt: skip
