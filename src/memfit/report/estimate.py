"""One footprint: the verdict, the bar, every named share of the peak, and the peak of every phase."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from memfit.nouns.architecture import Architecture
from memfit.nouns.footprint import Footprint
from memfit.nouns.gpu import Gpu
from memfit.nouns.job import Recipe
from memfit.nouns.plan import Judgement
from memfit.report.bar import StackedBar, shares
from memfit.report.layout import Ends, commands, hanging, paragraphs, table, text
from memfit.report.words import (
    DOT,
    ROLE_WORDS,
    VERDICT_WORDS,
    card_room,
    card_title,
    instant,
    peak_words,
    phase_title,
    recipe_facts,
    room,
)
from memfit.units import billions, cell, rough, shared_unit


def estimate_view(
    architecture: Architecture, recipe: Recipe, gpu: Gpu, footprint: Footprint, judgement: Judgement,
    next_up: Sequence[str] = (), facts: Sequence[tuple[str, str]] = (),
) -> Group:  # fmt: skip
    """The whole answer of `memfit estimate`, and with further `facts` that of `memfit trace`."""
    head = text(f"{architecture.name} on {card_title(gpu, recipe.num_gpus)}", "bold")
    about = (f"{billions(architecture.parameters)} parameters", *recipe_facts(recipe))
    words, style = VERDICT_WORDS[judgement.verdict]
    peak = footprint.peak
    said = (f"{peak_words(peak, judgement)}{DOT}{room(judgement)}", f"worst instant: {instant(peak)}")
    parts: list[RenderableType] = [
        Ends(head, text(card_room(gpu, judgement.usable, recipe.num_gpus))), text(DOT.join(about), "dim"), "",
        hanging(Text(words, style), said), "",
        StackedBar(shares(peak, judgement), judgement.usable, rows_in_pipes=False),
        _lines(footprint), "", _phases(footprint), "",
        paragraphs([*beliefs(footprint, judgement), *facts]),
    ]  # fmt: skip
    if next_up:
        parts += ["", commands(next_up)]
    return Group(*parts)


def beliefs(footprint: Footprint, judgement: Judgement) -> list[tuple[str, str]]:
    """What the numbers take for granted, and what nobody can know from here."""
    unknowns = (*footprint.unknowns, f"prediction ±{rough(judgement.band)}")
    return [
        ("source:", footprint.source),
        ("assumed:", DOT.join(footprint.assumptions)),
        ("not known:", DOT.join(unknowns)),
    ]


def _lines(footprint: Footprint) -> RenderableType:
    """Every named share of the peak; the rows add up to what nvidia-smi shows."""
    peak = footprint.peak
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
    unit = shared_unit(footprint.peak.levels.reserved)
    levels = ("requested", "allocated", "reserved")
    made = table("phase", "worst instant", *(f">{level}{'' if unit == 'GiB' else f' {unit}'}" for level in levels))
    for p in footprint.phases:
        sizes = (cell(getattr(p.levels, level), unit) for level in levels)
        made.add_row(phase_title(p.phase), text(p.instant), *sizes, style="bold" if p is footprint.peak else "")
    return made
