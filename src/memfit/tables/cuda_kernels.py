"""Facts of CUDA's libraries and launch code that decide bytes, by the card's compute capability: PyTorch 2.13."""

from __future__ import annotations

Capability = tuple[int, int]

_THREADS = {(7, 5): 1024, (8, 6): 1536, (8, 9): 1536, (12, 0): 1536}
_WORKSPACES = ((9, 33_554_432), (0, 8_519_680))  # from that major capability on


def threads_per_multiprocessor(capability: Capability) -> int:
    """2048 on data-centre parts up to cc 9 and 10, 1536 on cc 8.6, 8.9 and 12, 1024 on 7.5."""
    return _THREADS.get(capability, 2048)


def cublas_workspace(capability: Capability) -> int:
    """Bytes that every thread which multiplies matrices on a stream takes once and keeps (CublasHandlePool.cpp)."""
    return next(size for major, size in _WORKSPACES if capability[0] >= major)


def reduction(
    inputs: int, outputs: int, *, fastest: bool, multiprocessors: int, threads: int, acc_bytes: int = 4
) -> tuple[int, ...]:
    """(staging buffer, semaphores) in bytes of a reduction across thread blocks; empty if one block suffices.

    inputs: elements that become one; fastest: they lie side by side. threads: per multiprocessor. Source: Reduce.cuh
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


_SPLIT_GOAL = 200  # blocks of keys times heads that the memory-efficient kernel's backward aims at


def key_splits(heads: int, keys: int) -> int:
    """Into how many parts the memory-efficient kernel's backward cuts the keys; heads: of the whole batch."""
    return min(max(_SPLIT_GOAL // heads, 1), _up(keys, 64))


def _up(a: int, b: int) -> int:
    return -(-a // b)


def _power_below(n: int) -> int:
    return 1 << (n.bit_length() - 1) if n > 0 else 1
