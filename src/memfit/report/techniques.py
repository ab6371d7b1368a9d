"""The cheat sheet, computed for one run: what each technique buys here, what it costs, and the switch that turns it on."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from memfit.nouns.job import Job
from memfit.nouns.plan import Rung, Verdict
from memfit.report.layout import Ends, hanging, paragraphs, table, text
from memfit.report.words import DOT, VERDICT_WORDS, card_room, card_title, room, tokens, visible
from memfit.units import cell, rough, shared_unit

_SHORT: dict[Verdict, str] = {"fits": "fits", "tight": "tight", "misfit": "over"}


def techniques_view(job: Job, rungs: Sequence[Rung], notes: Sequence[str] = ()) -> Group:
    """Which rung fits first, all rungs in order, each on top of those before it, then their costs and switches."""
    usable = job.gpu.usable_bytes(job.reserve)
    head = text(f"{job.architecture.name} on {card_title(job.gpu, job.num_gpus)}", "bold")
    asked = f"sequence {tokens(job.sequence_length)}{DOT}effective batch {tokens(job.effective_batch)}{DOT}each technique on top of those above it"
    parts: list[RenderableType] = [
        Ends(head, text(card_room(job.gpu, usable, job.num_gpus))), text(asked, "dim"), "", _verdict(rungs), "", _table(rungs), "",
        *_notes(notes), _details(rungs),
    ]  # fmt: skip
    return Group(*parts)


def _notes(notes: Sequence[str]) -> list[RenderableType]:
    return [paragraphs([("note:", line) for line in notes]), ""] if notes else []


def _verdict(rungs: Sequence[Rung]) -> RenderableType:
    """The best verdict of the ladder, and the first rung that has it."""
    for verdict in ("fits", "tight", "misfit"):
        some = [r for r in rungs if r.judgement.verdict == verdict]
        if some:
            words, style = VERDICT_WORDS[verdict]
            first = some[0] if verdict != "misfit" else min(some, key=lambda r: r.judgement.need)
            said = f"{'closest' if verdict == 'misfit' else 'first'}: {first.title.removeprefix('+ ')}"
            return hanging(
                Text(words, style), (f"{said}{DOT}peak {rough(first.judgement.need)}{DOT}{room(first.judgement)}",)
            )
    return Text("no technique applies")


def _table(rungs: Sequence[Rung]) -> RenderableType:
    unit = shared_unit(min((rung.judgement.need for rung in rungs), default=0))
    made = table("technique", f">saves {unit}", f">peak {unit}", ">time", "")
    for i, rung in enumerate(rungs):
        word, style = _SHORT[rung.judgement.verdict], VERDICT_WORDS[rung.judgement.verdict][1].removeprefix("bold ")
        saves = "-" if i == 0 else cell(rung.saved, unit)
        made.add_row(
            text(rung.title), saves, cell(rung.judgement.need, unit), f"{rung.step_time:.2f}x", Text(word, style)
        )
    return made


def _details(rungs: Sequence[Rung]) -> RenderableType:
    """What each technique costs in quality, and its switch by framework."""
    parts: list[RenderableType] = [Text("cost in quality, and how to turn it on", "dim")]
    widest = max((len(name) for rung in rungs for name in rung.flags), default=0)
    for rung in rungs:
        if rung.flags or rung.caveat:
            parts.append(Text.assemble((visible(rung.title.removeprefix("+ ")), "bold"), f": {visible(rung.caveat)}"))
            parts.append(paragraphs([(f"  {name:<{widest}}", flag) for name, flag in rung.flags.items()]))
    return Group(*parts)
