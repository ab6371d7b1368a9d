"""The first screen: verdict, where the bytes go, the ladder, what is assumed and what to type next."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from memfit.plan import Plan
from memfit.report.bar import StackedBar, shares
from memfit.report.ladder import Ladder, costs
from memfit.report.layout import Ends, commands, hanging, paragraphs, table, text
from memfit.report.words import (
    DOT,
    VERDICT_WORDS,
    batch_title,
    card_room,
    card_title,
    changes,
    clock,
    instant,
    method_title,
    recipe_facts,
    room,
    tokens,
)
from memfit.units import gib

SHOWN_REFUSALS = 3
_LIMITS = {"micro_batch": "micro-batch", "sequence_length": "sequence"}


def plan_view(plan: Plan, next_up: Sequence[str] = ()) -> Group:
    """Everything a plan says, most important first. `next_up`: what could be typed next."""
    parts: list[RenderableType] = [_head(plan), text(_asked(plan), "dim"), "", verdict(plan), ""]
    parts += [StackedBar(shares(plan.footprint.peak, plan.judgement), plan.judgement.usable), ""]
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
        f"sequence {job.sequence_length}",
        f"effective batch {job.effective_batch}",
        method,
        f"trainer {job.trainer}",
    ]
    if job.longest_sample:
        parts.append(f"longest sample {tokens(job.longest_sample)} tokens")
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
            f"peak {gib(plan.judgement.need)} GiB reserved{DOT}{room(plan.judgement)}{DOT}worst instant: {instant(peak)}",
        ),
    )


def _facts(plan: Plan) -> list[tuple[str, str]]:
    found = [("recipe:", DOT.join(recipe_facts(plan.recipe)[3:]))]
    found += [("quality:", line) for line in costs(plan.ladder, plan.recipe)]
    found += [("note:", line) for line in plan.notes]
    if plan.seconds_per_step:
        found.append(
            (
                "time:",
                f"about {clock(plan.seconds_per_step)} per optimizer step (roofline, see memfit glossary roofline)",
            )
        )
    limits = [f"{_LIMITS[k]} {tokens(v)}" for k, v in plan.largest.items() if v and k in _LIMITS]
    if limits:
        found.append(("largest:", f"{' or '.join(limits)} would still fit, with the rest as it is"))
    found += [("refused:", f"{r.title}: {r.why}") for r in plan.refused[:SHOWN_REFUSALS]]
    found.append(("assumed:", DOT.join(plan.footprint.assumptions)))
    found.append(("not known:", DOT.join((*plan.footprint.unknowns, f"prediction ±{gib(plan.judgement.band)} GiB"))))
    return found


def _alternatives(plan: Plan) -> RenderableType:
    made = table("other cards", ">GPUs", ">peak GiB", ">headroom", ">$ per hour", "recipe")
    for a in plan.alternatives:
        price = "-" if a.price_per_hour is None else f"{a.price_per_hour * a.num_gpus:.2f}"
        recipe = ", ".join(changes(plan.recipe, a.recipe)) or "the same"
        made.add_row(
            text(a.gpu), str(a.num_gpus), gib(a.judgement.need), gib(a.judgement.headroom), price, text(recipe)
        )
    return made
