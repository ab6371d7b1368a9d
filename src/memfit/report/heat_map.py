"""Draw a sweep as a map of headroom: an SVG, and a grid for terminals and pipes.

A cell's colour is its verdict and its lightness the headroom; its sign says the verdict without colour.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from math import log2
from textwrap import wrap
from typing import NamedTuple

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.text import Text

from memfit.nouns.plan import Judgement, Verdict
from memfit.nouns.sweep import CARDS_AXIS, Axis, Cell, Sweep, Value
from memfit.report.layout import GAP, Ends, commands, hanging, paragraphs, table, text
from memfit.report.words import (
    DOT,
    VERDICT_COLOURS,
    VERDICT_WORDS,
    card_room,
    card_title,
    clock,
    model_words,
    recipe_facts,
    room,
    short_recipe,
    visible,
    withheld_words,
)
from memfit.units import GIB, cell, rough, shared_unit, short_length

SIGNS: dict[Verdict, str] = {"fits": "+", "tight": "~", "misfit": "-", "not_judged": "?"}
MEANINGS: dict[Verdict, str] = {
    "fits": "fits", "tight": "too tight to promise", "misfit": "does not fit", "not_judged": "not judged"
}  # fmt: skip
BY_HOST = "h"  # behind a figure that is missing host RAM, where the card would do
IMPOSSIBLE = "#9aa0a6"
LIGHTEST = 0.6  # share of white in the colour of a cell with the most headroom of its verdict
DARKEST_AT = 8  # times the card's memory a run needs where its cell has the full colour


def figure(judgement: Judgement, unit: str) -> str:
    """Return what a cell shows: its sign, and the headroom or what is missing: '+4.6', '-38.1', '~-0.3', '-12.0h'."""
    sign, headroom = SIGNS[judgement.verdict], judgement.headroom
    if judgement.verdict == "misfit" and headroom >= 0 and judgement.host_over:
        return f"{sign}{_number(judgement.host_over, unit)}{BY_HOST}"
    below = "-" if headroom < 0 and judgement.verdict != "misfit" else ""
    return f"{sign}{below}{_number(abs(headroom), unit)}"


def _number(size: int, unit: str) -> str:
    if unit == "GiB" and size >= 1000 * GIB:
        return f"{int(cell(size, unit, 0)):,}"
    return cell(size, unit)


def _unit(sweep: Sweep) -> str:
    return shared_unit(max((c.judgement.usable for c in sweep.cells if c.judgement), default=0))


def axis_title(axis: Axis) -> str:
    """Return the name of an axis as its flag is written."""
    return axis.name.replace("_", "-")


def value_title(name: str, value: Value) -> str:
    """Return a value as it is typed: '8k', 'yes', 'rtx-4090'."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if name == "sequence_length" and isinstance(value, int):
        return short_length(value)
    return visible(str(value)) or "none"


def _reasons(sweep: Sweep) -> dict[str, str]:
    """Return a letter for each reason for which combinations are impossible."""
    found = dict.fromkeys(f"{c.refused} ({c.hint})" if c.hint else c.refused for c in sweep.cells if c.refused)
    return {why: chr(ord("a") + number) if number < 26 else "." for number, why in enumerate(found)}


def _facts(sweep: Sweep) -> str:
    """Return what all recipes of a sweep have in common."""
    each = [recipe_facts(c.recipe) for c in sweep.cells if c.judgement]
    return DOT.join(fact for fact in each[0] if all(fact in facts for facts in each)) if each else ""


# ---- colours -------------------------------------------------------------------------------------------------------


def colour_of(found: Cell) -> str:
    """Return the colour of a cell: its verdict's, lighter with more headroom."""
    judged = found.judgement
    if judged is None:
        return _mixed(IMPOSSIBLE, LIGHTEST)
    if judged.verdict == "fits":
        light = judged.headroom / max(judged.usable, 1)
    elif judged.verdict == "misfit":
        light = 1 - log2(max(judged.need / max(judged.usable, 1), 1)) / log2(DARKEST_AT)
    else:
        light = 0.5
    return _mixed(VERDICT_COLOURS[judged.verdict], LIGHTEST * min(max(light, 0.0), 1.0))


def ink_on(colour: str) -> str:
    """Return black or white, whichever has the higher contrast on a colour."""
    linear = (x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in (v / 255 for v in _rgb(colour)))
    luminance = sum(share * value for share, value in zip((0.2126, 0.7152, 0.0722), linear, strict=True))
    return "#000000" if (luminance + 0.05) ** 2 > 0.05 * 1.05 else "#ffffff"


