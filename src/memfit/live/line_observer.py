"""LineObserver: records the user's line of every allocation, and decides by these lines which passes train."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from types import CodeType, FrameType
from typing import Any

import torch

from memfit.documents.snapshot.frames import LABELS, Origin, made_for, of_both
from memfit.documents.snapshot.roles import Lines, untrained
from memfit.holders.names import own, short_line
from memfit.nouns.tape import BACKWARD, FORWARD, GRADIENTS_ON, NEXT_PART, Alloc, Event, Mark, Oom, Phase, Tape
from memfit.virtual.device.card import Card
from memfit.virtual.observer import Observer


class LineObserver(Observer):
    """An Observer whose tape labels every request with the user's line: "...(train.py:41)"."""

    def __init__(self, card: Card) -> None:
        self._first = len(card.ledger.blocks)
        # the user's line of each allocation, and the purpose for which a library made it
        self._allocated_at: list[tuple[str, Origin]] = []
        self._backward_at = ""  # the line that called the backward, whose own thread has no frames of the user's
        self._sites: list[Lines] = []  # where each forward was called
        super().__init__(card)

    def _tag_loaded(self) -> None:
        """Tag live tensors as parameters where modules made them or the observer is younger; not data, checkpoints."""
        for number in self.card.ledger.number_at.values():
            if number < self._first or self._site_of(number)[1] == "module":
                self._roles.setdefault(number, "parameters")

    def _begin_forward(self, root: torch.nn.Module, inputs: Any) -> None:
        on_card = [t.is_cuda for t in (*root.parameters(), *root.buffers())]
        if on_card and not any(on_card):  # a pass on the CPU allocates nothing on the card
            return
        for name, buffer in root.named_buffers():
            self._tag(buffer, "parameters", name)
        super()._begin_forward(root, inputs)

    def _without_training(self, root: torch.nn.Module) -> tuple[Phase, str]:
        return "eval", FORWARD  # until `_with_phases` has seen which backward passes follow

    def _mark_forward(self, phase: Phase, new: bool, _: str) -> None:
        self._sites.append(user_lines())
        graph = phase == "eval" and torch.is_grad_enabled()
        self.mark(phase, NEXT_PART if not new else GRADIENTS_ON if graph else FORWARD)

    def _backward(self, real: Any, learns: bool = True) -> Any:
        marked = super()._backward(real, learns)

        def backward(*args: Any, **kwargs: Any) -> Any:
            self._backward_at = allocation_site()[0]
            return marked(*args, **kwargs)

        return backward

    def _place(self) -> str:
        line, made = allocation_site()
        self._allocated_at.append((line or self._backward_at, made))
        return LABELS.get(made) or super()._place()

    def _site_of(self, number: int) -> tuple[str, Origin]:
        """Return the line and purpose of an allocation; empty texts for one made before the observer."""
        index = number - self._first
        return self._allocated_at[index] if 0 <= index < len(self._allocated_at) else ("", "")

    def tape(self, about: dict[str, str]) -> Tape:
        """Return what happened as a Tape, every request with its line."""
        self._tag_loaded()  # a model that never ran
        for root in self._roots:
            for name, p in root.named_parameters():
                self._tag(p.grad, "gradients", f"gradient of {name}")
        tape, refused = super().tape(about), iter(sorted(self.card.ledger.refused))
        return replace(tape, events=tuple(self._with_line(event, refused) for event in self._with_phases(tape.events)))

    def _with_line(self, event: Event, refused: Iterator[int]) -> Event:
        if not isinstance(event, Alloc | Oom):
            return event
        line, _ = self._site_of(event.id if isinstance(event, Alloc) else next(refused))
        return replace(event, label=f"{event.label} ({line})") if line else event

    def _with_phases(self, events: tuple[Event, ...]) -> Iterator[Event]:
        """Correct which passes train and which evaluate: those train that a backward follows, or one of the same lines.

        The mode of the modules is no proof: a teacher in a training step has no gradients, and a loop may evaluate in
        training mode.
        """
        corrected: dict[int, Mark] = {}
        passes = list(_passes(events, self._sites))
        trained = {one.kind for one in passes if one.followed}
        idle = {one.kind for one in passes[:-1] if not one.followed}
        for one in passes:
            evaluates = all(mark.phase == "eval" for mark in one.marks.values())
            if one.kind in trained or not evaluates:  # some of its modules need no gradients: a teacher, an average
                changed = {i: replace(mark, phase="step") for i, mark in one.marks.items() if mark.phase == "eval"}
                corrected |= {i: replace(mark, instant=mark.instant.partition(",")[0]) for i, mark in changed.items()}
            if one.kind in idle and untrained({one.kind}, trained) and not evaluates:
                corrected[min(one.marks)] = Mark("eval", GRADIENTS_ON)
        yield from (corrected.get(index, event) for index, event in enumerate(events))


@dataclass(slots=True)
class _Pass:
    """A forward pass of one or more parts."""

    kind: tuple[Lines, bool]  # the lines that called it, and whether its first part evaluates
    marks: dict[int, Mark]  # the marks of its parts, by their index among the events
    followed: bool = False  # whether a backward followed


def _passes(events: tuple[Event, ...], sites: list[Lines]) -> Iterator[_Pass]:
    """Yield the passes of a history in order. sites: where each forward was called, in the order of the marks."""
    one: _Pass | None = None
    site = iter(sites)
    for index, event in enumerate(events):
        if not isinstance(event, Mark):
            continue
        if event.instant == NEXT_PART and one is not None:
            next(site, None)
            one.marks[index] = event
        elif event.instant in (FORWARD, GRADIENTS_ON, NEXT_PART):
            if one is not None:
                yield one
            one = _Pass((next(site, ()), event.phase == "eval"), {index: event})
        elif event.instant == BACKWARD and one is not None:
            one.followed = True
    if one is not None:
        yield one


def about(card: Card) -> dict[str, str]:
    """Return what a tape of this card records about it."""
    known = {"gpu": card.gpu.name, "torch": str(torch.__version__), "alloc_conf": card.alloc_conf}
    return known if card.limit is None else {**known, "capacity": str(card.limit)}


# --- the stack of this thread ---


def allocation_site() -> tuple[str, Origin]:
    """Return the user's innermost line on this thread's stack, as "train.py:41", and what it called a library for."""
    purpose: Origin = ""
    for frame in _frames():
        if own(frame.f_code.co_filename):
            return short_line(frame.f_code.co_filename, frame.f_lineno), purpose
        purpose = of_both(purpose, _made_for(frame.f_code))
    return "", purpose


def user_lines() -> Lines:
    """Return all of the user's lines on this thread's stack, outermost first."""
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
