"""One rung down from a recipe that ran out of memory: the same learning and steps in less memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields, replace

from memfit.closed_form.run.account import Account
from memfit.closed_form.run.estimate import closed_form
from memfit.nouns.job import Job, Recipe
from memfit.nouns.plan import Plan
from memfit.planner import techniques
from memfit.planner.search import Estimator, ranked

# what is learned, from what, in which steps: never changed by a step down
LEARNED = (
    "method", "quantization", "lora_rank", "lora_alpha", "lora_dropout", "lora_targets", "sequence_length", "padding",
    "num_gpus", "trainer",
)  # fmt: skip
# what checkpoints depend on: changed only where there is none yet
STORED = ("precision", "offload", "shard")


def down(
    plan: Plan, shortfall: int, fixed: Iterable[str] = (), runs: Callable[[Recipe], bool] = lambda recipe: True
) -> Plan | None:
    """Return the plan with its budget lowered by a measured shortfall (bytes of tensors), None where nothing needs
    less.

    The ladder is climbed on from the plan's own recipe, with the effective batch it has. Taken is the first recipe,
    rung by rung and fastest first, whose tensors need that much less; failing that the one which needs least. `fixed`
    names recipe fields that must stay beside LEARNED; `runs` says what the machine can run at all.
    """
    job = _job(plan, {*LEARNED, *fixed})
    estimator = Estimator(job)
    now = tensor_bytes(plan.job, plan.recipe)
    smallest: tuple[int, Recipe] | None = None
    for recipe in _further(job, plan.recipe, estimator):
        if not runs(recipe):
            continue
        size = tensor_bytes(plan.job, recipe)
        if size <= now - max(shortfall, 1):
            return _with(plan, recipe, estimator)
        if size < min(now, smallest[0] if smallest else now):
            smallest = size, recipe
    return _with(plan, smallest[1], estimator) if smallest else None


def tensor_bytes(job: Job, recipe: Recipe) -> int:
    """Return the tensor bytes at the worst instant of training, by formula."""
    return closed_form(Account(job.architecture, recipe, job.gpu)).requested


def _job(plan: Plan, fixed: set[str]) -> Job:
    """Return the plan's job as a file would state it, so that the ladder starts at its recipe."""
    recipe = plan.recipe
    return replace(
        plan.job, method=recipe.method, effective_batch=recipe.effective_batch, sequence_length=recipe.sequence_length,
        wanted=tuple((name, getattr(recipe, name)) for name in sorted(fixed)),
        stated=tuple(f.name for f in fields(Recipe)),
    )  # fmt: skip


def _further(job: Job, recipe: Recipe, estimator: Estimator) -> Iterator[Recipe]:
    """Yield every recipe on the rungs from this one on: those predicted to fit first, each fastest first."""
    for rung in techniques(job, recipe):
        for group in ranked(job, rung.recipe, estimator):
            yield from (c.recipe for c in group if c.recipe.effective_batch == recipe.effective_batch)


def _with(plan: Plan, recipe: Recipe, estimator: Estimator) -> Plan:
    footprint, judgement = estimator.shown(recipe, exact=True)
    return replace(plan, recipe=recipe, footprint=footprint, judgement=judgement)
