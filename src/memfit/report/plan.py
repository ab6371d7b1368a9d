"""The screens of `memfit plan` and `memfit techniques`: the verdict, the bytes by role, and the ladder."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.text import Text

from memfit.data.lengths import MULTIPLE
from memfit.nouns.footprint import Footprint
from memfit.nouns.job import Job, Recipe
from memfit.nouns.plan import Judgement, Plan, Rung, Verdict
from memfit.nouns.task import USUAL_SECONDS, Task
from memfit.report.bar import StackedBar, shares
from memfit.report.layout import Column, Ends, Grid, commands, hanging, paragraphs, table, text
from memfit.report.words import (
    DOT,
    NO_PRICE,
    VERDICT_WORDS,
    batch_title,
    card_room,
    card_title,
    clock,
    cut_words,
    host_condition,
    host_rows,
    instant,
    peak_words,
    recipe_facts,
    retry_words,
    room,
    short_recipe,
    tokens,
    visible,
    withheld_words,
)
from memfit.tables.adapters import method_title
from memfit.tables.tasks import TASKS, WINDOWED
from memfit.units import cell, gib, rough, several, shared_unit

SHOWN_REFUSALS = 3
_LIMITS = {"micro_batch": "micro-batch", "sequence_length": "sequence"}


def plan_view(plan: Plan, next_up: Sequence[str] = ()) -> Group:
    """Show a plan, most important first. `next_up`: commands to type next."""
    parts: list[RenderableType] = [_head(plan), text(asked_words(plan), "dim"), "", verdict(plan), ""]
    parts.append(StackedBar(shares(plan.footprint.peak, plan.judgement), plan.judgement.usable))
    if len(plan.ladder) > 1:
        parts += [Ladder(plan), ""]
    if plan.alternatives:
        parts += [_alternatives(plan), ""]
    parts.append(paragraphs(facts(plan)))
    if next_up:
        parts += ["", commands(next_up)]
    return Group(*parts)


def _head(plan: Plan) -> Ends:
    job = plan.job
    name = f"{job.architecture.name} on {card_title(job.gpu, job.num_gpus)}"
    return Ends(text(name, "bold"), text(card_room(job.gpu, plan.judgement.usable, job.num_gpus)))


def asked_words(plan: Plan) -> str:
    """Return what was asked: task, sizes, batch, method and trainer."""
    job = plan.job
    method = "method chosen by the search" if job.method == "auto" else method_title(plan.recipe)
    parts = [*_sizes(job), method, f"trainer {job.trainer}"]
    if job.longest_sample and not job.samples:  # else the data's own line says it
        parts.append(f"longest sample {tokens(job.longest_sample)} tokens")
    return DOT.join(parts)


def _sizes(job: Job) -> list[str]:
    """Return the task, the size of a sample and the batch."""
    row = TASKS[job.task]
    return [
        *([row.title] if row.key != "sft" else []),
        *([f"sequence {tokens(job.sequence_length)}"] if row.of_tokens else []),
        *_size(job, row),
        f"effective batch {tokens(job.effective_batch)}",
    ]


def _size(job: Job, row: Task) -> list[str]:
    """Return the size of a sample beside its sequence length; of images alone, what the user gave."""
    shape = job.shape
    (wide, tall), windowed = shape.image, job.architecture.model_type in WINDOWED
    seconds = [f"{shape.audio_seconds or USUAL_SECONDS:g} s each"] * (row.heard and not windowed)
    if row.sample == "pictures":
        return [f"{several(shape.images, 'image')} of {wide} x {tall}"]
    if row.sample == "prompt":
        answers = f"{tokens(shape.generations)} answers of {tokens(shape.completion)}"
        return [f"{answers} tokens to each prompt of {tokens(shape.prompt)}"]
    if row.sample in ("text-to-text", "features"):
        return [*seconds, f"{tokens(shape.target)} tokens written"]
    cached = ", latents cached" if shape.cached else ""
    images = [f"images of {wide} x {tall}{cached}"] * bool(wide)
    return images + seconds


def verdict(plan: Plan) -> RenderableType:
    """Show the verdict, its recipe, and the peak; where fewer cards are used, first those of all cards."""
    made = [hanging(Text(*VERDICT_WORDS[judgement.verdict]), lines) for judgement, lines in verdicts(plan)]
    return made[0] if len(made) == 1 else Group(*made)


def verdicts(plan: Plan) -> list[tuple[Judgement, list[str]]]:
    """Return each verdict with its lines: the plan's, after that on all cards where the plan uses fewer."""
    if plan.all_cards is None:
        return [(plan.judgement, recipe_lines(plan.recipe, plan.footprint, plan.judgement))]
    whole, job = plan.all_cards, plan.job
    slower = f"{plan.seconds_per_step / whole.seconds_per_step:.1f}x the time on all of them"
    ways = [f"with sequence {tokens(whole.shorter)}"] if whole.shorter else []
    ways += [f"on {job.num_gpus} x {whole.larger}"] if whole.larger else []
    known = bool(job.gpu.half_flops)
    took, takes = (f"about {clock(x.seconds_per_step)} a step" if known else "" for x in (whole, plan))
    last = f"fits {' or '.join(ways)}" if ways else ""
    used = f"on {plan.recipe.num_gpus} of the {job.num_gpus} cards: "
    price = ", ".join(filter(None, (takes, slower)))
    return [
        (whole.judgement, recipe_lines(whole.recipe, whole.footprint, whole.judgement, time=took, last=last)),
        (plan.judgement, recipe_lines(plan.recipe, plan.footprint, plan.judgement, used, price)),
    ]


