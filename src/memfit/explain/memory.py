"""The noun Memory: what a recorded history ends with, or holds at its highest: who is alive, since when, and what is free."""

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
GROWING = (
    4  # passes in a row that each begin with more than the one before: what is remade larger each time is alive once
)
KEEPS = 0.5  # share of what a pass had at its highest that may be there when the next begins: outputs, a leak
LEVEL = 0.05  # share of what is kept by which a pass may begin with less and still have been like the one under way
REPLACED = 0.25  # share of it that came since, for which as much went: it is full, and grows no more
SETS = 3  # models, or sets of states, from which they are one too many


@dataclass(frozen=True, slots=True)
class Group:
    """Live tensors of one role, born at one place: `label` has the layers' numbers left out.

    `turns` are the forward passes (from 0) they were born in, -1: before the first. `now`: bytes born in the pass under
    way, `fresh`: bytes born in its present part (forward, backward, optimizer step).
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
        """Bytes born before the pass under way."""
        return self.bytes - self.now

    @property
    def recent(self) -> int:
        """About how many were born in the pass under way."""
        return round(self.now * self.count / self.bytes) if self.bytes else 0

    @property
    def line(self) -> str:
        """train.py:41, where it is recorded."""
        return _line_in(self.label)

    @property
    def module(self) -> str:
        """What the label says besides the line."""
        return _without_line(self.label)


@dataclass(frozen=True, slots=True)
class Memory:
    """One instant, in bytes. `asked` is the request that failed (0: none did), `capacity` what the allocator could have.

    `floors` are the bytes of tensors at the begin of each forward pass, `peaks` the most during each, `evals` says which
    of them were no training. `recurring`: bytes that were born in three passes or more before the one under way.
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
    trained: tuple[bool, ...] = ()  # of each forward pass: a backward came before the next
    batch: int = 0  # of the last floor, what was made since the step before it: the batch
    caught: tuple[int, ...] = ()  # the passes in which a request failed before, and the run went on

    scale: float = 1.0  # of this pass's tensors to the largest that those before it made at the same places

    def of(self, *roles: Part) -> int:
        """Bytes of some roles."""
        return sum(group.bytes for group in self.groups if group.role in roles)

    @property
    def kept(self) -> tuple[Group, ...]:
        """Places whose tensors of two earlier passes or more are alive: nothing of an ordinary step is."""
        groups = (g for g in self.groups if g.role not in LASTING)
        return tuple(g for g in groups if len([t for t in g.turns if 0 <= t < self.turn]) >= 2)

    @property
    def steady(self) -> bool:
        """What is kept grows no more: a pass began with as much already, and what came since took the place of other tensors."""
        held = sum(g.old for g in self.kept)
        level = self.floors[self.turn] - LEVEL * held if self.floors else 0
        full = next((t for t in range(self.turn) if self.floors[t] >= level), self.turn)
        came = sum(g.old * len([t for t in g.turns if full <= t < self.turn]) / len(g.turns) for g in self.kept)
        return came >= REPLACED * held > 0

    @property
    def growing(self) -> tuple[int, Group | None]:
        """(bytes, the tensor) of what each pass makes anew, larger by what it adds: a bank, outputs that are concatenated."""
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
        """A backward came, and what was made before it is still there."""
        oldest = min((t for g in self.kept for t in g.turns if t >= 0), default=self.turn)
        return any(self.trained[oldest + 1 : self.turn])  # the batch of the first was made after the backward before it

    @property
    def older_than_training(self) -> bool:
        """Of the passes that most is kept of, most came before the last that trained: no one evaluation keeps them."""
        most = max(self.kept, key=lambda g: g.old, default=None)
        if most is None:
            return False
        turns = [t for t in most.turns if 0 <= t < self.turn]
        last = max((t for t, trained in enumerate(self.trained) if trained), default=-1)
        return 2 * sum(t < last for t in turns) > len(turns)

    def from_training(self, size: int) -> bool:
        """Something of about this size came after a pass that trained, and was made once: nothing that was loaded."""
        first = next((t for t, trained in enumerate(self.trained) if trained), self.turn)
        old = (g for g in self.groups if g.role not in LASTING and g.turns and g.turns[0] > first)
        return any(2 * g.old >= size for g in old)

    @property
    def demand(self) -> int:
        """Bytes that the pass under way has asked for; of the whole history before the first."""
        return self.requested + self.asked - (self.floors[self.turn] if self.floors else 0)

    @property
    def passed(self) -> list[int]:
        """The passes before the one under way that let go of what they made: those it can be measured by.

        A module that runs twice before one backward makes two, the first of which is not over when the second begins.
        """
        lasting = self.of("gradients", "optimizer_states")  # made in the first, and no part of its working memory

        def kept(t: int) -> int:
            last = self.batch * (t == self.turn - 1)
            return self.floors[t + 1] - self.floors[t] - lasting * (t == 0) - last

        alike = [t for t in range(self.turn) if self.evals[t] == self.evals[self.turn]]
        return [t for t in alike if kept(t) <= KEEPS * (self.peaks[t] - self.floors[t])]

    @property
    def repeated(self) -> tuple[int, str]:
        """(bytes, line) of models that were made again and again, and of states that a weight has more than once."""
        weights: Counter[str] = Counter()
        for g in self.groups:
            weights[g.module] += g.count * (g.role == "parameters")
        size, most, line = 0, 0, ""
        for g in self.groups:
            sets = len([t for t in g.turns if t < self.turn])
            if g.role == "optimizer_states" and " of " in g.module:  # a snapshot's stacks do not say of which weight
                sets = g.count // (weights[g.module.partition(" of ")[2]] or g.count)
            if g.role in ("parameters", "optimizer_states") and sets >= SETS:
                more = g.bytes - g.bytes // sets
                size += more
                most, line = max((most, line), (more, g.line))
        return size, line

    @property
    def line(self) -> str:
        """Of the request that failed: train.py:41, where it is recorded."""
        return _line_in(self.asked_by)

    @property
    def asker(self) -> str:
        """What `asked_by` says besides the line."""
        return _without_line(self.asked_by)

    @property
    def turn(self) -> int:
        """The number of the forward pass under way, -1 before the first."""
        return len(self.floors) - 1

    @property
    def limit(self) -> int:
        """What the allocator could have, or had."""
        return self.capacity if self.capacity is not None else self.reserved


def _line_in(label: str) -> str:
    found = _LINE.search(label)
    return found[1] if found else ""


def _without_line(label: str) -> str:
    return _LINE.sub("", label).strip(" ,:")


def unnumbered(label: str) -> str:
    """'layers.3.mlp: mm (model.py:7)' -> 'layers.*.mlp: mm (model.py:7)': the same place of every layer."""
    return _NUMBER.sub("*", label)


def holders(groups: Sequence[Group], most: int = MOST_HOLDERS) -> tuple[Holder, ...]:
    """The largest holders."""
    top = sorted(groups, key=lambda g: -g.bytes)[:most]
    return tuple(Holder(g.role, g.module, g.line, g.bytes, g.count) for g in top)
