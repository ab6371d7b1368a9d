"""The same allocator with expandable segments, otherwise default settings and one stream: twice as fast, for searches."""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import Final

from memfit.allocator.blocks import K_MIN_BLOCK_SIZE, K_SMALL_BUFFER, allocation_size
from memfit.allocator.plain import LARGE_SEGMENT, SMALL
from memfit.allocator.reserve import UNLIMITED, OutOfMemory

SHIFT: Final = 40  # a block is its size << SHIFT | its address, as in PlainAllocator; addresses up to 512 TiB
ADDRESS: Final = (1 << SHIFT) - 1


class Range:
    """The blocks of one pool: free ones as in PlainAllocator, `unmapped` from where each gap begins to where it ends.

    Segments of `length` follow one another with a gap between them; everything is counted in blocks of 512 bytes.
    """

    __slots__ = ("ends", "granule", "keys", "length", "next", "starts", "unmapped")

    def __init__(self, granule: int, total: int) -> None:
        self.granule = granule // K_MIN_BLOCK_SIZE
        self.length = max(1, -(-(total + total // 8) // granule)) * self.granule
        self.keys: list[int] = []
        self.starts: dict[int, int] = {}
        self.ends: dict[int, int] = {}
        self.unmapped: dict[int, int] = {}
        self.next = self.granule  # no block is 0

    def add(self, address: int, end: int) -> None:
        """A free block, merged with those beside it."""
        before, after = self.ends.pop(address, 0), self.starts.pop(end, 0)
        if before:
            del self.keys[bisect_left(self.keys, before)]
            address = before & ADDRESS
        if after:
            del self.keys[bisect_left(self.keys, after)]
            end += after >> SHIFT
        block = end - address << SHIFT | address
        insort(self.keys, block)
        self.starts[address] = self.ends[end] = block

    def take(self, block: int) -> None:
        """A block is no longer free."""
        del self.keys[bisect_left(self.keys, block)]
        del self.starts[block & ADDRESS], self.ends[(block & ADDRESS) + (block >> SHIFT)]

    def room(self, block: int) -> int:
        """What a block could grow to without moving: its size and the gap behind it."""
        end = (block & ADDRESS) + (block >> SHIFT)
        return (block >> SHIFT) + self.unmapped.get(end, end) - end

    def best_fit(self, position: int) -> int:
        """From the smallest sufficient block on, the next one while it could grow less than this one."""
        keys = self.keys
        while position + 1 < len(keys) and self.room(keys[position + 1]) < self.room(keys[position]):
            position += 1
        return position

    def candidate(self, wanted: int) -> int:
        """The lowest address with so much free or unmapped behind it, which is there after a gap or before one."""
        for gap in sorted(self.unmapped):
            before = self.ends.get(gap, 0)
            start = end = before & ADDRESS if before else gap
            while end - start < wanted and (after := self.behind(end)) > end:
                end = after
            if end - start >= wanted:
                return start
        address = self.next
        self.next += self.length + self.granule
        self.unmapped[address] = address + self.length
        return address

    def behind(self, address: int) -> int:
        """Where the free block or the gap ends that begins at an address; the address itself if neither does."""
        block = self.starts.get(address)
        return address + (block >> SHIFT) if block else self.unmapped.get(address, address)

    def release(self) -> int:
        """Give the whole granules inside free blocks back, and forget segments that are all gap; returns how much."""
        released = 0
        for block in self.keys.copy():
            address, stop = block & ADDRESS, (block & ADDRESS) + (block >> SHIFT)
            begin, end = -(-address // self.granule) * self.granule, stop // self.granule * self.granule
            if begin < end:
                self.take(block)
                if begin > address:
                    self.add(address, begin)
                if end < stop:
                    self.add(end, stop)
                self.unmapped[begin] = end
                released += end - begin
        gaps, self.unmapped = sorted(self.unmapped.items()), {}
        last = 0
        for begin, end in gaps:
            if last and self.unmapped[last] == begin:
                self.unmapped[last] = end
            else:
                self.unmapped[begin], last = end, begin
        for begin, end in reversed(list(self.unmapped.items())):
            if end - begin == self.length:
                del self.unmapped[begin]
                if end + self.granule == self.next:
                    self.next = begin
        return released


class GrowingAllocator:
    """Rules 1 to 5, 7, 8 and 10 of `Allocator`; tests hold the two equal. `capacity` as there."""

    __slots__ = ("_allocated", "_allocated_peak", "_large", "_reserved", "_reserved_peak", "_small", "capacity", "num_alloc_retries")  # fmt: skip

    def __init__(self, capacity: int | None = None) -> None:
        self.capacity = UNLIMITED if capacity is None else capacity
        self.num_alloc_retries = 0
        self._allocated = self._allocated_peak = self._reserved = self._reserved_peak = 0
        self._small, self._large = Range(K_SMALL_BUFFER, self.capacity), Range(LARGE_SEGMENT, self.capacity)

    def malloc(self, size: int) -> int:
        """A block for `size` bytes; 0, which is no block, for 0 bytes. Raises OutOfMemory."""
        if size <= 0:
            return 0
        wanted = (size + 511) >> 9
        pool = self._large if wanted > SMALL else self._small
        keys, starts, ends = pool.keys, pool.starts, pool.ends
        position = bisect_left(keys, wanted << SHIFT)
        if position < len(keys):
            block = keys[position]
            if (block & ADDRESS) + (block >> SHIFT) in pool.unmapped:  # only such a block could grow more than the next
                position = pool.best_fit(position)
        else:
            position = self._grow(pool, wanted, size)
        block = keys.pop(position)
        address, have = block & ADDRESS, block >> SHIFT
        del starts[address]
        if have > wanted:
            rest = have - wanted << SHIFT | address + wanted
            insort(keys, rest)
            starts[address + wanted] = ends[address + have] = rest
        else:
            del ends[address + have]
        self._allocated = allocated = self._allocated + wanted
        if allocated > self._allocated_peak:
            self._allocated_peak = allocated
        return wanted << SHIFT | address

    def free(self, block: int) -> None:
        """Give a block back, to be cached; 0 is nothing."""
        if not block:
            return
        address, size = block & ADDRESS, block >> SHIFT
        self._allocated -= size
        pool = self._large if size > SMALL else self._small
        keys, starts, ends = pool.keys, pool.starts, pool.ends  # pool.add, which is called too often to be called
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
        """Give back every granule that is wholly free."""
        for pool in (self._large, self._small):
            self._reserved -= pool.release()

    def _grow(self, pool: Range, wanted: int, requested: int) -> int:
        """The position of a block that was mapped; the cache is given back where the driver has no more."""
        block = self._map(pool, wanted)
        if not block:
            self.empty_cache()
            self.num_alloc_retries += 1
            block = self._map(pool, wanted)
        if not block:
            raise OutOfMemory(
                requested=requested, tried=allocation_size(wanted * K_MIN_BLOCK_SIZE, LARGE_SEGMENT), allowed=None,
                device_total=self.capacity, device_free=self.capacity - self.reserved, allocated=self.allocated,
                reserved=self.reserved,
            )  # fmt: skip
        return bisect_left(pool.keys, block)

    def _map(self, pool: Range, wanted: int) -> int:
        """Back the lowest place with memory, gap by gap; 0 where the driver refuses, and what it gave stays mapped."""
        start = pool.candidate(wanted)
        while True:
            block = pool.starts.get(start, 0)
            have = block >> SHIFT
            if have >= wanted:
                return block
            gap, end = start + have, pool.unmapped[start + have]
            mapped = -(-min(wanted - have, end - gap) // pool.granule) * pool.granule
            if self.reserved + mapped * K_MIN_BLOCK_SIZE > self.capacity:
                return 0
            del pool.unmapped[gap]
            if gap + mapped < end:
                pool.unmapped[gap + mapped] = end
            self._reserved += mapped
            self._reserved_peak = max(self._reserved_peak, self._reserved)
            pool.add(gap, gap + mapped)

    @property
    def allocated(self) -> int:
        """Bytes of all blocks in use."""
        return self._allocated * K_MIN_BLOCK_SIZE

    @property
    def allocated_peak(self) -> int:
        """Their highest."""
        return self._allocated_peak * K_MIN_BLOCK_SIZE

    @property
    def reserved(self) -> int:
        """Bytes that are mapped."""
        return self._reserved * K_MIN_BLOCK_SIZE

    @property
    def reserved_peak(self) -> int:
        """Their highest."""
        return self._reserved_peak * K_MIN_BLOCK_SIZE
