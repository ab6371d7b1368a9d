"""Find other hardware for the same job: cheaper cards, the cheapest of all, or the smallest change that fits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from memfit.errors import MemfitError
from memfit.nouns.architecture import LANGUAGE
from memfit.nouns.gpu import Gpu
from memfit.nouns.job import Job, Recipe
from memfit.nouns.plan import AllCards, Alternative, Plan
from memfit.planner.ladder import starting_recipe
from memfit.planner.search import Estimator, Writable, search
from memfit.planner.traced import TracedEstimator

SHOWN = 6  # cards in the answer
COUNTS = (2, 4, 8)  # numbers of the same card that are tried
ALIKE = 0.8  # of the closest need on one card: less than that does not fit another card of the same maker either
SHORTER = (7 / 8, 3 / 4, 5 / 8, 1 / 2, 3 / 8, 1 / 4)  # shares of the sequence length that are tried on all cards
Progress = Callable[[str, float], None]


def cheaper(
    plan: Plan, cards: Iterable[Gpu], base: Recipe, tell: Progress, writable: Writable | None
) -> tuple[tuple[Alternative, ...], str]:
    """Return cards that run the job for less per hour, cheapest first with their recipes, and a note on them.

    If the job's own card has no price, or the job does not fit it, any priced card that fits is listed.
    """
    limit, priced = _cheaper_cards(plan, cards)
    found: list[Alternative] = []
    for done, gpu in enumerate(priced):
        tell("looking at other cards", done / len(priced))
        option = _on(plan.job, base, gpu, plan.job.num_gpus, writable)
        found += [option] if option else []
        if len(found) == SHOWN:
            break
    return tuple(found), _about(plan, limit, len(found))


def cheaper_by_trace(
    plan: Plan, cards: Iterable[Gpu], estimator: TracedEstimator
) -> tuple[tuple[Alternative, ...], str]:  # fmt: skip
    """Return cards that run a recipe traced for the plan for less per hour, cheapest first, and a note on them.

    Nothing is traced again: cards that compute in another dtype, whose recipes are others, are left out.
    """
    limit, priced = _cheaper_cards(plan, cards)
    own, found = plan.job.gpu, list[Alternative]()
    for gpu in priced:
        option = estimator.elsewhere(gpu, plan.recipe) if (gpu.vendor, gpu.bf16) == (own.vendor, own.bf16) else None
        if option:
            count, price = option.recipe.num_gpus, gpu.price_per_hour
            found.append(Alternative(gpu.name, count, option.recipe, option.judgement, price, option.seconds))
    listed = tuple(found[:SHOWN])
    return listed, f"{_about(plan, limit, len(listed))}{f' by what was traced on the {own.name}' if listed else ''}"


def _cheaper_cards(plan: Plan, cards: Iterable[Gpu]) -> tuple[float | None, list[Gpu]]:
    """Return the price per hour of the job's own card, None where it does not count, and the cards below it."""
    own = plan.job.gpu
    limit = own.price_per_hour if plan.judgement.verdict != "misfit" else None
    priced = [g for g in cards if g.price_per_hour is not None and g.short != own.short]
    return limit, sorted((g for g in priced if limit is None or _price(g) < limit), key=_price)


def _about(plan: Plan, limit: float | None, found: int) -> str:
    name = plan.job.gpu.name
    if limit is not None:
        below = f"below the {limit:.2f} USD per hour of the {name}"
        return f"cheaper cards: those {below} that would do" if found else f"no card {below} would do"
    why = f"the {name} has no price in the table" if plan.judgement.verdict != "misfit" else f"nothing fits the {name}"
    return f"{why}: the cheapest priced cards that would do" if found else f"{why}, and no priced card would do"


def by_price_per_step(
    jobs: Sequence[tuple[Job, Recipe]], tell: Progress, writable: Writable | None
) -> list[tuple[int, Alternative]]:
    """Return the jobs that fit, each by its index and with its plan, the one whose optimizer step costs least first."""
    found: list[tuple[int, Alternative]] = []
    for index, (job, base) in enumerate(jobs):
        tell(f"looking at {job.num_gpus} x {job.gpu.name}", index / len(jobs))
        option = _fitting(job, base, writable)
        found += [(index, option)] if option else []
    return sorted(found, key=lambda row: row[1].price_per_step or 0)


