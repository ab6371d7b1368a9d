"""What CUDA kernels allocate internally, and in which order relative to their outputs: one row per operator.

A row is a function from the call to a script: n >= 0 allocates n bytes that are freed when the kernel returns or at a
FREE before, ~i makes the i-th output, a tuple is a script of its own, whose temporaries are freed as it ends; outputs
that the script does not name are made first, in their order. Each row names its source in the launch code of PyTorch
2.13, checked against recorded tapes of the CUDA build and against what an H100 allocated under PyTorch 2.11
(benchmarks/measured).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import ceil, prod, sqrt
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from memfit.tables.cuda_kernels import (
    CUDNN_FORWARD,
    FREE,
    Free,
    Script,
    cudnn_backward,
    key_splits,
    radix_sort,
    reduction,
    scan,
    unique,
)
from memfit.virtual.device import convolutions
from memfit.virtual.device.shapes import by_cudnn

if TYPE_CHECKING:
    from memfit.virtual.device.card import Card

Call = tuple[Any, ...]
Words = dict[str, Any]
ScriptOf = Callable[["Card", Call, Words], Script]


def _up(a: int, b: int) -> int:
    return -(-a // b)


def _power_below(n: int) -> int:
    return 1 << (n.bit_length() - 1)


def _bytes(t: Tensor) -> int:
    return t.numel() * t.element_size()


def _not_contiguous(*tensors: Tensor) -> tuple[int, ...]:
    """Return the bytes of the copies that a kernel makes of operands that are not contiguous."""
    return tuple(_bytes(t) for t in tensors if not t.is_contiguous())


# --- reductions ---

_BOOLS, _PAIRS = 1, 16  # bytes that a reduction adds up: of `any` and `all`; of arg* (number, index) and var (Welford)


def _reduce(card: Card, args: Call, kwargs: Words) -> Script:
    """make_reduction: cast integers to the dtype of the result, then allocate the staging buffers."""
    x, out = args[0], kwargs.get("out")
    first: Script = ()
    if isinstance(out, Tensor) and out.dtype not in (x.dtype, torch.bool) and not x.is_floating_point():
        first = (x.numel() * out.element_size(),)
    wide = out if isinstance(out, Tensor) and not x.is_floating_point() else x
    return (*first, *_staging(card, x, _dims(args), max(wide.element_size(), 4)))


def _reduced(size: int | None, single: bool = True) -> ScriptOf:
    """Return the row of a reduction. size: bytes of what is added up, None: the input's; single: one int is a dim."""

    def script(card: Card, args: Call, kwargs: Words) -> Script:
        return _staging(card, args[0], _dims(args, single), size or args[0].element_size())

    return script


def _dims(args: Call, single: bool = False) -> Sequence[int] | None:
    """Return the dimensions that a call names; None for all of them. single: they may be one number."""
    for a in args[1:]:
        if isinstance(a, list | tuple):
            return a
        if single and isinstance(a, int) and not isinstance(a, bool):
            return (a,)
    return None


