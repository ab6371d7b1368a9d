"""The leak test decides whether a series of live bytes grows beyond noise, and what to report when the run has ended.

It is a rank test on the minima of blocks, which assumes no distribution. Noise is whatever leaves the order of the
blocks to chance: batches of varying length, what the last step left behind. Eight minima are in rising order by
chance once in 8! = 40,320 tests, and the series is tested only when it is half as long again as at the last test.
Only its later half counts, which leaves out loading, the first step's optimizer states and a cache that fills up.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from memfit.nouns.sample import Alarm, Leak, Sample
from memfit.units import MIB, human, several

BLOCKS = 8
FIRST_TEST = 2 * BLOCKS  # points
WARMUP = 3  # steps that are left out: the first makes optimizer states, workspaces and caches settle in the next two
FLOOR = MIB  # bytes a growth must have reached: less is not worth a search for the holders
MOST_POINTS = 4096  # beyond these, neighbours are merged into the lower of two, which changes no minimum of a block
RESIDENT = 8 * MIB  # growth of resident memory that settling allocators do not reach after the first steps
ENOUGH = 4  # counts that suffice: if they did not rise, resident memory grows by something else than tensors
STOPPED = 0.1  # share of a leak's growth per step below which it has stopped
COUNT_ALWAYS = "count_every=1 counts them at every step"


@dataclass(frozen=True, slots=True)
class Growth:
    """Bytes gained from step `since` to `until`, and the Theil-Sen slope."""

    per_step: float
    since: int
    until: int
    bytes: int


class Series:
    """Live bytes at the end of steps; `add` returns a Growth when a test finds one."""

    def __init__(self, floor: int = FLOOR, warmup: int = WARMUP) -> None:
        self.floor, self.warmup = floor, warmup
        self.points: list[tuple[int, int]] = []
        self._stride, self._seen, self._next = 1, 0, FIRST_TEST

    def add(self, step: int, live: int) -> Growth | None:
        """Add one more step, and test the series where that is due."""
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
        """Begin again after a growth that was reported."""
        self.points.clear()
        self._stride, self._seen, self._next = 1, 0, FIRST_TEST


def growth_of(points: Sequence[tuple[int, int]], floor: int = FLOOR) -> Growth | None:
    """Return the growth in the later half of (step, bytes) points; None for noise and for less than `floor`."""
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


# --- alarms at the end of the run ---


def inconclusive(samples: Iterable[Sample]) -> Alarm | None:
    """Return an alarm where memory grew, but tensors were counted fewer times than the test needs."""
    ends: dict[int, Sample] = {}  # the first sample of each step: later ones belong to what came after it
    for sample in samples:
        if sample.phase == "step":
            ends.setdefault(sample.step, sample)
    steps = list(ends.values())
    counts = [s for s in steps if s.counted]
    late = [s for s in counts if s.step > WARMUP]  # the steps that the test counts
    if not steps or len(late) >= FIRST_TEST:
        return None
    if steps[-1].step < WARMUP + FIRST_TEST:
        return _too_short(late)
    tensors, resident = _risen(counts), _resident([s.now.device for s in steps if s.step > WARMUP])
    if tensors < FLOOR and (resident < RESIDENT or len(counts) >= ENOUGH):
        return None
    grown = [f"they grew by {human(tensors)} from step {counts[0].step:,} to {counts[-1].step:,}"] * (tensors >= FLOOR)
    grown += [f"resident memory grew by {human(resident)}"] * (resident >= RESIDENT)
    times = "once" if len(counts) == 1 else f"{len(counts)} times"
    text = f"tensors were counted {times} in {several(steps[-1].step, 'step')}, too seldom to tell a leak: "
    text += f"{', '.join(grown)}; {COUNT_ALWAYS}"
    return Alarm("unsure", steps[-1].step, "step", max(tensors, resident), 0, text)


def _too_short(late: Sequence[Sample]) -> Alarm | None:
    """Return an alarm for a run of a few steps, each of which left more alive than the one before."""
    grown = _risen(late)
    if len(late) < ENOUGH or grown < FLOOR:
        return None
    text = (
        f"the run ended after {several(late[-1].step, 'step')}, too few to tell a leak: tensors grew by {human(grown)} "
        f"from step {late[0].step} to {late[-1].step}, and never shrank"
    )
    return Alarm("unsure", late[-1].step, "step", grown, 0, text)


def stopped(leak: Leak, samples: Iterable[Sample], since: int) -> Alarm | None:
    """Return an alarm where live bytes have not grown over the later half of the steps since the leak was found."""
    after = [s for s in samples if s.counted and s.phase == "step" and s.step >= since]
    if leak.unit != "step" or len(after) < FIRST_TEST:
        return None
    first, last = after[len(after) // 2], after[-1]
    grown = last.now.allocated - first.now.allocated
    if grown > STOPPED * leak.per_step * (last.step - first.step):
        return None
    text = (
        f"what grew over steps {leak.since:,} to {leak.until:,} has not grown from step {first.step:,} to "
        f"{last.step:,}: a cache that is full looks like this, a leak does not"
    )
    return Alarm("unsure", last.step, "step", leak.bytes, 0, text)


def _risen(counts: Sequence[Sample]) -> int:
    """Return the bytes by which counts rose; 0 if they ever fell."""
    live = [s.now.allocated for s in counts]
    return live[-1] - live[0] if len(live) > 1 and all(b >= a for a, b in pairwise(live)) else 0


def _resident(sizes: Sequence[int]) -> int:
    """Return the growth from the median of the first quarter to that of the last."""
    part = len(sizes) // 4
    return int(median(sizes[-part:]) - median(sizes[:part])) if part else 0
