"""The parts of the caching allocator: constants, size rules, Blocks of segments, Pools of free blocks."""

from __future__ import annotations

from bisect import bisect_left, insort
from operator import attrgetter
from typing import Final

from memfit.nouns.alloc_settings import K_MIN_LARGE_ALLOC
from memfit.units import KIB, MIB

# Twins of the constants in CUDACachingAllocator.cpp (AllocatorConfig.h since 2.11).
K_MIN_BLOCK_SIZE: Final = 512  # kMinBlockSize: all sizes are rounded to at least this
K_SMALL_SIZE: Final = 1024 * KIB  # kSmallSize: the largest "small" request
K_SMALL_BUFFER: Final = 2 * MIB  # kSmallBuffer: segment that small requests are packed in
K_ROUND_LARGE: Final = 2 * MIB  # kRoundLarge: large segments are multiples of it

# Streams from this number on stand for the private pools of CUDA graphs, whose cached memory only they use and keep.
# The numbers of recorded streams are addresses.
PRIVATE_POOLS: Final = 1 << 62

ALLOCATED, PENDING, FREE, UNMAPPED = range(4)  # Block.state; FREE and UNMAPPED bytes are not in use

# A free block's key orders it in its pool: size first, then the tie-break. Sizes are multiples of 512, so `size << 47`
# leaves the 56 low bits for an address or a registration number, and one int compares faster than a tuple.
KEY_SHIFT: Final = 47


class Block:
    """A piece of a segment, as `struct Block`: `size` bytes at `addr`, of which the program requested `requested`.

    `prev` and `next` are its neighbours in the segment, `order` its registration number (torch 2.12 only), `age_base`
    the age of the large pool when it was freed (garbage collection only).
    """

    __slots__ = ("addr", "age_base", "key", "next", "order", "pool", "prev", "requested", "size", "state")

    size: int
    addr: int
    pool: Pool
    prev: Block | None
    next: Block | None
    state: int
    requested: int
    key: int
    order: int
    age_base: int

    def __init__(self, size: int, addr: int, pool: Pool, prev: Block | None, next_: Block | None) -> None:
        # the other slots are set at their first use, because a replay makes millions of blocks
        self.size = size
        self.addr = addr
        self.pool = pool
        self.prev = prev
        self.next = next_

    @property
    def is_split(self) -> bool:
        """Return whether the block is only a part of its segment."""
        return self.prev is not None or self.next is not None

    def __repr__(self) -> str:
        state = ("allocated", "pending", "free", "unmapped")[self.state]
        return f"<{state} block of {self.size} at {self.addr:#x}>"


class Pool:
    """The free blocks of one stream and kind, as `BlockPool`: `keys` sorted ascending, `blocks` by key.

    `unmapped` holds the unmapped parts of expandable segments by address. A block is split if more than `slack` bytes
    would be left and the request is below `split_below` (should_split).
    """

    __slots__ = ("blocks", "by_order", "granule", "keys", "slack", "small", "split_below", "stream", "unmapped")

    def __init__(self, stream: int, granule: int, slack: int, split_below: int, *, small: bool, by_order: bool) -> None:
        self.stream = stream
        self.small = small
        self.granule = granule  # bytes by which an expandable segment grows
        self.slack = slack
        self.split_below = split_below
        self.by_order = by_order
        self.keys: list[int] = []
        self.blocks: dict[int, Block] = {}
        self.unmapped: list[Block] = []

    def insert(self, block: Block) -> None:
        """insert_into_blocks: make a free, mapped block available."""
        block.state = FREE
        block.key = key = block.size << KEY_SHIFT | (block.order if self.by_order else block.addr)
        insort(self.keys, key)
        self.blocks[key] = block

    def remove(self, block: Block) -> None:
        """Remove a free block."""
        del self.keys[bisect_left(self.keys, block.key)]
        del self.blocks[block.key]

    def insert_unmapped(self, block: Block) -> None:
        """Add an unmapped part of an expandable segment."""
        block.state = UNMAPPED
        insort(self.unmapped, block, key=attrgetter("addr"))

    def in_order(self, least: int = 0) -> list[Block]:
        """Return a copy of the free blocks of at least `least` bytes, so that the caller may remove some."""
        return [self.blocks[key] for key in self.keys[self.lower_bound(least) :]]

    def lower_bound(self, size: int) -> int:
        """Return the position in `keys` of the smallest free block of at least `size` bytes."""
        return bisect_left(self.keys, size << KEY_SHIFT)


def round_up_power2(size: int, divisions: int) -> int:
    """roundup_power2_next_division: return the next multiple of (power of two below `size`) / `divisions`."""
    if size & (size - 1) == 0:
        return size
    step = (1 << (size.bit_length() - 1)) // divisions
    return -(-size // step) * step


def round_size(size: int, divisions: tuple[int, ...]) -> int:
    """round_size: return the bytes of the block for `size` requested bytes; `divisions` as roundup_power2_divisions."""
    ways = divisions[max(0, min(size.bit_length() - 21, len(divisions) - 1))]
    if ways > 1 and size > K_MIN_BLOCK_SIZE * ways:
        return round_up_power2(size, ways)
    return (size + K_MIN_BLOCK_SIZE - 1) & -K_MIN_BLOCK_SIZE


def allocation_size(rounded: int, large_segment_size: int) -> int:
    """get_allocation_size: return the bytes of the segment to ask the driver for when no free block fits."""
    if rounded <= K_SMALL_SIZE:
        return K_SMALL_BUFFER
    if rounded < K_MIN_LARGE_ALLOC:
        return large_segment_size
    return -(-rounded // K_ROUND_LARGE) * K_ROUND_LARGE
