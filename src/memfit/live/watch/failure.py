"""The error that a watched run ended in, as its last alarm."""

from __future__ import annotations

import sys
from functools import cache
from types import TracebackType
from typing import Protocol
from weakref import WeakSet

from memfit.explain.oom_message import messages
from memfit.nouns.sample import Alarm
from memfit.nouns.tape import Phase

SENTENCES = 2  # of the error's message: what ran out, and how much was asked for


def failed(error: Exception, step: int, phase: Phase) -> Alarm:
    """Its `bytes` are those of a request for memory that failed, 0 for another error."""
    said = " ".join(str(error).split())
    asked = next((message.tried for message in messages(said) if message.tried is not None), 0)
    short = ". ".join(said.split(". ")[:SENTENCES])
    return Alarm("failed", step, phase, asked, 0, f"the run ended in {type(error).__name__}: {short}")


class Ends(Protocol):
    """What is told of the error that its run ends in."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


_OPEN: WeakSet[Ends] = WeakSet()


def ends_with_the_program(watch: Ends) -> None:
    """An error that nobody catches ends this watch too, as one that leaves its block does: a callback is told of none."""
    _installed()
    _OPEN.add(watch)


@cache
def _installed() -> None:
    before = sys.excepthook

    def uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        try:
            for watch in list(_OPEN):
                watch.__exit__(kind, error, trace)
        finally:
            before(kind, error, trace)

    sys.excepthook = uncaught
