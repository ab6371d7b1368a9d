"""An Observer that keeps the user's own line of every allocation, and says when an evaluation has gradients on."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from memfit.tape import GRADIENTS_ON, Alloc, Event, Oom, Phase, Tape
from memfit.virtual.card import Card
from memfit.virtual.observer import Observer
from memfit.virtual.values import base, tensors
from memfit.watcher.roots import own

NEXT_PART = "next part of the forward"  # a second module in the same pass: a head after a body


class LineObserver(Observer):
    """As Observer; its tape's labels end in "(train.py:41)"."""

    def __init__(self, card: Card) -> None:
        self._first = len(card.ledger.blocks)
        self._lines: list[str] = []
        self._at = ""  # where the backward pass under way was called: its own thread has no frames of the user's
        self._again = True
        self._run: set[int] = set()  # root modules that ran in the pass under way
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

    def _begin_forward(self, root: torch.nn.Module) -> None:
        held = [t.is_cuda for t in (*root.parameters(), *root.buffers())]
        if held and not any(held):  # a pass on the CPU, which asks nothing of the card
            return
        self._again = id(root) in self._run or not self._run
        self._run = {id(root)} if self._again else self._run | {id(root)}
        super()._begin_forward(root)

    def mark(self, phase: Phase, instant: str) -> None:
        """An instant begins."""
        if instant == "forward" and not self._again:
            instant = NEXT_PART
        elif instant == "forward":
            instant = GRADIENTS_ON if phase == "eval" and torch.is_grad_enabled() else instant
        else:
            self._run = set()
        super().mark(phase, instant)

    def _backward(self, real: Any) -> Any:
        marked = super()._backward(real)

        def backward(*args: Any, **kwargs: Any) -> None:
            self._at = user_line()
            marked(*args, **kwargs)

        return backward

    def _place(self) -> str:
        self._lines.append(user_line() or self._at)
        return super()._place()

    def line(self, number: int) -> str:
        """Where an allocation was asked for; "" for those before the watch began."""
        place = number - self._first
        return self._lines[place] if 0 <= place < len(self._lines) else ""

    def tape(self, about: dict[str, str]) -> Tape:
        """What happened, every request with its line."""
        tape, refused = super().tape(about), iter(sorted(self.card.ledger.refused))
        return replace(tape, events=tuple(self._with_line(event, refused) for event in tape.events))

    def _with_line(self, event: Event, refused: Iterator[int]) -> Event:
        if not isinstance(event, Alloc | Oom):
            return event
        line = self.line(event.id if isinstance(event, Alloc) else next(refused))
        return replace(event, label=f"{event.label} ({line})") if line else event


def user_line() -> str:
    """The innermost line on this thread's stack that is no library's: "train.py:41"."""
    frame = sys._getframe(1)
    while frame is not None:
        if own(frame.f_code.co_filename):
            return f"{frame.f_code.co_filename.rsplit('/', 1)[-1]}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return ""


def about(card: Card) -> dict[str, str]:
    """What a tape of this card says of itself."""
    allocator = card.ledger.allocator
    known = {"gpu": card.gpu.name, "torch": str(torch.__version__), "alloc_conf": card.alloc_conf}
    if allocator.capacity < card.gpu.total_bytes * 2:  # one without a limit has an endless capacity
        known["capacity"] = str(allocator.capacity)
    return known
