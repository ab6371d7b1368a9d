"""What is tried next where memory ran out, by the stage that failed; a new way is one function and its place in WAYS."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from memfit.frameworks.process_layout import backend
from memfit.nouns.job import Recipe
from memfit.nouns.plan import Plan
from memfit.planner.next_lower_recipe import STORED, down
from memfit.train.folder import Run, target_of
from memfit.train.installed import missing
from memfit.train.outcome import Settings, Shortage, Stage


@dataclass(frozen=True, slots=True)
class Rung:
    """What the next attempt runs under."""

    plan: Plan
    settings: Settings


Way = Callable[[Run, Shortage], Rung | None]  # None: this way has nothing left to give


def lower(run: Run, shortage: Shortage) -> Rung | None:
    """The next rung: the first way of the failed stage that has one. None: stop, nothing that helps is left."""
    return next(filter(None, (way(run, shortage) for way in WAYS[shortage.stage])), None)


def smaller_evaluation(run: Run, shortage: Shortage) -> Rung | None:
    """Fewer samples at a time in evaluation, at most half as many: what they need grows as they do. Training stays as it is."""
    plan, settings = run.plan, run.settings
    now = eval_batch(plan.recipe, settings)
    fits = now >> (1 + _in_vain(run, shortage))
    needed, room = shortage.held + shortage.asked - shortage.began, shortage.limit - shortage.began
    if 0 < room < needed and shortage.began:
        fits = min(fits, now * room // needed)
    return Rung(plan, replace(settings, eval_batch=max(fits, 1))) if now > 1 else None


def lean_save(run: Run, shortage: Shortage) -> Rung | None:
    """The same again with gradients and cached blocks given back before anything is written: no recipe would help there."""
    plan, settings = run.plan, run.settings
    return None if settings.lean_save else Rung(plan, replace(settings, lean_save=True))


def smaller_recipe(run: Run, shortage: Shortage) -> Rung | None:
    """The plan one rung down: first what keeps the optimizer's states, then what starts them again."""
    plan, trained, cpu = run.plan, run.last_good() is not None, run.settings.cpu
    runs = _can_run(plan, cpu)
    for fixed in _tiers(plan.recipe, trained, cpu):
        found = down(plan, shortage.short << _in_vain(run, shortage), fixed, runs)
        if found is not None:
            return Rung(found, run.settings)
    return None


WAYS: dict[Stage, tuple[Way, ...]] = {
    "load": (smaller_recipe,),
    "rehearsal": (smaller_recipe,),
    "resume": (smaller_recipe,),
    "forward and backward": (smaller_recipe,),
    "optimizer step": (smaller_recipe,),
    "eval": (smaller_evaluation, smaller_recipe),
    "save": (lean_save,),
    "merge": (),  # on the CPU in a process of its own; --resume --merge does it again
}


def eval_batch(recipe: Recipe, settings: Settings) -> int:
    """Samples at a time in evaluation: a micro-batch, or fewer once memory ran out there."""
    return min(settings.eval_batch or recipe.micro_batch, recipe.micro_batch)


def _in_vain(run: Run, shortage: Shortage) -> int:
    """Falls at the same step: an allocation that fails says how much was missing for it, not for those behind it."""
    return sum(1 for fall in run.falls if fall.shortage.step == shortage.step)


def _can_run(plan: Plan, cpu: bool) -> Callable[[Recipe], bool]:
    """What is installed. Pinned memory needs a card; so do a place to offload from, and Liger's kernels."""
    now, target = plan.recipe, target_of(plan)

    def runs(recipe: Recipe) -> bool:
        if recipe.checkpointing == "offload" or recipe.offload not in ("none", now.offload):
            return False
        return not (target == "transformers" and recipe.loss == "fused" != now.loss)

    return lambda recipe: not missing(recipe, target) and (not cpu or runs(recipe))


def _tiers(recipe: Recipe, trained: bool, cpu: bool) -> list[tuple[str, ...]]:
    """Recipe fields to keep, the most careful choice first.

    Sharding, offloading and precision decide what a checkpoint looks like: they change only before there is one. Nor can an
    optimizer begin beside a checkpoint of DeepSpeed's, whose states lie in one file with the weights.
    """
    tiers: list[tuple[str, ...]] = [("optimizer", *STORED)]
    restarts = not trained or backend(recipe) != "deepspeed"
    if restarts and recipe.optimizer.startswith("adamw"):
        tiers.append(STORED)
    return tiers if trained or cpu else [*tiers, ()]  # a CPU gains nothing by them


def changes(run: Run, below: Rung) -> tuple[str, ...]:
    """("micro-batch 8 -> 4", ...)."""
    before, after = run.plan.recipe, below.plan.recipe
    found = [
        f"{name.replace('_', '-')} {getattr(before, name)} -> {getattr(after, name)}"
        for name in Recipe.__dataclass_fields__
        if getattr(before, name) != getattr(after, name)
    ]
    batches = eval_batch(before, run.settings), eval_batch(after, below.settings)
    if before == after and batches[0] != batches[1]:
        found.append(f"evaluation batch {batches[0]} -> {batches[1]}")
    if below.settings.lean_save and not run.settings.lean_save:
        found.append("gradients and cache given back before saving")
    return tuple(found)
