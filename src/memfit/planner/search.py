"""Search everything a job may choose: the fastest recipe of the highest class of what is learned that fits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from itertools import islice, product
from math import log
from typing import Protocol

from memfit.closed_form.host_memory import CARDS_PER_NODE, with_host
from memfit.closed_form.run.account import Account
from memfit.closed_form.run.estimate import ROUNDING_SHARE, closed_form, estimate, reserved_of
from memfit.closed_form.task_runs import counted
from memfit.errors import Unsupported
from memfit.nouns.architecture import LANGUAGE
from memfit.nouns.footprint import Footprint
from memfit.nouns.job import Job, Recipe
from memfit.nouns.plan import Judgement, judge, verdict_of
from memfit.planner.cost import step_time
from memfit.planner.rungs import LEARNED, ORDER, STEPS, already, backend_precision, sequences_each, taken
from memfit.tables import combinations
from memfit.tables.loading import choices
from memfit.tables.optimizers import optimizer
from memfit.tables.tasks import TASKS
from memfit.tables.trainers import trainer

NEAR = 1.35  # recipes whose quick estimate is below this share of the card are worth a replay
CONFIRMED = 6  # how many of a class's fastest candidates are replayed before its leanest is taken
CLOSEST = 3  # how many candidates are replayed to find the closest where nothing fits
LEANEST = 2  # how many of a class's leanest candidates are replayed before it is given up
SAME_SPEED = 1.02  # the roofline does not resolve smaller ratios of times


@dataclass(frozen=True, slots=True)
class Candidate:
    """A recipe with its quick estimate."""

    recipe: Recipe
    judgement: Judgement
    seconds: float  # roofline time of one optimizer step
    hopeless: bool = False  # its tensors alone are more than the card has, whatever a replay of the allocator says
    at_least: bool = False  # the judgement is on weights, gradients and states alone


Known = Mapping[Recipe, tuple[Footprint, Judgement]]
Writable = Callable[[Recipe], bool]


class Estimates(Protocol):
    """What the planner asks of recipes of a job, by formula (`Estimator`) or by trace (`planner.traced`)."""

    job: Job

    @property
    def usable(self) -> int: ...
    def possible(self, recipe: Recipe) -> bool: ...
    def quick(self, recipe: Recipe) -> Candidate: ...
    def footprint(self, recipe: Recipe, replay: bool, at_capacity: bool = True) -> Footprint: ...
    def replayed(self, recipe: Recipe) -> Footprint | None: ...
    def shown(self, recipe: Recipe, exact: bool = False) -> tuple[Footprint, Judgement]: ...
    def with_host(self, recipe: Recipe, found: Judgement) -> Judgement: ...
    def seconds(self, recipe: Recipe) -> float: ...


class Estimator:
    """Estimates recipes of one job and caches the results; `known` recipes have traced ones.

    `writable` returns whether the files that are to be written can express a recipe.
    """

    def __init__(self, job: Job, known: Known | None = None, writable: Writable | None = None) -> None:
        self.job, self._known = job, known or {}
        self._host_counts = bool(job.host_memory or job.gpu.pool_bytes)
        self.writable = lru_cache(maxsize=None)(writable or (lambda recipe: True))
        self._full: dict[tuple[Recipe, bool, bool], Footprint] = {}
        self._quick: dict[Recipe, Candidate] = {}

    def possible(self, recipe: Recipe) -> bool:
        """Return whether the combination is possible on this model and card."""
        enough = recipe.micro_batch >= TASKS[self.job.task].least
        enough = enough and counted(recipe)
        return enough and combinations.refusal(recipe, self.job.architecture, self.job.gpu) is None

    def quick(self, recipe: Recipe) -> Candidate:
        """Estimate loading, the training step and saving by the closed form, in about 100 microseconds."""
        if recipe not in self._quick:
            self._quick[recipe] = self._estimated(recipe)
        return self._quick[recipe]

    def _estimated(self, recipe: Recipe) -> Candidate:
        account = Account(self.job.architecture, recipe, self.job.gpu)
        seconds = step_time(self.job.architecture, recipe, self.job.gpu, account.static).total
        if recipe in self._known:
            return Candidate(recipe, self._hosted(recipe, self._known[recipe][1]), seconds)
        step, still = closed_form(account), max(account.load().requested, account.save().requested)
        nccl = account.share.nccl
        tensors = max(step.requested, still)
        tensors += int(ROUNDING_SHARE * tensors)
        need = max(reserved_of(account, step), tensors)
        hopeless = verdict_of(tensors + nccl, tensors + nccl, self.usable).verdict == "misfit"
        found = self._hosted(recipe, verdict_of(need + nccl, tensors + nccl, self.usable))
        return Candidate(recipe, found, seconds, hopeless or bool(found.host_over))

    def _hosted(self, recipe: Recipe, found: Judgement) -> Judgement:
        """Return the judgement with that of the host RAM where one is possible; a search needs no more."""
        return self.with_host(recipe, found) if self._host_counts else found

    @property
    def usable(self) -> int:
        """Return the bytes of the card that PyTorch's allocator may take."""
        return self.job.gpu.usable_bytes(self.job.reserve)

    def footprint(self, recipe: Recipe, replay: bool, at_capacity: bool = True) -> Footprint:
        """Estimate all phases, with a replay of the allocator if `replay`, and on the card's own bytes too."""
        key, j = (recipe, replay, at_capacity), self.job
        if key not in self._full:
            self._full[key] = estimate(
                j.architecture, recipe, j.gpu, replay=replay, reserve=j.reserve, at_capacity=at_capacity
            )
        return self._full[key]

    def replayed(self, recipe: Recipe) -> Footprint | None:
        """Return the footprint by a replay on the card, if one was made."""
        return self._full.get((recipe, True, True))

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
        return with_host(found, job.architecture, recipe, job.gpu, given=job.host_memory, workers=job.workers)

    def seconds(self, recipe: Recipe) -> float:
        """Return the roofline's seconds for one optimizer step."""
        return self.quick(recipe).seconds


