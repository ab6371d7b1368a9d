"""An Observer that keeps the user's own line of every allocation, and decides by lines which passes train."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from types import CodeType, FrameType
from typing import Any

import torch

from memfit.documents.snapshot.origins import LABELS, Origin, made_for, of_both
from memfit.documents.snapshot.passes import Site
from memfit.live.holders.names import own
from memfit.nouns.tape import FORWARD, GRADIENTS_ON, NEXT_PART, Alloc, Event, Mark, Oom, Phase, Role, Tape
from memfit.virtual.device.card import Card
from memfit.virtual.device.values import base, tensors
from memfit.virtual.observer import Observer


class LineObserver(Observer):
    """As Observer; its tape's labels end in "(train.py:41)"."""

    def __init__(self, card: Card) -> None:
        self._first = len(card.ledger.blocks)
        self._births: list[tuple[str, Origin]] = []  # of each allocation: the user's line, what a library made it for
        self._at = ""  # where the backward pass under way was called: its own thread has no frames of the user's
        self._again = True
        self._run: set[int] = set()  # root modules that ran in the pass under way
        self._sites: list[Site] = []  # of each forward
        self._forward = False  # is one under way that a backward is to follow?
        super().__init__(card)

    def _enter(self, module: torch.nn.Module, inputs: Any) -> None:
        if not (self._depth or self._in_backward):  # else the first batch would count as loaded with the model
            for t in tensors(inputs):
                self._tag_batch(t)
        super()._enter(module, inputs)

    def _tag_batch(self, t: torch.Tensor) -> None:
        number = self.card.ledger.number_at.get(base(t)) if t.is_cuda else None
        if number is not None:
            self._roles.setdefault(number, "temporaries")

    def _tag_live(self, role: Role) -> None:
        """Of what was there before the first pass the models' own: data and checkpoints are none of it."""
        for number in self.card.ledger.number_at.values():
            if number < self._first or self._born(number)[1] == "module":
                self._roles.setdefault(number, role)

    def _begin_forward(self, root: torch.nn.Module) -> None:
        held = [t.is_cuda for t in (*root.parameters(), *root.buffers())]
        if held and not any(held):  # a pass on the CPU, which asks nothing of the card
            return
        self._again = id(root) in self._run or not self._run
        self._run = {id(root)} if self._again else self._run | {id(root)}
        for name, buffer in root.named_buffers():
            self._tag(buffer, "parameters", name)
        super()._begin_forward(root)

    def mark(self, phase: Phase, instant: str) -> None:
        """An instant begins."""
        if instant == FORWARD:
            self._sites.append(site())
            if not self._again:
                instant = NEXT_PART
            elif phase == "eval" and torch.is_grad_enabled():
                instant = GRADIENTS_ON
        else:
            self._run = set()
        self._forward = phase != "eval" and instant in (FORWARD, NEXT_PART)
        super().mark(phase, instant)

    def _backward(self, real: Any) -> Any:
        marked = super()._backward(real)

        def backward(*args: Any, **kwargs: Any) -> None:
            self._at = birth()[0]
            marked(*args, **kwargs)

        return backward

    def _place(self) -> str:
        line, made = birth()
        self._births.append((line or self._at, made))
        return LABELS.get(made) or super()._place()

    def _born(self, number: int) -> tuple[str, Origin]:
        """Where an allocation was asked for and what for; "" for those before the watch began."""
        place = number - self._first
        return self._births[place] if 0 <= place < len(self._births) else ("", "")

    def tape(self, about: dict[str, str]) -> Tape:
        """What happened, every request with its line."""
        self._tag_live("parameters")  # a model that never ran
        for root in self._roots:
            for name, p in root.named_parameters():
                self._tag(p.grad, "gradients", f"gradient of {name}")
        if self._forward:  # it failed before a backward could show what it keeps
            for number in self.card.ledger.number_at.values():
                if number >= self._began:
                    self._roles.setdefault(number, "activations")
        tape, refused = super().tape(about), iter(sorted(self.card.ledger.refused))
        return replace(tape, events=tuple(self._with_line(event, refused) for event in self._with_phases(tape.events)))

    def _with_line(self, event: Event, refused: Iterator[int]) -> Event:
        if not isinstance(event, Alloc | Oom):
            return event
        line, _ = self._born(event.id if isinstance(event, Alloc) else next(refused))
        return replace(event, label=f"{event.label} ({line})") if line else event

    def _with_phases(self, events: tuple[Event, ...]) -> Iterator[Event]:
        """What trains and what evaluates, by what passes of the same lines came to, whatever mode their modules are in."""
        told: dict[int, Mark] = {}
        passes = list(_passes(events, self._sites))
        trained = {one.kind for one in passes if one.followed}
        idle = {one.kind for one in passes[:-1] if not one.followed}
        for one in passes:
            evaluates = all(mark.phase == "eval" for mark in one.marks.values())
            if (
                one.kind in trained or not evaluates
            ):  # one of its modules has no gradients: a teacher, a momentum encoder
                changed = {i: replace(mark, phase="step") for i, mark in one.marks.items() if mark.phase == "eval"}
                told |= {i: replace(mark, instant=mark.instant.partition(",")[0]) for i, mark in changed.items()}
            if trained and one.kind in idle - trained and not evaluates:
                told[min(one.marks)] = Mark("eval", GRADIENTS_ON)
        yield from (told.get(index, event) for index, event in enumerate(events))


@dataclass(slots=True)
class _Pass:
    """A forward pass: the marks of its parts by their index. `kind`: from which lines, and does its first part evaluate."""

    kind: tuple[Site, bool]
    marks: dict[int, Mark]
    followed: bool = False  # by a backward


def _passes(events: tuple[Event, ...], sites: list[Site]) -> Iterator[_Pass]:
    """The passes of a history in order; `sites` of each of its marks that begin a forward."""
    one: _Pass | None = None
    there = iter(sites)
    for index, event in enumerate(events):
        if not isinstance(event, Mark):
            continue
        if event.instant == NEXT_PART and one is not None:
            next(there, None)
            one.marks[index] = event
        elif event.instant in (FORWARD, GRADIENTS_ON, NEXT_PART):
            if one is not None:
                yield one
            one = _Pass((next(there, ()), event.phase == "eval"), {index: event})
        elif event.instant == "backward" and one is not None:
            one.followed = True
    if one is not None:
        yield one


def about(card: Card) -> dict[str, str]:
    """What a tape of this card says of itself."""
    known = {"gpu": card.gpu.name, "torch": str(torch.__version__), "alloc_conf": card.alloc_conf}
    return known if card.limit is None else {**known, "capacity": str(card.limit)}


# --- the stack of this thread ---


def birth() -> tuple[str, Origin]:
    """The innermost line on this thread's stack that is no library's, "train.py:41", and what it asked a library for."""
    found: Origin = ""
    for frame in _frames():
        if own(frame.f_code.co_filename):
            return f"{frame.f_code.co_filename.rsplit('/', 1)[-1]}:{frame.f_lineno}", found
        found = of_both(found, _made_for(frame.f_code))
    return "", found


def site() -> Site:
    """All lines on this thread's stack that are no library's, outermost first."""
    lines = [(f.f_code.co_filename, f.f_code.co_name, f.f_lineno) for f in _frames() if own(f.f_code.co_filename)]
    return tuple(reversed(lines))


def _frames() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        yield frame
        frame = frame.f_back


@lru_cache(maxsize=4096)
def _made_for(code: CodeType) -> Origin:
    return made_for(code.co_filename.replace("\\", "/"), code.co_name)
