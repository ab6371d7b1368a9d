"""What programs are played on: allocators, and tapes that record the calls."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

EMPTY_CACHE = -(1 << 62)  # an operation of a tape's compact form


class Heap(ABC):
    """An allocator of one stream, or a tape. A falsy block is none."""

    __slots__ = ()

    @abstractmethod
    def malloc(self, size: int) -> Any:
        """Return a block of `size` bytes; none for 0 bytes."""

    @abstractmethod
    def free(self, block: Any) -> None:
        """Free a block once."""

    @abstractmethod
    def empty_cache(self) -> None:
        """Release wholly free memory to the driver."""

    def play(self, events: Sequence[int], sizes: Sequence[int], live: dict[int, Any], at: int = 0) -> int:
        """Play events from position `at` on, and return the position of the first that it leaves to the caller.

        An event n > 0 allocates `sizes[n]` bytes, whose block is put into `live`; -n frees that block, if there is one.
        An event 0, or one with a negative size, is left to the caller; if there is none, the result is their number.
        """
        malloc, free, pop = self.malloc, self.free, live.pop
        for position in range(at, len(events)):
            event = events[position]
            if event < 0:
                free(pop(-event, None))
            elif event and (size := sizes[event]) >= 0:
                live[event] = malloc(size)
            else:
                return position
        return len(events)

    def play_ops(self, ops: Sequence[int], blocks: list[Any]) -> None:
        """Play a tape in its compact form (see `compact`), all on one stream; append each new block to `blocks`."""
        malloc, free, append = self.malloc, self.free, blocks.append
        for op in ops:
            if op >= 0:
                append(malloc(op))
            elif op != EMPTY_CACHE:
                free(blocks[~op])
            else:
                self.empty_cache()
