"""The allocator on one stream with blocks as integers, for planners and searches: what its two kinds have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left, insort
from collections.abc import Callable
from typing import Final, Self

from memfit.allocator.blocks import K_MIN_BLOCK_SIZE, K_SMALL_SIZE, allocation_size
from memfit.allocator.reserve import UNLIMITED, OutOfMemory
from memfit.nouns.alloc_settings import AllocSettings

# Sizes and addresses are counted in units of K_MIN_BLOCK_SIZE, and a block is one integer: its size << SHIFT | its
# address, which is also its key in the sorted pool.
SHIFT: Final = 40  # addresses up to 512 TiB
ADDRESS: Final = (1 << SHIFT) - 1
SMALL: Final = K_SMALL_SIZE // K_MIN_BLOCK_SIZE
LARGE_SEGMENT: Final = AllocSettings().large_segment_size
Charge = Callable[[int], bool]  # units taken from the driver; False where it has not got them


class BlockPool(ABC):
    """The free blocks of one kind: `keys` in best-fit order, `starts` and `ends` by the address each begins or ends at.

    A block is split when more than `slack` units would be left. `unmapped` says where the gaps of expandable segments
    begin and end.
    """

    __slots__ = ("ends", "keys", "slack", "starts", "unmapped")

    def __init__(self, slack: int) -> None:
        self.slack = slack
        self.keys: list[int] = []
        self.starts: dict[int, int] = {}
        self.ends: dict[int, int] = {}
        self.unmapped: dict[int, int] = {}

    @abstractmethod
    def map(self, wanted: int, charge: Charge) -> int:
        """A new free block of at least `wanted` units; 0 where the driver has not got them."""

    @abstractmethod
    def release(self) -> int:
        """release_blocks: give back what is wholly free; returns how many units."""

    @abstractmethod
    def copy(self, capacity: int) -> BlockPool:
        """The same blocks in a pool of a card of another capacity."""

    def best_fit(self, position: int) -> int:
        """The position of the block to take, from that of the smallest sufficient one; asked where there are gaps."""
        return position

    def insert(self, block: int) -> None:
        """Make a block available as it is, between blocks that are in use."""
        insort(self.keys, block)
        self.starts[block & ADDRESS] = self.ends[(block & ADDRESS) + (block >> SHIFT)] = block

    def remove(self, block: int) -> None:
        """Take a free block out again."""
        del self.keys[bisect_left(self.keys, block)]
        del self.starts[block & ADDRESS], self.ends[(block & ADDRESS) + (block >> SHIFT)]

    def _copy_to(self, other: Self) -> Self:
        other.keys, other.starts, other.ends = self.keys.copy(), self.starts.copy(), self.ends.copy()
        other.unmapped = self.unmapped.copy()
        return other


class QuickAllocator:
    """Rules 1 to 5, 7 and 8 of `Allocator`, with the tie-break of torch 2.13; tests hold the two equal.

    `capacity` is what the driver can hand out in bytes (None: any number).
    """

    __slots__ = (
        "_allocated", "_allocated_peak", "_large", "_reserved", "_reserved_peak", "_small", "capacity", "least_refused",
        "num_alloc_retries",
    )  # fmt: skip

    def __init__(self, capacity: int | None, small: BlockPool, large: BlockPool) -> None:
        self.capacity = UNLIMITED if capacity is None else capacity
        self.least_refused = UNLIMITED  # the smallest `reserved` that the driver refused to grow to
        self.num_alloc_retries = 0
        self._allocated = self._allocated_peak = self._reserved = self._reserved_peak = 0
        self._small, self._large = small, large

    def copy(self, capacity: int) -> QuickAllocator:
        """One that holds the same blocks on a card of another capacity; its peaks go on from these."""
        other = QuickAllocator(capacity, self._small.copy(capacity), self._large.copy(capacity))
        other._allocated, other._allocated_peak = self._allocated, self._allocated_peak
        other._reserved, other._reserved_peak = self._reserved, self._reserved_peak
        return other

    def malloc(self, size: int) -> int:
        """A block for `size` bytes; 0, which is no block, for 0 bytes. Raises OutOfMemory."""
        if size <= 0:
            return 0
        wanted = (size + 511) >> 9
        pool = self._large if wanted > SMALL else self._small
        keys = pool.keys
        position = bisect_left(keys, wanted << SHIFT)
        if position == len(keys):
            position = self._grow(pool, wanted, size)
        elif pool.unmapped and ((block := keys[position]) & ADDRESS) + (block >> SHIFT) in pool.unmapped:
            position = pool.best_fit(position)  # only a block before a gap could grow more than the next
        block = keys.pop(position)
        address, have = block & ADDRESS, block >> SHIFT
        starts = pool.starts
        del starts[address]
        left = have - wanted
        if left > pool.slack:
            rest = left << SHIFT | address + wanted
            insort(keys, rest)
            starts[address + wanted] = pool.ends[address + have] = rest
            block, have = wanted << SHIFT | address, wanted
        else:
            del pool.ends[address + have]
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
        pool = self._large if size > SMALL else self._small
        keys, starts, ends = pool.keys, pool.starts, pool.ends
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

    def empty_cache(self) -> None:
        """Give back what is wholly free, segments or granules."""
        self._reserved -= self._large.release() + self._small.release()

    def _grow(self, pool: BlockPool, wanted: int, requested: int) -> int:
        """The position of a new free block; the cache is given back where the driver has no more."""
        block = pool.map(wanted, self._charge)
        if not block:
            self.empty_cache()
            self.num_alloc_retries += 1
            block = pool.map(wanted, self._charge)
        if not block:
            raise OutOfMemory(
                requested=requested, tried=allocation_size(wanted * K_MIN_BLOCK_SIZE, LARGE_SEGMENT), allowed=None,
                device_total=self.capacity, device_free=self.capacity - self.reserved, allocated=self.allocated,
                reserved=self.reserved,
            )  # fmt: skip
        return bisect_left(pool.keys, block)

    def _charge(self, units: int) -> bool:
        reserved = (self._reserved + units) * K_MIN_BLOCK_SIZE
        if reserved > self.capacity:
            self.least_refused = min(self.least_refused, reserved)
            return False
        self._reserved += units
        self._reserved_peak = max(self._reserved_peak, self._reserved)
        return True

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
        """Bytes that the driver gave."""
        return self._reserved * K_MIN_BLOCK_SIZE

    @property
    def reserved_peak(self) -> int:
        """Their highest since the last reset."""
        return self._reserved_peak * K_MIN_BLOCK_SIZE