def _rgb(colour: str) -> tuple[int, ...]:
    return tuple(int(colour[at : at + 2], 16) for at in (1, 3, 5))


def _mixed(colour: str, white: float) -> str:
    return "#" + "".join(f"{round(value + (255 - value) * white):02x}" for value in _rgb(colour))


# ---- the terminal --------------------------------------------------------------------------------------------------


def heat_map_view(sweep: Sweep, next_up: Sequence[str] = ()) -> Group:
    """Show a sweep: two axes as a grid of headroom, one as a table with a line for each value."""
    first = next((c.judgement for c in sweep.cells if c.judgement), None)
    by_card = any(axis.name == CARDS_AXIS for axis in sweep.axes)
    count = 1 if any(axis.name == "num_gpus" for axis in sweep.axes) else sweep.base.num_gpus
    usable = card_room(sweep.gpu, first.usable, count) if first and not by_card else ""
    head = text(_heading(sweep), "bold")
    withheld = next((c.judgement for c in sweep.cells if c.judgement and c.verdict == "not_judged"), None)
    parts: list[RenderableType] = [
        Ends(head, text(usable)) if usable else head,
        text(f"{model_words(sweep.architecture)}{DOT}{_facts(sweep)}", "dim"), "",
    ]  # fmt: skip
    if withheld:
        words, style = VERDICT_WORDS["not_judged"]
        parts += [hanging(Text(words, style), withheld_words(withheld)), ""]
    parts += [HeatMap(sweep), "", *_legend(sweep)] if len(sweep.axes) > 1 else [_rows(sweep)]
    if next_up:
        parts += ["", commands(next_up)]
    return Group(*parts)


def _heading(sweep: Sweep) -> str:
    """Return the model, and the card unless it is an axis."""
    axes = {axis.name for axis in sweep.axes}
    card = sweep.gpu.name if "num_gpus" in axes else card_title(sweep.gpu, sweep.base.num_gpus)
    name = sweep.architecture.title
    return name if CARDS_AXIS in axes else f"{name} on {card}"


def _rows(sweep: Sweep) -> RenderableType:
    """Return the table of one axis."""
    unit = _unit(sweep)
    made = table(axis_title(sweep.columns), f">peak {unit}", "verdict", "", ">step")
    for value, found in zip(sweep.columns.values, sweep.cells, strict=True):
        title, judged = value_title(sweep.columns.name, value), found.judgement
        if judged is None:
            why = f"{found.refused}: {found.hint}" if found.hint else found.refused
            made.add_row(title, "", Text("impossible", "dim"), text(why), "")
            continue
        words, style = VERDICT_WORDS[judged.verdict]
        seconds = clock(found.seconds_per_step)
        made.add_row(title, _number(judged.need, unit), Text(words, style), text(room(judged)), seconds)
    return made


def _legend(sweep: Sweep) -> Iterator[RenderableType]:
    """Yield what the signs of a grid mean, and why some combinations are impossible."""
    yield text(_signs(sweep), "dim")
    if reasons := _reasons(sweep):
        yield paragraphs([(f"{letter}:", why) for why, letter in reasons.items()])


def _signs(sweep: Sweep) -> str:
    """Return what the figures and signs of a map mean, those that it has."""
    found = [verdict for verdict in SIGNS if any(c.verdict == verdict for c in sweep.cells)]
    signs = [f"{SIGNS[verdict]} {MEANINGS[verdict]}" for verdict in found]
    if any(c.judgement and figure(c.judgement, "GiB").endswith(BY_HOST) for c in sweep.cells):
        signs.append(f"{BY_HOST} host RAM is missing")
    return f"{_unit(sweep)} of headroom, or over: {', '.join(signs)}"


class _Drawn(NamedTuple):
    """A cell as it is drawn in a terminal."""

    text: str
    style: str
    fits: bool | None  # None: no verdict


