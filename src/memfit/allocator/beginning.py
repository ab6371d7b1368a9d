"""The beginning of a run as it is on every card above some capacity, for searches that play it once."""

from __future__ import annotations

from memfit.allocator.blocks import K_SMALL_BUFFER
from memfit.allocator.growing import Range
from memfit.allocator.plain import Segments
from memfit.allocator.quick import LARGE_SEGMENT, SMALL, QuickAllocator
from memfit.allocator.reserve import UNLIMITED


class Undecided(Exception):
    """From here on the run is another on one card than on the next."""


class AnyRange(Range):
    """A pool of one segment of any length from `shortest` on."""

    __slots__ = ("shortest",)

    def __init__(self, granule: int) -> None:
        super().__init__(granule, UNLIMITED)
        self.shortest = 0

    def candidate(self, wanted: int) -> int:
        """The same, unless a short segment ends before."""
        start = super().candidate(wanted)
        if start + wanted > self.granule + self.shortest:
            raise Undecided
        return start

    def best_fit(self, position: int) -> int:
        """The same, unless the last block of a short segment could grow less than another."""
        found, last = super().best_fit(position), max(self.unmapped)
        end, self.unmapped[last] = self.unmapped[last], self.granule + self.shortest
        shortest = super().best_fit(position)
        self.unmapped[last] = end
        if found != shortest:
            raise Undecided
        return found


class Beginning(QuickAllocator):
    """Raises Undecided instead of changing anything that is not the same on every card above `capacity`."""

    __slots__ = ()

    def __init__(self, *, expandable_segments: bool) -> None:
        if expandable_segments:
            super().__init__(0, AnyRange(K_SMALL_BUFFER), AnyRange(LARGE_SEGMENT))
        else:
            super().__init__(0, Segments(slack=0), Segments(slack=SMALL))

    def above(self, capacity: int) -> None:
        """From here on be what it is on every card above that."""
        self.capacity = capacity
        for pool in (self._small, self._large):
            if isinstance(pool, AnyRange):
                pool.shortest = pool.length_on(capacity)

    def _charge(self, units: int) -> bool:
        if not super()._charge(units):
            raise Undecided
        return True
