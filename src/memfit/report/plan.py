"""The first screen: verdict, where the bytes go, the ladder, what is assumed and what to type next."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from memfit.nouns.plan import Plan
from memfit.report.bar import StackedBar, shares
from memfit.report.ladder import Ladder, costs
from memfit.report.layout import Column, Ends, Grid, commands, hanging, paragraphs, text
from memfit.report.words import (
    DOT,
    VERDICT_WORDS,
    batch_title,
    card_room,
    card_title,
    clock,
    instant,
    method_title,
    peak_words,
    recipe_facts,
    room,
    short_recipe,
    tokens,
)
from memfit.units import gib, rough, said_share

SHOWN_REFUSALS = 3
_LIMITS = {"micro_batch": "micro-batch", "sequence_length": "sequence"}


def plan_view(plan: Plan, next_up: Sequence[str] = ()) -> Group:
    """Everything a plan says, most important first. `next_up`: what could be typed next."""
    parts: list[RenderableType] = [_head(plan), text(_asked(plan), "dim"), "", verdict(plan), ""]
    parts.append(StackedBar(shares(plan.footprint.peak, plan.judgement), plan.judgement.usable))
    if len(plan.ladder) > 1:
        parts += [Ladder(plan), ""]
    if plan.alternatives:
        parts += [_alternatives(plan), ""]
    parts.append(paragraphs(_facts(plan)))
    if next_up:
        parts += ["", commands(next_up)]
    return Group(*parts)


def _head(plan: Plan) -> Ends:
    job = plan.job
    name = f"{job.architecture.name} on {card_title(job.gpu, plan.recipe.num_gpus)}"
    return Ends(text(name, "bold"), text(card_room(job.gpu, plan.judgement.usable, plan.recipe.num_gpus)))


def _asked(plan: Plan) -> str:
    job = plan.job
    method = "method chosen by the ladder" if job.method == "auto" else method_title(plan.recipe)
    parts = [
        f"sequence {tokens(job.sequence_length)}",
        f"effective batch {tokens(job.effective_batch)}",
        method,
        f"trainer {job.trainer}",
    ]
    if job.longest_sample:
        parts.append(f"longest sample {tokens(job.longest_sample)} tokens")
    if job.truncated is not None:
        parts.append(f"{said_share(job.truncated)} of the samples cut")
    return DOT.join(parts)


def verdict(plan: Plan) -> RenderableType:
    """The verdict, the recipe it is about, and its peak."""
    words, style = VERDICT_WORDS[plan.judgement.verdict]
    recipe = plan.recipe
    closest = "closest: " if plan.judgement.verdict == "misfit" else ""
    peak = plan.footprint.peak
    return hanging(
        Text(words, style),
        (
            f"{closest}{method_title(recipe)}, {batch_title(recipe)}",
            f"{peak_words(peak, plan.judgement)}{DOT}{room(plan.judgement)}{DOT}worst instant: {instant(peak)}",
        ),
    )


def _facts(plan: Plan) -> list[tuple[str, str]]:
    found = [("recipe:", DOT.join(recipe_facts(plan.recipe)[3:]))]
    found += [("quality:", line) for line in costs(plan.ladder, plan.recipe)]
    found += [("note:", line) for line in plan.notes]
    if not plan.job.gpu.half_flops:
        found.append(("time:", f"only relative: how fast the {plan.job.gpu.name} is in 16 bits is not known"))
    elif plan.seconds_per_step:
        about = f"about {clock(plan.seconds_per_step)} per optimizer step"
        found.append(("time:", f"{about} (roofline, see memfit glossary roofline)"))
    limits = [f"{_LIMITS[k]} {tokens(v)}" for k, v in plan.largest.items() if v and k in _LIMITS]
    if limits:
        found.append(("largest:", f"{' or '.join(limits)} would still fit, with the rest as it is"))
    found += [("refused:", f"{r.title}: {r.why}") for r in plan.refused[:SHOWN_REFUSALS]]
    if plan.footprint.source != "formula":
        found.append(("source:", plan.footprint.source))
    found.append(("assumed:", DOT.join(plan.footprint.assumptions)))
    found.append(("not known:", DOT.join((*plan.footprint.unknowns, f"prediction ±{rough(plan.judgement.band)}"))))
    return found


def _alternatives(plan: Plan) -> RenderableType:
    columns = (
        Column("other cards"), Column("GPUs", right=True, spare=3), Column("peak\nGiB", right=True, spare=2),
        Column("headroom\nGiB", right=True, spare=4), Column("$ per\nhour", right=True), Column("$ per\n1,000 steps", right=True, spare=1),
        Column("with the recipe", wraps=24),
    )  # fmt: skip
    rows = [
        (text(a.gpu), tokens(a.num_gpus), gib(a.judgement.need), gib(a.judgement.headroom), _usd(a.price_per_hour, a.num_gpus),
         _usd(a.price_per_step, 1000), text(short_recipe(a.recipe)))
        for a in plan.alternatives
    ]  # fmt: skip
    return Grid(columns, rows)


def _usd(price: float | None, times: int) -> str:
    return "-" if price is None else f"{price * times:,.2f}"
