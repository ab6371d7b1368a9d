"""Confirm a plan: trace the chosen recipe, and plan again with the trace's answer where the two disagree."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from memfit.cli import terminal
from memfit.errors import BadInput, MemfitError
from memfit.nouns.footprint import Footprint
from memfit.nouns.job import Recipe
from memfit.nouns.plan import Judgement, Plan
from memfit.units import gib
from memfit.virtual.supported import obstacle

if TYPE_CHECKING:
    from memfit.allocator.capacity import Progress
    from memfit.cli.request import Request

    Known = dict[Recipe, tuple[Footprint, Judgement]]

TRIES = 6  # finalists that are traced; as many as the search replays by formula


def wanted(flags: dict[str, Any]) -> bool:
    """Return whether to confirm: with --trace, or by default on a terminal with the training libraries installed."""
    if flags["trace"] and flags["no_trace"]:
        raise BadInput("--trace and --no-trace contradict each other", hint="leave one of them out")
    return bool(flags["trace"]) or (
        terminal.interactive() and not flags["json"] and not flags["no_trace"] and _installed()
    )


def _installed() -> bool:
    """Return whether the libraries that a trace needs are installed, without importing any."""
    from importlib.util import find_spec

    return not obstacle() and all(find_spec(name) for name in ("torch", "transformers", "peft", "trl", "accelerate"))


def confirmed(plan: Plan, name: str, request: Request, again: Callable[[Known], Plan], tell: Progress) -> Plan:
    """Return the plan with the traced answer of its recipe; `again` plans anew with the recipes traced so far.

    Adds a note for each trace that compares it with the formulas. Raises Unsupported if a recipe cannot be traced.
    """
    from memfit.cli.trace import traced
    from memfit.documents.traced_answers import write_tape

    known: Known = {}
    while plan.recipe not in known and len(known) < TRIES:
        footprint, answer, tape, _ = traced(plan.recipe, name, request, tell, lean=False)
        assert answer.judgement is not None
        write_tape(plan.recipe, footprint, tape)
        known[plan.recipe] = footprint, answer.judgement
        request.notes.append(_compared(plan, answer.judgement))
        if answer.judgement.verdict == plan.judgement.verdict:
            return replace(plan, footprint=footprint, judgement=answer.judgement)
        plan = again(known)
    if plan.recipe not in known:
        request.notes.append(f"{TRIES} recipes were traced; the one shown was not")
    footprint, judgement = known.get(plan.recipe, (plan.footprint, plan.judgement))
    return replace(plan, footprint=footprint, judgement=judgement)


def _compared(plan: Plan, judgement: Judgement) -> str:
    line = f"traced: {gib(judgement.need, 2)} GiB reserved, by formula {gib(plan.judgement.need, 2)}"
    if judgement.verdict == plan.judgement.verdict:
        return f"{line}: confirmed"
    r = plan.recipe
    words = {"fits": "fits", "tight": "is too tight to promise", "misfit": "does not fit"}
    what = f"{r.method}, micro-batch {r.micro_batch} x {r.accumulation}, checkpointing {r.checkpointing}"
    return f"{line}: {what} {words[judgement.verdict]}"


def at_leisure(plan: Plan, name: str, request: Request, again: Callable[[Known], Plan]) -> Plan:
    """Confirm a plan that was already shown; return it unchanged if the trace fails or is interrupted."""
    terminal.note("confirming by a trace (Ctrl-C keeps this answer, --no-trace skips it)")
    request.notes.clear()
    try:
        with terminal.progress() as tell:
            made = confirmed(plan, name, request, again, tell)
    except KeyboardInterrupt:
        terminal.note("not traced: interrupted; the answer above is the formulas'")
        return plan
    except MemfitError as error:
        terminal.note(f"not traced: {error.message}; the answer above is the formulas'")
        return plan
    terminal.notes(request.notes)
    return made
