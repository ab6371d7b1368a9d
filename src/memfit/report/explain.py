"""Print an explanation: the cause in a line, its evidence in bytes, who held the memory, and what to change."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from memfit.explain import Evidence, wanted
from memfit.explain.memory import Memory
from memfit.nouns.finding import Finding, Holder, Part, Proof, Remedy
from memfit.nouns.tape import WRITTEN
from memfit.report.layout import Ends, commands, paragraphs, table, text
from memfit.report.words import DOT, part_word
from memfit.units import human

MOST_EARLIER = 8  # earlier failures that are shown
STYLES = {"certain": "bold red", "likely": "bold yellow", "possible": "bold"}


def explain_view(
    name: str,
    evidence: Evidence,
    findings: Sequence[Finding],
    next_up: Sequence[str] = (),
    recipe: Remedy | None = None,
    earlier: Sequence[Finding] = (),
    over: int = 0,
) -> Group:
    """Return everything that `memfit explain` prints.

    recipe: one of the planner that needs less by the shortfall. earlier: the failures before this one in the same log.
    over: bytes by which the run that is priced exceeds the card, by estimate.
    """
    first, *others = findings
    parts: list[RenderableType] = [Ends(text(name, "bold"), text(numbers(evidence)))]
    if evidence.memory is not None and not evidence.memory.asked:
        shown = WRITTEN if evidence.memory.instant == WRITTEN else "at the peak"
        parts.append(text(f"no failure is recorded; alive {shown}:", "dim"))
        parts.append(text(_made_of(evidence.memory)))
    if earlier:
        parts += ["", *_before(earlier)]
    parts += ["", _cause(first), ""]
    if first.evidence:
        parts += [paragraphs([("evidence:" if not n else "", proof(p)) for n, p in enumerate(first.evidence)]), ""]
    if first.holders:
        parts += [holders_table(first.holders), ""]
    if first.remedies:
        parts += [*_remedies(first.remedies, evidence.shortfall, over), ""]
    if recipe is not None and recipe.saves is not None:
        parts += [paragraphs([("planner:", f"{recipe.text}: {human(recipe.saves)} less, {recipe.cost}")]), ""]
    if lacks := wanted(evidence, findings):
        label = "would tell them apart:" if others else "would show more:"
        parts += [paragraphs([(label, ", ".join(lacks))]), ""]
    if others:
        parts += [paragraphs([("also:" if not n else "", _short(f)) for n, f in enumerate(others)]), ""]
    return Group(*(parts[:-1] if not next_up else [*parts, commands(next_up)]))


def _before(earlier: Sequence[Finding]) -> list[RenderableType]:
    """Return one line for each of the last failures before the one that is explained."""
    count = len(earlier) + 1
    shown = [f"{n}. {line}" for n, line in enumerate(before_words(earlier), 1)][-MOST_EARLIER:]
    head = text(f"{count} failures in this log; the last one ended it. Before it:")
    rest = [text(f"{len(earlier) - len(shown)} more", "dim")] if len(earlier) > len(shown) else []
    return [head, *rest, *map(text, shown)]


def before_words(earlier: Sequence[Finding]) -> list[str]:
    """Return one line for each failure."""
    return [f"{f.cause} ({f.confidence}){_at(f)}: {f.title}" for f in earlier]


def _at(finding: Finding) -> str:
    return f"{DOT}at {finding.line}" if finding.line else ""


def _cause(finding: Finding) -> Text:
    at = _at(finding)
    if finding.cause == "not-known":
        return Text.assemble(("NOT KNOWN", "bold"), f"  {finding.title}{at}")
    return Text.assemble(
        (finding.cause.upper(), STYLES[finding.confidence]), f"  {finding.confidence}{DOT}{finding.title}{at}"
    )


def _short(finding: Finding) -> str:
    why = f": {proof(finding.evidence[0])}" if finding.evidence else ""
    return f"{finding.cause} ({finding.confidence}){why}"


def _made_of(memory: Memory) -> str:
    """Return the roles with their shares, the largest first."""
    sizes: dict[Part, int] = {}
    for group in memory.groups:
        sizes[group.role] = sizes.get(group.role, 0) + group.bytes
    ordered = sorted(sizes.items(), key=lambda pair: -pair[1])
    return DOT.join(
        f"{part_word(part).title} {human(size)} ({size / memory.requested:.0%})" for part, size in ordered if size
    )


def numbers(evidence: Evidence) -> str:
    """Return the sizes of the request and of the card in one line."""
    m, memory = evidence.message, evidence.memory
    named: list[tuple[str, int | None]] = []
    if memory is not None:
        named = [
            ("requested", memory.asked or None),
            ("allocated", memory.allocated),
            ("reserved", memory.reserved),
            ("available", memory.capacity if memory.asked else None),
        ]
    elif m is not None:
        named = [
            ("requested", m.tried),
            ("card", m.total),
            ("free", m.free),
            ("allocated", m.allocated),
            ("reserved, no tensor", m.unallocated),
        ]
    return DOT.join(f"{word} {human(size)}" for word, size in named if size is not None) or "no sizes"


def proof(p: Proof) -> str:
    """Return one line of evidence, with its size unless the sentence has it already."""
    return p.text if p.bytes is None or human(p.bytes) in p.text else f"{p.text}: {human(p.bytes)}"


def holders_table(held: Sequence[Holder]) -> RenderableType:
    """Return the holders as a table: what they are, and where they were allocated."""
    made = table("what it is", "allocated at", ">tensors", ">size")
    for h in held:
        place = "  ".join(part for part in (h.line, h.module) if part)
        made.add_row(part_word(h.role).title, text(place), str(h.count), human(h.bytes))
    return made


def useful_remedies(remedies: Sequence[Remedy]) -> tuple[list[Remedy], list[Remedy]]:
    """Return the remedies, and those that save nothing in this run."""
    idle = [r for r in remedies if r.saves is not None and r.saves <= 0]
    return [r for r in remedies if r not in idle], idle


def saving(remedy: Remedy, shortfall: int | None, over: int) -> str:
    """Return what a remedy saves, and whether that is enough; "" where it is not priced."""
    if remedy.saves is None:
        return ""
    missing = None if shortfall is None else max(shortfall, over)
    return f"{human(remedy.saves)}{' (enough)' if missing is not None and remedy.saves >= missing else ''}"


def _remedies(remedies: Sequence[Remedy], shortfall: int | None, over: int) -> list[RenderableType]:
    """Return what to change as a table; remedies that save nothing in this run are only listed."""
    useful, idle = useful_remedies(remedies)
    priced = any(r.saves is not None for r in useful)
    made = table("to change", *([">saves"] if priced else []), "its cost")
    for r in useful:
        made.add_row(text(r.text), *([saving(r, shortfall, over)] if priced else []), text(r.cost))
    label = "saves nothing in the run as described:"
    listed = paragraphs([(label if not n else "", r.text) for n, r in enumerate(idle)])
    return [*([made] if useful else []), *([listed] if idle else [])]
