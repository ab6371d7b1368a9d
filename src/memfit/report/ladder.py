"""The ladder as a table: what each rung leaves on the card, what it buys, what it costs in time, and where to stop."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from memfit.nouns.job import Recipe
from memfit.nouns.plan import Judgement, Plan, Rung
from memfit.report.layout import table, text
from memfit.report.words import VERDICT_WORDS, changes
from memfit.units import cell, rough, shared_unit

ARROW, ARROW_ASCII = "▶", ">"


def chosen_index(plan: Plan) -> int | None:
    """The rung the plan stands on: its very recipe, else the last one that learns the same; None on an empty ladder."""
    exact = [i for i, rung in enumerate(plan.ladder) if rung.recipe == plan.recipe]
    alike = [i for i, rung in enumerate(plan.ladder) if rung.recipe.method == plan.recipe.method]
    found = exact or alike
    return found[-1] if found else None


class Ladder:
    """The rungs of a plan, with an arrow at the chosen one and a row below it where the search did better."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if not self.plan.ladder:
            return
        unit = shared_unit(self.plan.judgement.need)
        heads = ("", "rung", f">peak\n{unit}", f">buys\n{unit}", ">step\ntime", "why (not)")
        if not options.is_terminal:
            heads = tuple(h.replace("\n", " ") for h in heads)  # type: ignore[assignment]
        style = VERDICT_WORDS[self.plan.judgement.verdict][1]
        arrow = Text(ARROW_ASCII if options.ascii_only else ARROW, style)
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
    """The cells of one rung: title, peak, buys, step time, why."""
    buys = "-" if first else cell(rung.saved, unit)
    return (
        text(rung.title),
        cell(rung.judgement.need, unit),
        buys,
        f"{rung.step_time:.2f}x",
        text(rung.why or why(rung.judgement)),
    )


def speed(before: float, after: float) -> str:
    """'12 % faster' than the rung; within what a roofline cannot tell, 'as fast'."""
    gain = before / after - 1 if after else 0.0
    if abs(gain) < 0.02:
        return "as fast"
    return f"{gain:.0%} faster" if gain > 0 else f"{1 - before / after:.0%} slower"


def why(judgement: Judgement) -> str:
    """The verdict in a few words, with the bytes that decide it."""
    if judgement.verdict == "misfit":
        return f"{rough(-judgement.headroom)} over"
    if judgement.verdict == "tight":
        return f"tight, {rough(judgement.headroom)} headroom"
    return f"fits, {rough(judgement.headroom)} headroom"


def costs(ladder: Sequence[Rung], recipe: Recipe) -> tuple[str, ...]:
    """What the chosen recipe gives up in quality: the caveats of the rungs whose changes it still carries."""
    if not ladder:
        return ()
    found: list[str] = []
    before = ladder[0].recipe
    for rung in ladder[1:]:
        moved = [f for f in recipe.__dataclass_fields__ if getattr(rung.recipe, f) != getattr(before, f)]
        if rung.recipe.method != before.method:
            found.clear()  # what was given up for trained weights does not matter to frozen ones
        kept = moved and all(getattr(recipe, f) == getattr(rung.recipe, f) for f in moved)
        if kept and rung.caveat and not rung.caveat.startswith("none"):
            found.append(f"{rung.title.removeprefix('+ ')}: {rung.caveat}")
        before = rung.recipe
    return tuple(found)
