"""The same allocator for its default settings, one stream and a card without a limit: twice as fast, for planners."""

from __future__ import annotations

from bisect import bisect_left, insort

from memfit.alloc_conf import AllocSettings
from memfit.allocator.blocks import K_MIN_BLOCK_SIZE, K_SMALL_SIZE, KEY_SHIFT, allocation_size

ADDRESS = (1 << KEY_SHIFT) - 1
LARGE_SEGMENT = AllocSettings().large_segment_size


class PlainAllocator:
    """Rules 1 to 5, 8 and empty_cache of `Allocator`, tie-break of torch 2.13; `tests/test_allocator_plain.py` holds them equal.

    A block is one int, its size << KEY_SHIFT | its address, which is also its key in the sorted pool. Neighbours are
    found by address: `_starts` and `_ends` map where a free block begins and ends to it. All levels are bytes.
    """

    __slots__ = (
        "_ends", "_large", "_next", "_segments", "_small", "_starts", "allocated", "allocated_peak", "reserved",
        "reserved_peak",
    )  # fmt: skip

    def __init__(self) -> None:
        self.allocated = self.allocated_peak = self.reserved = self.reserved_peak = 0
        self._small: list[int] = []
        self._large: list[int] = []
        self._starts: dict[int, int] = {}
        self._ends: dict[int, int] = {}
        self._segments: set[int] = set()  # as blocks
        self._next = K_MIN_BLOCK_SIZE  # address of the next segment; a gap before it keeps neighbours from merging

    def malloc(self, size: int) -> int:
        """A block for `size` bytes; 0, which is no block, for 0 bytes."""
        if size <= 0:
            return 0
        rounded = (size + 511) & -512
        keys, slack = (self._large, K_SMALL_SIZE) if rounded > K_SMALL_SIZE else (self._small, 511)
        position = bisect_left(keys, rounded << KEY_SHIFT)
        if position == len(keys):
            self._grow(keys, rounded)
        block = keys.pop(position)
        address, have = block & ADDRESS, block >> KEY_SHIFT
        del self._starts[address]
        left = have - rounded
        if left > slack:
            rest = left << KEY_SHIFT | address + rounded
            insort(keys, rest)
            self._starts[address + rounded] = self._ends[address + have] = rest
            block, have = rounded << KEY_SHIFT | address, rounded
        else:
            del self._ends[address + have]
        self.allocated = allocated = self.allocated + have
        if allocated > self.allocated_peak:
            self.allocated_peak = allocated
        return block

    def free(self, block: int) -> None:
        """Give a block back, to be cached; 0 is nothing."""
        if not block:
            return
        address, size = block & ADDRESS, block >> KEY_SHIFT
        self.allocated -= size
        keys, starts, ends = self._large if size > K_SMALL_SIZE else self._small, self._starts, self._ends
        end = address + size
        before, after = ends.pop(address, 0), starts.pop(end, 0)
        if before:
            del keys[bisect_left(keys, before)]
            address = before & ADDRESS
        if after:
            del keys[bisect_left(keys, after)]
            end += after >> KEY_SHIFT
        merged = end - address << KEY_SHIFT | address
        insort(keys, merged)
        starts[address] = ends[end] = merged

    def _grow(self, keys: list[int], rounded: int) -> None:
        """A new segment as the largest free block."""
        size = allocation_size(rounded, LARGE_SEGMENT)
        address, self._next = self._next, self._next + size + K_MIN_BLOCK_SIZE
        block = size << KEY_SHIFT | address
        self._segments.add(block)
        keys.append(block)
        self._starts[address] = self._ends[address + size] = block
        self.reserved += size
        self.reserved_peak = max(self.reserved_peak, self.reserved)

    def empty_cache(self) -> None:
        """Give every segment back that is wholly free."""
        for keys in (self._large, self._small):
            for block in self._segments.intersection(keys):
                address, size = block & ADDRESS, block >> KEY_SHIFT
                del keys[bisect_left(keys, block)], self._starts[address], self._ends[address + size]
                self._segments.remove(block)
                self.reserved -= size

    def reset_peak_stats(self) -> None:
        """Every peak becomes the current value."""
        self.allocated_peak, self.reserved_peak = self.allocated, self.reserved