def recipe_lines(
    recipe: Recipe, footprint: Footprint, judgement: Judgement, used: str = "", time: str = "", last: str = ""
) -> list[str]:
    """Return the lines under the verdict on one recipe."""
    closest = "closest: " if judgement.verdict == "misfit" else ""
    need = f"{peak_words(footprint, judgement)}{DOT}{room(judgement)}"
    lines = [
        *withheld_words(judgement),
        host_condition(judgement),
        DOT.join(filter(None, (f"{used}{closest}{method_title(recipe)}, {batch_title(recipe)}", time))),
        f"{need}{DOT}worst instant: {instant(footprint.peak)}",
        retry_words(footprint.on_card, judgement),
        last,
    ]
    return [line for line in lines if line]


def facts(plan: Plan) -> list[tuple[str, str]]:
    """Return labelled lines on what else there is to know of a plan."""
    texts = plan.job.architecture.task not in ("diffusion", "vision")
    found = [("recipe:", DOT.join(recipe_facts(plan.recipe, texts)[3 if texts else 2 :]))]
    found += [("quality:", line) for line in costs(plan.ladder)]
    found += host_rows(plan.judgement)
    found += [("note:", line) for line in plan.notes]
    found += _data(plan)
    if not plan.job.gpu.half_flops:
        found.append(("time:", f"relative only: the 16-bit speed of the {plan.job.gpu.name} is not known"))
    elif plan.seconds_per_step:
        about = f"about {clock(plan.seconds_per_step)} per optimizer step"
        found.append(("time:", f"{about} (roofline, see memfit glossary roofline)"))
    found += _cost(plan)
    limits = [f"{_LIMITS[k]} {tokens(v)}" for k, v in plan.largest.items() if k in _LIMITS]
    if limits:
        found.append(("largest:", f"{' or '.join(limits)} would still fit, with everything else unchanged"))
    found += [("refused:", f"{r.title}: {r.why}") for r in plan.refused[:SHOWN_REFUSALS]]
    if plan.footprint.source != "formula":
        found.append(("source:", plan.footprint.source))
    found.append(("assumed:", DOT.join(plan.footprint.assumptions)))
    found.append(("not known:", DOT.join((*plan.footprint.unknowns, f"prediction ±{rough(plan.judgement.band)}"))))
    return found


