"""Fold a micro-step into its highest level: the maximum over instants, in requested bytes."""

from __future__ import annotations

from dataclasses import dataclass

from memfit.formula.program import Segment, by_role
from memfit.formula.run import MicroStep, Step
from memfit.formula.size import Basis, Dims, Size, added
from memfit.tape import Role


class Meter:
    """Evaluates sizes for one batch, each basis once."""

    def __init__(self, dims: Dims) -> None:
        self.dims = dims
        self.values: dict[Basis, int] = {}

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

    def top(self, segment: Segment) -> tuple[int, int]:
        """The highest level inside a segment above its start, and the index of its event."""
        best, at = 0, -1
        for size, index in segment.peaks:
            height = self.bytes(size)
            if height > best:
                best, at = height, index
        return best, at


@dataclass(slots=True)
class Peak:
    """A highest level with the place it was reached at."""

    level: int
    steps: list[Step]  # completed before
    step: Step | None
    event: int

    def by_role(self) -> dict[Role, dict[Basis, int]]:
        """What is alive at the peak, by role, as sizes."""
        total: dict[Role, dict[Basis, int]] = {}
        for done in self.steps:
            for role, size in done.segment.left_by_role.items():
                added(total.setdefault(role, {}), size)
        if self.step is not None:
            program = self.step.part.program
            events = self.step.segment.events[: self.event + 1]
            for role, size in by_role(events, program.sizes, program.roles).items():
                added(total.setdefault(role, {}), size)
        return total


def fold(steps: list[Step], meter: Meter, start: int = 0) -> tuple[Peak, int]:
    """Peak over `steps` and the level after them, both counted from `start` bytes.

    Each distinct segment is evaluated once; the rest is additions.
    """
    heights: dict[int, tuple[int, int, int]] = {}
    level, best, where, event = start, start, -1, -1
    for i, step in enumerate(steps):
        segment = step.segment
        known = heights.get(id(segment))
        if known is None:
            known = heights[id(segment)] = (*meter.top(segment), meter.bytes(segment.left))
        height, index, left = known
        if level + height > best:
            best, where, event = level + height, i, index
        level += left
    return Peak(best, steps[: max(where, 0)], steps[where] if where >= 0 else None, event), level


def whole(micro: MicroStep) -> list[Step]:
    """Forward, the frees at its end, and backward."""
    return [*micro.forward, *micro.exits, *micro.backward]
