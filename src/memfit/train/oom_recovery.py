"""Choose the changes for the next attempt by the stage in which memory ran out; a new way is a function in WAYS."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from memfit.closed_form.task_runs import by_formula
from memfit.frameworks.process_layout import backend
from memfit.frameworks.script import missing
from memfit.nouns.job import Recipe
from memfit.nouns.plan import Plan
from memfit.planner.next_lower_recipe import STORED, down
from memfit.tables.tasks import TASKS
from memfit.train.folder import Run, target_of
from memfit.train.outcome import Settings, Shortage, Stage


@dataclass(frozen=True, slots=True)
class NextAttempt:
    """The plan and settings of the next attempt."""

    plan: Plan
    settings: Settings


Way = Callable[[Run, Shortage], NextAttempt | None]  # None: this way has nothing left to change


def lower(run: Run, shortage: Shortage) -> NextAttempt | None:
    """Return the next attempt by the first way of the failed stage that still has one, else None."""
    return next(filter(None, (way(run, shortage) for way in WAYS[shortage.stage])), None)


def smaller_evaluation(run: Run, shortage: Shortage) -> NextAttempt | None:
    """Evaluate at most half as many samples at a time; training does not change."""
    plan, settings = run.plan, run.settings
    now = eval_batch(plan.recipe, settings)
    fits = now >> (1 + _in_vain(run, shortage))
    needed, room = shortage.held + shortage.asked - shortage.began, shortage.limit - shortage.began
    if 0 < room < needed and shortage.began:
        fits = min(fits, now * room // needed)
    return NextAttempt(plan, replace(settings, eval_batch=max(fits, 1))) if now > 1 else None


def lean_save(run: Run, shortage: Shortage) -> NextAttempt | None:
    """Free gradients and cached blocks before saving, where another recipe would not help."""
    plan, settings = run.plan, run.settings
    return None if settings.lean_save else NextAttempt(plan, replace(settings, lean_save=True))


def smaller_recipe(run: Run, shortage: Shortage) -> NextAttempt | None:
    """Switch to a plan that needs less: first one that keeps the optimizer's states, then one that resets them."""
    plan, trained, cpu = run.plan, run.last_good() is not None, run.settings.cpu
    runs = _can_run(plan, cpu)
    own = () if TASKS[plan.job.task].language else ("loss", "padding")  # other tasks have their trainer's alone
    tiers = _tiers(plan.recipe, trained, cpu)
    if _in_batch_negatives(plan):  # which stay while anything else helps
        tiers = [*((*fixed, "micro_batch") for fixed in tiers), *tiers]
    for fixed in tiers:
        found = down(plan, shortage.short << _in_vain(run, shortage), (*fixed, *own), runs)
        if found is not None:
            return NextAttempt(found, run.settings)
    return None


def _in_batch_negatives(plan: Plan) -> bool:
    """Return whether each sample learns from the others of its micro-batch."""
    return TASKS[plan.job.task].sample == "anchor"


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
    """Return the batch size of evaluation: a micro-batch, or less once memory ran out there."""
    return min(settings.eval_batch or recipe.micro_batch, recipe.micro_batch)


def _in_vain(run: Run, shortage: Shortage) -> int:
    """Count earlier failures at the same step, as each shows only the bytes that its own allocation lacked."""
    return sum(1 for fall in run.falls if fall.shortage.step == shortage.step)


def _can_run(plan: Plan, cpu: bool) -> Callable[[Recipe], bool]:
    """Return a test that a recipe's packages are installed and that on a CPU it needs no card.

    Pinned memory, offloading and Liger's kernels need one.
    """
    now, target = plan.recipe, target_of(plan)

    def runs(recipe: Recipe) -> bool:
        if recipe.checkpointing == "offload" or recipe.offload not in ("none", now.offload):
            return False
        return not (target == "transformers" and recipe.loss == "fused" != now.loss)

    row, model = TASKS[plan.job.task], plan.job.architecture
    return lambda r: not missing(r, target) and by_formula(row, model, r) and (not cpu or runs(r))


def _tiers(recipe: Recipe, trained: bool, cpu: bool) -> list[tuple[str, ...]]:
    """Return sets of recipe fields to keep, the most careful choice first.

    Sharding, offloading and precision decide the format of a checkpoint and change only before the first one. DeepSpeed
    keeps states and weights in one file, so after its first checkpoint the optimizer cannot change either.
    """
    tiers: list[tuple[str, ...]] = [("optimizer", *STORED)]
    restarts = not trained or backend(recipe) != "deepspeed"
    if restarts and recipe.optimizer.startswith("adamw"):
        tiers.append(STORED)
    return tiers if trained or cpu else [*tiers, ()]  # a CPU gains nothing by changing the stored fields


def changes(run: Run, below: NextAttempt) -> tuple[str, ...]:
    """Return the changes of the next attempt: ("micro-batch 8 -> 4", ...)."""
    before, after = run.plan.recipe, below.plan.recipe
    found = [
        f"{name.replace('_', '-')} {getattr(before, name)} -> {getattr(after, name)}"
        for name in Recipe.__dataclass_fields__
        if getattr(before, name) != getattr(after, name)
    ]
    if before.micro_batch != after.micro_batch and _in_batch_negatives(run.plan):
        found.append("as many negatives for each pair as the new micro-batch has")
    batches = eval_batch(before, run.settings), eval_batch(after, below.settings)
    if before == after and batches[0] != batches[1]:
        found.append(f"evaluation batch {batches[0]} -> {batches[1]}")
    if below.settings.lean_save and not run.settings.lean_save:
        found.append("gradients and cache given back before saving")
    return tuple(found)
