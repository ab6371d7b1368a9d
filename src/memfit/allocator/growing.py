"""The quick allocator with expandable segments (rule 10)."""

from __future__ import annotations

from memfit.allocator.blocks import K_MIN_BLOCK_SIZE, K_SMALL_BUFFER
from memfit.allocator.quick import ADDRESS, LARGE_SEGMENT, SHIFT, BlockPool, Charge, QuickAllocator
from memfit.allocator.reserve import UNLIMITED


class Range(BlockPool):
    """A pool of expandable segments: `length` units each, one behind the other with a granule between them."""

    __slots__ = ("granule", "length", "next")

    def __init__(self, granule: int, capacity: int) -> None:
        """Sizes in bytes."""
        super().__init__(slack=0)
        self.granule = granule // K_MIN_BLOCK_SIZE
        self.length = self.length_on(capacity)
        self.next = self.granule

    def length_on(self, capacity: int) -> int:
        """`new ExpandableSegment`: addresses for 9/8 of a card of so many bytes."""
        return max(1, -(-(capacity + capacity // 8) // (self.granule * K_MIN_BLOCK_SIZE))) * self.granule

    def map(self, wanted: int, charge: Charge) -> int:
        """Back the lowest place with memory, gap by gap; what the driver gave before it refused stays mapped."""
        start = self.candidate(wanted)
        while (have := (before := self.starts.get(start, 0)) >> SHIFT) < wanted:
            gap = start + have
            end = self.unmapped[gap]
            mapped = -(-min(wanted - have, end - gap) // self.granule) * self.granule
            if not charge(mapped):
                return 0
            del self.unmapped[gap]
            if gap + mapped < end:
                self.unmapped[gap + mapped] = end
            after = self.starts.get(gap + mapped, 0)
            for neighbour in filter(None, (before, after)):
                self.remove(neighbour)
            self.insert(have + mapped + (after >> SHIFT) << SHIFT | start)
        return before

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
                self.remove(block)
                if begin > address:
                    self.insert(begin - address << SHIFT | address)
                if end < stop:
                    self.insert(stop - end << SHIFT | end)
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

    def copy(self, capacity: int) -> Range:
        """The same on a card whose segments have another length, which must not have mattered yet."""
        other = self._copy_to(Range(self.granule * K_MIN_BLOCK_SIZE, capacity))
        if self.next > self.granule:
            other.unmapped[max(other.unmapped)] = other.granule + other.length
            other.next = other.granule + other.length + other.granule
        return other


class GrowingAllocator(QuickAllocator):
    """That of a card of `capacity` bytes."""

    __slots__ = ()

    def __init__(self, capacity: int | None = None) -> None:
        total = UNLIMITED if capacity is None else capacity
        super().__init__(capacity, Range(K_SMALL_BUFFER, total), Range(LARGE_SEGMENT, total))
