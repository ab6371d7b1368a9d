"""Estimating candidates: quickly for a search, through the allocator for those that are shown as the answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from memfit.closed_form.run.account import Account
from memfit.closed_form.run.estimate import ROUNDING_SHARE, closed_form, estimate, reserved_of
from memfit.nouns.footprint import Footprint
from memfit.nouns.job import Job, Recipe
from memfit.nouns.plan import Judgement, judge, verdict_of
from memfit.planner.cost import step_time
from memfit.tables import combinations

NEAR = 1.35  # recipes whose quick estimate is below this share of the card are worth a replay


@dataclass(frozen=True, slots=True)
class Candidate:
    """A recipe with its quick estimate."""

    recipe: Recipe
    judgement: Judgement
    seconds: float  # of one optimizer step


Known = Mapping[Recipe, tuple[Footprint, Judgement]]


class Estimator:
    """Remembers what it has estimated for one job; of `known` recipes a trace has told more."""

    def __init__(self, job: Job, known: Known | None = None) -> None:
        self.job, self._known = job, known or {}
        self._full: dict[tuple[Recipe, bool], Footprint] = {}

    def possible(self, recipe: Recipe) -> bool:
        """The combination makes sense on this model and card."""
        return combinations.refusal(recipe, self.job.architecture, self.job.gpu) is None

    def quick(self, recipe: Recipe) -> Candidate:
        """Closed form of the training step alone; about 100 microseconds."""
        account = Account(self.job.architecture, recipe, self.job.gpu)
        worst = closed_form(account)
        nccl = account.share.nccl
        need = reserved_of(account, worst) + nccl
        tensors = worst.requested + int(ROUNDING_SHARE * worst.requested) + nccl
        found = verdict_of(need, tensors, self.job.gpu.usable_bytes(self.job.reserve))
        found = self._known[recipe][1] if recipe in self._known else found
        seconds = step_time(self.job.architecture, recipe, self.job.gpu, account.static).total
        return Candidate(recipe, found, seconds)

    def footprint(self, recipe: Recipe, replay: bool) -> Footprint:
        """All phases; with a replay when asked."""
        key = (recipe, replay)
        if key not in self._full:
            self._full[key] = estimate(self.job.architecture, recipe, self.job.gpu, replay=replay)
        return self._full[key]

    def shown(self, recipe: Recipe, exact: bool = False) -> tuple[Footprint, Judgement]:
        """What is printed for a recipe: replayed when the answer could depend on it, or where it must be `exact`."""
        if recipe in self._known:
            return self._known[recipe]
        quick = self.footprint(recipe, replay=False)
        found = judge(quick, self.job.gpu, self.job.reserve)
        if exact or found.need <= NEAR * found.usable:
            quick = self.footprint(recipe, replay=True)
            found = judge(quick, self.job.gpu, self.job.reserve)
        return quick, found

    def host_bytes(self, recipe: Recipe) -> int:
        """Bytes that offloading keeps in host memory, over all processes."""
        if recipe.offload == "none":
            return 0
        s = Account(self.job.architecture, recipe, self.job.gpu).static
        weights = s.base + s.adapter if recipe.offload == "parameters" else 0
        return s.states + s.master + s.gradients + weights

    def seconds(self, recipe: Recipe) -> float:
        """Roofline seconds of one optimizer step."""
        return self.quick(recipe).seconds
