"""Fold a stretch of steps into its highest level: the maximum over instants, in requested bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from memfit.closed_form.layers.program import ProgramPart, by_role
from memfit.closed_form.run.micro_step import Step, Stretch
from memfit.closed_form.size import Basis, Dims, Size, added
from memfit.nouns.tape import Role


class Meter:
    """Evaluates sizes for one batch: each basis, each segment and each stretch once."""

    def __init__(self, dims: Dims) -> None:
        self.dims = dims
        self.values: dict[Basis, int] = {}
        self.tops: dict[ProgramPart, tuple[int, int, int]] = {}
        self.peaks: dict[Stretch, Peak] = {}

    def bytes(self, size: Size) -> int:
        """`size` in bytes."""
        total = 0
        values = self.values
        for basis, coefficient in size.items():
            value = values.get(basis)
            if value is None:
                value = values[basis] = self.dims.value(basis)
            total += coefficient * value
        return total

    def top(self, segment: ProgramPart) -> tuple[int, int, int]:
        """The highest level inside a segment above its start, the index of its event, and what the segment leaves."""
        best, at = 0, -1
        for size, index in segment.peaks:
            height = self.bytes(size)
            if height > best:
                best, at = height, index
        self.tops[segment] = best, at, self.bytes(segment.left)
        return self.tops[segment]


@lru_cache(maxsize=256)
def meter_of(dims: Dims) -> Meter:
    """One meter for all recipes of a batch: they share most segments."""
    return Meter(dims)


@dataclass(frozen=True, slots=True, eq=False)
class Peak:
    """The highest level of a stretch, in bytes above its start, with the place it is reached at."""

    height: int
    stretch: Stretch
    done: int  # steps completed before
    event: int | None  # of the step after them; None: before it
    left: int = 0  # level at the end of the stretch, in bytes above its start

    @property
    def steps(self) -> Sequence[Step]:
        """Those completed before."""
        return self.stretch.steps[: self.done]

    @property
    def step(self) -> Step | None:
        """The one it is reached in."""
        return None if self.event is None else self.stretch.steps[self.done]

    @property
    def by_role(self) -> Mapping[Role, Size]:
        """What is alive at the peak, by role, as sizes."""
        return _alive(self.stretch, self.done, self.event)


@lru_cache(maxsize=4096)
def _alive(stretch: Stretch, done: int, event: int | None) -> Mapping[Role, Size]:
    """What `done` steps and the beginning of the next leave alive: the same polynomials for every batch."""
    total: dict[Role, dict[Basis, int]] = {}
    for segment, times in Counter(step.segment for step in stretch.steps[:done]).items():
        for role, size in segment.left_by_role.items():
            added(total.setdefault(role, {}), size, times)
    if event is not None:
        begun = stretch.steps[done].segment
        for role, size in by_role(begun.events[: event + 1], begun.sizes, begun.roles).items():
            added(total.setdefault(role, {}), size)
    return total


def fold(stretch: Stretch, meter: Meter) -> Peak:
    """The peak of a stretch; folded once for each meter."""
    known = meter.peaks.get(stretch)
    if known is None:
        known = meter.peaks[stretch] = _folded(stretch, meter)
    return known


def _folded(stretch: Stretch, meter: Meter) -> Peak:
    tops = meter.tops
    height, where, event, level = 0, -1, -1, 0
    for segment, first, times in stretch.runs:
        top, index, left = tops.get(segment) or meter.top(segment)
        highest = times - 1 if left > 0 else 0  # of equal steps the last one, when each leaves something behind
        if level + highest * left + top > height:
            height, where, event = level + highest * left + top, first + highest, index
        level += times * left
    if where < 0:
        return Peak(height, stretch, stretch.begin, None, level)
    return Peak(height, stretch, where, event, level)
