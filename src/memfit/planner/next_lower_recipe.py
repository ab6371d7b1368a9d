"""Find the next recipe below one that ran out of memory: it learns the same, in the same steps, with less memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields, replace

from memfit.closed_form.run.account import Account
from memfit.closed_form.run.estimate import closed_form
from memfit.nouns.job import Job, Recipe
from memfit.nouns.plan import Plan
from memfit.planner import techniques
from memfit.planner.search import Estimator, ranked

# fields that decide what is learned, from which data and in which steps: a step down never changes them
LEARNED = (
    "method", "quantization", "adapter", "lora_rank", "lora_alpha", "lora_dropout", "lora_targets",
    "modules_to_save", "sequence_length",
    "padding", "num_gpus", "fsdp_version", "context_parallel", "trainer", "zero_conf",
)  # fmt: skip
# fields that decide the format of a checkpoint: changed only while there is none
STORED = ("precision", "offload", "shard")


def down(
    plan: Plan, shortfall: int, fixed: Iterable[str] = (), runs: Callable[[Recipe], bool] = lambda recipe: True
) -> Plan | None:
    """Return the plan of a recipe that needs `shortfall` bytes of tensors less, None if no recipe needs less.

    The search climbs the ladder from the plan's own recipe and keeps its effective batch. It returns the first recipe,
    rung by rung and fastest first, whose tensors need that much less, else the one that needs least. `fixed` names
    further fields to keep beside LEARNED; `runs` returns whether the machine can run a recipe.
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
    """Return the plan's job as if a file had set every field, so that the ladder starts at its recipe."""
    recipe = plan.recipe
    return replace(
        plan.job, method=recipe.method, effective_batch=recipe.effective_batch, sequence_length=recipe.sequence_length,
        wanted=tuple((name, getattr(recipe, name)) for name in sorted(fixed)),
        stated=tuple(f.name for f in fields(Recipe)),
    )  # fmt: skip


def _further(job: Job, recipe: Recipe, estimator: Estimator) -> Iterator[Recipe]:
    """Yield the recipes of this rung and the later ones: in each rung first those that fit, each fastest first."""
    for rung in techniques(job, recipe):
        for group in ranked(job, rung.recipe, estimator):
            yield from (c.recipe for c in group if c.recipe.effective_batch == recipe.effective_batch)


def _with(plan: Plan, recipe: Recipe, estimator: Estimator) -> Plan:
    footprint, judgement = estimator.shown(recipe, exact=True)
    return replace(plan, recipe=recipe, footprint=footprint, judgement=judgement)
