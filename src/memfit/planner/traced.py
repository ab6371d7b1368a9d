"""A plan by traces: an estimator that measures few recipes on a virtual card, and a search that needs few of them."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter

from memfit.errors import TRACE_HINT, BadInput, Unsupported
from memfit.nouns.footprint import Footprint
from memfit.nouns.gpu import Gpu
from memfit.nouns.job import Job, Recipe
from memfit.nouns.plan import Judgement, verdict_of
from memfit.planner.cost import BANDWIDTH_SHARE, LAUNCH_SECONDS, TRAINING_SHARE, UNKNOWN_BANDWIDTH, UNKNOWN_FLOPS
from memfit.planner.rungs import sequences_each
from memfit.planner.search import Candidate, Found, Writable, classes, splits
from memfit.tables import combinations
from memfit.tables.matmul_rates import fp32_share, half_share
from memfit.tables.optimizers import optimizer
from memfit.tables.precisions import BYTES, meaning
from memfit.tables.tasks import TASKS

# What stays the same whatever the batch, by role
_STILL = ("parameters", "gradients", "optimizer_states", "workspace", "context")
# Products of a backward pass against those of its forward pass: frozen weights need no gradients of their own
_BACKWARD = {"full": 2.0, "lora": 1.05, "qlora": 1.05}
FOUR_BITS = 0.5  # bytes of a quantised weight, without its scales
BACKWARD_KERNELS = 2  # launches of a backward pass against its forward's


@dataclass(frozen=True, slots=True)
class Work:
    """What one sample costs to compute, and the weights that do it."""

    flops: float  # of its forward passes, those of a reference model among them
    kernels: int  # launches of the forward passes of a micro-batch, whatever its size
    weights: int = 0  # elements of the model; 0: not counted
    trained: int = 0  # of them those that full fine-tuning trains
    sampled: int = 0  # tokens that are sampled one after another before a step, each from all the weights


Answer = tuple[Footprint, Judgement]
Measure = Callable[[Recipe], Answer]
Begin = Callable[[Recipe], Callable[[], Answer]]


@dataclass(slots=True)
class TracedEstimator:
    """Measures recipes, each once, and draws lines between those that differ in size alone.

    `begin` begins to measure one and returns what waits for its answer, so that several can be measured at a time;
    `busy` returns how many are being measured, without it all whose answers were not asked for.
    It answers as `planner.search.Estimator` does, which has formulas for the same. A recipe that the trainer refuses is
    impossible, and `refused` says why.
    """

    job: Job
    begin: Begin
    work: Work
    express: Writable | None = None
    busy: Callable[[], int] | None = None
    refused: dict[Recipe, BadInput] = field(default_factory=dict)
    _known: dict[Recipe, Answer] = field(default_factory=dict)
    _begun: dict[Recipe, Callable[[], Answer]] = field(default_factory=dict)

    def possible(self, recipe: Recipe) -> bool:
        """Return whether the combination is possible, as far as is known without running it."""
        impossible = combinations.refusal(recipe, self.job.architecture, self.job.gpu) is not None
        return not impossible and _kind(recipe) not in map(_kind, self.refused)

    def writable(self, recipe: Recipe) -> bool:
        """Return whether the files that are to be written can express a recipe."""
        return self.express is None or self.express(recipe)

    @property
    def usable(self) -> int:
        """Return the bytes of the card that PyTorch's allocator may take."""
        return self.job.gpu.usable_bytes(self.job.reserve)

    def elsewhere(self, gpu: Gpu, like: Recipe) -> Candidate | None:
        """Return the fastest recipe on another card, of those traced that learn the same as one; None where none fits.

        Its bytes are those traced on this card, and the verdict is without a replay at the other's capacity.
        """
        there = TracedEstimator(replace(self.job, gpu=gpu), self.begin, self.work, self.express)
        found = []
        for recipe, (footprint, _) in self._known.items():
            same = recipe.effective_batch == like.effective_batch and _learned(recipe) == _learned(like)
            if not same or recipe.sequence_length != like.sequence_length or not there.possible(recipe):
                continue
            levels = footprint.peak.levels
            nccl = max(levels.device - levels.reserved - self.job.gpu.context_bytes - footprint.peak.paged, 0)
            tensors = max(p.levels.allocated for p in footprint.needed)
            judgement = verdict_of(_unlimited(footprint) + nccl, tensors + nccl, there.usable)
            if judgement.verdict == "fits" and there.writable(recipe):
                found.append(Candidate(recipe, judgement, there.seconds(recipe)))
        return min(found, key=lambda c: c.seconds, default=None)

    def tried(self, recipe: Recipe) -> Judgement | None:
        """Return the judgement of a recipe; None if its trainer refuses it."""
        if not self.possible(recipe):
            return None
        try:
            return self.shown(recipe)[1]
        except (BadInput, Unsupported) as problem:  # of a trainer that cannot run this recipe of the job
            self.refused[recipe] = problem
            return None

    def ahead(self, *recipes: Recipe) -> None:
        """Begin to measure recipes whose answers will be asked for."""
        for recipe in recipes:
            if recipe not in self._known and recipe not in self._begun and self.possible(recipe):
                self._begun[recipe] = self.begin(recipe)

    @property
    def idle(self) -> bool:
        """Return whether a second recipe could be measured beside the one that is waited for."""
        return (self.busy() if self.busy else len(self._begun)) < 2

    def shown(self, recipe: Recipe, exact: bool = False) -> Answer:
        """Return the traced footprint and judgement of a recipe."""
        if recipe not in self._known:
            wait = self._begun.pop(recipe, None) or self.begin(recipe)
            self._known[recipe] = wait()
        return self._known[recipe]

    def footprint(self, recipe: Recipe, replay: bool, at_capacity: bool = True) -> Footprint:
        """Return the traced footprint, which was replayed with and without the card's limit."""
        return self.shown(recipe)[0]

    def replayed(self, recipe: Recipe) -> Footprint | None:
        """Return the footprint of a recipe that was traced."""
        return self._known[recipe][0] if recipe in self._known else None

    def with_host(self, recipe: Recipe, found: Judgement) -> Judgement:
        """Return the judgement as it is: a trace does not count host RAM."""
        return found

    def quick(self, recipe: Recipe) -> Candidate:
        """Return what was traced, or what lies on a line through the nearest recipes that differ in size alone."""
        if recipe in self._known:
            found = self._known[recipe][1]
            return Candidate(recipe, found, self.seconds(recipe), found.verdict == "misfit")
        need = self._by_line(recipe)
        return Candidate(recipe, verdict_of(need, need, self.usable), self.seconds(recipe))

    def at_least(self, recipe: Recipe) -> int:
        """Return the bytes of weights, and where all are trained of gradients and states: a run takes more."""
        stored, row = BYTES[meaning(recipe).stored], optimizer(recipe.optimizer)
        models = 2 if recipe.method == "full" and (TASKS[self.job.task].beside or self.job.shape.reference) else 1
        total = self.work.weights * (FOUR_BITS if recipe.method == "qlora" else stored) * models
        if recipe.method == "full":
            buckets = stored if recipe.num_gpus > 1 and recipe.shard == "none" else 0  # DDP's, beside gradients
            small = row.paged or row.factored or row.rank_of
            states = 0 if small else row.moments * (stored if row.width is None else row.width)
            total += self.work.trained * (states + (0 if row.in_backward else stored) + buckets)
        return int(total / (recipe.num_gpus if recipe.shard == "parameters" else 1))

    def far_over(self, recipe: Recipe, fits: Recipe) -> bool:
        """Return whether a larger micro-batch than one that fits is over the card, were half of its memory to grow."""
        footprint = self._known[fits][0]
        grown = (_unlimited(footprint) - _still(footprint)) * (_size(recipe) / _size(fits) - 1)
        return _unlimited(footprint) + grown / 2 > self.usable

    def bounded(self, recipe: Recipe) -> Candidate:
        """Return a recipe that was not traced, because its least bytes are more than the card has."""
        need = self.at_least(recipe)
        return Candidate(recipe, verdict_of(need, need, self.usable), self.seconds(recipe), True, at_least=True)

    def _by_line(self, recipe: Recipe) -> int:
        """Return the bytes that a recipe needs, by the traced recipes of its kind; 0 where there is none."""
        points = sorted(
            (_size(r), _unlimited(f), _still(f)) for r, (f, _) in self._known.items() if _kind(r) == _kind(recipe)
        )
        if not points:
            return 0
        size = _size(recipe)
        (x, y, still), *_ = points
        if len(points) > 1:
            near = sorted(points, key=lambda p: abs(p[0] - size))[:2]
            (x, y, _), (x2, y2, _) = sorted(near)
            return int(y + (size - x) * max(y2 - y, 0) / max(x2 - x, 1))
        return int(still + (y - still) * size / x)

    def seconds(self, recipe: Recipe) -> float:
        """Return the roofline's seconds for one optimizer step."""
        gpu = self.job.gpu
        rate = (gpu.half_flops or UNKNOWN_FLOPS) * half_share(gpu) * TRAINING_SHARE
        if BYTES[meaning(recipe).computed] == 4:
            rate *= fp32_share(gpu)
        share = recipe.sequence_length / self.job.sequence_length
        again = 0.0 if recipe.checkpointing == "none" else 1.0
        passes = 1 + _BACKWARD[recipe.method] + again
        forward = self.work.flops * share * recipe.micro_batch / rate
        launched = self.work.kernels * LAUNCH_SECONDS * (1 + BACKWARD_KERNELS + again)
        token = max(2 * self.work.weights / ((gpu.bandwidth or UNKNOWN_BANDWIDTH) * BANDWIDTH_SHARE),
                    self.work.kernels * LAUNCH_SECONDS)  # fmt: skip
        return recipe.accumulation * max(forward * passes, launched) + self.work.sampled * token


