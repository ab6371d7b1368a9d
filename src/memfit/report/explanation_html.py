"""An explanation as HTML: the cause, its evidence in bytes, who held the memory, and what to change."""

from __future__ import annotations

from collections.abc import Sequence

from memfit.explain import Evidence, wanted
from memfit.nouns.finding import Finding, Holder, Remedy
from memfit.report.document_html import breakable, html_table, words
from memfit.report.explain import MOST_EARLIER, before_words, numbers, proof, saving, useful_remedies
from memfit.report.words import part_word
from memfit.units import human

_STYLE = {"certain": "misfit", "likely": "tight", "possible": "not_judged"}


def explanation_html(
    name: str, evidence: Evidence, findings: Sequence[Finding], recipe: Remedy | None = None,
    earlier: Sequence[Finding] = (), over: int = 0,
) -> str:  # fmt: skip
    """Return what `memfit explain` says of a failure; the arguments are those of `report.explain.explain_view`."""
    first, *others = findings
    parts = [f'<h1>{words(name)}</h1><p class="dim">{words(numbers(evidence))}</p>']
    if earlier:
        rows = "".join(f"<li>{words(line)}</li>" for line in before_words(earlier)[-MOST_EARLIER:])
        parts.append(
            f"<p>{len(earlier) + 1} failures in this log; the last one ended it. Before it:</p><ol>{rows}</ol>"
        )
    parts.append(_cause(first))
    if first.evidence:
        parts.append("<h2>Evidence</h2><ul>" + "".join(f"<li>{words(proof(p))}</li>" for p in first.evidence) + "</ul>")
    if first.holders:
        parts.append(_holders(first.holders))
    if first.remedies:
        parts.append(_remedies(first.remedies, evidence.shortfall, over))
    if recipe is not None and recipe.saves is not None:
        parts.append(f"<p>The planner: {words(recipe.text)}: {human(recipe.saves)} less, {words(recipe.cost)}</p>")
    if lacks := wanted(evidence, findings):
        label = "Would tell them apart" if others else "Would show more"
        parts.append(f'<p class="dim">{label}: {words(", ".join(lacks))}</p>')
    if others:
        also = "".join(f"<li>{words(f'{f.cause} ({f.confidence}): {f.title}')}</li>" for f in others)
        parts.append(f"<h2>Also possible</h2><ul>{also}</ul>")
    return "\n".join(parts)


def _cause(finding: Finding) -> str:
    at = f" · at {finding.line}" if finding.line else ""
    if finding.cause == "not-known":
        style, title, said = "not_judged", "NOT KNOWN", f"{finding.title}{at}"
    else:
        style, title = _STYLE[finding.confidence], finding.cause.upper()
        said = f"{finding.confidence} · {finding.title}{at}"
    head = f'<div class="verdict {style}" role="status"><strong>{words(title)}</strong>'
    return f"{head}<p>{words(said)}</p></div>"


def _holders(held: Sequence[Holder]) -> str:
    places = ("  ".join(part for part in (h.line, h.module) if part) for h in held)
    rows = (
        (words(part_word(h.role).title), f"{h.count:,}", human(h.bytes), words(place))
        for h, place in zip(held, places, strict=True)
    )
    heads = ("what it is", ">tensors", ">size", "=allocated at")
    return f"<h2>What held the memory</h2>{html_table(heads, rows, kind='stacked')}"


def _remedies(remedies: Sequence[Remedy], shortfall: int | None, over: int) -> str:
    useful, idle = useful_remedies(remedies)
    any_price = any(r.saves is not None for r in useful)
    rows = ((breakable(r.text), *([saving(r, shortfall, over)] if any_price else []), words(r.cost)) for r in useful)
    heads = ("to change", *([">saves"] if any_price else []), "its cost")
    made = f"<h2>What to change</h2>{html_table(heads, rows, kind='long')}" if useful else ""
    listed = "".join(f"<li>{words(r.text)}</li>" for r in idle)
    return made + (f"<p>Saves nothing in the run as described:</p><ul>{listed}</ul>" if idle else "")
