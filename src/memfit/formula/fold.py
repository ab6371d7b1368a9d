"""Fold a micro-step into its highest level: the maximum over instants, in requested bytes."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from memfit.formula.program import Segment, by_role
from memfit.formula.run import Step, Stretch
from memfit.formula.size import Basis, Dims, Size, added
from memfit.tape import Role


class Meter:
    """Evaluates sizes for one batch, each basis once."""

    def __init__(self, dims: Dims) -> None:
        self.dims = dims
        self.values: dict[Basis, int] = {}
        self.heights: dict[Segment, tuple[int, int, int]] = {}

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
        """The highest level inside a segment above its start, the index of its event, and what is left at the end."""
        known = self.heights.get(segment)
        if known is None:
            best, at = 0, -1
            for size, index in segment.peaks:
                height = self.bytes(size)
                if height > best:
                    best, at = height, index
            known = self.heights[segment] = best, at, self.bytes(segment.left)
        return known


@dataclass(slots=True)
class Peak:
    """A highest level with the place it was reached at."""

    level: int
    steps: tuple[Step, ...]  # completed before
    step: Step | None
    event: int

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


def fold(stretch: Stretch, meter: Meter, start: int = 0) -> tuple[Peak, int]:
    """Peak over a stretch and the level after it, both counted from `start` bytes."""
    level, best, where, event = start, start, -1, -1
    for segment, first, count in stretch.runs:
        height, index, left = meter.top(segment)
        highest = count - 1 if left > 0 else 0  # of equal steps the last one, when each leaves something behind
        if level + highest * left + height > best:
            best, where, event = level + highest * left + height, first + highest, index
        level += count * left
    steps = stretch.steps
    return Peak(best, steps[: max(where, 0)], steps[where] if where >= 0 else None, event), level