def _learned(recipe: Recipe) -> tuple[str, ...]:
    return recipe.method, recipe.precision, recipe.quantization, recipe.optimizer


def _kind(recipe: Recipe) -> Recipe:
    """Return a recipe without what only its size changes."""
    return recipe.but(micro_batch=1, accumulation=1, sequence_length=1)


def _size(recipe: Recipe) -> int:
    """Return the tokens of a micro-batch, which activations grow with."""
    return recipe.tokens


def _unlimited(footprint: Footprint) -> int:
    """Return the bytes that a run reserves on a card without a limit."""
    on_card = footprint.on_card
    return max(footprint.peak.levels.reserved, on_card.unlimited if on_card else 0)


def _still(footprint: Footprint) -> int:
    return sum(line.bytes for line in footprint.peak.lines if line.role in _STILL and line.role != "context")


# --- the search ---


def search_by_trace(job: Job, start: Recipe, estimator: TracedEstimator) -> Found:
    """Return the fastest recipe of the highest class of what is learned that fits, else the closest.

    A class is given up where its leanest recipe does not fit; else each way to keep activations gets the largest
    micro-batch that fits, found by lines through what was traced. Where memory is plenty the fastest recipe is tried
    first.
    """
    kinds = [kind for kind in classes(job, start) if kind.offload == "none"]
    shared = [(at, ways) for at, kind in enumerate(kinds) for ways in _ways(job, kind)]
    near: list[Candidate] = []
    fitting: list[Candidate] = []
    for number, (at, every) in enumerate(shared):
        if fitting and at != shared[number - 1][0]:
            break
        ways = [] if fitting else [r for r in every if estimator.possible(r) and estimator.writable(r)]
        if ways and (quickest := _at_once(job, ways, estimator)):
            fitting, ways = [quickest], []
        while ways:
            leanest = ways.pop()  # where it does not fit, the others cannot
            if estimator.at_least(leanest) > estimator.usable:
                near.append(estimator.bounded(leanest))
                break
            estimator.ahead(leanest)
            if estimator.idle:
                estimator.ahead(*_next_leanest(shared[number + 1 :], estimator))
            judgement = estimator.tried(leanest)
            if judgement is None:
                continue
            if judgement.verdict == "fits":
                rung = leanest.but(micro_batch=start.micro_batch, accumulation=start.accumulation)  # of its ladder
                fitting = _side_by_side([_explored(job, r, estimator, near) for r in (leanest, *ways)], estimator, rung)
            else:
                near.append(estimator.quick(leanest))
            break
    if fitting:
        best = min(fitting, key=lambda c: (c.seconds, c.judgement.need))
        return Found(best.recipe, best.judgement, near)
    if not near:
        combinations.check(start, job.architecture, job.gpu)
        raise next(iter(estimator.refused.values()), Unsupported("no recipe is possible", hint=TRACE_HINT))
    return _closest(near, estimator)


