"""The noun Memory: the card where a recorded history ends or peaks, with live tensors grouped by origin."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from memfit.nouns.finding import Holder, Part

_LINE = re.compile(r"\(([^()\s]+:\d+)\)")
_NUMBER = re.compile(r"(?<!\w)\d+(?=[.: ])")
MOST_HOLDERS = 8
LASTING = ("parameters", "optimizer_states", "gradients", "workspace")
# passes in a row that must each begin with more than the one before, for a tensor that is recreated larger and so is
# alive once
GROWING = 4
KEEPS = 0.5  # share of the peak of a pass that may still be alive when the next begins: outputs, a leak
LEVEL = 0.05  # share of what is kept by which a pass may begin with less and count as having begun with as much
REPLACED = 0.25  # share of what is kept that replaced other tensors, from which it is a full buffer that grows no more
SETS = 3  # models, or sets of optimizer states, from which earlier ones are reported


@dataclass(frozen=True, slots=True)
class Group:
    """Live tensors of one role that were allocated at one place; `label` omits the numbers of layers.

    `turns` are the forward passes (from 0) they were allocated in, -1: before the first. `now` are the bytes of the
    current pass, `fresh` those of its current part (forward, backward, optimizer step).
    """

    role: Part
    label: str
    bytes: int
    count: int
    largest: int
    turns: tuple[int, ...] = ()
    now: int = 0
    fresh: int = 0

    @property
    def old(self) -> int:
        """Bytes allocated before the current pass."""
        return self.bytes - self.now

    @property
    def recent(self) -> int:
        """About how many were allocated in the current pass."""
        return round(self.now * self.count / self.bytes) if self.bytes else 0

    @property
    def line(self) -> str:
        """train.py:41, "" where it is not recorded."""
        return _line_in(self.label)

    @property
    def module(self) -> str:
        """The label without the line."""
        return _without_line(self.label)


@dataclass(frozen=True, slots=True)
class Memory:
    """One instant, in bytes. `asked` is the request that failed (0: none did), `capacity` what the allocator could
    have.

    `floors` are the bytes of tensors at the beginning of each forward pass, `peaks` the most during it, `evals` says
    which passes belong to an evaluation. The last pass is the current one.
    """

    requested: int
    allocated: int
    reserved: int
    capacity: int | None
    asked: int
    phase: str
    instant: str
    groups: tuple[Group, ...]
    floors: tuple[int, ...] = ()
    peaks: tuple[int, ...] = ()
    evals: tuple[bool, ...] = ()
    expandable: bool = False
    asked_by: str = ""  # the operator and line of the request that failed
    trained: tuple[bool, ...] = ()  # of each forward pass: a backward followed before the next
    batch: int = 0  # bytes of the last floor that were allocated after the step before it: the batch
    caught: tuple[int, ...] = ()  # earlier passes in which a request failed and the run went on
    losses: bool = True  # most earlier passes made a single number, as a loss; the layers of a loop make none
    barred: int = 0  # bytes that the driver still had, and a limit of the process kept from it
    scale: float = 1.0  # size of this pass's tensors relative to the largest of earlier passes at the same places

    def of(self, *roles: Part) -> int:
        """Return the bytes of some roles."""
        return sum(group.bytes for group in self.groups if group.role in roles)

    @property
    def kept(self) -> tuple[Group, ...]:
        """Groups with live tensors of two or more earlier passes, which an ordinary step never has."""
        groups = (g for g in self.groups if g.role not in LASTING)
        return tuple(g for g in groups if len([t for t in g.turns if 0 <= t < self.turn]) >= 2)

    @property
    def steady(self) -> bool:
        """Did an earlier pass begin with as much, and have new tensors replaced others since? Then nothing grows."""
        held = sum(g.old for g in self.kept)
        level = self.floors[self.turn] - LEVEL * held if self.floors else 0
        full = next((t for t in range(self.turn) if self.floors[t] >= level), self.turn)
        came = sum(g.old * len([t for t in g.turns if full <= t < self.turn]) / len(g.turns) for g in self.kept)
        return came >= REPLACED * held > 0

    @property
    def growing(self) -> tuple[int, Group | None]:
        """(bytes, group) of a tensor that each pass recreates larger: a memory bank, outputs that are concatenated."""
        rising = self.turn
        while rising > 0 and self.floors[rising] > self.floors[rising - 1]:
            rising -= 1
        grown = self.floors[self.turn] - self.floors[rising] if self.floors else 0
        if self.turn - rising < GROWING:
            return 0, None
        recent = (self.turn - 1, self.turn)
        alike = (g for g in self.groups if g.role not in LASTING and g.turns and g.turns[0] in recent)
        most = max(alike, key=lambda g: g.largest, default=None)
        return (grown, most) if most is not None and most.largest >= KEEPS * grown else (0, None)

    @property
    def outlived(self) -> bool:
        """Has a backward run since the oldest kept tensor was made?"""
        oldest = min((t for g in self.kept for t in g.turns if t >= 0), default=self.turn)
        return any(self.trained[oldest + 1 : self.turn])  # the first one's batch is newer than the backward before it

    @property
    def older_than_training(self) -> bool:
        """Were most retained tensors created before the last training pass? Then no single evaluation retained them."""
        most = max(self.kept, key=lambda g: g.old, default=None)
        if most is None:
            return False
        turns = [t for t in most.turns if 0 <= t < self.turn]
        last = max((t for t, trained in enumerate(self.trained) if trained), default=-1)
        return 2 * sum(t < last for t in turns) > len(turns)

    def from_training(self, size: int) -> bool:
        """Was something of about this size made after a training pass? Then it was not loaded."""
        first = next((t for t, trained in enumerate(self.trained) if trained), self.turn)
        old = (g for g in self.groups if g.role not in LASTING and g.turns and g.turns[0] > first)
        return any(2 * g.old >= size for g in old)

    @property
    def demand(self) -> int:
        """Bytes that the current pass needs; before the first pass, what the whole history needs."""
        return self.requested + self.asked - (self.floors[self.turn] if self.floors else 0)

    @property
    def passed(self) -> list[int]:
        """Earlier passes that freed what they made, so that the current pass can be compared with them.

        A module that runs twice before one backward makes two passes, and the first is not over when the second begins.
        """
        lasting = self.of("gradients", "optimizer_states")  # made in the first pass, but no part of its working memory

        def kept(t: int) -> int:
            last = self.batch * (t == self.turn - 1)
            return self.floors[t + 1] - self.floors[t] - lasting * (t == 0) - last

        alike = [t for t in range(self.turn) if self.evals[t] == self.evals[self.turn]]
        return [t for t in alike if kept(t) <= KEEPS * (self.peaks[t] - self.floors[t])]

    @property
    def repeated(self) -> tuple[int, str]:
        """(bytes, line) of models that were made several times, and of a weight's further sets of optimizer states."""
        weights: Counter[str] = Counter()
        for g in self.groups:
            weights[g.module] += g.count * (g.role == "parameters")
        size, most, line = 0, 0, ""
        for g in self.groups:
            sets = len([t for t in g.turns if t < self.turn])
            if g.role == "optimizer_states" and " of " in g.module:  # stacks of a snapshot do not name the weight
                sets = g.count // (weights[g.module.partition(" of ")[2]] or g.count)
            if g.role in ("parameters", "optimizer_states") and sets >= SETS:
                more = g.bytes - g.bytes // sets
                size += more
                most, line = max((most, line), (more, g.line))
        return size, line

    @property
    def line(self) -> str:
        """The line of the request that failed, "" where it is not recorded."""
        return _line_in(self.asked_by)

    @property
    def asker(self) -> str:
        """`asked_by` without the line."""
        return _without_line(self.asked_by)

    @property
    def turn(self) -> int:
        """The number of the current forward pass, -1 before the first."""
        return len(self.floors) - 1

    @property
    def limit(self) -> int:
        """The bytes that the allocator could have; where that is unknown, those it had."""
        return self.capacity if self.capacity is not None else self.reserved


def _line_in(label: str) -> str:
    found = _LINE.search(label)
    return found[1] if found else ""


def _without_line(label: str) -> str:
    return _LINE.sub("", label).strip(" ,:")


def unnumbered(label: str) -> str:
    """Return a label without the numbers of layers: "layers.3.mlp: mm (model.py:7)" -> "layers.*.mlp: mm (...)"."""
    return _NUMBER.sub("*", label)


def holders(groups: Sequence[Group], most: int = MOST_HOLDERS) -> tuple[Holder, ...]:
    """Return the largest holders."""
    top = sorted(groups, key=lambda g: -g.bytes)[:most]
    return tuple(Holder(g.role, g.module, g.line, g.bytes, g.count) for g in top)