def _on(job: Job, base: Recipe, gpu: Gpu, count: int, writable: Writable | None) -> Alternative | None:
    """Return the plan of the job on other hardware, as if it had been asked for; None where it does not fit."""
    wanted = tuple((name, value) for name, value in job.wanted if name != "num_gpus")
    return _fitting(replace(job, gpu=gpu, num_gpus=count, wanted=wanted), base.but(num_gpus=count), writable)


def _fitting(job: Job, base: Recipe, writable: Writable | None) -> Alternative | None:
    """Return what the search chooses for a job; None where nothing fits, or the job is impossible on its card."""
    estimator = Estimator(job, writable=writable)
    try:
        found = search(job, starting_recipe(job, base), estimator)
    except MemfitError:
        return None
    if found.judgement.verdict != "fits":
        return None
    seconds, gpu = estimator.seconds(found.recipe), job.gpu
    return Alternative(gpu.name, found.recipe.num_gpus, found.recipe, found.judgement, gpu.price_per_hour, seconds)


def _price(gpu: Gpu) -> float:
    return gpu.price_per_hour if gpu.price_per_hour is not None else float("inf")


def all_cards(job: Job, recipe: Recipe, cards: Iterable[Gpu], estimator: Estimator) -> AllCards:
    """Return the answer of the best recipe on all cards of a job, and what would make it fit."""
    footprint, judgement = estimator.shown(recipe, exact=True)
    seconds = estimator.seconds(recipe)
    if judgement.verdict == "fits" or judgement.host_over:  # neither frees host RAM
        return AllCards(recipe, footprint, judgement, seconds)
    return AllCards(recipe, footprint, judgement, seconds, _shorter(estimator, recipe), _larger(job, recipe, cards))


def _shorter(estimator: Estimator, recipe: Recipe) -> int:
    """Return a shorter sequence length with which a recipe fits; 0: none of SHORTER."""
    for share in SHORTER:
        length = int(recipe.sequence_length * share) // 64 * 64
        if length and estimator.shown(recipe.but(sequence_length=length), exact=True)[1].verdict == "fits":
            return length
    return 0


def _larger(job: Job, recipe: Recipe, cards: Iterable[Gpu]) -> str:
    """Return the name of the smallest larger card of the same maker on which a recipe fits; "" for none."""
    need = 0
    for gpu in _larger_cards(job, cards):
        if gpu.usable_bytes(job.reserve) < ALIKE * need:
            continue
        there = Estimator(replace(job, gpu=gpu))
        if there.possible(recipe):
            judgement = there.shown(recipe, exact=True)[1]
            if judgement.verdict == "fits":
                return gpu.name
            need = judgement.need
    return ""


def _larger_cards(job: Job, cards: Iterable[Gpu]) -> list[Gpu]:
    """Return the cards of the same maker with more memory, the smallest first."""
    larger = (g for g in cards if g.total_bytes > job.gpu.total_bytes and g.vendor == job.gpu.vendor)
    return sorted(larger, key=lambda g: (g.total_bytes, _price(g)))


def smallest_change(
    plan: Plan, cards: Iterable[Gpu], base: Recipe, writable: Writable | None
) -> tuple[Alternative, ...]:
    """Return the smallest changes of hardware that fit: more of the same card, and a larger one of the same maker."""
    job, need = plan.job, plan.judgement.need
    single = job.architecture.trained_for != LANGUAGE  # several cards were not compared
    more = ((job.gpu, count) for count in (() if single else COUNTS) if count > job.num_gpus)
    worth = ((g, job.num_gpus) for g in _larger_cards(job, cards) if g.usable_bytes(job.reserve) >= ALIKE * need)
    found = []
    for options in (more, worth):
        fitting = (_on(job, base, gpu, count, writable) for gpu, count in options)
        found.append(next((option for option in fitting if option is not None), None))
    return tuple(option for option in found if option is not None)
