"""The glossary: every word memfit prints, in plain language."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Group, RenderableType

from memfit.errors import UnknownName
from memfit.report.layout import paragraphs, text


@dataclass(frozen=True, slots=True)
class Term:
    """One word. `means` is one sentence; `more` adds numbers or a caveat; `see` names other terms."""

    name: str
    means: str
    more: str = ""
    also: tuple[str, ...] = ()  # other names for it
    see: tuple[str, ...] = ()


def terms(data: Mapping[str, Sequence[Mapping[str, Any]]]) -> tuple[Term, ...]:
    """The parsed glossary.toml as terms, by name."""
    found = []
    for row in data["term"]:
        cells: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in row.items()}
        found.append(Term(**cells))
    return tuple(sorted(found, key=lambda t: t.name.lower()))


def lookup(known: Iterable[Term], word: str) -> Term:
    """The term called `word` or one of its other names. Raises UnknownName with what is near."""
    by_name = {_key(name): t for t in known for name in (t.name, *t.also)}
    if _key(word) not in by_name:
        raise UnknownName("term", word, by_name, hint="see: memfit glossary")
    return by_name[_key(word)]


def _key(word: str) -> str:
    return " ".join(word.lower().replace("_", " ").replace("-", " ").split())


def glossary_view(known: Sequence[Term]) -> Group:
    """All terms, one line each."""
    return Group(paragraphs([(t.name, t.means) for t in known]))


def term_view(term: Term) -> Group:
    """One term in full."""
    parts: list[RenderableType] = [text(term.name, "bold"), text(term.means)]
    parts += [text(term.more)] if term.more else []
    return Group(*parts, paragraphs([("also called:", ", ".join(term.also)), ("see:", ", ".join(term.see))]))
