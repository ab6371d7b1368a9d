"""The run as a whole: attempt, and where memory ran out fall one rung and resume, until it is done or cannot go lower."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from importlib import util

from memfit.job import Recipe
from memfit.plan import Plan
from memfit.planner.descend import STORED, down
from memfit.run.cause import cause
from memfit.run.folder import Run, fallen
from memfit.run.nouns import Event, Fall, Outcome, Shortage

Start = Callable[[Run, Callable[[Event], None]], Outcome]


def supervise(run: Run, start: Start, tell: Callable[[Event], None]) -> Outcome:
    """Attempt until the run is done, is stopped, or has fallen as often as its settings allow; returns the last outcome."""
    while True:
        outcome = start(run, tell)
        run.write_outcome(outcome)
        if outcome.status != "oom" or outcome.shortage is None:
            return outcome
        if len(run.falls) >= run.settings.falls:
            return _stop(run, outcome, f"memory ran out {len(run.falls) + 1} times, the most allowed (--falls)")
        below = lower(run, outcome.shortage)
        if below is None:
            return _stop(run, outcome, "no recipe that learns the same needs less memory")
        fall = fall_of(run, outcome.shortage, below)
        fallen(run, fall, below)
        tell({"event": "fall", "cause": list(fall.cause), "changed": list(fall.changed), "step": fall.resumed_at})


def _stop(run: Run, outcome: Outcome, why: str) -> Outcome:
    stopped = replace(outcome, error=why)
    run.write_outcome(stopped)
    return stopped


def lower(run: Run, shortage: Shortage) -> Plan | None:
    """The plan one rung down: first what keeps the optimizer's states, then what starts them again."""
    plan, trained = run.plan, run.last_good() is not None
    # an allocation that fails says how much was missing for it, not for those behind it: ask for more each time
    vain = sum(1 for fall in run.falls if fall.shortage.step == shortage.step)
    for fixed in _tiers(plan.recipe, trained, run.settings.cpu):
        found = down(plan, shortage.short << vain, fixed, _on_cpu if run.settings.cpu else _anywhere)
        if found is not None:
            return found
    return None


def _anywhere(recipe: Recipe) -> bool:
    return True


def _on_cpu(recipe: Recipe) -> bool:
    """Pinned memory needs a device; so does a place to offload from."""
    return recipe.checkpointing != "offload" and recipe.offload == "none"


def _tiers(recipe: Recipe, trained: bool, cpu: bool) -> list[tuple[str, ...]]:
    """Recipe fields to keep, the most careful choice first.

    Sharding, offloading and precision decide what a checkpoint looks like: they change only before there is one.
    """
    tiers: list[tuple[str, ...]] = [("optimizer", *STORED)]
    if recipe.optimizer.startswith("adamw") and util.find_spec("bitsandbytes"):
        tiers.append(STORED)
    if not trained and not cpu:
        tiers.append(() if util.find_spec("deepspeed") else ("offload",))
    return tiers


def fall_of(run: Run, shortage: Shortage, plan: Plan) -> Fall:
    """What happened and what changes."""
    before, after, last = run.plan.recipe, plan.recipe, run.last_good()
    return Fall(
        shortage=shortage, cause=cause(shortage), changed=changes(before, after), resumed_at=last.step if last else 0,
        moments_lost=last is not None and before.optimizer != after.optimizer,
    )  # fmt: skip


def changes(before: Recipe, after: Recipe) -> tuple[str, ...]:
    """("micro-batch 8 -> 4", ...)."""
    return tuple(
        f"{name.replace('_', '-')} {getattr(before, name)} -> {getattr(after, name)}"
        for name in Recipe.__dataclass_fields__
        if getattr(before, name) != getattr(after, name)
    )