PLENTY = 4  # as often must weights, gradients and states fit on the card for the fastest recipe to be tried first


def _at_once(job: Job, ways: Sequence[Recipe], estimator: TracedEstimator) -> Candidate | None:
    """Return the fastest recipe where memory is plenty and it fits: then the search needs no other; else None.

    ways: recipes with the smallest micro-batch that differ in how they keep activations, the leanest last. The smallest
    micro-batch of the fastest is traced too: a line through both finds the largest that fits.
    """
    if PLENTY * estimator.at_least(ways[-1]) > estimator.usable:
        return None
    (seconds, best), *others = sorted(
        ((estimator.seconds(largest := _sizes(job, way)[-1]), largest) for way in ways), key=itemgetter(0)
    )
    if others and others[0][0] <= seconds:
        return None
    estimator.ahead(best)
    beside = [way for way in ways if way.checkpointing == best.checkpointing]
    estimator.ahead(*beside)
    judgement, *_ = (estimator.tried(recipe) for recipe in (best, *beside))
    return estimator.quick(best) if judgement is not None and judgement.verdict == "fits" else None


def _next_leanest(later: Sequence[tuple[int, list[Recipe]]], estimator: TracedEstimator) -> list[Recipe]:
    """Return the recipe that is traced next if the present class does not fit."""
    leanest = (ways[-1] for _, ways in later if estimator.writable(ways[-1]))
    return next(([r] for r in leanest if estimator.at_least(r) <= estimator.usable), [])


