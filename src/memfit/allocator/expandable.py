"""Expandable segments: one growing range of addresses per pool and stream, mapped and unmapped by the granule.

Twin of `struct ExpandableSegment` and the functions around it. A segment is a chain of blocks covering all its
addresses, mapped or not; granules are aligned to multiples of their size because every segment starts at one.
"""

from __future__ import annotations

from memfit.allocator.blocks import FREE, UNMAPPED, Block, Pool
from memfit.allocator.reserve import Reserve


def allocate_expandable(reserve: Reserve, pool: Pool, size: int) -> Block | None:
    """try_allocate_expandable_block: take a mapped block of at least `size` bytes from its pool; None without memory.

    Granules that were mapped before the driver refused stay mapped and cached.
    """
    block = _find_expandable_block(reserve, pool, size)
    if block.state == UNMAPPED and not _map_block(reserve, block, min(block.size, size)):
        return None
    while block.size < size:
        following = block.next
        if following is None or not _map_block(reserve, following, min(size - block.size, following.size)):
            return None
        block = following  # mapping merged it with the free block before it
    pool.remove(block)
    return block


def best_fit(pool: Pool, position: int) -> int:
    """Advance from the smallest sufficient block while the next one could expand less."""
    keys = pool.keys

    def room(at: int) -> int:
        return _expandable_size(pool.blocks[keys[at]])

    while position + 1 < len(keys) and room(position + 1) < room(position):
        position += 1
    return position


def unmap_granules(reserve: Reserve, block: Block) -> None:
    """release_blocks: unmap every whole granule inside a free block; forget a segment that is wholly unmapped."""
    _unmap_block(reserve, block)
    if not block.is_split:
        block.pool.unmapped.remove(block)
        reserve.forget_segment(block)


def _expandable_size(block: Block) -> int:
    following = block.next
    return block.size + (following.size if following is not None and following.state == UNMAPPED else 0)


def _find_expandable_block(reserve: Reserve, pool: Pool, size: int) -> Block:
    """find_expandable_block: return the block at the lowest address where `size` bytes are free or unmapped."""
    for unmapped in pool.unmapped:
        before = unmapped.prev
        candidate = before if before is not None and before.state >= FREE else unmapped
        room = 0
        block: Block | None = candidate
        while room < size and block is not None and block.state >= FREE:
            room += block.size
            block = block.next
        if room >= size:
            return candidate
    return _new_segment(reserve, pool)


def _new_segment(reserve: Reserve, pool: Pool) -> Block:
    """`new ExpandableSegment`: reserve addresses for 9/8 of the card, rounded up to granules, and map nothing."""
    granule = pool.granule
    size = max(1, -(-(reserve.total_memory + reserve.total_memory // 8) // granule)) * granule
    block = reserve.new_block(size, reserve.reserve_address(size, granule), pool)
    pool.insert_unmapped(block)
    return block


def _map_block(reserve: Reserve, block: Block, size: int) -> bool:
    """map_block: map the first `size` bytes of an unmapped block, up to the next granule; False without memory."""
    pool = block.pool
    mapped = -(-size // pool.granule) * pool.granule
    if reserve.reserved + mapped > reserve.capacity:
        return False
    pool.unmapped.remove(block)
    if mapped < block.size:
        rest = reserve.new_block(block.size - mapped, block.addr + mapped, pool, block, block.next)
        pool.insert_unmapped(rest)
        block.size = mapped
    reserve.charge(block.addr, mapped)
    _merge(reserve, block, FREE)
    pool.insert(block)
    reserve.note_releasable(block)
    return True


def _unmap_block(reserve: Reserve, block: Block) -> None:
    """unmap_block: unmap the whole granules inside a free block; the rest on either side stays free."""
    pool, granule = block.pool, block.pool.granule
    begin, end = -(-block.addr // granule) * granule, (block.addr + block.size) // granule * granule
    if begin >= end:
        return
    pool.remove(block)
    if begin > block.addr:
        pool.insert(reserve.new_block(begin - block.addr, block.addr, pool, block.prev, block))
    if end < block.addr + block.size:
        pool.insert(reserve.new_block(block.addr + block.size - end, end, pool, block, block.next))
    block.addr, block.size = begin, end - begin
    reserve.discharge(begin, end - begin)
    _merge(reserve, block, UNMAPPED)
    pool.insert_unmapped(block)


def _merge(reserve: Reserve, block: Block, state: int) -> None:
    """try_merge_blocks: merge a block with the neighbours that are in the same `state`, FREE or UNMAPPED."""
    pool, before, after = block.pool, block.prev, block.next
    if before is not None and before.state == state:
        pool.remove(before) if state == FREE else pool.unmapped.remove(before)
        block.addr, block.prev = before.addr, before.prev
        block.size += before.size
        if block.prev is None:
            reserve.replace_head(block)
        else:
            block.prev.next = block
    if after is not None and after.state == state:
        pool.remove(after) if state == FREE else pool.unmapped.remove(after)
        block.size += after.size
        block.next = after.next
        if block.next is not None:
            block.next.prev = block
