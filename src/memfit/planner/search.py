"""Search all sensible recipes with the requested effective batch for the fastest that fits."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from math import log

from memfit.closed_form.run.account import Account
from memfit.closed_form.run.estimate import ROUNDING_SHARE, closed_form, estimate, reserved_of
from memfit.nouns.footprint import Footprint
from memfit.nouns.job import Job, Recipe
from memfit.nouns.plan import Judgement, judge, verdict_of
from memfit.planner.cost import step_time
from memfit.planner.host_memory import judged
from memfit.planner.rungs import backend_precision
from memfit.tables import combinations
from memfit.tables.optimizers import optimizer
from memfit.tables.trainers import trainer

NEAR = 1.35  # recipes whose quick estimate is below this share of the card are worth a replay


@dataclass(frozen=True, slots=True)
class Candidate:
    """A recipe with its quick estimate."""

    recipe: Recipe
    judgement: Judgement
    seconds: float  # roofline time of one optimizer step


Known = Mapping[Recipe, tuple[Footprint, Judgement]]


class Estimator:
    """Estimates recipes of one job and caches the results; `known` recipes have traced ones."""

    def __init__(self, job: Job, known: Known | None = None) -> None:
        self.job, self._known = job, known or {}
        self._host_counts = bool(job.host_memory or job.gpu.pool_bytes)
        self._full: dict[tuple[Recipe, bool], Footprint] = {}

    def possible(self, recipe: Recipe) -> bool:
        """Return whether the combination is possible on this model and card."""
        return combinations.refusal(recipe, self.job.architecture, self.job.gpu) is None

    def quick(self, recipe: Recipe) -> Candidate:
        """Estimate the training step alone by the closed form, in about 100 microseconds."""
        account = Account(self.job.architecture, recipe, self.job.gpu)
        worst = closed_form(account)
        nccl = account.share.nccl
        need = reserved_of(account, worst) + nccl
        tensors = worst.requested + int(ROUNDING_SHARE * worst.requested) + nccl
        found = verdict_of(need, tensors, self.job.gpu.usable_bytes(self.job.reserve))
        found = self._known[recipe][1] if recipe in self._known else found
        found = self.with_host(recipe, found) if self._host_counts else found
        seconds = step_time(self.job.architecture, recipe, self.job.gpu, account.static).total
        return Candidate(recipe, found, seconds)

    def footprint(self, recipe: Recipe, replay: bool) -> Footprint:
        """Estimate all phases, with a replay of the allocator if `replay`."""
        key = (recipe, replay)
        if key not in self._full:
            self._full[key] = estimate(self.job.architecture, recipe, self.job.gpu, replay=replay)
        return self._full[key]

    def shown(self, recipe: Recipe, exact: bool = False) -> tuple[Footprint, Judgement]:
        """Return the footprint and judgement to print, replayed if the verdict could depend on that, or if `exact`."""
        if recipe in self._known:
            footprint, found = self._known[recipe]
            return footprint, self.with_host(recipe, found)
        quick = self.footprint(recipe, replay=False)
        found = judge(quick, self.job.gpu, self.job.reserve)
        if exact or found.need <= NEAR * found.usable:
            quick = self.footprint(recipe, replay=True)
            found = judge(quick, self.job.gpu, self.job.reserve)
        return quick, self.with_host(recipe, found)

    def with_host(self, recipe: Recipe, found: Judgement) -> Judgement:
        """Return the judgement of a recipe on the card with that of the job's host RAM."""
        job = self.job
        return judged(found, job.architecture, recipe, job.gpu, given=job.host_memory, workers=job.workers)

    def seconds(self, recipe: Recipe) -> float:
        """Return the roofline's seconds for one optimizer step."""
        return self.quick(recipe).seconds


def splits(per_gpu: int) -> list[int]:
    """Return the micro-batches that divide a batch evenly, largest first."""
    return [b for b in range(per_gpu, 0, -1) if per_gpu % b == 0]


def candidates(job: Job, rung: Recipe, estimator: Estimator) -> Iterator[Recipe]:
    """Yield the recipes that learn the same as `rung` at no higher cost in quality."""
    wanted = dict(job.wanted)
    per_gpu = max(job.effective_batch // rung.num_gpus, 1)
    batches = [wanted["micro_batch"]] if "micro_batch" in wanted else splits(per_gpu)

    def options(name: str, values: Iterable[str]) -> list[str]:
        return [wanted[name]] if name in wanted else list(dict.fromkeys([*values, getattr(rung, name)]))

    checkpointing = options("checkpointing", ("none", "full"))
    # only another implementation of AdamW takes the same steps
    same = "adamw" in rung.optimizer and not optimizer(rung.optimizer).in_backward
    optimizers = options("optimizer", ("adamw",) if same else ())
    losses = [rung.loss] if trainer(rung.trainer).one_loss else options("loss", ("fused", "full"))
    attention = options("attention", ("sdpa",))
    shards = options("shard", ("none", "optimizer", "gradients", "parameters")) if rung.num_gpus > 1 else [rung.shard]
    for batch, c, o, loss, at, shard in product(batches, checkpointing, optimizers, losses, attention, shards):
        other = rung.but(
            micro_batch=batch, accumulation=wanted.get("accumulation", max(per_gpu // batch, 1)), checkpointing=c,
            optimizer=o, loss=loss, attention=at, shard=shard,
        )  # fmt: skip
        recipe = backend_precision(other, job)
        if estimator.possible(recipe):
            yield recipe


def ranked(job: Job, rung: Recipe, estimator: Estimator) -> tuple[list[Candidate], list[Candidate]]:
    """Return the candidates that may fit and those that cannot, each fastest first."""
    found = [estimator.quick(recipe) for recipe in candidates(job, rung, estimator)]
    found.sort(key=_preference)
    fitting = [c for c in found if c.judgement.verdict != "misfit"]
    return fitting, [c for c in found if c.judgement.verdict == "misfit"]


SAME_SPEED = 1.02  # the roofline does not resolve smaller ratios of times


def _preference(c: Candidate) -> tuple[float, bool, bool, int, int]:
    """Return the sort key: fastest, then unsharded, then fused AdamW, then larger micro-batch, then smaller need."""
    speed = round(log(max(c.seconds, 1e-9)) / log(SAME_SPEED))
    r = c.recipe
    return speed, r.shard != "none", r.optimizer != "adamw", -r.micro_batch, c.judgement.need


TRIES = 16  # replayed values between the closed form's largest and the recipe's own


def largest(estimator: Estimator, recipe: Recipe, name: str, limit: int) -> int:
    """Return the largest value of a field that fits, the rest unchanged, by doubling and bisection; 0: none fits."""

    # if only the replay found that the recipe fits, the closed form would refuse every value
    replayed = estimator.quick(recipe).judgement.verdict != "fits"

    def fits(value: int, exact: bool = replayed) -> bool:
        changed = recipe.but(**{name: value})
        if not estimator.possible(changed):
            return False
        judgement = estimator.shown(changed, exact=True)[1] if exact else estimator.quick(changed).judgement
        return judgement.verdict == "fits"

    step = 64 if name == "sequence_length" else 1
    low, high = 0, step
    while high <= limit and fits(high):
        low, high = high, high * 2
    high = min(high, limit + step)
    while high - low > step:
        middle = (low + high) // 2 // step * step
        low, high = (middle, high) if fits(middle) else (low, middle)
    sure, first = getattr(recipe, name), low
    # the closed form does not include what the allocator keeps beyond the tensors
    while not replayed and low > sure and not fits(low, exact=True):
        low = max(sure, low - max(step, first // TRIES // step * step))
    return low
