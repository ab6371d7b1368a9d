"""The error that a watched run ended in, as its last alarm."""

from __future__ import annotations

from memfit.explain.oom_text import messages
from memfit.sample import Alarm
from memfit.tape import Phase

SENTENCES = 2  # of the error's message: what ran out, and how much was asked for


def failed(error: Exception, step: int, phase: Phase) -> Alarm:
    """Its `bytes` are those of a request for memory that failed, 0 for another error."""
    said = " ".join(str(error).split())
    asked = next((message.tried for message in messages(said) if message.tried is not None), 0)
    short = ". ".join(said.split(". ")[:SENTENCES])
    return Alarm("failed", step, phase, asked, 0, f"the run ended in {type(error).__name__}: {short}")