# ---- the lattice: what a job may choose ------------------------------------------------------------------------------


def classes(job: Job, start: Recipe) -> list[Recipe]:
    """Return one recipe of each class of what is learned, best first; what the user set stays in all of them."""
    wanted = dict(job.wanted)
    method = wanted.get("method", job.method)
    found: dict[Recipe, None] = {}
    for keys in LEARNED:
        recipe = start.but(shard="none") if "shard" not in dict(job.wanted) else start
        for key in keys:
            if not already(STEPS[key], recipe):
                recipe = taken(STEPS[key], recipe, job)
        if method not in ("auto", recipe.method) or (recipe.method == "full" and "adapter" in wanted):
            continue
        if recipe.offload == "none" or job.architecture.trained_for == LANGUAGE:  # others were not compared
            found[recipe] = None
    return list(found)


def counts(kind: Recipe, batch: int, near: Sequence[Candidate]) -> Iterator[int]:
    """Yield how many of the cards a run may use: all of them, else one, which needs no buckets and no NCCL buffers.

    Where what was found so far (`near`) needs more host RAM than a node has, which every card's process adds to, also
    the counts between, those first that divide the effective batch.
    """
    yield kind.num_gpus
    if kind.num_gpus == 1 or kind.context_parallel > 1:
        return
    if any(c.judgement.host_over for c in near):
        between = range(min(kind.num_gpus - 1, CARDS_PER_NODE), 1, -1)
        yield from sorted(between, key=lambda n: batch % n != 0)
    yield 1


def splits(per_gpu: int, least: int = 1) -> list[int]:
    """Return the micro-batches of at least so many that divide a batch evenly, smallest first."""
    return [b for b in range(least, per_gpu + 1) if per_gpu % b == 0] or [least]


