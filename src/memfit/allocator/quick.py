"""Quick allocators for planner and searches: one per stream, blocks as integers, default or expandable segments.

They follow rules 1 to 5, 7, 8 and 10 of the package with the tie-break of torch 2.13, count no requests and check no
frees; tests hold them equal to `Allocator`. Measured on the median of seven runs: without them `memfit plan` takes 13 %
(one card) to 30 % (eight) more CPU time, and `memfit replay` of a run of 80,000 events 70 % more, of which 38 points
are the one with expandable segments. `_native.cpp` is the compiled twin of this module, used where it could be built: a
change of one is a change of both.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from typing import Any, Final, NoReturn, Self

from memfit.allocator.blocks import K_MIN_BLOCK_SIZE, K_SMALL_BUFFER, K_SMALL_SIZE, allocation_size
from memfit.allocator.heap import EMPTY_CACHE, Heap
from memfit.allocator.reserve import UNLIMITED, OutOfMemory
from memfit.errors import BadInput
from memfit.nouns.alloc_settings import AllocSettings

# Sizes and addresses are counted in units of K_MIN_BLOCK_SIZE, and a block is one integer: its size << SHIFT | its
# address, which is also its key in the sorted pool.
SHIFT: Final = 40  # addresses up to 512 TiB
ADDRESS: Final = (1 << SHIFT) - 1
SMALL: Final = K_SMALL_SIZE // K_MIN_BLOCK_SIZE
SEGMENT: Final = K_SMALL_BUFFER // K_MIN_BLOCK_SIZE  # the smallest segment
LARGE_SEGMENT: Final = AllocSettings().large_segment_size
Charge = Callable[[int], bool]  # takes units from the driver; returns False if it has not as many left


class QuickPool(ABC):
    """The free blocks of one kind: `keys` in best-fit order, `starts` and `ends` by their first and end address.

    A block is split when more than `slack` units would be left. `unmapped` maps the first address of each gap in
    expandable segments to its end.
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
        """Return a new free block of at least `wanted` units; 0 if the driver has not as many left."""

    @abstractmethod
    def release(self) -> int:
        """release_blocks: release wholly free memory to the driver; return how many units."""

    @abstractmethod
    def copy(self, capacity: int) -> QuickPool:
        """Return a pool with the same blocks on a card of another capacity."""

    def best_fit(self, position: int) -> int:
        """Return the position of the block to take; `position` is that of the smallest sufficient one."""
        return position

    def insert(self, block: int) -> None:
        """Add a free block without merging it."""
        insort(self.keys, block)
        self.starts[block & ADDRESS] = self.ends[(block & ADDRESS) + (block >> SHIFT)] = block

    def remove(self, block: int) -> None:
        """Remove a free block."""
        del self.keys[bisect_left(self.keys, block)]
        del self.starts[block & ADDRESS], self.ends[(block & ADDRESS) + (block >> SHIFT)]

    def _copy_to(self, other: Self) -> Self:
        other.keys, other.starts, other.ends = self.keys.copy(), self.starts.copy(), self.ends.copy()
        other.unmapped = self.unmapped.copy()
        return other


