"""malloc and free of the caching allocator, with streams, retries and out-of-memory."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import replace

from memfit.allocator.blocks import (
    ALLOCATED,
    FREE,
    K_MIN_BLOCK_SIZE,
    K_SMALL_BUFFER,
    K_SMALL_SIZE,
    KEY_SHIFT,
    PENDING,
    UNMAPPED,
    Block,
    Pool,
    allocation_size,
    round_size,
)
from memfit.allocator.expandable import allocate_expandable, best_fit, unmap_granules
from memfit.allocator.heap import Heap
from memfit.allocator.reserve import UNLIMITED, OutOfMemory, Reserve


class Allocator(Reserve, Heap):
    """One device's caching allocator, empty at first.

    `capacity`: bytes that the driver can give (None: any number). `total_memory`: bytes that a memory fraction refers
    to (default: the capacity). `torch`: the version whose rules apply.
    """

    def malloc(self, size: int, stream: int = 0) -> Block | None:
        """Return a block for `size` bytes used on `stream`; None for 0 bytes, as torch does. Raises OutOfMemory."""
        if size <= 0:
            if size < 0:
                raise ValueError(f"a block of {size} bytes cannot be allocated")
            return None
        if self._events:
            self._process_events()
        rounded = round_size(size, self.settings.roundup_power2_divisions) if self._rounds else (size + 511) & -512
        pools = self._pools.get(stream) or self._new_pools(stream)
        pool = pools[rounded > K_SMALL_SIZE]
        keys = pool.keys
        position = bisect_left(keys, rounded << KEY_SHIFT) if self._plain else self._find(pool, rounded)
        block = pool.blocks.pop(keys.pop(position)) if position < len(keys) else self._grow(pool, rounded, size)

        if block.size - rounded > pool.slack and rounded < pool.split_below:
            block = self._split(block, rounded)
        elif block.prev is not None or block.next is not None:
            self.inactive_split -= block.size

        block.state = ALLOCATED
        block.requested = size
        self.requested = requested = self.requested + size
        if requested > self.requested_peak:
            self.requested_peak = requested
        self.allocated = allocated = self.allocated + block.size
        if allocated > self.allocated_peak:
            self.allocated_peak = allocated
        return block

    def free_blocks(self, stream: int = 0, *, small: bool) -> list[Block]:
        """Return the free blocks of a pool, smallest first."""
        return self.pools_of(stream)[not small].in_order()

    def pools_of(self, stream: int) -> tuple[Pool, Pool]:
        """Return the small pool and the large one of a stream."""
        return self._pools.get(stream) or self._new_pools(stream)

    def free_pools(self) -> Iterator[Pool]:
        """Yield the pools of every stream, the small one before the large one."""
        for pools in self._pools.values():
            yield from pools

    def is_cached(self, size: int, stream: int = 0) -> bool:
        """Return whether malloc would find a cached block. Changes nothing."""
        rounded = round_size(size, self.settings.roundup_power2_divisions)
        pool, age = self.pools_of(stream)[rounded > K_SMALL_SIZE], self._age
        cached = self._find(pool, rounded) < len(pool.keys)
        self._age = age
        return cached

    def _split(self, rest: Block, rounded: int) -> Block:
        """alloc_found_block: make a new Block of the first `rounded` bytes; the old Block stays free with the rest."""
        before = rest.prev
        front = Block(rounded, rest.addr, rest.pool, before, rest)
        if self._by_order:
            front.order = self._next_order
            self._next_order += 1
        left = rest.size - rounded
        if before is not None:
            before.next = front
            self.inactive_split -= rounded
        else:
            self._heads[front.addr] = front
            self.inactive_split += left if rest.next is None else -rounded
            if self.inactive_split > self.inactive_split_peak:
                self.inactive_split_peak = self.inactive_split
        rest.prev = front
        rest.addr += rounded
        rest.size = left
        rest.pool.insert(rest)
        return front

    def free(self, block: Block | None) -> None:
        """Free a block, which stays cached. If other streams used it, it becomes available at the next malloc."""
        if block is None:
            return
        if block.state != ALLOCATED:
            raise ValueError(f"{block} is not allocated")
        size = block.size
        self.allocated -= size
        if self._stream_uses and block in self._stream_uses:
            self._insert_events(block)
            return
        pool = (
            block.pool
        )  # from here on free_block: merge with free neighbours in the segment, then insert into the pool
        self.requested -= block.requested
        split = self.inactive_split
        before, after = block.prev, block.next
        if before is not None and before.state == FREE:
            pool.remove(before)
            size += before.size
            split -= before.size
            block.addr = before.addr
            block.prev = before = before.prev
            if before is None:
                self._heads[block.addr] = block
            else:
                before.next = block
        if after is not None and after.state == FREE:
            pool.remove(after)
            size += after.size
            split -= after.size
            block.next = after = after.next
            if after is not None:
                after.prev = block
        block.size = size
        pool.insert(block)
        if before is not None or after is not None:
            split += size
            if self._grows and size >= pool.granule:
                self._freed_in[pool] = None
        else:
            self.note_releasable(block)
            if self._ages:
                block.age_base = self._age
        self.inactive_split = split
        if split > self.inactive_split_peak:
            self.inactive_split_peak = split

    def record_stream(self, block: Block | None, stream: int) -> None:
        """recordStream: let the block's reuse wait for `stream`, which uses it too."""
        if block is not None and stream != block.pool.stream:
            self._stream_uses.setdefault(block, {})[stream] = None

    def set_memory_fraction(self, fraction: float) -> None:
        """torch.cuda.set_per_process_memory_fraction: set the limit to a fraction of `total_memory`."""
        self.settings = replace(self.settings, per_process_memory_fraction=fraction)
        self.allowed = self._allowed_memory_maximum()
        self._collects = self.allowed is not None and self._ages
        self._plain = self._plain and not self._collects

    def empty_cache(self) -> None:
        """torch.cuda.empty_cache(): release every wholly free segment to the driver (release_cached_blocks)."""
        self._process_events()
        for block in self.releasable():
            if self.settings.expandable_segments:
                unmap_granules(self, block)
            elif not block.is_split:
                self._release_block(block)
        self._releasable.clear()
        self._freed_in.clear()

    def _insert_events(self, block: Block) -> None:
        """insert_events: make a freed block wait for every other stream that used it."""
        block.state = PENDING
        self.pending += block.size
        for stream in self._stream_uses[block]:
            self._events.setdefault(stream, []).append(block)

    def _process_events(self) -> None:
        """process_events: all streams have caught up, so every waiting block becomes free."""
        events, self._events = self._events, {}
        for blocks in events.values():
            for block in blocks:
                uses = self._stream_uses[block]
                uses.popitem()
                if not uses:
                    del self._stream_uses[block]
                    self.pending -= block.size
                    self.allocated += block.size  # as if it was freed only now
                    block.state = ALLOCATED
                    self.free(block)

    def _new_pools(self, stream: int) -> tuple[Pool, Pool]:
        """Make the two pools of a stream; should_split's two rules become `slack` and `split_below`."""
        grows, max_split_size = self.settings.expandable_segments, self.settings.max_split_size
        tight = K_MIN_BLOCK_SIZE - 1
        small = Pool(stream, K_SMALL_BUFFER, tight, UNLIMITED, small=True, by_order=self._by_order)
        large = Pool(
            stream, self.settings.large_segment_size, tight if grows else K_SMALL_SIZE,
            UNLIMITED if grows or max_split_size is None else max_split_size, small=False, by_order=self._by_order,
        )  # fmt: skip
        self._pools[stream] = pools = (small, large)
        return pools

    def _find(self, pool: Pool, rounded: int) -> int:
        """get_free_block under every setting: return the position of the block to take; the end if none fits."""
        if self._collects and not pool.small:
            self._age += 1
        position, end = pool.lower_bound(rounded), len(pool.keys)
        if position == end:
            return end
        settings = self.settings
        if settings.expandable_segments:
            following = pool.blocks[pool.keys[position]].next
            if following is not None and following.state == UNMAPPED:  # only then could it expand more than the next
                position = best_fit(pool, position)
        if settings.max_split_size is None:
            return position
        size = pool.blocks[pool.keys[position]].size
        if rounded < settings.max_split_size:
            return end if size >= settings.max_split_size else position
        return end if size >= rounded + settings.max_non_split_rounding else position

    def _grow(self, pool: Pool, rounded: int, requested: int) -> Block:
        """Take a segment from the driver, because no cached block fits; release the cache if the driver has no more."""
        size = allocation_size(rounded, self.settings.large_segment_size)
        if self._collects:
            self._collect_garbage()
        block = self._alloc_block(pool, rounded, size, requested)
        if block is None and self._release_oversize_blocks(pool, rounded):
            block = self._alloc_block(pool, rounded, size, requested)
        if block is None:
            self.empty_cache()
            self.num_alloc_retries += 1
            block = self._alloc_block(pool, rounded, size, requested)
        if block is None:
            self.num_ooms += 1
            raise self.out_of_memory(size, requested)
        return block

    def _alloc_block(self, pool: Pool, rounded: int, size: int, requested: int) -> Block | None:
        """alloc_block: within the limits, take a segment of `size` bytes or grow an expandable one for `rounded`."""
        if self.allowed is not None and self.reserved + size > self.allowed:
            return None
        if self._rejects_above is not None and self.reserved + size > self._rejects_above:
            self.num_oom_rejections += 1
            raise self.out_of_memory(size, requested)
        if self.settings.expandable_segments:
            return allocate_expandable(self, pool, rounded)
        return self._cuda_malloc(pool, size)

    def out_of_memory(self, tried: int, requested: int) -> OutOfMemory:
        """Return the error for a tensor of `requested` bytes, for which the driver refused `tried` bytes."""
        return OutOfMemory(
            requested=requested, tried=tried, allowed=self.allowed, device_total=self.total_memory,
            device_free=self.capacity - self.reserved - self.padding, allocated=self.allocated, reserved=self.reserved,
        )  # fmt: skip