@dataclass(frozen=True)
class HeatMap:
    """The grid of a sweep over two axes; columns that a terminal has no room for follow below."""

    sweep: Sweep

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        columns, rows = self.sweep.axes
        heads = [value_title(columns.name, value) for value in columns.values]
        labels = [axis_title(rows), *(value_title(rows.name, value) for value in rows.values)]
        drawn = self._drawn()
        width = GAP + max(len(word) for word in (*heads, *(found.text for row in drawn for found in row)))
        margin = max(map(len, labels))
        shown = max((options.max_width - margin - 1) // (width + 1), 1)
        wall = "│" if options.is_terminal and not options.ascii_only else "|"
        for begin in range(0, len(heads), shown):
            part = slice(begin, begin + shown)
            if begin:
                yield ""
            yield Text(f"{'':>{margin}}  {axis_title(columns)}", "dim")
            yield Text(f"{labels[0]:>{margin}}" + "".join(f" {head:>{width - 1}} " for head in heads[part]), "dim")
            for label, row in zip(labels[1:], drawn, strict=True):
                yield Text.assemble((f"{label:>{margin}} ", "dim"), *_line(row[part], width, wall))

    def _drawn(self) -> list[list[_Drawn]]:
        unit, reasons = _unit(self.sweep), _reasons(self.sweep)
        made: list[list[_Drawn]] = []
        for row in self.sweep.rows:
            made.append([])
            for found in row:
                colour = colour_of(found)
                judged = found.judgement
                shown = figure(judged, unit) if judged else next(
                    letter for why, letter in reasons.items() if why.startswith(found.refused))  # fmt: skip
                made[-1].append(_Drawn(shown, f"{ink_on(colour)} on {colour}", _fits(found)))
        return made


def _line(row: Sequence[_Drawn], width: int, wall: str) -> Iterator[tuple[str, str]]:
    """Yield the parts of a line, with a wall where what fits ends or begins."""
    for number, found in enumerate(row):
        yield f"{found.text:>{width - 1}} ", found.style
        after = row[number + 1] if number + 1 < len(row) else found
        yield (wall if _edge(found.fits, after.fits) else " "), ""


def _fits(found: Cell) -> bool | None:
    """Return whether a combination fits; None where there is no verdict."""
    return None if found.verdict in (None, "not_judged") else found.verdict == "fits"


def _edge(one: bool | None, other: bool | None) -> bool:
    return one is not None and other is not None and one != other


# ---- the picture ---------------------------------------------------------------------------------------------------

WIDE, HIGH = 66, 34  # units of the least width and of the height of a cell
LETTER = 7.6  # units that a letter of a label is taken to be wide
HEAD = 52  # units above the cells: the name of the first axis and its values
FOOT = 44  # units below them: what the signs mean
LINE = 20  # units from a line of a heading to the next
FONT = 'font-family="system-ui, sans-serif" font-size="13"'


def heat_map_svg(sweep: Sweep, *, alone: bool = False) -> str:
    """Return the map as an <svg> without styles and scripts, for pages that allow none.

    alone: on white, headed by the model, the card and the recipe, for a file of its own. Every cell is a
    <g class="cell"> with a <title> and `data-over`: the values of the axes, as fields of Recipe.
    """
    columns, rows = sweep.columns, sweep.axes[1] if len(sweep.axes) > 1 else None
    heads = [value_title(columns.name, value) for value in columns.values]
    labels = [value_title(rows.name, value) for value in rows.values] if rows else [""]
    title = axis_title(rows) if rows else ""
    wide = max(WIDE, round(LETTER * max(map(len, heads))) + 14)
    left = round(LETTER * max(len(title), *map(len, labels))) + 16
    right, bottom = left + wide * len(heads), HEAD + HIGH * len(labels)
    key = _signs(sweep).replace("- ", "\N{MINUS SIGN} ")
    width = max(right + 8, left + 8 + round(LETTER * len(key)))
    name = f"{sweep.architecture.title}: headroom by {axis_title(columns)}{f' and {title}' if rows else ''}"
    above, heading = _header(sweep, left, width) if alone else (0, [])
    ink = ' color="#000000"' if alone else ""
    box = f"0 {-above} {width} {bottom + FOOT + above}"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" class="heat-map" role="group" aria-label="{_safe(name)}" '
        f'viewBox="{box}" {FONT} fill="currentColor"{ink}>',
        *heading,
        _label(left, 18, axis_title(columns), "start", 'class="axis" font-weight="600"'),
        *(_label(left + wide * (i + 0.5), HEAD - 8, head, "middle") for i, head in enumerate(heads)),
    ]  # fmt: skip
    if title:
        parts.append(_label(left - 8, HEAD - 8, title, "end", 'class="axis" font-weight="600"'))
    parts += [_label(left - 8, HEAD + HIGH * (i + 0.5) + 5, label, "end") for i, label in enumerate(labels)]
    for number, found in enumerate(sweep.cells):
        down, along = divmod(number, len(heads))
        parts.append(_cell(sweep, number, found, left + wide * along, HEAD + HIGH * down, wide))
    parts += [
        f'<path class="edge" d="{_edges(sweep, left, wide)}" fill="none" stroke="currentColor" stroke-width="3" '
        'stroke-linecap="square" pointer-events="none"/>',
        _label(left, bottom + 26, key, "start", 'class="key"'), "</svg>",
    ]  # fmt: skip
    return "\n".join(parts) + "\n"


