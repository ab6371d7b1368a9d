"""The screens of `memfit plan` and `memfit techniques`: the verdict, the bytes by role, and the ladder."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.text import Text

from memfit.nouns.job import Job, Recipe
from memfit.nouns.plan import Judgement, Plan, Rung, Verdict
from memfit.report.bar import StackedBar, shares
from memfit.report.layout import Column, Ends, Grid, commands, hanging, paragraphs, table, text
from memfit.report.words import (
    DOT,
    VERDICT_WORDS,
    batch_title,
    card_room,
    card_title,
    changes,
    clock,
    host_rows,
    instant,
    method_title,
    peak_words,
    recipe_facts,
    room,
    short_recipe,
    tokens,
    visible,
)
from memfit.units import cell, gib, rough, share_of_samples, shared_unit

SHOWN_REFUSALS = 3
_LIMITS = {"micro_batch": "micro-batch", "sequence_length": "sequence"}


def plan_view(plan: Plan, next_up: Sequence[str] = ()) -> Group:
    """Show a plan, most important first. `next_up`: commands to type next."""
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
        parts.append(f"{share_of_samples(job.truncated)} of the samples cut")
    return DOT.join(parts)


def verdict(plan: Plan) -> RenderableType:
    """Show the verdict, its recipe, and the peak."""
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
    found += host_rows(plan.judgement)
    found += [("note:", line) for line in plan.notes]
    if not plan.job.gpu.half_flops:
        found.append(("time:", f"relative only: the 16-bit speed of the {plan.job.gpu.name} is not known"))
    elif plan.seconds_per_step:
        about = f"about {clock(plan.seconds_per_step)} per optimizer step"
        found.append(("time:", f"{about} (roofline, see memfit glossary roofline)"))
    limits = [f"{_LIMITS[k]} {tokens(v)}" for k, v in plan.largest.items() if v and k in _LIMITS]
    if limits:
        found.append(("largest:", f"{' or '.join(limits)} would still fit, with everything else unchanged"))
    found += [("refused:", f"{r.title}: {r.why}") for r in plan.refused[:SHOWN_REFUSALS]]
    if plan.footprint.source != "formula":
        found.append(("source:", plan.footprint.source))
    found.append(("assumed:", DOT.join(plan.footprint.assumptions)))
    found.append(("not known:", DOT.join((*plan.footprint.unknowns, f"prediction ±{rough(plan.judgement.band)}"))))
    return found


def _alternatives(plan: Plan) -> RenderableType:
    columns = (
        Column("other cards"), Column("GPUs", right=True, spare=3), Column("peak\nGiB", right=True, spare=2),
        Column("headroom\nGiB", right=True, spare=4), Column("$ per\nhour", right=True),
        Column("$ per\n1,000 steps", right=True, spare=1), Column("with the recipe", wraps=24),
    )  # fmt: skip
    rows = [
        (text(a.gpu), tokens(a.num_gpus), gib(a.judgement.need), gib(a.judgement.headroom),
         _usd(a.price_per_hour, a.num_gpus), _usd(a.price_per_step, 1000), text(short_recipe(a.recipe)))
        for a in plan.alternatives
    ]  # fmt: skip
    return Grid(columns, rows)


def _usd(price: float | None, times: int) -> str:
    return "-" if price is None else f"{price * times:,.2f}"


def chosen_index(plan: Plan) -> int | None:
    """Return the index of the plan's rung: the one with its recipe, else the last of its method; None if none is."""
    exact = [i for i, rung in enumerate(plan.ladder) if rung.recipe == plan.recipe]
    alike = [i for i, rung in enumerate(plan.ladder) if rung.recipe.method == plan.recipe.method]
    found = exact or alike
    return found[-1] if found else None