def members(
    job: Job, kind: Recipe, count: int, checkpointing: Iterable[str], estimator: Estimator, lean: bool = False
) -> Iterator[Recipe]:
    """Yield the recipes on `count` cards that learn the same as `kind` at no higher cost in quality.

    `lean`: only those with the smallest micro-batch and the smallest loss that is possible.
    """
    wanted = dict(job.wanted)
    per_gpu = sequences_each(job, kind.but(num_gpus=count))
    if "micro_batch" in wanted:
        batches = [wanted["micro_batch"]]
    elif "accumulation" in wanted:
        batches = [max(per_gpu // wanted["accumulation"], 1)]
    else:
        batches = splits(per_gpu, TASKS[job.task].least)[: 1 if lean else None]

    def options(name: str, values: Iterable[str]) -> list[str]:
        return [wanted[name]] if name in wanted else list(dict.fromkeys([*values, getattr(kind, name)]))

    fixed = trainer(kind.trainer).one_loss or job.architecture.trained_for != LANGUAGE
    losses = [kind.loss] if fixed else options("loss", ("fused", "full"))
    several = ("none", "optimizer", "gradients", "parameters") if count > 1 else ()
    shards = options("shard", several) if count > 1 or "shard" in wanted else ["none"]
    kept = [wanted["checkpointing"]] if "checkpointing" in wanted else list(checkpointing)
    kept = [max(kept, key=ORDER["checkpointing"].index)] if lean else kept
    quantised = ("auto", "host") if kind.method == "qlora" else ("auto",)
    for shard, attention, way in product(shards, options("attention", ("sdpa",)), options("loading", quantised)):
        placed = kind.but(num_gpus=count, shard=shard, attention=attention, loading=way)
        without_choice = way != "auto" and not choices(placed)
        if without_choice and ("loading" not in wanted or len(shards) > 1):
            continue  # what the user set stays where no way of sharding gives it an effect
        for optimizer_key, saved, batch in product(_optimizers(job, placed, lean), kept, batches):
            for loss in losses:
                recipe = backend_precision(placed.but(
                    optimizer=optimizer_key, loss=loss, checkpointing=saved, micro_batch=batch,
                    accumulation=wanted.get("accumulation", max(per_gpu // batch, 1)),
                ), job)  # fmt: skip
                if estimator.possible(recipe):
                    yield recipe
                    if lean:
                        break


def _optimizers(job: Job, recipe: Recipe, lean: bool) -> list[str]:
    """Return the implementations of the recipe's optimizer that take the same steps."""
    key = recipe.optimizer
    if "optimizer" in dict(job.wanted):
        return [key]
    if key == "adamw-8bit" and recipe.shard == "parameters":
        return ["adamw-8bit-torchao"]
    same = "adamw" in key and not optimizer(key).in_backward and not optimizer(key).block
    return list(dict.fromkeys(["adamw", key])) if same and not lean else [key]


# ---- the search ------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Found:
    """The recipe a search settled on, and the candidates it passed over with their judgements."""

    recipe: Recipe
    judgement: Judgement
    passed: list[Candidate] = field(default_factory=list)
    on_all_cards: Found | None = None  # where this recipe uses fewer cards than the job has


def search(job: Job, start: Recipe, estimator: Estimator, tell: Callable[[float], None] = lambda share: None) -> Found:
    """Return the fastest recipe of the highest class that fits, else the first that is tight, else the closest.

    A recipe that leaves cards idle is taken only where none on all cards trains as much of the model as fast; the best
    on all cards is kept beside it. Raises BadInput with the reason if no recipe is possible at all, or the
    recipe of a file is not.
    """
    if job.stated:
        combinations.check(start, job.architecture, job.gpu)
    found = _searched(job, start, estimator, tell, fewer=True)
    if found is None:
        combinations.check(start, job.architecture, job.gpu)
        raise Unsupported("the files to write cannot express any recipe of this job", hint="another --target")
    if found.recipe.num_gpus == start.num_gpus:
        return found
    whole = _searched(job, start, estimator, tell, fewer=False)
    if whole and _does_as_well(whole, found, estimator):
        return whole
    return replace(found, on_all_cards=whole)


def _does_as_well(whole: Found, found: Found, estimator: Estimator) -> bool:
    """Return whether a recipe on all cards trains as much of the model as one on fewer, and no slower."""
    if whole.judgement.verdict != found.judgement.verdict:
        return False
    if found.judgement.verdict != "fits":
        return True
    method, (all_cards, fewer) = ORDER["method"].index, (whole.recipe, found.recipe)
    as_fast = estimator.seconds(all_cards) <= estimator.seconds(fewer)
    return as_fast and method(all_cards.method) <= method(fewer.method)


def _searched(
    job: Job, start: Recipe, estimator: Estimator, tell: Callable[[float], None], fewer: bool
) -> Found | None:
    """Search the recipes on all cards, and if `fewer`, those that leave cards idle; None if none is possible."""
    near: list[Candidate] = []
    passed: list[Candidate] = []
    kinds = classes(job, start)
    for done, kind in enumerate(kinds):
        tell(done / len(kinds))
        lean: list[Candidate] = []
        numbers = counts(kind, job.effective_batch, lean) if fewer else [kind.num_gpus]
        for count, tier in ((n, t) for n in numbers for t in _tiers(kind)):
            lean += _leanest(members(job, kind, count, tier, estimator, lean=True), estimator)
            if lean and lean[-1].judgement.verdict == "fits":
                every = members(job, kind, count, tier, estimator)
                found = _fastest(every, lean[-1], estimator, passed, start if job.stated else None)
                if found.judgement.verdict == "fits":
                    return found
                lean[-1] = Candidate(found.recipe, found.judgement, lean[-1].seconds)
        near += lean
        passed += sorted(lean, key=_order)[:1]
    return _closest(near, passed, estimator) if near else None


def _closest(near: list[Candidate], passed: list[Candidate], estimator: Estimator) -> Found:
    """Return the first tight recipe, else the one that needs least by replay."""
    best = min(near, key=_order)
    if best.judgement.verdict != "tight":
        few = sorted(near, key=_order)[:CLOSEST]
        best = min((replace(c, judgement=estimator.shown(c.recipe, exact=True)[1]) for c in few), key=_order)
    return Found(best.recipe, best.judgement, [c for c in passed if c.recipe != best.recipe])


def _tiers(kind: Recipe) -> tuple[tuple[str, ...], ...]:
    """Return the ways to keep activations: checkpoints go to the host only where they do not fit the card."""
    usual = tuple(dict.fromkeys(("none", "full", kind.checkpointing)))
    return usual, ("offload",)


def _leanest(found: Iterable[Recipe], estimator: Estimator) -> list[Candidate]:
    """Return the candidates that need least, the last one judged by a replay where the verdict depends on that.

    The second is looked at only if it would fit with the closed form as far off as it was at the first.
    """
    best: list[Candidate] = []
    off = 0.0
    possible = filter(estimator.writable, found)
    for candidate in sorted(map(estimator.quick, possible), key=lambda c: c.judgement.need)[:LEANEST]:
        need = candidate.judgement.need
        if best and verdict_of(int(need * off), 0, estimator.usable).verdict != "fits":
            break
        if candidate.judgement.verdict != "fits" and not candidate.hopeless:
            candidate = replace(candidate, judgement=estimator.shown(candidate.recipe)[1])
        off = candidate.judgement.need / need
        best.append(candidate)
        if candidate.judgement.verdict == "fits":
            break
    return best


def _order(found: Candidate) -> tuple[bool, int, int]:
    """Return the sort key of what does not fit: the first tight recipe, then the fewest bytes short, then the need."""
    judgement = found.judgement
    if judgement.verdict == "tight":
        return False, 0, 0
    return True, max(-judgement.headroom, 0) + judgement.host_over, judgement.need


def _fastest(
    every: Iterable[Recipe], lean: Candidate, estimator: Estimator, passed: list[Candidate], start: Recipe | None
) -> Found:
    """Return the fastest of a class's recipes that fits by replay, else `lean`; what it passes over follows `passed`.

    Of equally fast recipes the one nearest to `start` is taken, which is a file's recipe, if there is one.
    """
    key = partial(_preference, start=start)
    quick = sorted(_until_hopeless(every, estimator), key=key)
    faster = [c for c in quick if key(c) < key(lean)]
    hopeful = [c for c in faster if c.judgement.verdict != "misfit"]
    failed = sorted((c for c in faster if c.judgement.verdict == "misfit"), key=lambda c: c.judgement.need)
    refused: list[Candidate] = []
    chosen = lean.recipe
    writable = (c for c in hopeful if estimator.writable(c.recipe))
    for candidate in islice(writable, CONFIRMED):
        _, judgement = estimator.shown(candidate.recipe, exact=True)
        if judgement.verdict == "fits":
            chosen = candidate.recipe
            break
        refused.append(Candidate(candidate.recipe, judgement, candidate.seconds))
    limit = estimator.seconds(chosen)
    refused += [c for c in failed if c.seconds < limit]
    return Found(chosen, estimator.shown(chosen, exact=True)[1], [*passed, *refused])


def _until_hopeless(every: Iterable[Recipe], estimator: Estimator) -> Iterator[Candidate]:
    """Yield quick estimates, for rising micro-batches no further than the first that cannot fit."""
    dead: set[Recipe] = set()
    for recipe in every:
        key = recipe.but(micro_batch=1, accumulation=1)
        if key not in dead:
            candidate = estimator.quick(recipe)
            if candidate.hopeless:
                dead.add(key)
            yield candidate


def _preference(c: Candidate, start: Recipe | None = None) -> tuple[float, int, bool, bool, bool, int, int]:
    """Return the sort key: fastest, nearest to `start`, unsharded, loaded as usual, fused AdamW, larger batch, less."""
    speed = round(log(max(c.seconds, 1e-9)) / log(SAME_SPEED))
    r = c.recipe
    changed = sum(getattr(r, name) != getattr(start, name) for name in r.__dataclass_fields__) if start else 0
    unusual = r.loading != "auto"
    return speed, changed, r.shard != "none", unusual, r.optimizer != "adamw", -r.micro_batch, c.judgement.need


def ranked(job: Job, rung: Recipe, estimator: Estimator) -> tuple[list[Candidate], list[Candidate]]:
    """Return the recipes of a rung's class that may fit and those that cannot, each fastest first."""
    tier = dict.fromkeys(("none", "full", rung.checkpointing))
    found = sorted(map(estimator.quick, members(job, rung, rung.num_gpus, tier, estimator)), key=_preference)
    fitting = [c for c in found if c.judgement.verdict != "misfit"]
    return fitting, [c for c in found if c.judgement.verdict == "misfit"]


TRIES = 6  # replays of a largest value before the recipe's own is said to be the largest
BY_LINE = 3  # how many of them follow the line, before those that halve the distance to the recipe's own


def largest(estimator: Estimates, recipe: Recipe, name: str, limit: int) -> int:
    """Return the largest value of a field that fits by replay, the rest unchanged; 0: none fits.

    The closed form is bisected, corrected by a line through the last two replays, the first through the origin.
    """
    step, own = 64 if name == "sequence_length" else 1, getattr(recipe, name)
    exact = estimator.shown(recipe, exact=True)[1]
    quick, needed = estimator.quick(recipe).judgement.need, _unlimited(estimator, recipe).need
    slope = needed / quick

    def fits(value: int) -> bool:
        changed = recipe.but(**{name: value})
        if not estimator.possible(changed):
            return False
        need = needed + slope * (estimator.quick(changed).judgement.need - quick)
        return verdict_of(int(need), 0, estimator.usable).verdict == "fits"

    found = _bisected(fits, step, limit)
    for tried in range(1, TRIES + 1):
        if found <= own:
            break
        changed = recipe.but(**{name: found})
        judgement = _unlimited(estimator, changed)
        if judgement.verdict == "fits":
            return found
        more = estimator.quick(changed).judgement.need - quick
        slope = max((judgement.need - needed) / more if more else slope, slope)
        nearer = _bisected(fits, step, found - step)
        halved = nearer <= own or judgement.host_over > 0 or tried >= BY_LINE  # the line knows the card alone
        found = (own + found) // 2 // step * step if halved else nearer
    return own if exact.verdict == "fits" else 0


def _unlimited(estimator: Estimates, recipe: Recipe) -> Judgement:
    """Return the judgement by a replay without a limit, which fits only where a replay on the card fits too."""
    known = estimator.replayed(recipe)
    footprint = known or estimator.footprint(recipe, True, at_capacity=False)
    found = judge(footprint, estimator.job.gpu, estimator.job.reserve)
    if footprint.on_card is not None:
        nccl = found.need - footprint.peak.levels.reserved
        found = replace(found, need=max(found.need, footprint.on_card.unlimited + nccl))
    return estimator.with_host(recipe, found)


def _bisected(fits: Callable[[int], bool], step: int, limit: int) -> int:
    """Return the largest multiple of `step` up to `limit` that fits, by doubling and bisection; 0: none."""
    low, high = 0, step
    while high <= limit and fits(high):
        low, high = high, high * 2
    high = min(high, limit + step)
    while high - low > step:
        middle = (low + high) // 2 // step * step
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
