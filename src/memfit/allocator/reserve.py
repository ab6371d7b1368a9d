"""The state of the allocator: segments taken from the driver, limits on them, and the counters of memory_stats()."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from memfit.allocator.blocks import PRIVATE_POOLS, Block, Pool
from memfit.errors import EXIT_MISFIT, MemfitError, Unsupported
from memfit.nouns.alloc_settings import LATEST_TORCH, NO_ROUNDUP, AllocSettings, Torch
from memfit.nouns.tape import SegmentAlloc, SegmentFree
from memfit.units import MIB, human

DRIVER_PAGE = 2 * MIB  # cudaMalloc gives physical memory by the page of 2 MiB
UNLIMITED = 1 << 46  # capacity of a card without a limit: above any real card, below the largest address


class OutOfMemory(MemfitError):
    """An out-of-memory with the numbers of torch.OutOfMemoryError, in bytes.

    `tried`: "Tried to allocate", the size of the segment. `requested`: the tensor's bytes. `allowed`: the limit of a
    memory fraction. `device_free`: bytes that the driver could still give.
    """

    exit_code = EXIT_MISFIT

    def __init__(
        self, *, requested: int, tried: int, device_total: int, device_free: int, allowed: int | None, allocated: int,
        reserved: int,
    ) -> None:  # fmt: skip
        self.requested, self.tried = requested, tried
        self.device_total, self.device_free, self.allowed = device_total, device_free, allowed
        self.allocated, self.reserved = allocated, reserved
        limit = f"{human(allowed)} allowed; " if allowed is not None else ""
        super().__init__(
            f"CUDA out of memory. Tried to allocate {human(tried)}. GPU has a total capacity of {human(device_total)} "
            f"of which {human(device_free)} is free. {limit}Of the allocated memory {human(allocated)} is allocated "
            f"by PyTorch, and {human(reserved - allocated)} is reserved by PyTorch but unallocated.",
            hint="if much is reserved but unallocated, try PYTORCH_ALLOC_CONF=expandable_segments:True",
        )


@dataclass(frozen=True, slots=True)
class Stats:
    """torch.cuda.memory_stats() over both pools; sizes in bytes. `inactive_split` stays 0 with expandable segments."""

    requested: int
    requested_peak: int
    allocated: int
    allocated_peak: int
    active: int
    active_peak: int
    reserved: int
    reserved_peak: int
    inactive_split: int
    inactive_split_peak: int
    segments: int
    num_alloc_retries: int
    num_ooms: int
    num_oom_rejections: int
    num_device_alloc: int
    num_device_free: int


class Reserve:
    """DeviceCachingAllocator without malloc and free: pools, segments, limits, counters.

    Counters are plain attributes, in bytes, because malloc and free update them at every event.
    """

    def __init__(
        self, capacity: int | None = None, settings: AllocSettings = AllocSettings(),  # noqa: B008  (frozen)
        torch: Torch = LATEST_TORCH, *, total_memory: int | None = None,
    ) -> None:  # fmt: skip
        if settings.backend != "native":
            raise Unsupported(
                f"the allocator backend {settings.backend} is not modelled", hint="use backend:native, the default"
            )
        self.settings = settings
        self.torch = torch
        self.capacity = UNLIMITED if capacity is None else capacity
        self.total_memory = self.capacity if total_memory is None else total_memory
        self.allowed = self._allowed_memory_maximum()
        self._rejects_above = self._rejection_limit()

        self.requested = self.requested_peak = 0
        self.allocated = self.allocated_peak = 0
        self.pending = self._active_at_reset = 0
        self.reserved = self.reserved_peak = 0
        self.padding = 0  # bytes of the driver's pages beyond `reserved`, with an odd large_segment_size
        self.least_refused = UNLIMITED  # the smallest `reserved` that the driver refused to grow to
        self.inactive_split = self.inactive_split_peak = 0
        self.segments = self.num_alloc_retries = self.num_ooms = self.num_oom_rejections = 0
        self.num_device_alloc = self.num_device_free = 0
        self.driver_calls: list[SegmentAlloc | SegmentFree] = []  # cudaMalloc, cudaFree, and maps and unmaps likewise

        self._pools: dict[int, tuple[Pool, Pool]] = {}  # stream -> (small, large)
        self._heads: dict[int, Block] = {}  # address of a segment -> its first block, oldest segment first
        self._next_address = 0
        self._places: dict[int, list[int]] = {}  # size -> addresses of recorded segments, oldest first
        self._taken: dict[int, int] = {}  # address -> size of memory that the driver gave
        self._next_order = 0
        self._by_order = torch == (2, 12)  # BlockComparatorRegistrationCounter; older and newer order by address
        self._ages = settings.garbage_collection_threshold > 0.0
        self._collects = self.allowed is not None and self._ages
        self._age = 0  # get_free_blocks_call_count of the large pool
        self._rounds = settings.roundup_power2_divisions != NO_ROUNDUP
        self._grows = settings.expandable_segments
        self._plain = settings.max_split_size is None and not settings.expandable_segments and not self._collects
        self._releasable: dict[int, Block] = {}  # address of memory that may go back -> the block it is in
        self._freed_in: dict[Pool, None] = {}  # pools of expandable segments in which granules may have become free
        self._stream_uses: dict[Block, dict[int, None]] = {}  # blocks that record_stream was called for
        self._events: dict[int, list[Block]] = {}  # stream -> freed blocks that wait for it

    def _allowed_memory_maximum(self) -> int | None:
        """setMemoryFraction: return the limit, if any: up to torch 2.9 any fraction sets one, later one below 1."""
        fraction = self.settings.per_process_memory_fraction
        if fraction is None or (fraction >= 1.0 and self.torch >= (2, 10)):
            return None
        return int(fraction * self.total_memory)

    def _rejection_limit(self) -> int | None:
        """throw_on_cudamalloc_oom: return the limit on segments, by the fraction in the settings."""
        if not self.settings.throw_on_cudamalloc_oom:
            return None
        fraction = self.settings.per_process_memory_fraction
        return int((1.0 if fraction is None else fraction) * self.total_memory)

    @property
    def stats(self) -> Stats:
        """Return all counters as they are now."""
        expandable = self.settings.expandable_segments
        return Stats(
            requested=self.requested,
            requested_peak=self.requested_peak,
            allocated=self.allocated,
            allocated_peak=self.allocated_peak,
            active=self.allocated + self.pending,
            active_peak=max(self.allocated_peak, self._active_at_reset),
            reserved=self.reserved,
            reserved_peak=self.reserved_peak,
            inactive_split=0 if expandable else self.inactive_split,
            inactive_split_peak=0 if expandable else self.inactive_split_peak,
            segments=self.segments,
            num_alloc_retries=self.num_alloc_retries,
            num_ooms=self.num_ooms,
            num_oom_rejections=self.num_oom_rejections,
            num_device_alloc=self.num_device_alloc,
            num_device_free=self.num_device_free,
        )

    def reset_peak_stats(self) -> None:
        """torch.cuda.reset_peak_memory_stats(): every peak becomes the current value."""
        self.requested_peak, self.allocated_peak = self.requested, self.allocated
        # malloc first frees what is pending, so later peaks of `active` are those of `allocated`
        self._active_at_reset = self.allocated + self.pending
        self.reserved_peak, self.inactive_split_peak = self.reserved, self.inactive_split

    def blocks(self) -> Iterator[tuple[Block, ...]]:
        """Yield the segments, oldest first, each as its blocks in address order (unmapped ones included)."""
        for head in self._heads.values():
            chain: list[Block] = []
            block: Block | None = head
            while block is not None:
                chain.append(block)
                block = block.next
            yield tuple(chain)

    def holds(self, address: int) -> bool:
        """Return whether a segment begins at this address."""
        return address in self._heads

    def new_block(
        self, size: int, addr: int, pool: Pool, prev: Block | None = None, next_: Block | None = None
    ) -> Block:
        """`new Block`, linked between its neighbours, with a registration number where the order needs one."""
        block = Block(size, addr, pool, prev, next_)
        if self._by_order:
            block.order = self._next_order
            self._next_order += 1
        if prev is None:
            self._heads[addr] = block
        else:
            prev.next = block
        if next_ is not None:
            next_.prev = block
        return block

    def reserve_address(self, size: int, alignment: int = 1) -> int:
        """Return the address of a new segment.

        Addresses grow and are never reused, so that "oldest segment, then address" is the order of addresses. Up to
        torch 2.11 the driver's addresses decide ties, so recorded ones are used if known.
        """
        known = self._places.get(size, [])
        for number, address in enumerate(known):
            if not any(address < other + span and other < address + size for other, span in self._taken.items()):
                del known[number]
                return address
        address = -(-self._next_address // alignment) * alignment
        self._next_address = address + size
        return address

    def use_addresses(self, recorded: Iterable[SegmentAlloc]) -> None:
        """Give later segments the recorded addresses, in recorded order for each size, unless they are taken."""
        for segment in recorded:
            self._places.setdefault(segment.size, []).append(segment.address)
            self._next_address = max(self._next_address, segment.address + segment.size)

    def forget_segment(self, block: Block) -> None:
        """Remove the segment that consists of `block`."""
        del self._heads[block.addr]

    def replace_head(self, block: Block) -> None:
        """Make `block` the first of its segment."""
        self._heads[block.addr] = block

    def charge(self, address: int, size: int) -> None:
        """Count `size` bytes that the driver gave."""
        self.reserved += size
        self.reserved_peak = max(self.reserved_peak, self.reserved)
        self.num_device_alloc += 1
        self._taken[address] = size
        self.driver_calls.append(SegmentAlloc(address, size))

    def discharge(self, address: int, size: int) -> None:
        """Count `size` bytes that went back to the driver."""
        self.reserved -= size
        self.num_device_free += 1
        self._taken.pop(address, None)
        self.driver_calls.append(SegmentFree(address, size))

    def _cuda_malloc(self, pool: Pool, size: int) -> Block | None:
        """Return a new segment as one block outside the pool; None if the driver has not `size` bytes left."""
        held = self.reserved + self.padding + size + -size % DRIVER_PAGE
        if held > self.capacity:
            self.least_refused = min(self.least_refused, held)
            return None
        self.padding += -size % DRIVER_PAGE
        block = self.new_block(size, self.reserve_address(size), pool)
        self.segments += 1
        self.charge(block.addr, size)
        return block

    def _release_block(self, block: Block) -> None:
        """release_block: give a segment that is one free block back to the driver."""
        block.pool.remove(block)
        self.forget_segment(block)
        self.segments -= 1
        self.padding -= -block.size % DRIVER_PAGE
        self.discharge(block.addr, block.size)

    def note_releasable(self, block: Block) -> None:
        """Remember a free block that is a whole segment, or may hold whole granules of an expandable one.

        So a release looks at what was freed since the last one, and not at every block of every stream.
        """
        if self._grows:
            self._freed_in[block.pool] = None
        else:
            self._releasable[block.addr] = block

    def releasable(self) -> list[Block]:
        """Return the free blocks that were noted, in the order in which they are released."""
        large = [block for pool in self._freed_in for block in pool.in_order(pool.granule)]
        noted = [block for block in self._releasable.values() if block.pool.blocks.get(block.key) is block]
        free = [block for block in (*large, *noted) if block.pool.stream < PRIVATE_POOLS]
        return sorted(free, key=lambda block: (block.pool.small, block.pool.stream, block.key))  # the large pool first

    def _release_oversize_blocks(self, pool: Pool, rounded: int) -> bool:
        """release_available_cached_blocks: release just enough oversize cached blocks; return whether it was enough."""
        max_split_size = self.settings.max_split_size
        if max_split_size is None or self.settings.expandable_segments:  # no expandable block came from cudaMalloc
            return False
        wanted = max(rounded, max_split_size)
        position = pool.lower_bound(wanted)
        if position < len(pool.keys):
            self._release_block(pool.blocks[pool.keys[position]])
            return True
        released = 0
        while released < wanted and pool.keys and (largest := pool.blocks[pool.keys[-1]]).size >= max_split_size:
            released += largest.size
            self._release_block(largest)
        return released >= wanted

    def _collect_garbage(self) -> None:
        """garbage_collect_cached_blocks: above the threshold, release cached large segments older than the average."""
        assert self.allowed is not None
        excess = self.reserved - int(self.settings.garbage_collection_threshold * self.allowed)
        if excess <= 0:
            return
        cached = [block for block in self.releasable() if not (block.pool.small or block.is_split)]
        reclaimed = 0
        while reclaimed < excess and cached:
            average = sum(self._age - block.age_base for block in cached) / len(cached)
            old = [block for block in cached if self._age - block.age_base >= average]
            cached = [block for block in cached if self._age - block.age_base < average]
            for block in old:
                reclaimed += block.size
                self._release_block(block)