class Ladder:
    """The rungs of a plan, with an arrow at the chosen one, or at an added row if the search found a better recipe."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if not self.plan.ladder:
            return
        unit = shared_unit(self.plan.judgement.need)
        heads = ("", "rung", f">peak\n{unit}", f">saves\n{unit}", ">step\ntime", "verdict")
        if not options.is_terminal:
            heads = tuple(h.replace("\n", " ") for h in heads)  # type: ignore[assignment]
        style = VERDICT_WORDS[self.plan.judgement.verdict][1]
        arrow = Text(">" if options.ascii_only else "▶", style)
        rows = table(*heads)
        chosen = chosen_index(self.plan)
        tuned = chosen is not None and self.plan.ladder[chosen].recipe != self.plan.recipe
        for i, rung in enumerate(self.plan.ladder):
            here = i == chosen and not tuned
            rows.add_row(arrow if here else "", *row(rung, unit, first=i == 0), style="bold" if here else "")
        if tuned and chosen is not None:
            rung = self.plan.ladder[chosen]
            title = "= tuned: " + ", ".join(changes(rung.recipe, self.plan.recipe))
            better = rung.judgement.need - self.plan.judgement.need
            rows.add_row(
                arrow,
                text(title),
                cell(self.plan.judgement.need, unit),
                cell(better, unit),
                f"{self.plan.step_time:.2f}x",
                f"{why(self.plan.judgement)}, {speed(rung.step_time, self.plan.step_time)}",
                style="bold",
            )
        yield rows


def row(rung: Rung, unit: str, first: bool) -> tuple[Text | str, ...]:
    """Return the cells of one rung: title, peak, saved bytes, step time, verdict."""
    buys = "-" if first else cell(rung.saved, unit)
    return (
        text(rung.title),
        cell(rung.judgement.need, unit),
        buys,
        f"{rung.step_time:.2f}x",
        text(rung.why or why(rung.judgement)),
    )


def speed(before: float, after: float) -> str:
    """Return '12% faster' than the rung, or 'as fast' within the 2 % that a roofline cannot resolve."""
    gain = before / after - 1 if after else 0.0
    if abs(gain) < 0.02:
        return "as fast"
    return f"{gain:.0%} faster" if gain > 0 else f"{1 - before / after:.0%} slower"


def why(judgement: Judgement) -> str:
    """Return the verdict in a few words, with the bytes that decide it."""
    if judgement.verdict == "misfit":
        return judgement.shortage
    if judgement.verdict == "tight":
        return f"tight, {rough(judgement.headroom)} headroom"
    return f"fits, {rough(judgement.headroom)} headroom"


def costs(ladder: Sequence[Rung], recipe: Recipe) -> tuple[str, ...]:
    """List what the chosen recipe costs in quality: the caveats of all rungs whose changes it includes."""
    if not ladder:
        return ()
    found: list[str] = []
    before = ladder[0].recipe
    for rung in ladder[1:]:
        moved = [f for f in recipe.__dataclass_fields__ if getattr(rung.recipe, f) != getattr(before, f)]
        if rung.recipe.method != before.method:
            found.clear()  # a caveat about trained weights does not apply to frozen ones
        kept = moved and all(getattr(recipe, f) == getattr(rung.recipe, f) for f in moved)
        if kept and rung.caveat and not rung.caveat.startswith("none"):
            found.append(f"{rung.title.removeprefix('+ ')}: {rung.caveat}")
        before = rung.recipe
    return tuple(found)


_SHORT: dict[Verdict, str] = {"fits": "fits", "tight": "tight", "misfit": "over"}


def techniques_view(job: Job, rungs: Sequence[Rung], notes: Sequence[str] = ()) -> Group:
    """Show the first rung that fits, then all rungs, each on top of those before it, then their costs and settings."""
    usable = job.gpu.usable_bytes(job.reserve)
    head = text(f"{job.architecture.name} on {card_title(job.gpu, job.num_gpus)}", "bold")
    batch = f"effective batch {tokens(job.effective_batch)}"
    asked = DOT.join((f"sequence {tokens(job.sequence_length)}", batch, "each technique on top of those above it"))
    parts: list[RenderableType] = [
        Ends(head, text(card_room(job.gpu, usable, job.num_gpus))), text(asked, "dim"), "", _verdict(rungs), "",
        _table(rungs), "",
    ]  # fmt: skip
    if notes:
        parts += [paragraphs([("note:", line) for line in notes]), ""]
    return Group(*parts, _details(rungs))


def _verdict(rungs: Sequence[Rung]) -> RenderableType:
    """Show the best verdict of the ladder, and the first rung that has it."""
    for verdict in ("fits", "tight", "misfit"):
        some = [r for r in rungs if r.judgement.verdict == verdict]
        if some:
            words, style = VERDICT_WORDS[verdict]
            first = some[0] if verdict != "misfit" else min(some, key=lambda r: r.judgement.need)
            title = f"{'closest' if verdict == 'misfit' else 'first'}: {first.title.removeprefix('+ ')}"
            return hanging(
                Text(words, style), (f"{title}{DOT}peak {rough(first.judgement.need)}{DOT}{room(first.judgement)}",)
            )
    return Text("no technique applies")


def _table(rungs: Sequence[Rung]) -> RenderableType:
    unit = shared_unit(min((rung.judgement.need for rung in rungs), default=0))
    made = table("technique", f">saves {unit}", f">peak {unit}", f">host RAM {unit}", ">time", "")
    for i, rung in enumerate(rungs):
        word, style = _SHORT[rung.judgement.verdict], VERDICT_WORDS[rung.judgement.verdict][1].removeprefix("bold ")
        saves = "-" if i == 0 else cell(rung.saved, unit)
        host = cell(rung.judgement.host.need, unit) if rung.judgement.host else "-"
        time = f"{rung.step_time:.2f}x"
        made.add_row(text(rung.title), saves, cell(rung.judgement.need, unit), host, time, Text(word, style))
    return made


def _details(rungs: Sequence[Rung]) -> RenderableType:
    """Show what each technique costs in quality, and its setting in each framework."""
    parts: list[RenderableType] = [Text("what each costs in quality, and the setting that turns it on", "dim")]
    widest = max((len(name) for rung in rungs for name in rung.flags), default=0)
    for rung in rungs:
        if rung.flags or rung.caveat:
            title = visible(rung.title.removeprefix("+ "))
            parts.append(Text.assemble((title, "bold"), f"{DOT}cost in quality: {visible(rung.caveat)}"))
            parts.append(paragraphs([(f"  {name:<{widest}}", flag) for name, flag in rung.flags.items()]))
    return Group(*parts)
