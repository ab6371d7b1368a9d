"""Other cards as HTML: those that a plan found, and one recipe on every priced card, the cheapest first."""

from __future__ import annotations

from collections.abc import Sequence

from memfit.nouns.gpu import Gpu
from memfit.nouns.plan import Plan
from memfit.nouns.sweep import Cell
from memfit.report.document_html import html_table, words
from memfit.report.words import VERDICT_WORDS, short_recipe, tokens
from memfit.units import gib

BAR, HEIGHT = 200, 14  # units of the bar of a card


def cards_html(plan: Plan) -> str:
    """Return the other cards, cheapest first as the plan orders them; "" where there are none."""
    if not plan.alternatives:
        return ""
    rows = []
    for a in plan.alternatives:
        price = "-" if a.price_per_hour is None else f"{a.price_per_hour * a.num_gpus:,.2f}"
        step = "-" if a.price_per_step is None else f"{a.price_per_step * 1000:,.2f}"
        sizes = gib(a.judgement.need), gib(a.judgement.headroom)
        rows.append((words(a.gpu), tokens(a.num_gpus), *sizes, price, step, words(short_recipe(a.recipe))))
    heads = ("card", ">GPUs", ">peak GiB", ">headroom GiB", ">$ per hour", ">$ per 1,000 steps", "recipe")
    return f"<h2>Other cards</h2>{html_table(heads, rows, (a.judgement.verdict for a in plan.alternatives))}"


def priced_cards_html(cells: Sequence[tuple[Gpu, Cell]]) -> str:
    """Return one recipe on several cards, in the order given: what it needs, what is left, and what it costs."""
    most = max((max(c.judgement.need, c.judgement.usable) for _, c in cells if c.judgement), default=1)
    rows = "".join(_row(gpu, cell, most) for gpu, cell in cells)
    names = ("need GiB", "headroom GiB", "$ per hour", "$ per 1,000 steps")
    head = "<tr><th>card</th><th></th>" + "".join(f'<th class="number">{name}</th>' for name in names)
    return f'<div class="wide"><table class="priced">{head}<th></th></tr>{rows}</table></div>'


def _row(gpu: Gpu, cell: Cell, most: int) -> str:
    judged = cell.judgement
    if judged is None:
        return f'<tr><td>{words(gpu.name)}</td><td colspan="6" class="dim">{words(cell.refused)}</td></tr>'
    need, room = (f"{BAR * size / most:.1f}" for size in (judged.need, judged.usable))
    bar = (
        f'<svg viewBox="0 0 {BAR} {HEIGHT}" width="{BAR}" height="{HEIGHT}" aria-hidden="true">'
        f'<rect class="need" width="{need}" height="{HEIGHT}"/>'
        f'<line class="limit" x1="{room}" x2="{room}" y1="0" y2="{HEIGHT}"/></svg>'
    )
    price = None if gpu.price_per_hour is None else gpu.price_per_hour * cell.recipe.num_gpus
    step = None if price is None else price / 3.6 * cell.seconds_per_step
    figures = (gib(judged.need), gib(judged.headroom), _dollars(price), _dollars(step))
    over = f"gpu={gpu.short}"
    return (
        f'<tr class="{judged.verdict}" data-over="{words(over)}"><td><span class="mark"></span>{words(gpu.name)}</td>'
        f'<td class="room">{bar}</td>{"".join(f"<td class=number>{text}</td>" for text in figures)}'
        f"<td>{VERDICT_WORDS[judged.verdict][0].lower()}</td></tr>"
    )


def _dollars(amount: float | None) -> str:
    return "-" if amount is None else f"{amount:,.2f}"
