"""Why memory ran out, in two lines: what was asked for and where, and what filled the memory."""

from __future__ import annotations

from memfit.explain import explain, read_text
from memfit.nouns.finding import CAUSES, Cause
from memfit.train.outcome import Shortage, Stage
from memfit.units import human

# what cannot be the cause in a stage: the rehearsal is the first step, and its batch the longest on purpose; train.py keeps no
# logits of an evaluation, whatever names the Trainer's own lines have
NOT_IN: dict[Stage, tuple[Cause, ...]] = {"rehearsal": ("long-sample", "leak"), "eval": ("eval-logits",)}


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
    never = NOT_IN.get(shortage.stage, ())
    found = [f for f in explain(read_text(shortage.trace or shortage.text)) if f.cause not in never]
    known = found and found[0].cause != "not-known" and found[0].confidence != "possible"
    return CAUSES[found[0].cause] if known else ""