def _header(sweep: Sweep, left: int, width: int) -> tuple[int, list[str]]:
    """Return the units that the heading of a picture by itself takes, and its elements with the white ground."""
    styled = ((_heading(sweep), 'font-weight="600"'), (_facts(sweep), ""))
    lines = [(line, style) for words, style in styled for line in wrap(words, int((width - left) / LETTER))]
    above = LINE * (len(lines) + 1)
    labels = (_label(left, LINE * at - above, line, "start", style) for at, (line, style) in enumerate(lines, 1))
    return above, [f'<rect y="{-above}" width="100%" height="100%" fill="#ffffff"/>', *labels]


def _cell(sweep: Sweep, number: int, found: Cell, x: int, y: int, wide: int) -> str:
    values = sweep.values(number)
    over = ",".join(f"{name}={str(v).lower() if isinstance(v, bool) else v}" for name, v in values.items())
    colour, judged = colour_of(found), found.judgement
    shown = figure(judged, _unit(sweep)).replace("-", "\N{MINUS SIGN}") if judged else "n/a"
    ink = f'font-variant-numeric="tabular-nums" fill="{ink_on(colour)}" pointer-events="none"'
    return (
        f'<g class="cell {found.verdict or "impossible"}" data-over="{_safe(over)}">'
        f"<title>{_safe(cell_words(values, found))}</title>"
        f'<rect x="{x + 0.5}" y="{y + 0.5}" width="{wide - 1}" height="{HIGH - 1}" fill="{colour}"/>'
        f"{_label(x + wide / 2, y + HIGH / 2 + 5, shown, 'middle', ink)}</g>"
    )


def cell_words(values: dict[str, Value], found: Cell) -> str:
    """Return a combination in words: its values, verdict, need, headroom and recipe, a line each."""
    at = ", ".join(f"{name.replace('_', ' ')} {value_title(name, value)}" for name, value in values.items())
    judged = found.judgement
    if judged is None:
        return f"{at}\nimpossible: {found.refused}" + (f"\n{found.hint}" if found.hint else "")
    verdict = VERDICT_WORDS[judged.verdict][0]
    needs = f"peak {rough(judged.need)} of {rough(judged.usable)} usable"
    step = f"{clock(found.seconds_per_step)} a step"
    reasons = "".join(f"\n{reason.key}: {reason.why}" for reason in judged.not_understood)
    left = "" if judged.verdict == "not_judged" else f"{DOT}{room(judged)}"
    return f"{at}\n{verdict}: {needs}{left}{DOT}{step}\n{short_recipe(found.recipe)}{reasons}"


def _edges(sweep: Sweep, left: int, wide: int) -> str:
    """Return the line between what fits and what does not, as the data of a path."""
    rows, made = [[_fits(found) for found in row] for row in sweep.rows], []
    for down, row in enumerate(rows):
        y = HEAD + HIGH * down
        made += [
            f"M{left + wide * along} {y}v{HIGH}" for along, pair in enumerate(pairwise(row), 1) if _edge(*pair)
        ]  # fmt: skip
    for down, (above, below) in enumerate(pairwise(rows), 1):
        y = HEAD + HIGH * down
        pairs = enumerate(zip(above, below, strict=True))
        made += [f"M{left + wide * along} {y}h{wide}" for along, pair in pairs if _edge(*pair)]
    return "".join(made)


def _label(x: float, y: float, words: str, anchor: str, more: str = "") -> str:
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}"{" " * bool(more)}{more}>{_safe(words)}</text>'


def _safe(words: str) -> str:
    """Escape text from files and command lines; line breaks stay."""
    return escape("\n".join(map(visible, words.split("\n"))), quote=True)