class QuickAllocator(Heap):
    """The base of both quick allocators, which differ in their pools.

    `capacity`: bytes that the driver can give (None: any number).
    """

    __slots__ = (
        "_allocated", "_allocated_peak", "_large", "_reserved", "_reserved_peak", "_small", "_together", "capacity",
        "least_refused", "num_alloc_retries",
    )  # fmt: skip

    def __init__(self, capacity: int | None, small: QuickPool, large: QuickPool) -> None:
        self.capacity = UNLIMITED if capacity is None else capacity
        self.least_refused = UNLIMITED  # the smallest `reserved` that the driver refused to grow to
        self.num_alloc_retries = 0
        self._allocated = self._allocated_peak = self._reserved = self._reserved_peak = 0
        self._small, self._large = small, large
        self._together = [self]  # this one and those of other streams of the same card

    def share_card(self, *others: QuickAllocator) -> None:
        """Let the allocators of other streams of the same card take from this one's capacity, and release with it.

        `reserved` and its peak, of each, are then those of all streams together.
        """
        for allocator in (together := [self, *others]):
            allocator._together, allocator.capacity = together, self.capacity

    def copy(self, capacity: int) -> QuickAllocator:
        """Return an allocator with the same blocks and peaks on a card of another capacity."""
        other = QuickAllocator(capacity, self._small.copy(capacity), self._large.copy(capacity))
        other._allocated, other._allocated_peak = self._allocated, self._allocated_peak
        other._reserved, other._reserved_peak = self._reserved, self._reserved_peak
        return other

    def copies(self, capacity: int) -> list[QuickAllocator]:
        """Return copies of this allocator and of those of other streams, together on a card of another capacity."""
        first, *others = (allocator.copy(capacity) for allocator in self._together)
        first.share_card(*others)
        return [first, *others]

    def malloc(self, size: int) -> int:
        """Return a block for `size` bytes; 0, which is no block, for 0 bytes. Raises OutOfMemory."""
        if size <= 0:
            return 0
        wanted = (size + 511) >> 9
        pool = self._large if wanted > SMALL else self._small
        keys = pool.keys
        position = bisect_left(keys, wanted << SHIFT)
        if position == len(keys):
            position = self._grow(pool, wanted, size)
        elif pool.unmapped and ((block := keys[position]) & ADDRESS) + (block >> SHIFT) in pool.unmapped:
            position = pool.best_fit(position)  # only a block before a gap could expand more than the next
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
        """Free a block, which stays cached; 0 is none."""
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
        """Release wholly free segments or granules to the driver, those of all streams."""
        for allocator in self._together:
            allocator._reserved -= allocator._large.release() + allocator._small.release()

    def play_ops(self, ops: Sequence[int], blocks: list[int], places: Sequence[int] = ()) -> None:
        """Play a tape in its compact form. places: those of each allocation's stream among the card's; (): this one."""
        if not places:
            super().play_ops(ops, blocks)
            return
        streams = [self._together[place] for place in places]
        for op in ops:
            if op >= 0:
                blocks.append(streams[len(blocks)].malloc(op))
            elif op != EMPTY_CACHE:
                streams[~op].free(blocks[~op])
            else:
                self.empty_cache()

    def _grow(self, pool: QuickPool, wanted: int, requested: int) -> int:
        """Return the position of a new free block; release the cache if the driver has no more."""
        block = pool.map(wanted, self._charge)
        if not block:
            self.empty_cache()
            for allocator in self._together:
                allocator.num_alloc_retries += 1
            block = pool.map(wanted, self._charge)
        if not block:
            refuse(self, requested)
        return bisect_left(pool.keys, block)

    def _charge(self, units: int) -> bool:
        reserved = self.reserved + units * K_MIN_BLOCK_SIZE
        if reserved > self.capacity:
            self.least_refused = min(self.least_refused, reserved)
            return False
        self._reserved += units
        for allocator in self._together:
            allocator._reserved_peak = max(allocator._reserved_peak, reserved)
        return True

    def reset_peak_stats(self) -> None:
        """Set every peak to the current value."""
        self._allocated_peak, self._reserved_peak = self._allocated, self.reserved

    @property
    def allocated(self) -> int:
        """Return the bytes of all blocks in use."""
        return self._allocated * K_MIN_BLOCK_SIZE

    @property
    def allocated_peak(self) -> int:
        """Return the highest `allocated` since the last reset."""
        return self._allocated_peak * K_MIN_BLOCK_SIZE

    @property
    def reserved(self) -> int:
        """Return the bytes that the driver gave, to all streams of the card."""
        return sum(allocator._reserved for allocator in self._together) * K_MIN_BLOCK_SIZE

    @property
    def reserved_peak(self) -> int:
        """Return the highest `reserved` since the last reset."""
        return self._reserved_peak


