"""The quick allocator with default settings: whole segments, taken and given back."""

from __future__ import annotations

from memfit.allocator.blocks import K_MIN_BLOCK_SIZE, allocation_size
from memfit.allocator.quick import LARGE_SEGMENT, SHIFT, SMALL, BlockPool, Charge, QuickAllocator


class Segments(BlockPool):
    """A pool of segments from cudaMalloc, which are kept as blocks. `next`: where the next one will lie."""

    __slots__ = ("next", "segments")

    def __init__(self, slack: int) -> None:
        super().__init__(slack)
        self.segments: set[int] = set()
        self.next = 1

    def map(self, wanted: int, charge: Charge) -> int:
        """A new segment."""
        size = allocation_size(wanted * K_MIN_BLOCK_SIZE, LARGE_SEGMENT) // K_MIN_BLOCK_SIZE
        if not charge(size):
            return 0
        segment = size << SHIFT | self.next
        self.next += size + 1  # a gap keeps segments from merging
        self.segments.add(segment)
        self.insert(segment)
        return segment

    def release(self) -> int:
        """Give every segment back that is one free block."""
        free = self.segments.intersection(self.keys)
        for segment in free:
            self.remove(segment)
        self.segments -= free
        return sum(segment >> SHIFT for segment in free)

    def copy(self, capacity: int) -> Segments:
        """The same on any card."""
        other = self._copy_to(Segments(self.slack))
        other.segments, other.next = self.segments.copy(), self.next
        return other


class PlainAllocator(QuickAllocator):
    """That of a card of `capacity` bytes."""

    __slots__ = ()

    def __init__(self, capacity: int | None = None) -> None:
        super().__init__(capacity, Segments(slack=0), Segments(slack=SMALL))
