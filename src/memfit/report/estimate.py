"""The screen of one footprint: verdict, bar, all named shares of the peak, all phases; with --why the arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from memfit.nouns.architecture import Architecture
from memfit.nouns.footprint import Footprint, PhasePeak
from memfit.nouns.gpu import Gpu
from memfit.nouns.job import Recipe
from memfit.nouns.plan import Judgement
from memfit.report.bar import StackedBar, shares
from memfit.report.layout import GAP, Ends, commands, hanging, paragraphs, table, text
from memfit.report.words import (
    DOT,
    ROLE_WORDS,
    VERDICT_WORDS,
    card_room,
    card_title,
    host_condition,
    host_rows,
    instant,
    model_words,
    peak_words,
    phase_title,
    recipe_facts,
    retry_words,
    room,
    tokens,
    withheld_words,
)
from memfit.units import cell, human, rough, shared_unit

if TYPE_CHECKING:
    from memfit.closed_form.why import Kept, Reason, Why


def estimate_view(
    architecture: Architecture, recipe: Recipe, gpu: Gpu, footprint: Footprint, judgement: Judgement,
    next_up: Sequence[str] = (), facts: Sequence[tuple[str, str]] = (),
) -> Group:  # fmt: skip
    """Show the answer of `memfit estimate` or, with further `facts`, of `memfit trace`."""
    head = text(f"{architecture.name} on {card_title(gpu, recipe.num_gpus)}", "bold")
    about = recipe_facts(recipe, texts=architecture.task not in ("diffusion", "vision"))
    about = (*([model_words(architecture)] if architecture.parameters else []), *about)
    words, style = VERDICT_WORDS[judgement.verdict]
    peak = footprint.peak
    lines = [
        *withheld_words(judgement),
        f"{peak_words(footprint, judgement)}{DOT}{room(judgement)}",
        f"worst instant: {instant(peak)}",
    ]
    lines += filter(None, (host_condition(judgement), retry_words(footprint.on_card, judgement)))
    parts: list[RenderableType] = [
        Ends(head, text(card_room(gpu, judgement.usable, recipe.num_gpus))), text(DOT.join(about), "dim"), "",
        hanging(Text(words, style), lines), "",
        StackedBar(shares(peak, judgement), judgement.usable, rows_in_pipes=False),
        _lines(peak), "", _phases(footprint), "",
        paragraphs([*beliefs(footprint, judgement), *facts]),
    ]  # fmt: skip
    if next_up:
        parts += ["", commands(next_up)]
    return Group(*parts)


def beliefs(footprint: Footprint, judgement: Judgement) -> list[tuple[str, str]]:
    """List the host RAM, the source of the numbers, their assumptions, and what is not known."""
    unknowns = (*footprint.unknowns, f"prediction ±{rough(judgement.band)}")
    return [
        *host_rows(judgement),
        ("source:", footprint.source),
        ("assumed:", DOT.join(footprint.assumptions)),
        ("not known:", DOT.join(unknowns)),
    ]


def _lines(peak: PhasePeak) -> RenderableType:
    """Show every named share of the peak; the rows add up to what nvidia-smi shows."""
    unit = shared_unit(peak.levels.device)
    made = table("at the worst instant", "", f">{unit}", ">share")
    order = list(ROLE_WORDS)
    for line in sorted(peak.lines, key=lambda x: (order.index(x.role), -x.bytes)):
        word = ROLE_WORDS[line.role]
        share = f"{line.bytes / peak.levels.device:.1%}"
        made.add_row(Text(word.title, word.colour), text(line.label), cell(line.bytes, unit, 2), share)
    made.add_row(Text("device", "bold"), "what nvidia-smi shows", cell(peak.levels.device, unit, 2), "")
    return made


def _phases(footprint: Footprint) -> RenderableType:
    peak = footprint.peak
    unit = shared_unit(peak.levels.reserved)
    levels = ("requested", "allocated", "reserved")
    made = table("phase", "worst instant", *(f">{level}{'' if unit == 'GiB' else f' {unit}'}" for level in levels))
    for p in footprint.phases:
        sizes = (cell(getattr(p.levels, level), unit) for level in levels)
        made.add_row(phase_title(p.phase), text(p.instant), *sizes, style="bold" if p.phase == peak.phase else "")
    return made


ROWS = 20  # tensors shown by name; the small ones are summed


def why_view(why: Why) -> Group:
    """Show the arithmetic of the peak, the tensors kept for the backward pass, and the others at the worst instant."""
    parts: list[RenderableType] = [
        text(f"why {human(why.peak.levels.device)}: {instant(why.peak)}", "bold"),
        _sums(why.reasons),
    ]
    per_token = sum(k.bytes * k.count for k in why.kept if k.where == "block" and k.per_token) // max(why.tokens, 1)
    total = human(sum(k.total for k in why.kept))
    kept = (
        f"kept by the forward pass for the backward pass: {total}, {human(per_token)} per token in {why.blocks} blocks"
    )
    working = f"other tensors at the worst instant, {why.peak.instant}"
    for title, group in ((kept, why.kept), (working, why.working)):
        if group:
            parts += ["", text(title, "bold"), _tensors(group, why.tokens)]
    return Group(*parts)


def arithmetic(reason: Reason) -> str:
    """Return '6,738,415,616 x 2 x 2 B = 25.1 GiB', with terms joined by '+'; a term that is only a size has no '='."""
    parts = (t.text if t.text == human(t.bytes) else f"{t.text} = {human(t.bytes)}" for t in reason.terms)
    return " + ".join(parts)


def _sums(reasons: Sequence[Reason]) -> Table:
    grid = Table.grid(padding=(0, GAP, 0, 0))
    grid.add_column(no_wrap=True)
    grid.add_column(no_wrap=True, justify="right")
    grid.add_column(overflow="fold")
    for reason in reasons:
        sums = arithmetic(reason)
        line = f"{reason.words}: {sums}" if sums and sums != human(reason.bytes) else reason.words
        grid.add_row(Text(f"{reason.label}:", ROLE_WORDS[reason.role].colour), human(reason.bytes), text(line))
    return grid


def _tensors(group: Sequence[Kept], count: int) -> RenderableType:
    made = table("tensor", ">B per token", ">x tokens", ">x tensors", ">together")
    shown, rest = group[:ROWS], group[ROWS:]
    for kept in shown:
        place = kept.label if kept.where == "block" else f"{kept.where}: {kept.label}"
        made.add_row(text(place), *_per_token(kept, count), tokens(kept.count), human(kept.total))
    if rest:
        many, total = sum(k.count for k in rest), sum(k.total for k in rest)
        made.add_row(text(f"{len(rest)} smaller rows"), "", "", tokens(many), human(total))
    return made


def _per_token(kept: Kept, count: int) -> tuple[str, str]:
    """Return (bytes per token, tokens), or (size, '-') for a tensor whose size does not depend on the tokens."""
    if not kept.per_token or kept.bytes % count:
        return human(kept.bytes), "-"
    return tokens(kept.bytes // count), tokens(count)
