"""Does a series of live bytes grow beyond noise? A rank test on the minima of blocks: no distribution is assumed.

Noise is whatever leaves the order of the blocks to chance: batches of varying length, what the last step left behind.
Eight minima are in rising order by chance once in 8! = 40,320 looks, and a look is taken only when the series is half
as long again as at the last. Only its later half is looked at, so that loading, the first step's optimizer states and
whatever fills up and then stays do not count.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from memfit.units import MIB

BLOCKS = 8
FIRST_LOOK = 2 * BLOCKS  # points
WARMUP = 3  # steps left out: the first makes optimizer states, the next two settle workspaces and caches
FLOOR = MIB  # bytes a growth must have reached: less is not worth a search for who holds it
MOST_POINTS = 4096  # then neighbours are merged, the lower one stays: a minimum of blocks loses nothing by it


@dataclass(frozen=True, slots=True)
class Growth:
    """Bytes gained from step `since` to `until`, and the Theil-Sen slope."""

    per_step: float
    since: int
    until: int
    bytes: int


class Series:
    """Live bytes at the end of steps; `add` returns a Growth at a look that finds one."""

    def __init__(self, floor: int = FLOOR, warmup: int = WARMUP) -> None:
        self.floor, self.warmup = floor, warmup
        self.points: list[tuple[int, int]] = []
        self._stride, self._seen, self._next = 1, 0, FIRST_LOOK

    def add(self, step: int, live: int) -> Growth | None:
        """One more step."""
        if step <= self.warmup:
            return None
        self._seen += 1
        if self.points and self._seen % self._stride:
            self.points[-1] = min(self.points[-1], (step, live), key=lambda point: point[1])
        else:
            self.points.append((step, live))
        if len(self.points) > MOST_POINTS:
            pairs = zip(self.points[::2], self.points[1::2], strict=False)
            self.points = [min(pair, key=lambda point: point[1]) for pair in pairs]
            self._stride *= 2
        if self._seen < self._next:
            return None
        self._next = self._next * 3 // 2
        return growth_of(self.points, self.floor)

    def forget(self) -> None:
        """Begin again: what was found has been told."""
        self.points.clear()
        self._stride, self._seen, self._next = 1, 0, FIRST_LOOK


def growth_of(points: Sequence[tuple[int, int]], floor: int = FLOOR) -> Growth | None:
    """The growth in the later half of (step, bytes) points; None: flat, falling, noise, or less than `floor`."""
    late = points[len(points) // 2 :]
    if len(late) < BLOCKS:
        return None
    edges = [len(late) * i // BLOCKS for i in range(BLOCKS + 1)]
    lows = [min(late[a:b], key=lambda point: point[1]) for a, b in pairwise(edges)]
    if any(after[1] <= before[1] for before, after in pairwise(lows)):
        return None
    slope = median((b[1] - a[1]) / (b[0] - a[0]) for i, a in enumerate(lows) for b in lows[i + 1 :])
    since, until = late[0][0], late[-1][0]
    gained = int(slope * (until - since))
    return Growth(slope, since, until, gained) if gained >= floor else None
