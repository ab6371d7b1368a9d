"""Find other hardware for the same job: cheaper cards that fit it, or the smallest change when nothing fits."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from memfit.errors import MemfitError
from memfit.nouns.gpu import Gpu
from memfit.nouns.job import Job, Recipe
from memfit.nouns.plan import Alternative, Plan
from memfit.planner.rungs import backend_precision
from memfit.planner.search import Estimator

SHOWN = 6  # cards in the answer
COUNTS = (2, 4, 8)  # numbers of the same card that are tried
Progress = Callable[[str, float], None]


def cheaper(
    plan: Plan, cards: Iterable[Gpu], answer: Callable[[Job], Plan], tell: Progress
) -> tuple[tuple[Alternative, ...], str]:
    """Return cards that run the job for less per hour, cheapest first with their recipes, and a note on them.

    If the job's own card has no price, or the job does not fit it, any priced card that fits is listed.
    """
    own = plan.job.gpu
    limit = own.price_per_hour if plan.judgement.verdict != "misfit" else None
    priced = [g for g in cards if g.price_per_hour is not None and g.short != own.short]
    priced = sorted((g for g in priced if limit is None or _price(g) < limit), key=_price)
    found: list[Alternative] = []
    for done, gpu in enumerate(priced):
        tell("looking at other cards", done / len(priced))
        option = _on(replace(plan.job, gpu=gpu), answer)
        found += [option] if option else []
        if len(found) == SHOWN:
            break
    return tuple(found), _about(plan, limit, len(found))


def _about(plan: Plan, limit: float | None, found: int) -> str:
    name = plan.job.gpu.name
    if limit is not None:
        below = f"below the {limit:.2f} USD per hour of the {name}"
        return f"cheaper cards: those {below} that would do" if found else f"no card {below} would do"
    why = f"the {name} has no price in the table" if plan.judgement.verdict != "misfit" else f"nothing fits the {name}"
    return f"{why}: the cheapest priced cards that would do" if found else f"{why}, and no priced card would do"


def _on(job: Job, answer: Callable[[Job], Plan]) -> Alternative | None:
    """Return the plan of the job on another card, None where it does not fit or is impossible."""
    try:
        plan = answer(job)
    except MemfitError:  # the job is impossible on that card
        return None
    if plan.judgement.verdict != "fits":
        return None
    return Alternative(
        job.gpu.name, plan.recipe.num_gpus, plan.recipe, plan.judgement, job.gpu.price_per_hour, plan.seconds_per_step
    )


def _price(gpu: Gpu) -> float:
    return gpu.price_per_hour if gpu.price_per_hour is not None else float("inf")


def smallest_change(plan: Plan, cards: Iterable[Gpu]) -> tuple[Alternative, ...]:
    """Return the smallest changes of hardware that fit: more of the same card, and a larger one."""
    job, found = plan.job, []
    for count in COUNTS:
        if count > job.num_gpus:
            several = replace(job, num_gpus=count)
            sharded = plan.recipe.but(num_gpus=count, shard="parameters",
                                      accumulation=max(job.effective_batch // count, 1),
                                      micro_batch=1, offload="none")  # fmt: skip
            if (option := _as_is(several, backend_precision(sharded, several), job.gpu)) is not None:
                found.append(option)
                break
    larger = sorted(
        (g for g in cards if g.total_bytes > job.gpu.total_bytes and g.vendor == job.gpu.vendor),
        key=lambda g: (g.total_bytes, _price(g)),
    )
    for gpu in larger:
        if (option := _as_is(replace(job, gpu=gpu), plan.recipe, gpu)) is not None:
            found.append(option)
            break
    return tuple(found)


def _as_is(job: Job, recipe: Recipe, gpu: Gpu) -> Alternative | None:
    """Return the same recipe on another card, None where it does not fit."""
    estimator = Estimator(job)
    if not estimator.possible(recipe):
        return None
    candidate = estimator.quick(recipe)
    if candidate.judgement.verdict != "fits":
        return None
    return Alternative(gpu.name, recipe.num_gpus, recipe, candidate.judgement, gpu.price_per_hour, candidate.seconds)
