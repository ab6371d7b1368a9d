"""Sizes that CUDA's libraries and PyTorch 2.13's kernels derive from the card's compute capability."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from memfit.nouns.alloc_settings import Torch

Capability = tuple[int, int]
SdpaKernel = Literal["flash", "efficient", "cudnn", "math"]

_THREADS = {(7, 5): 1024, (8, 6): 1536, (8, 9): 1536, (12, 0): 1536}
_WORKSPACES = ((9, 33_554_432), (0, 8_519_680))  # (first major capability, bytes)
# version that gave Blackwell Hopper's workspace (github.com/pytorch/pytorch/pull/175344 of 2026-02-19): 2.10 had not,
# as recorded on B200 cards (benchmarks/simumax.py). Whether 2.11 has could not be checked: the larger one is taken
_BLACKWELL_AS_HOPPER: Torch = (2, 11)


def threads_per_multiprocessor(capability: Capability) -> int:
    """Return 2048 on data-centre cards up to compute capability 10, 1536 on 8.6, 8.9 and 12, 1024 on 7.5."""
    return _THREADS.get(capability, 2048)


def cublas_workspace(capability: Capability, config: str = "", torch: Torch = _BLACKWELL_AS_HOPPER) -> int:
    """Return the bytes that cuBLAS allocates once per thread and stream and keeps (CublasHandlePool.cpp).

    config: a value of CUBLAS_WORKSPACE_CONFIG, pairs of a size in KiB and a count such as :4096:8; others are ignored.
    """
    if pairs := re.findall(r":(\d+):(\d+)", config):
        return sum(int(size) * 1024 * int(count) for size, count in pairs)
    own = 0 if capability[0] > 9 and torch < _BLACKWELL_AS_HOPPER else capability[0]
    return next(size for major, size in _WORKSPACES if own >= major)


def reduction(
    inputs: int, outputs: int, *, fastest: bool, multiprocessors: int, threads: int, acc_bytes: int = 4
) -> tuple[int, ...]:
    """Return (staging buffer, semaphores) in bytes of a reduction across thread blocks; empty if one block suffices.

    inputs: elements reduced to one; fastest: they are contiguous. threads: per multiprocessor. Source: Reduce.cuh
    (setReduceConfig of at::native::gpu_reduce_kernel), checked against recorded kernels on cc 8.0 and 9.0.
    """
    if not inputs or not outputs:
        return ()
    vector = 1
    if fastest:
        width, height = inputs, outputs
        if width > 128:
            width //= 4
    else:
        vector = next(v for v in (4, 2, 1) if outputs % v == 0)
        width, height = outputs // vector, inputs
    most = 512 // vector
    p0, p1 = min(_power_below(width), most), min(_power_below(height), most)
    columns = min(p0, 32)
    rows = min(p1, most // columns)
    columns = min(p0, most // rows)
    split_inputs, split_outputs = (columns, 1) if fastest else (1, columns)
    across = _up(inputs, split_inputs) >= min(rows * 16, 256)
    if across:
        split_inputs *= rows
    else:
        split_outputs *= rows
    grid, target = _up(outputs // vector, split_outputs), multiprocessors * (threads // (columns * rows))
    per_thread = _up(inputs, split_inputs)
    if not (across and per_thread >= 256 and grid <= target):
        return ()
    blocks = max(min(_up(target, grid), _up(per_thread, 16)), _up(per_thread, 256))
    if blocks <= 1:
        return ()
    return acc_bytes * outputs * blocks * (1 if fastest else columns * vector), 4 * grid


_SPLIT_GOAL = 200  # target of the memory-efficient kernel's backward: blocks of keys times heads


def key_splits(heads: int, keys: int) -> int:
    """Return into how many parts the memory-efficient backward splits the keys; heads: of the whole batch."""
    return min(max(_SPLIT_GOAL // heads, 1), _up(keys, 64))


def _up(a: int, b: int) -> int:
    return -(-a // b)


def _power_below(n: int) -> int:
    return 1 << (n.bit_length() - 1) if n > 0 else 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SdpaCall:
    """The properties of a scaled_dot_product_attention call by which PyTorch chooses the kernel."""

    capability: Capability
    dtype: Literal["bf16", "fp16", "fp32"]
    head_dim: int  # width of each head of the queries and keys
    value_dim: int  # ... and of the values
    masked: bool = False  # an attn_mask is passed; is_causal alone is no mask
    grouped: bool = False  # enable_gqa with fewer heads of keys than of queries
    broadcast: bool = False  # fewer heads of keys than of queries without enable_gqa
    dropout: float = 0.0
    needs_grad: bool = True
    fits_cudnn: bool = True  # the mask, if any, has a shape that cuDNN takes, and needs no gradient
    queries: int = 2  # tokens, as the next
    keys: int = 2
    causal: bool = False

    @property
    def half(self) -> bool:
        """Return whether the operands have 16 bits."""
        return self.dtype != "fp32"

    def aligned(self, elements: int) -> bool:
        """Return whether both head widths are multiples of `elements`."""
        return self.head_dim % elements == 0 and self.value_dim % elements == 0


def _takes_cudnn(c: SdpaCall) -> bool:
    """Return whether cuDNN takes the call: heads up to 256 on Hopper, 128 on Blackwell; dropout in steps of 1/16.

    It takes no single key, and no single query with dropout.
    """
    widest = 256 if c.capability[0] == 9 else 128
    sizes = c.half and c.aligned(8) and max(c.head_dim, c.value_dim) <= widest and c.keys != 1
    return sizes and c.fits_cudnn and c.dropout * 16 % 1 == 0 and not (c.dropout and c.queries == 1)


def _takes_flash(c: SdpaCall) -> bool:
    """Return whether FlashAttention takes the call: Ampere or newer, one head width up to 256, no mask.

    A causal call has as many keys as queries. Cards with little shared memory (compute capability 8.6 to 8.9 and 12)
    have no backward for heads of 193 to 224 elements, nor for wider ones with dropout.
    """
    if not (c.half and c.capability >= (8, 0) and not c.masked and c.head_dim == c.value_dim <= 256):
        return False
    if c.causal and c.queries != c.keys:
        return False
    small = (8, 6) <= c.capability <= (8, 9) or c.capability[0] == 12
    return not (small and c.needs_grad and c.head_dim > 192 and (c.head_dim <= 224 or c.dropout > 0))


def _takes_efficient(c: SdpaCall) -> bool:
    """Return whether the memory-efficient kernel takes the call: no grouped heads, and no bf16 below Ampere."""
    modern = c.capability >= (8, 0)
    return not c.grouped and (modern or c.dtype != "bf16") and c.aligned(8 if c.half else 4 if modern else 1)


_TAKES: dict[SdpaKernel, Callable[[SdpaCall], bool]] = {
    "cudnn": _takes_cudnn, "flash": _takes_flash, "efficient": _takes_efficient
}  # fmt: skip


def sdpa_kernel(
    call: SdpaCall, enabled: Collection[str] = _TAKES, order: Sequence[SdpaKernel] | None = None
) -> SdpaKernel:
    """Return the kernel PyTorch 2.13 picks. enabled: the fused kernels the program has not switched off.

    order: how the program ranks them (`torch.nn.attention.sdpa_kernel(..., set_priority=True)`); None: PyTorch's order.
    Source: sdp_utils.cpp (select_sdp_backend, with cuDNN above 9.15: it comes first on compute capability 9 and 10 and
    behind `math` elsewhere), checked against the choices of the real library on compute capability 7.5 to 12.0.
    """
    if call.broadcast:  # check_batch_size_and_num_heads_dense: no fused kernel broadcasts heads
        return "math"
    first: tuple[SdpaKernel, ...] = ("cudnn",) if call.capability[0] in (9, 10) else ()
    ranked = order or (*first, "flash", "efficient")
    return next((k for k in ranked if k == "math" or (k in enabled and _TAKES[k](call))), "math")


# --- what a kernel allocates, in order ---


class Free(NamedTuple):
    """A step of a script that frees a temporary: the newest, or of those that live the nth from the newest."""

    nth: int = 1


FREE = Free()
# n >= 0 allocates n bytes, ~i makes the i-th output, a tuple is a script of its own; a script frees what is left at its
# end, newest first
Script = Sequence["int | Free | tuple[int, ...]"]


# --- CUB, as PyTorch calls it: sorts and scans of n elements ---

_DIGITS = 256  # of a pass over 8 bits
_ALIGNED = 256  # bytes to which CUB aligns each part of its storage; one more such step for the whole
# elements that a block of the one-sweep sort takes, by bytes of a key and of a value, on compute capability 8 and newer
_SORT_TILES = {(8, 8): 4608, (4, 8): 5376, (2, 8): 5632, (8, 0): 5760}
_SORT_TILE = 4608
_SCAN_TILES = {8: 896, 4: 1920, 2: 1664}  # elements of a block of a sum, by bytes
_UNIQUE_TILE = 4608  # ... of UniqueByKey: fits what an H100 allocated for 4,096 to 262,144 indices (4,096 to 5,350)
_ONE_BLOCK = 2304  # elements that a single block sorts by itself


def radix_sort(n: int, key: int, value: int, bits: int = 0) -> int:
    """Return the storage of cub::DeviceRadixSort. key, value: bytes; bits: of the key that are sorted by; 0: all.

    Source: dispatch_radix_sort.cuh (InvokeOnesweep with 64-bit offsets): histograms, counters and look-back words, and
    where there are several passes a second copy of keys and values. Its tiles are of tuning_radix_sort.cuh where it
    states them (keys of 4 and 8 bytes), those of 2 bytes fit what an H100 allocated (5,608 to 5,637).
    """
    if n <= _ONE_BLOCK:
        return 1
    passes = _up(bits or 8 * key, 8)
    copies = n * (key + value) if passes > 1 else 0
    blocks = _up(n, _SORT_TILES.get((key, value), _SORT_TILE))
    return copies + _DIGITS * (8 * passes + 4 * blocks) + 2 * _ALIGNED - 1


def scan(n: int, size: int) -> int:
    """Return the storage of cub::DeviceScan over numbers of so many bytes: a word a block, and 32 more.

    Source: agent_scan.cuh, ScanTileState; the tiles of 8 and 4 bytes are 128 threads' with 7 and 15 elements, that of 2
    bytes fits what an H100 allocated (1,561 to 1,721).
    """
    return _states(_up(n, _SCAN_TILES.get(size, _SCAN_TILES[8])), 2 * size)


def unique(n: int) -> int:
    """Return the storage of cub::DeviceSelect::UniqueByKey, whose blocks count in 64 bits; its tile as in `scan`."""
    return _states(_up(n, _UNIQUE_TILE), 16)


def _states(blocks: int, word: int) -> int:
    return _up(word * (blocks + 32), _ALIGNED) * _ALIGNED + 2 * _ALIGNED - 1


# --- cuDNN's attention ---

CUDNN_FORWARD = 256  # bytes of workspace, measured on an H100 with cuDNN 9.19 (benchmarks/measured), as the next


def cudnn_backward(rows: int, width: int, expanded: int) -> int:
    """Return the bytes of a backward's workspace: dq in fp32, row sums and, of grouped heads, `expanded` bytes.

    rows: query heads times tokens; width: of a query's head; expanded: dk and dv with a copy for every query head.
    """
    return 4 * rows * (width + 1) + expanded + CUDNN_FORWARD


def cudnn_reproducible_backward(batch: int, heads: int, queries: int, keys: int, rows: int) -> int:
    """Return the bytes of a reproducible backward's workspace on Hopper: dP of all pairs of tokens, and row sums.

    cudnn-frontend has no dq in fp32 then (scaled_dot_product_flash_attention.h); its limit of 256 MB for such a
    workspace, which cuDNN 8.9 had, counts dP so. rows: query heads times tokens.
    """
    return 2 * batch * heads * _tiles(queries) * _tiles(keys) + 4 * rows + CUDNN_FORWARD


def _tiles(tokens: int) -> int:
    return -(-tokens // 64) * 64