def refuse(allocator: Any, requested: int) -> NoReturn:
    """Raise OutOfMemory for a request of so many bytes."""
    rounded = -(-requested // K_MIN_BLOCK_SIZE) * K_MIN_BLOCK_SIZE
    raise OutOfMemory(
        requested=requested, tried=allocation_size(rounded, LARGE_SEGMENT), allowed=None,
        device_total=allocator.capacity, device_free=allocator.capacity - allocator.reserved,
        allocated=allocator.allocated, reserved=allocator.reserved,
    )  # fmt: skip


# ---- whole segments -------------------------------------------------------------------------------------------------


def check_address(end: int) -> None:
    """Raise BadInput where a tape takes more addresses than a block's number has room for."""
    if end > ADDRESS:
        raise BadInput("the tape takes more than 512 TiB of addresses", hint="it is damaged; record or copy it again")


class SegmentPool(QuickPool):
    """A pool of segments from cudaMalloc, each remembered as a block. `next`: address of the next one."""

    __slots__ = ("next", "segments")

    def __init__(self, slack: int) -> None:
        super().__init__(slack)
        self.segments: set[int] = set()
        self.next = 1

    def map(self, wanted: int, charge: Charge) -> int:
        """Take a segment from the driver."""
        size = allocation_size(wanted * K_MIN_BLOCK_SIZE, LARGE_SEGMENT) // K_MIN_BLOCK_SIZE
        if not charge(size):
            return 0
        check_address(self.next + size)
        segment = size << SHIFT | self.next
        self.next += size + 1  # a gap keeps segments from merging
        self.segments.add(segment)
        self.insert(segment)
        return segment

    def release(self) -> int:
        """Release every segment that is one free block."""
        free = self.segments.intersection(self.keys[bisect_left(self.keys, SEGMENT << SHIFT) :])
        for segment in free:
            self.remove(segment)
        self.segments -= free
        return sum(segment >> SHIFT for segment in free)

    def copy(self, capacity: int) -> SegmentPool:
        """Return a pool with the same blocks."""
        other = self._copy_to(SegmentPool(self.slack))
        other.segments, other.next = self.segments.copy(), self.next
        return other


class PlainAllocator(QuickAllocator):
    """The quick allocator with default settings."""

    __slots__ = ()

    def __init__(self, capacity: int | None = None) -> None:
        super().__init__(capacity, SegmentPool(slack=0), SegmentPool(slack=SMALL))


# ---- expandable segments --------------------------------------------------------------------------------------------


class ExpandablePool(QuickPool):
    """A pool of expandable segments of `length` units each, at increasing addresses with a granule between them."""

    __slots__ = ("granule", "length", "next")

    def __init__(self, granule: int, capacity: int) -> None:
        """Make an empty pool; sizes are in bytes."""
        super().__init__(slack=0)
        self.granule = granule // K_MIN_BLOCK_SIZE
        self.length = self.length_on(capacity)
        self.next = self.granule

    def length_on(self, capacity: int) -> int:
        """Return the units of `new ExpandableSegment`: addresses for 9/8 of a card of `capacity` bytes."""
        return max(1, -(-(capacity + capacity // 8) // (self.granule * K_MIN_BLOCK_SIZE))) * self.granule

    def map(self, wanted: int, charge: Charge) -> int:
        """Map memory at the lowest place, gap by gap; granules mapped before the driver refused stay mapped."""
        start = self.candidate(wanted)
        while (have := (before := self.starts.get(start, 0)) >> SHIFT) < wanted:
            gap = start + have
            end = self.unmapped.get(gap)
            if end is None:  # the request is longer than a segment's addresses, which ends in an out-of-memory
                return 0
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
        """Return the size that a block could expand to: its own and that of the gap after it."""
        end = (block & ADDRESS) + (block >> SHIFT)
        return (block >> SHIFT) + self.unmapped.get(end, end) - end

    def best_fit(self, position: int) -> int:
        """Advance from the smallest sufficient block while the next one could expand less."""
        keys = self.keys
        while position + 1 < len(keys) and self.room(keys[position + 1]) < self.room(keys[position]):
            position += 1
        return position

    def candidate(self, wanted: int) -> int:
        """Return the lowest address with `wanted` units free or unmapped, which is at a gap or before one."""
        for gap in sorted(self.unmapped):
            before = self.ends.get(gap, 0)
            start = end = before & ADDRESS if before else gap
            while end - start < wanted and (after := self.behind(end)) > end:
                end = after
            if end - start >= wanted:
                return start
        address = self.next
        check_address(address + self.length)
        self.next += self.length + self.granule
        self.unmapped[address] = address + self.length
        return address

    def behind(self, address: int) -> int:
        """Return the end of the free block or gap that begins at an address; the address itself if there is none."""
        block = self.starts.get(address)
        return address + (block >> SHIFT) if block else self.unmapped.get(address, address)

    def release(self) -> int:
        """Release the whole granules inside free blocks, and forget unmapped segments; return the released units."""
        released = 0
        for block in self.keys[bisect_left(self.keys, self.granule << SHIFT) :]:  # smaller ones hold no whole granule
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
        if not released:
            return 0
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

    def copy(self, capacity: int) -> ExpandablePool:
        """Return the pool on a card with segments of another length, which must not have mattered yet."""
        other = self._copy_to(ExpandablePool(self.granule * K_MIN_BLOCK_SIZE, capacity))
        if self.next > self.granule:
            other.unmapped[max(other.unmapped)] = other.granule + other.length
            other.next = other.granule + other.length + other.granule
        return other


class GrowingAllocator(QuickAllocator):
    """The quick allocator with expandable segments (rule 10)."""

    __slots__ = ()

    def __init__(self, capacity: int | None = None) -> None:
        total = UNLIMITED if capacity is None else capacity
        super().__init__(capacity, ExpandablePool(K_SMALL_BUFFER, total), ExpandablePool(LARGE_SEGMENT, total))


# ---- the beginning on all cards above a capacity --------------------------------------------------------------------


class Undecided(Exception):
    """Raised before an operation whose result depends on the card."""


class AnyLengthPool(ExpandablePool):
    """A pool of one segment of any length from `shortest` on."""

    __slots__ = ("shortest",)

    def __init__(self, granule: int) -> None:
        super().__init__(granule, UNLIMITED)
        self.shortest = 0

    def candidate(self, wanted: int) -> int:
        """Return the address. Raises Undecided if the shortest segment is too short for it."""
        start = super().candidate(wanted)
        if start + wanted > self.granule + self.shortest:
            raise Undecided
        return start

    def best_fit(self, position: int) -> int:
        """Return the position. Raises Undecided if it is another one in the shortest segment."""
        longest, last = super().best_fit(position), max(self.unmapped)
        end, self.unmapped[last] = self.unmapped[last], self.granule + self.shortest
        shortest = super().best_fit(position)
        self.unmapped[last] = end
        if longest != shortest:
            raise Undecided
        return longest


class Beginning(QuickAllocator):
    """An allocator on all cards above `capacity`; it raises Undecided before an operation that differs between them."""

    __slots__ = ()

    def __init__(self, *, expandable_segments: bool) -> None:
        if expandable_segments:
            super().__init__(0, AnyLengthPool(K_SMALL_BUFFER), AnyLengthPool(LARGE_SEGMENT))
        else:
            super().__init__(0, SegmentPool(slack=0), SegmentPool(slack=SMALL))

    def above(self, capacity: int) -> None:
        """Exclude the cards up to this capacity."""
        self.capacity = capacity
        for pool in (self._small, self._large):
            if isinstance(pool, AnyLengthPool):
                pool.shortest = pool.length_on(capacity)

    def _charge(self, units: int) -> bool:
        if not super()._charge(units):
            raise Undecided
        return True
