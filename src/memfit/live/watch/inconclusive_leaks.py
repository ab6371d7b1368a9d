"""What is left to say of leaks when a run has ended: that tensors were counted too seldom, or that what grew has stopped to."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from statistics import median

from memfit.live.watch.leak_test import FIRST_LOOK, FLOOR, WARMUP
from memfit.nouns.sample import Alarm, Leak, Sample
from memfit.units import MIB, human

RESIDENT = 8 * MIB  # growth that settling allocators do not reach once the first steps are over
ENOUGH = 4  # counts that did not rise: what else the process keeps is no matter of tensors
STOPPED = 0.1  # of a leak's growth, over the steps since it was told: less is none
ADVICE = "count_every=1 counts them at every step"


def doubt(samples: Iterable[Sample]) -> Alarm | None:
    """An alarm where memory grew over steps whose tensors were counted fewer times than a test for leaks needs."""
    ends: dict[int, Sample] = {}  # of each step: later looks are at what came after it
    for sample in samples:
        if sample.phase == "step":
            ends.setdefault(sample.step, sample)
    steps = list(ends.values())
    counts = [s for s in steps if s.counted]
    late = [s for s in counts if s.step > WARMUP]  # what a test for leaks looks at
    if not steps or len(late) >= FIRST_LOOK:
        return None
    if steps[-1].step < WARMUP + FIRST_LOOK:
        return _too_short(late)
    tensors, resident = _risen(counts), _resident([s.now.device for s in steps if s.step > WARMUP])
    if tensors < FLOOR and (resident < RESIDENT or len(counts) >= ENOUGH):
        return None
    grown = [f"they grew by {human(tensors)} from step {counts[0].step:,} to {counts[-1].step:,}"] * (tensors >= FLOOR)
    grown += [f"resident memory grew by {human(resident)}"] * (resident >= RESIDENT)
    times = "once" if len(counts) == 1 else f"{len(counts)} times"
    said = f"tensors were counted {times} in {steps[-1].step:,} steps, too seldom to tell a leak: {', '.join(grown)}; {ADVICE}"
    return Alarm("unsure", steps[-1].step, "step", max(tensors, resident), 0, said)


def _too_short(late: Sequence[Sample]) -> Alarm | None:
    """A run of a few steps, at each of which more was alive than at the one before."""
    grown = _risen(late)
    if len(late) < ENOUGH or grown < FLOOR:
        return None
    said = (
        f"the run ended after {late[-1].step} steps, too few to tell a leak: tensors grew by {human(grown)} from step {late[0].step} to "
        f"{late[-1].step}, and never shrank"
    )
    return Alarm("unsure", late[-1].step, "step", grown, 0, said)


def stopped(leak: Leak, samples: Iterable[Sample], told: int) -> Alarm | None:
    """An alarm where live bytes have not grown over the later half of the steps since `told`, the step at which the leak was found."""
    after = [s for s in samples if s.counted and s.phase == "step" and s.step >= told]
    if leak.unit != "step" or len(after) < FIRST_LOOK:
        return None
    first, last = after[len(after) // 2], after[-1]
    grown = last.now.allocated - first.now.allocated
    if grown > STOPPED * leak.per_step * (last.step - first.step):
        return None
    said = (
        f"what grew over steps {leak.since:,} to {leak.until:,} has not grown from step {first.step:,} to {last.step:,}: "
        "a cache that is full looks like this, a leak does not"
    )
    return Alarm("unsure", last.step, "step", leak.bytes, 0, said)


def _risen(counts: Sequence[Sample]) -> int:
    """Bytes by which counts rose that never fell."""
    live = [s.now.allocated for s in counts]
    return live[-1] - live[0] if len(live) > 1 and all(b >= a for a, b in pairwise(live)) else 0


def _resident(sizes: Sequence[int]) -> int:
    """Bytes from the first quarter's median to the last one's."""
    part = len(sizes) // 4
    return int(median(sizes[-part:]) - median(sizes[:part])) if part else 0
