"""PyTorch's CUDA caching allocator as a pure state machine: no CUDA, no clock, the same bytes.

The rules, in the order malloc applies them (c10/cuda/CUDACachingAllocator.cpp; functions here are named after or
name their twins there):

 1. Sizes are rounded up to 512 B (`round_size`), or to a division of a power of two (`roundup_power2_divisions`).
 2. Up to 1 MiB a block comes from the small pool, above from the large one; each stream has its own free blocks.
 3. The smallest free block that suffices is taken (`get_free_block`). Among equal sizes: the lowest address (torch up
    to 2.11), the block registered first (2.12), the oldest segment and then the lowest address (2.13).
 4. It is split if at least 512 B (small pool) or more than 1 MiB (large pool) would be left over: up to 1 MiB of slack
    stays inside a large block and counts as allocated (`should_split`). The rest is free in the same segment.
 5. If none suffices, a segment is taken from the driver: 2 MiB for a small request, 20 MiB (`large_segment_size`)
    below 10 MiB, else the size rounded up to 2 MiB (`get_allocation_size`).
 6. Before that, with a memory fraction and `garbage_collection_threshold`, old cached large segments are released.
 7. If the driver or the fraction refuses: with `max_split_size`, oversize cached blocks are released for a second try;
    then all wholly free segments are released for a last one (`num_alloc_retries`). If that fails: OutOfMemory.
 8. free merges a block with free neighbours in its segment and caches it: memory returns to the driver only by 6, 7 and
    empty_cache. A block that other streams used (record_stream) becomes free once they have caught up.
 9. Blocks of `max_split_size` and more are never split, and serve only requests at most
    `max_non_split_rounding` smaller.
10. With `expandable_segments` there is one growing segment per pool and stream: 2 MiB granules (small) or 20 MiB ones
    (large) are mapped after the last one, rests from 512 B on are split off, and 7 unmaps whole free granules.

`requested <= allocated <= reserved <= capacity` holds at every moment, except that while freed blocks wait for other
streams their bytes still count as requested, and as active instead of allocated.

Streams from PRIVATE_POOLS on are private pools of CUDA graphs, which nothing above releases.

Not modelled: MemPool, private pools whose graphs are deleted, the cudaMallocAsync backend,
PYTORCH_NO_CUDA_MEMORY_CACHING, free-memory callbacks, settings changed during a run, several devices, IPC, malloc
hints. The driver is a counter: it gives `capacity` bytes without fragmentation, at addresses that only grow. Real
addresses may be reused, and decide ties up to torch 2.11, so recorded ones can be given. Other streams have always
caught up by the next malloc. Statistics cover both pools. Changes between torch 2.4 and 2.13 beyond the tie-break, the
memory fraction's rule and the keys of the settings were not examined.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from memfit.allocator.blocks import Block
from memfit.allocator.machine import Allocator
from memfit.allocator.player import restore
from memfit.allocator.reserve import UNLIMITED, OutOfMemory, Stats
from memfit.nouns.alloc_settings import AllocSettings

if TYPE_CHECKING:
    from memfit.allocator import quick as engine
else:
    try:  # compiled where the installation had a compiler; refuses to be imported where MEMFIT_PURE_PYTHON is set
        from memfit.allocator import _native as engine
    except ImportError:
        from memfit.allocator import quick as engine

__all__ = [
    "QUICK",
    "UNLIMITED",
    "Allocator",
    "Beginning",
    "Block",
    "GrowingAllocator",
    "OutOfMemory",
    "PlainAllocator",
    "QuickAllocator",
    "Stats",
    "allocator_for",
    "engine",
    "restore",
]

Beginning = engine.Beginning
GrowingAllocator = engine.GrowingAllocator
PlainAllocator = engine.PlainAllocator
QuickAllocator = engine.QuickAllocator
QUICK: Mapping[AllocSettings, type[PlainAllocator | GrowingAllocator]] = {
    AllocSettings(): PlainAllocator,
    AllocSettings(expandable_segments=True): GrowingAllocator,
}


def allocator_for(settings: AllocSettings, capacity: int | None = None) -> Allocator | QuickAllocator:
    """Return the quickest allocator with these settings for one stream, on a card of `capacity` bytes (None: any)."""
    return QUICK[settings](capacity) if settings in QUICK else Allocator(capacity, settings)
