"""Why memory ran out, in two lines: what was asked for and where, and what filled the memory."""

from __future__ import annotations

from memfit.explain import explain, read_text
from memfit.finding import CAUSES
from memfit.run.nouns import Shortage
from memfit.units import human


def cause(shortage: Shortage) -> tuple[str, str]:
    """Two lines about a failed allocation; the snapshot beside it tells more (`memfit explain`)."""
    after = f"after {shortage.step} step{'s' * (shortage.step != 1)}"
    what = f"{human(shortage.asked)} more" if shortage.asked else "memory"
    first = f"{what} asked for in {shortage.stage}, {after}{f', at {shortage.frame}' if shortage.frame else ''}"
    return first, "; ".join(filter(None, (_levels(shortage), _found(shortage)))) or shortage.text.splitlines()[0][:160]


def _levels(shortage: Shortage) -> str:
    if not shortage.limit:
        return ""
    free = max(shortage.limit - shortage.held, 0)
    return f"tensors held {human(shortage.held)} of {human(shortage.limit)}, {human(free)} were left"


def _found(shortage: Shortage) -> str:
    """What the traceback points at, where it points at anything with some certainty."""
    best = explain(read_text(shortage.trace or shortage.text))[0]
    return CAUSES[best.cause] if best.cause != "not-known" and best.confidence != "possible" else ""
