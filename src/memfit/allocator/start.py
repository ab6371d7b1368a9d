"""An allocator that does not begin empty: segments, blocks in use and free ones put where a recording found them."""

from __future__ import annotations

from collections.abc import Iterable

from memfit.allocator.blocks import ALLOCATED, Block
from memfit.allocator.machine import Allocator
from memfit.nouns.tape import Segment


def restore(allocator: Allocator, segments: Iterable[Segment]) -> dict[int, Block]:
    """Give an empty allocator these segments; returns the block of each allocation by its id.

    Segments count as taken in the order given, which decides ties from torch 2.13 on. What is in use is charged as if
    it had been allocated just now; that the driver has the memory is not checked.
    """
    held: dict[int, Block] = {}
    for segment in segments:
        pool = allocator.pools_of(segment.stream)[not segment.small]
        sizes = sum(piece.size for piece in segment.pieces)
        whole = sizes
        if segment.expandable:  # its addresses go on behind what is mapped
            room = allocator.total_memory + allocator.total_memory // 8
            whole = max(sizes, -(-room // pool.granule) * pool.granule)
        address = allocator.reserve_address(whole, pool.granule if segment.expandable else 1)
        last: Block | None = None
        for piece in segment.pieces:
            block = last = allocator.new_block(piece.size, address, pool, last)
            address += piece.size
            if not piece.mapped:
                pool.insert_unmapped(block)
                continue
            allocator.charge(block.addr, piece.size)
            if piece.alloc is None:
                pool.insert(block)
                continue
            block.state, block.requested = ALLOCATED, piece.alloc.size
            held[piece.alloc.id] = block
            allocator.requested += piece.alloc.size
            allocator.allocated += piece.size
        if whole > sizes:
            pool.insert_unmapped(allocator.new_block(whole - sizes, address, pool, last))
        allocator.segments += not segment.expandable
        allocator.inactive_split += _inactive(segment)
    allocator.driver_calls.clear()
    allocator.num_device_alloc = 0
    allocator.reset_peak_stats()
    return held


def _inactive(segment: Segment) -> int:
    """Free bytes of a segment that is partly in use."""
    split = len(segment.pieces) > 1
    return sum(piece.size for piece in segment.pieces if piece.alloc is None and piece.mapped) if split else 0
