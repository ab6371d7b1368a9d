"""The stylesheet of every view: one colour a role and a verdict, as in the terminal, in front of views.css."""

from __future__ import annotations

from collections.abc import Iterator

from memfit.report.bar import NCCL
from memfit.report.words import ROLE_WORDS, UNKNOWN, VERDICT_COLOURS


def _colours() -> Iterator[tuple[str, str]]:
    for role, word in ROLE_WORDS.items():
        yield role, word.colour
    yield from (("unknown", UNKNOWN.colour), ("nccl", NCCL.colour), ("slack", ROLE_WORDS["fragmentation"].colour))


def stylesheet(views: str) -> str:
    """Return the whole stylesheet. views: the text of views.css."""
    found = dict(_colours())
    named = (*found.items(), *VERDICT_COLOURS.items())
    names = ";".join(f"--{name}:{colour}" for name, colour in named)
    fills = "\n".join(f".{name} {{ fill: var(--{name}); }}" for name in found)
    return f":root {{ {names} }}\n{fills}\n{views}"
