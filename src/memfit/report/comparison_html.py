"""A comparison as HTML: the answer, both sides as bars, phases, roles, and what explains the difference."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from memfit.footprints.compare import Comparison
from memfit.nouns.footprint import Footprint
from memfit.report.answer_html import bar_svg, legend
from memfit.report.bar import BarPart
from memfit.report.compare import WORDS, Side, against, figures, outside_words, parts, where_words
from memfit.report.document_html import breakable, html_table, words
from memfit.report.words import ROLE_WORDS
from memfit.units import human, shared_unit

_STYLE = {"agrees": "fits", "more": "misfit", "less": "tight"}


def comparison_html(
    left: str, right: str, sides: tuple[Footprint, Footprint] | None, found: Comparison,
    changed: Sequence[str] | None = None, cards: tuple[int, int] = (0, 0), settings: bool = False,
    called: tuple[str, str] = ("left", "right"),
) -> str:  # fmt: skip
    """Return right against left.

    sides: what is drawn as bars. changed: settings that differ; None: not known. cards: bytes of each side's card, 0
    where not known. settings: the two are answers to different questions, so that neither is what the other should
    have been. called: what the sides are to each other.
    """
    left, right = (f"{side}: {name}" if name else side for side, name in zip(called, (left, right), strict=True))
    unit = shared_unit(max(found.left_need, found.right_need))
    title = against(found, found.left_need, found.right_need)
    head = f"<h1>{words(right)}</h1><p class='dim'>against {words(left)}</p>"
    if settings:
        lines = [] if changed is None else [f"what differs: {', '.join(changed) or 'nothing'}"]
        strong, style = title, "not_judged"
    else:
        strong, style = WORDS[found.agreement][0], _STYLE[found.agreement]
        lines = [f"{title}, the band is ±{human(found.band)}"]
    lines += [line for line in (where_words(found), "" if settings else outside_words(found)) if line]
    said = "".join(f"<p>{words(line)}</p>" for line in lines)
    made = [head, f'<div class="verdict {style}" role="status"><strong>{words(strong)}</strong>{said}</div>']
    made += _bars((left, right), sides, cards) if sides else []
    made += (_table(name, rows, unit, called) for name, rows in parts(found, unit))
    made += [f'<p class="dim">{words(note)}</p>' for note in found.notes]
    return "\n".join(made)


def _bars(names: tuple[str, str], sides: tuple[Footprint, Footprint], cards: tuple[int, int]) -> Iterator[str]:
    most = max(*(side.peak.levels.device for side in sides), *cards)
    for name, side, card in zip(names, sides, cards, strict=True):
        shares = [BarPart(ROLE_WORDS[role], size) for role, size in side.peak.by_role.items() if size]
        drawn = bar_svg(shares, card or most, "card" if card else "in the larger", {}, most)
        yield f"<h3>{words(name)}</h3>{drawn}{legend(shares)}"


def _table(title: str, rows: Iterable[Side], unit: str, called: tuple[str, str]) -> str:
    heads = (title, *(f">{name}" for name in (*called, "difference")))
    return html_table(heads, ((breakable(row[0]), *figures(row, unit)) for row in rows), kind="long")