def _staging(card: Card, x: Tensor, dims: Sequence[int] | None, acc_bytes: int = 4) -> Script:
    """Return the staging buffers of sums over leading dimensions (bias gradients), trailing ones, or all.

    Other sums need none in practice.
    """
    kept = [i for i in range(x.dim()) if dims and i not in {d % x.dim() for d in dims}]
    outputs, leading = prod(x.shape[i] for i in kept), list(range(len(kept)))
    words = {"multiprocessors": card.multiprocessors, "threads": card.threads, "acc_bytes": acc_bytes}
    if not x.numel() or outputs == 1:
        return reduction(x.numel(), 1, fastest=True, **words)
    if kept == leading:
        return reduction(x.numel() // outputs, outputs, fastest=True, **words)
    if kept == [x.dim() - len(kept) + i for i in leading]:
        return reduction(x.numel() // outputs, outputs, fastest=False, **words)
    return ()


def _mean_loss(card: Card, args: Call, kwargs: Words) -> Script:
    """Loss.cu: the losses of all elements, then their mean or sum. Unreduced losses are the output itself."""
    x, y = args[:2]
    if (args[2] if len(args) > 2 else 1) == 0:
        return ()
    shape = torch.broadcast_shapes(x.shape, y.shape)
    losses = prod(shape)
    words = {"multiprocessors": card.multiprocessors, "threads": card.threads}
    return (losses * x.element_size(), *reduction(losses, 1, fastest=True, **words))


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
    """_flash_attention_backward copies a gradient and an output that do not lie token by token, then calls mha_bwd.

    Which makes row sums, the dq accumulator, and dk and dv for every query head when heads are grouped.
    """
    gradient, q, k, _, out = args[:5]
    batch, heads, queries, _ = q.shape
    copies = _not_contiguous(gradient.transpose(1, 2), out.transpose(1, 2))
    keys = k.shape[1] != heads and batch * k.shape[2]
    return (*copies, ~0, ~1, ~2, *_flash_gradients(q, heads, batch * _up(queries, 128) * 128, keys))


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


def _unless_kept(card: Card, args: Call) -> tuple[int, ...]:
    """_cudnn_attention: makes the log-sum-exp only where a backward will read it."""
    return () if args[4] else (1,)


def _unless_captured(card: Card, args: Call) -> tuple[int, ...]:
    """attention.cu: efficient attention's random state lies on the host unless a CUDA graph is captured."""
    return () if card.capturing else (2, 3)


# operator -> outputs that take no memory of the card
HOST_OUTPUTS: dict[str, Callable[[Card, Call], tuple[int, ...]]] = {
    "aten._scaled_dot_product_efficient_attention.default": _unless_captured,
    "aten._scaled_dot_product_cudnn_attention.default": _unless_kept,
}


def _efficient(card: Card, args: Call, kwargs: Words) -> Script:
    """attention.cu: an fp32 output accumulator for heads wider than one tile."""
    q, v = args[0], args[2]
    if max(q.shape[-1], v.shape[-1]) <= 128 or q.element_size() == 4:
        return ()
    return (~0, ~1, 4 * prod(q.shape[:-1]) * v.shape[-1])


def _efficient_backward(card: Card, args: Call, kwargs: Words) -> Script:
    """attention_backward.cu: row sums (of a product, in fp32), and the workspace of AttentionBackwardKernel."""
    q, k, v = args[1], args[2], args[3]
    (batch, heads, queries, width), value_width, keys = q.shape, v.shape[-1], k.shape[2]
    rows, fp32 = batch * heads, q.element_size() == 4
    delta = 4 * rows * queries
    script = [delta * value_width, delta, delta, Free(2), Free(2)] if fp32 else [delta]
    tile = 64 if max(width, value_width) <= 64 else 128
    columns = 64 if tile == 64 else (128 if width <= 128 else _up(width, 64) * 64)
    blocks = _up(queries, tile)
    parts = 1 if tile == 64 or (max(width, value_width) <= 96 and not fp32) else columns // 64  # of a row of dq
    size = rows * blocks * (tile * columns + 4 * parts)
    if width > 128 and not fp32:
        size += rows * key_splits(rows, keys) * 64 * sum(_up(h, 128) * 128 for h in (width, value_width))
    return [*script, 4 * size, Free(2)]


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
    """embedding_backward_cuda_kernel: more than 3072 indices are sorted, and partial sums are kept in fp32."""
    gradient, indices, weights = args[:3]
    copied = () if gradient.is_contiguous() else (_bytes(gradient),)
    return (*copied, *(_sorted_sums(indices, weights, gradient.shape[-1]) if indices.numel() > 3072 else ()))


def _bags_backward(card: Card, args: Call, kwargs: Words) -> Script:
    """EmbeddingBag.cu: sums and means of bags take the same kernel, whatever the number of indices."""
    gradient, indices, weights, mode, sparse = args[0], args[1], args[6], args[8], args[9]
    return () if sparse or mode == _MAXIMUM else _sorted_sums(indices, weights, gradient.shape[-1])


_MAXIMUM = 2  # the mode of an EmbeddingBag that takes maxima
_ROWS_PER_PART = 10  # NROWS_PER_THREAD


def _sorted_sums(indices: Tensor, weights: int, width: int) -> Script:
    """EmbeddingBackwardKernel.cu: sort the indices; then the segments of equal ones, their parts, and sums of parts."""
    n, size = indices.numel(), indices.element_size()
    segments = min(n, weights)
    parts, all_of = n // _ROWS_PER_PART + segments, size * n
    order = (all_of, all_of, all_of, radix_sort(n, size, size), FREE, FREE, ~0)
    found = (all_of, 8, all_of, unique(n), FREE, FREE, size * segments, size * segments, scan(segments, size), FREE, 8)
    return (*order, *found, size * parts, 4 * width * parts)


def _index_put(card: Card, args: Call, kwargs: Words) -> Script:
    """index_put_with_sort_kernel: positions are sorted where they may repeat (Indexing.cu)."""
    x, indices, accumulate = args[0], args[1], args[3] if len(args) > 3 else kwargs.get("accumulate", False)
    given = [i for i in indices if i is not None and i.dtype not in (torch.bool, torch.uint8)]
    if not accumulate or not given or not x.numel():
        return ()
    n = prod(torch.broadcast_shapes(*(i.shape for i in given)))
    positions = prod(x.shape[d] for d, i in enumerate(indices) if i is not None)
    return (8 * n, 8 * n, FREE, 8 * n, 8 * n, 8 * n, radix_sort(n, 8, 8, positions.bit_length()))


_SMALL_SORT = 4096  # elements of a row that are sorted in place


def _sort(card: Card, args: Call, kwargs: Words) -> Script:
    """Sort.cpp, SortStable.cu: one long row by CUB; few rows by two sorts of all, by value and by row."""
    x, values, indices = args[0], kwargs["values"], kwargs["indices"]
    dim = kwargs.get("dim", -1)
    if not x.dim() or not x.numel():
        return ()
    row, n, size, index = x.shape[dim], x.numel(), x.element_size(), indices.element_size()
    if row <= _SMALL_SORT:
        return (row * index,)
    rows = n // row
    laid_out = [] if x.stride(dim) == 1 else [n * size]
    laid_out += [] if values.stride(dim) == 1 else [n * (size + index)]
    if rows == 1 or row >= 1_000_000:
        return (*laid_out, row * index, radix_sort(row, size, index))
    if rows >= 128:
        return (*laid_out, n * index, n * (size + index))
    bits = (rows - 1).bit_length()
    return (*laid_out, 8 * n, 8 * n, size * n, radix_sort(n, size, 8), FREE, FREE, radix_sort(n, 8, 0, bits))


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
    """ReduceOps.cpp impl_func_cum_ops: the input is first cast to the dtype of the sums; CUB sums one long row."""
    x, out = args[0], kwargs["out"]
    cast = () if out.dtype == x.dtype else (_bytes(out),)
    one_row = x.dim() and x.shape[args[1]] == x.numel() and x.is_contiguous()
    return (*cast, scan(x.numel(), out.element_size())) if one_row else cast


def _roll(card: Card, args: Call, kwargs: Words) -> Script:
    """roll_common of TensorTransformations.h: several dimensions are rolled one after the other."""
    return (_bytes(args[0]), ~0) if len(args) > 2 and len(args[2]) > 1 else ()


def _layer_norm(card: Card, args: Call, kwargs: Words) -> Script:
    """layer_norm_kernel.cu: a copy of an input that is not contiguous, as where a convolution made it."""
    return (*_not_contiguous(args[0]), ~0, ~1, ~2)


def _layer_norm_backward(card: Card, args: Call, kwargs: Words) -> Script:
    """layer_norm_kernel.cu: copies an input that is not contiguous before the gradients are made, theirs after."""
    made = (~i for i, wanted in enumerate(args[7]) if wanted)
    return (*_not_contiguous(args[1]), *made, *_not_contiguous(args[0]))


def _group_norm(card: Card, args: Call, kwargs: Words) -> Script:
    """group_norm_kernel.cu: scale and shift of every sample and channel, in fp32."""
    weight, bias, count, channels, positions = args[1:6]
    if (weight is None and bias is None) or positions == 1:
        return ()
    return (4 * count * channels, 4 * count * channels)


def _group_norm_backward(card: Card, args: Call, kwargs: Words) -> Script:
    """group_norm_kernel.cu: sums of every sample and channel, and for the input's gradient three factors."""
    weight, count, channels, groups, mask = args[4], args[5], args[6], args[8], args[9]
    each, by_group = 4 * count * channels, 4 * count * groups
    if not mask[0]:
        return (each, each)
    return (each, each, by_group, by_group, *((each, Free(2), Free(2)) if weight is not None else ()))


def last_channel(x: Tensor) -> bool:
    """Return whether batch_norm's kernels for channels that lie last take a tensor (batch_norm_choose_impl)."""
    return (x.is_contiguous() and x.stride(1) == 1) or (
        x.dim() == 4 and not x.is_contiguous() and x.is_contiguous(memory_format=torch.channels_last)
    )


def _channel_sums(x: Tensor, count: int) -> Script:
    """Return the buffers of `count` sums for each channel (flexible_launch_configs of Normalization.cuh)."""
    channels, rows, threads = x.shape[1], x.numel() // x.shape[1], 512
    columns = min(_power_below(channels), 32)
    high = min(_power_below(_up(rows, 16)), threads // columns)
    if columns * high != threads:
        columns = min(_power_below(channels), threads // high)
    blocks = min(_up(rows, 16 * high), 128)
    return (4 * count * channels * blocks, 4 * _up(channels, columns)) if blocks >= 8 else ()


def _batch_norm(card: Card, args: Call, kwargs: Words) -> Script:
    """Normalization.cuh: mean and variance of channels that lie last are summed across blocks."""
    x, training = args[0], args[5]
    return _channel_sums(x, 4) if training and not by_cudnn(x, args[1], training) and last_channel(x) else ()


def _batch_norm_backward(card: Card, args: Call, kwargs: Words) -> Script:
    """batch_norm_backward_cuda: where channels lie last, two sums of each come first, and the input's gradient last."""
    x, weight, train = args[1], args[2], args[7]
    if by_cudnn(x, weight, train) or not (train and last_channel(x) and last_channel(args[0])):
        return ()
    sums = 4 * x.shape[1]
    return (sums, sums, ~1, ~2, *_channel_sums(x, 2), *((FREE, FREE) if _channel_sums(x, 2) else ()), ~0)


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
    "aten.native_layer_norm.default": _layer_norm,
    "aten.native_layer_norm_backward.default": _layer_norm_backward,
    "aten.native_group_norm.default": _group_norm,
    "aten.native_group_norm_backward.default": _group_norm_backward,
    "aten.native_batch_norm.default": _batch_norm,
    "aten.native_batch_norm_backward.default": _batch_norm_backward,
    "aten._embedding_bag.default": lambda *_: (~2, ~1, ~0),
    "aten._embedding_bag_backward.default": _bags_backward,
    "aten._index_put_impl_.default": _index_put,
    "aten.sort.values_stable": _sort,
    "aten.roll.default": _roll,
    **dict.fromkeys(("aten.mse_loss.out", "aten.smooth_l1_loss.out"), _mean_loss),
    **dict.fromkeys(
        ("aten.sum.IntList_out", "aten.mean.out", "aten.sum.default", "aten.linalg_vector_norm.out"), _reduce
    ),
    **dict.fromkeys(("aten.all.all_out", "aten.any.all_out", "aten.any.out", "aten.all.out"), _reduced(_BOOLS)),
    **dict.fromkeys((
        "aten.max.unary_out", "aten.min.unary_out", "aten.max.default", "aten.min.default", "aten.amax.out",
        "aten.amin.out",
    ), _reduced(None)),
    **dict.fromkeys(("aten.argmax.out", "aten.argmin.out"), _reduced(_PAIRS)),
    **dict.fromkeys(
        (f"aten.{name}.correction" for name in ("var", "std", "var_mean", "std_mean")), _reduced(_PAIRS)
    ),
}  # fmt: skip
