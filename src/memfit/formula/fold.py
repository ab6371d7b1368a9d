"""Fold a stretch of steps into its highest level: the maximum over instants, in requested bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from memfit.formula.program import Segment, by_role
from memfit.formula.run import Step, Stretch
from memfit.formula.size import Basis, Dims, Size, added
from memfit.tape import Role


class Meter:
    """Evaluates sizes for one batch: each basis, each segment and each stretch once."""

    def __init__(self, dims: Dims) -> None:
        self.dims = dims
        self.values: dict[Basis, int] = {}
        self.tops: dict[Segment, tuple[int, int, int]] = {}
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

    def top(self, segment: Segment) -> tuple[int, int, int]:
        """The highest level inside a segment above its start, the index of its event, and what the segment leaves."""
        best, at = 0, -1
        for size, index in segment.peaks:
            height = self.bytes(size)
            if height > best:
                best, at = height, index
        self.tops[segment] = best, at, self.bytes(segment.left)
        return self.tops[segment]


@dataclass(frozen=True, eq=False)
class Peak:
    """The highest level of a stretch, in bytes above its start, with the place it is reached at."""

    height: int
    steps: Sequence[Step]  # completed before
    step: Step | None
    event: int
    left: int = 0  # level at the end of the stretch, in bytes above its start

    @cached_property
    def by_role(self) -> dict[Role, dict[Basis, int]]:
        """What is alive at the peak, by role, as sizes."""
        total: dict[Role, dict[Basis, int]] = {}
        for done, times in Counter(step.segment for step in self.steps).items():
            for role, size in done.left_by_role.items():
                added(total.setdefault(role, {}), size, times)
        if self.step is not None:
            program = self.step.part.program
            events = self.step.segment.events[: self.event + 1]
            for role, size in by_role(events, program.sizes, program.roles).items():
                added(total.setdefault(role, {}), size)
        return total


def fold(stretch: Stretch, meter: Meter) -> Peak:
    """The peak of a stretch; folded once for each meter."""
    known = meter.peaks.get(stretch)
    if known is None:
        known = meter.peaks[stretch] = _folded(stretch, meter)
    return known


def _folded(stretch: Stretch, meter: Meter) -> Peak:
    tops, steps = meter.tops, stretch.steps
    height, where, event, level = 0, -1, -1, 0
    for segment, first, times in stretch.runs:
        top, index, left = tops.get(segment) or meter.top(segment)
        highest = times - 1 if left > 0 else 0  # of equal steps the last one, when each leaves something behind
        if level + highest * left + top > height:
            height, where, event = level + highest * left + top, first + highest, index
        level += times * left
    if where < 0:
        return Peak(height, steps[: stretch.begin], None, event, level)
    return Peak(height, steps[:where], steps[where], event, level)
