"""The cheat sheet, computed for one run: what each technique buys here, what it costs, and the switch that turns it on."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from memfit.job import Job
from memfit.plan import Rung
from memfit.report.layout import Ends, paragraphs, table, text
from memfit.report.words import DOT, VERDICT_WORDS, card_room, card_title
from memfit.units import gib


def techniques_view(job: Job, rungs: Sequence[Rung]) -> Group:
    """All rungs in order, each on top of those before it, then the switches by framework."""
    usable = job.gpu.usable_bytes(job.reserve)
    head = text(f"{job.architecture.name} on {card_title(job.gpu, job.num_gpus)}", "bold")
    asked = f"sequence {job.sequence_length}{DOT}effective batch {job.effective_batch}{DOT}each technique on top of those above it"
    parts: list[RenderableType] = [
        Ends(head, text(card_room(job.gpu, usable, job.num_gpus))), text(asked, "dim"), "", _table(rungs), "",
        _switches(rungs),
    ]  # fmt: skip
    return Group(*parts)


def _table(rungs: Sequence[Rung]) -> RenderableType:
    made = table("technique", ">saves GiB", ">peak GiB", ">time", "", "costs in quality")
    for i, rung in enumerate(rungs):
        words, style = VERDICT_WORDS[rung.judgement.verdict]
        word = Text({"FITS": "fits", "DOES NOT FIT": "over"}.get(words, "tight"), style.removeprefix("bold "))
        saves = "-" if i == 0 else gib(rung.saved)
        made.add_row(
            text(rung.title), saves, gib(rung.judgement.need), f"{rung.step_time:.2f}x", word, text(rung.caveat)
        )
    return made


def _switches(rungs: Sequence[Rung]) -> RenderableType:
    rows: list[tuple[str, str]] = []
    for rung in rungs:
        if rung.flags:
            rows.append(("", rung.title.removeprefix("+ ")))
            rows += [(f"  {framework}", flag) for framework, flag in rung.flags.items()]
    return Group(Text("how to turn them on", "dim"), paragraphs(rows))
