"""The same allocator for its default settings and one stream: twice as fast, for planners and searches."""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import Final

from memfit.alloc_conf import AllocSettings
from memfit.allocator.blocks import K_MIN_BLOCK_SIZE, K_SMALL_SIZE, allocation_size
from memfit.allocator.reserve import UNLIMITED, OutOfMemory

# Everything is counted in granules of K_MIN_BLOCK_SIZE, so that a block is one int of two machine digits:
# its size << SHIFT | its address, which is also its key in the sorted pool.
SHIFT: Final = 34  # addresses up to 8 TiB
ADDRESS: Final = (1 << SHIFT) - 1
SMALL: Final = K_SMALL_SIZE // K_MIN_BLOCK_SIZE
LARGE_SEGMENT: Final = AllocSettings().large_segment_size


class PlainAllocator:
    """Rules 1 to 5, 7, 8 and empty_cache of `Allocator`, with the tie-break of torch 2.13; tests hold the two equal.

    `capacity` is what the driver can hand out in bytes (None: any number). Neighbours are found by address: `_starts`
    and `_ends` map where a free block begins and ends to it.
    """

    __slots__ = (
        "_allocated", "_allocated_peak", "_ends", "_large", "_next", "_reserved", "_reserved_peak", "_segments",
        "_small", "_starts", "capacity", "least_refused", "num_alloc_retries",
    )  # fmt: skip

    def __init__(self, capacity: int | None = None) -> None:
        self.capacity = UNLIMITED if capacity is None else capacity
        self.least_refused = UNLIMITED  # the smallest `reserved` that the driver refused to grow to
        self.num_alloc_retries = 0
        self._allocated = self._allocated_peak = self._reserved = self._reserved_peak = 0
        self._small: list[int] = []
        self._large: list[int] = []
        self._starts: dict[int, int] = {}
        self._ends: dict[int, int] = {}
        self._segments: set[int] = set()  # as blocks
        self._next = 1  # address of the next segment: no block is 0; a gap keeps segments from merging

    def copy(self, capacity: int) -> PlainAllocator:
        """One that holds the same blocks on a card of another capacity; its peaks go on from these."""
        other = PlainAllocator(capacity)
        for name in self.__slots__:
            if name.startswith("_"):
                held = getattr(self, name)
                setattr(other, name, held if isinstance(held, int) else held.copy())
        return other

    def malloc(self, size: int) -> int:
        """A block for `size` bytes; 0, which is no block, for 0 bytes. Raises OutOfMemory."""
        if size <= 0:
            return 0
        wanted = (size + 511) >> 9
        keys, slack = (self._large, SMALL) if wanted > SMALL else (self._small, 0)
        position = bisect_left(keys, wanted << SHIFT)
        if position == len(keys):
            position = self._grow(keys, wanted, size)
        block = keys.pop(position)
        address, have = block & ADDRESS, block >> SHIFT
        starts = self._starts
        del starts[address]
        left = have - wanted
        if left > slack:
            rest = left << SHIFT | address + wanted
            insort(keys, rest)
            starts[address + wanted] = self._ends[address + have] = rest
            block, have = wanted << SHIFT | address, wanted
        else:
            del self._ends[address + have]
        self._allocated = allocated = self._allocated + have
        if allocated > self._allocated_peak:
            self._allocated_peak = allocated
        return block

    def free(self, block: int) -> None:
        """Give a block back, to be cached; 0 is nothing."""
        if not block:
            return
        address, size = block & ADDRESS, block >> SHIFT
        self._allocated -= size
        keys, starts, ends = self._large if size > SMALL else self._small, self._starts, self._ends
        end = address + size
        before, after = ends.pop(address, 0), starts.pop(end, 0)
        if before:
            del keys[bisect_left(keys, before)]
            address = before & ADDRESS
        if after:
            del keys[bisect_left(keys, after)]
            end += after >> SHIFT
        merged = end - address << SHIFT | address
        insort(keys, merged)
        starts[address] = ends[end] = merged

    def _grow(self, keys: list[int], wanted: int, requested: int) -> int:
        """A new segment as the largest free block; returns its position."""
        size = allocation_size(wanted * K_MIN_BLOCK_SIZE, LARGE_SEGMENT)
        if not self._has(size):
            self.empty_cache()
            self.num_alloc_retries += 1
            if not self._has(size):
                raise OutOfMemory(
                    requested=requested, tried=size, device_total=self.capacity, device_free=self.capacity - self.reserved,
                    allowed=None, allocated=self.allocated, reserved=self.reserved,
                )  # fmt: skip
        size //= K_MIN_BLOCK_SIZE
        address, self._next = self._next, self._next + size + 1
        block = size << SHIFT | address
        self._segments.add(block)
        keys.append(block)
        self._starts[address] = self._ends[address + size] = block
        self._reserved += size
        self._reserved_peak = max(self._reserved_peak, self._reserved)
        return len(keys) - 1

    def _has(self, size: int) -> bool:
        """Whether the driver has `size` bytes more."""
        if self.reserved + size <= self.capacity:
            return True
        self.least_refused = min(self.least_refused, self.reserved + size)
        return False

    def empty_cache(self) -> None:
        """Give every segment back that is wholly free."""
        for keys in (self._large, self._small):
            for block in self._segments.intersection(keys):
                address, size = block & ADDRESS, block >> SHIFT
                del keys[bisect_left(keys, block)], self._starts[address], self._ends[address + size]
                self._segments.remove(block)
                self._reserved -= size

    def reset_peak_stats(self) -> None:
        """Every peak becomes the current value."""
        self._allocated_peak, self._reserved_peak = self._allocated, self._reserved

    @property
    def allocated(self) -> int:
        """Bytes of all blocks in use."""
        return self._allocated * K_MIN_BLOCK_SIZE

    @property
    def allocated_peak(self) -> int:
        """Their highest since the last reset."""
        return self._allocated_peak * K_MIN_BLOCK_SIZE

    @property
    def reserved(self) -> int:
        """Bytes of all segments."""
        return self._reserved * K_MIN_BLOCK_SIZE

    @property
    def reserved_peak(self) -> int:
        """Their highest since the last reset."""
        return self._reserved_peak * K_MIN_BLOCK_SIZE