def _closest(near: list[Candidate], estimator: TracedEstimator) -> Found:
    """Return the recipe that is nearest to fitting, which is traced if only its least bytes are known."""
    while True:
        best = min(near, key=lambda c: (c.judgement.verdict != "tight", c.judgement.need))
        near = [c for c in near if c is not best]
        if not best.at_least:
            return Found(best.recipe, best.judgement, near)
        if estimator.tried(best.recipe) is not None:
            near.append(estimator.quick(best.recipe))
        elif not near:
            raise estimator.refused[best.recipe]


def _ways(job: Job, kind: Recipe) -> Iterator[list[Recipe]]:
    """Yield the recipes of a class with the smallest micro-batch, by sharding, each list from fastest to leanest."""
    wanted = dict(job.wanted)
    per_gpu = sequences_each(job, kind)
    least = splits(per_gpu, TASKS[job.task].least)[0]
    shared = max(per_gpu // wanted["accumulation"], 1) if "accumulation" in wanted else least
    batch = wanted.get("micro_batch", shared)
    several = ("none", "parameters") if kind.num_gpus > 1 and kind.method == "full" else (kind.shard,)
    for shard in [wanted["shard"]] if "shard" in wanted else several:
        kept = [wanted["checkpointing"]] if "checkpointing" in wanted else ["none", "full"]
        yield [
            kind.but(shard=shard, checkpointing=c, micro_batch=batch,
                     accumulation=wanted.get("accumulation", max(per_gpu // batch, 1)))
            for c in kept
        ]  # fmt: skip


# Yields recipes to be traced, takes their judgements (None: refused), and returns what fits (None: nothing)
Exploring = Generator[Recipe, Judgement | None, Candidate | None]


def _side_by_side(runs: Iterable[Exploring], estimator: TracedEstimator, rung: Recipe) -> list[Candidate]:
    """Explore several ways at a time; return what fits of each. rung: what a core without work measures."""
    found: list[Candidate] = []
    asked = {run: next(run) for run in runs}
    estimator.ahead(*asked.values())
    if estimator.idle:
        estimator.ahead(rung)
    while asked:
        for run, recipe in list(asked.items()):
            try:
                asked[run] = run.send(estimator.tried(recipe))
                estimator.ahead(asked[run])
            except StopIteration as end:
                del asked[run]
                found += [end.value] if end.value else []
    return found


def _explored(job: Job, recipe: Recipe, estimator: TracedEstimator, near: list[Candidate]) -> Exploring:
    """Return the recipe with the largest micro-batch that divides the batch and fits."""
    judgement = yield recipe
    if judgement is None:
        return None
    if judgement.verdict != "fits":
        near.append(estimator.quick(recipe))
        return None
    sized = _sizes(job, recipe)
    low, high = 0, len(sized)  # sized[low] fits, sized[high] does not, or does not exist
    while high - low > 1:
        fitting = (i for i in range(low + 1, high) if estimator.quick(sized[i]).judgement.verdict == "fits")
        guess = max(fitting, default=low + 1)
        if estimator.far_over(sized[guess], sized[low]):
            break
        judgement = yield sized[guess]
        if judgement is not None and judgement.verdict == "fits":
            low = guess
        else:
            high = guess
    return estimator.quick(sized[low])


def _sizes(job: Job, recipe: Recipe) -> list[Recipe]:
    """Return a recipe with every micro-batch that divides the batch, smallest first; as it is where the user said."""
    if dict(job.wanted).keys() & {"micro_batch", "accumulation"}:
        return [recipe]
    sequences = sequences_each(job, recipe)
    return [
        recipe.but(micro_batch=batch, accumulation=max(sequences // batch, 1))
        for batch in splits(sequences, TASKS[job.task].least)
    ]