def _data(plan: Plan) -> list[tuple[str, str]]:
    """Return what the sequence length cuts, and which quantity the longest sample decides."""
    job, r = plan.job, plan.recipe
    if not job.samples or not job.longest_sample:
        return []
    longest, batch = job.longest_sample, f"{r.micro_batch} x {tokens(r.sequence_length)} tokens in a micro-batch"
    if r.padding == "packing":
        decides = f"packed rows decide the peak, {batch}, and not the longest sample"
    elif longest + MULTIPLE <= r.sequence_length:  # by a length that the user gave
        decides = f"the peak is for {batch}, as asked; the longest sample has {tokens(longest)}"
    else:
        cut = f", cut to {tokens(r.sequence_length)}" if longest > r.sequence_length else ""
        decides = f"the longest sample, {tokens(longest)} tokens{cut}, decides the peak: {batch}"
    return [("data:", DOT.join((cut_words(job.samples), decides)))]


def _cost(plan: Plan) -> list[tuple[str, str]]:
    """Return how long the data takes and what that costs, and the day of the price."""
    if plan.judgement.verdict == "misfit":  # it cannot run here, so only the other cards' prices matter
        return [("prices:", f"read on {plan.prices_read}")] if plan.alternatives and plan.prices_read else []
    price, found = plan.job.gpu.price_per_hour, []
    if plan.duration:
        d = plan.duration
        low, high = d.range
        padding = ", padding included" if plan.recipe.padding == "longest" else ""
        epochs = f"{d.epochs:g} epoch{'s' * (d.epochs != 1)}" if d.epochs >= 0.1 else "part of an epoch"
        found.append(("run:", DOT.join((
            f"{epochs}, {several(d.steps, 'step')} of {several(plan.recipe.effective_batch, 'sequence')}",
            f"{d.mean_tokens:,.0f} tokens each on average{padding}",
            f"about {clock(d.seconds)} ({clock(low)} to {clock(high)} by the error of the roofline)",
        ))))  # fmt: skip
    if price is None:
        others = f"; those of the other cards were read on {plan.prices_read}" if plan.alternatives else ""
        return [*found, ("cost:", f"{NO_PRICE}{others}")]
    hourly = f"at {price:.2f} USD per hour and card, read on {plan.prices_read}"
    if plan.duration and plan.duration.cost is not None:
        found.append(("cost:", f"about {plan.duration.cost:,.2f} USD {hourly}"))
    elif plan.seconds_per_step:
        thousand = 1000 * price * plan.recipe.num_gpus * plan.seconds_per_step / 3600
        found.append(("cost:", f"about {thousand:,.2f} USD per 1,000 optimizer steps {hourly}"))
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


class Ladder:
    """The rungs of a plan, with an arrow at the last one, which is the chosen recipe."""

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
        last = len(self.plan.ladder) - 1
        for i, rung in enumerate(self.plan.ladder):
            cells = row(rung, unit, first=i == 0)
            rows.add_row(arrow if i == last else "", *cells, style="bold" if i == last else "")
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


def why(judgement: Judgement) -> str:
    """Return the verdict in a few words, with the bytes that decide it."""
    if judgement.verdict == "misfit":
        return judgement.shortage
    if judgement.verdict == "tight":
        return f"tight, {rough(judgement.headroom)} headroom"
    if judgement.verdict == "not_judged":
        return "not judged"
    return f"fits, {judgement.room}"


def costs(ladder: Sequence[Rung]) -> tuple[str, ...]:
    """List what the chosen recipe costs in quality: the caveats of its rungs."""
    return tuple(
        f"{rung.title.removeprefix('+ ')}: {rung.caveat}"
        for rung in ladder[1:]
        if rung.caveat and not rung.caveat.startswith("none")
    )


_SHORT: dict[Verdict, str] = {"fits": "fits", "tight": "tight", "misfit": "over", "not_judged": "not judged"}


def techniques_view(plan: Plan, rungs: Sequence[Rung], notes: Sequence[str] = ()) -> Group:
    """Show the plan's answer, then every technique on top of those before it, then their costs and settings."""
    asked = DOT.join((*_sizes(plan.job), "each technique on top of those above it"))
    parts: list[RenderableType] = [_head(plan), text(asked, "dim"), "", verdict(plan), "", _table(rungs), ""]
    if notes:
        parts += [paragraphs([("note:", line) for line in notes]), ""]
    if any(rung.flags or rung.caveat for rung in rungs):
        parts.append(_details(rungs))
    return Group(*parts)


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
