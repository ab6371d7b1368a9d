"""make_plan() searches the lattice of recipes for the fastest of the highest class that fits, and explains the way."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from memfit.errors import SOME_CARD, BadInput
from memfit.nouns.architecture import LANGUAGE
from memfit.nouns.footprint import Footprint
from memfit.nouns.gpu import Gpu
from memfit.nouns.job import JOB_SIZES, Job, Recipe, check_numbers, check_values
from memfit.nouns.plan import AllCards, Plan, Refusal
from memfit.planner.ladder import closest_title, left_out, starting_recipe, techniques, walk
from memfit.planner.search import Candidate, Estimates, Estimator, Found, Known, Writable, largest, search
from memfit.planner.traced import TracedEstimator, search_by_trace
from memfit.tables.tasks import TASKS, task
from memfit.units import rough, share_of_samples

__all__ = ["LONGEST_SEQUENCE", "left_out", "make_plan", "plan_by_trace", "starting_recipe", "techniques"]

Progress = Callable[[str, float], None]
LONGEST_SEQUENCE = 1 << 20
REFUSED = 6  # candidates of a plan that were passed over


def make_plan(
    job: Job, *, base: Recipe | None = None, cards: Iterable[Gpu] = (), any_gpu: bool = False,
    progress: Progress | None = None, known: Known | None = None, writable: Writable | None = None,
) -> Plan:  # fmt: skip
    """Return the plan of a job.

    `base` is the recipe from the user's flags or file. `cards` are considered with `any_gpu`, and where nothing fits.
    `known` maps recipes to traced footprints on the job's own card, which replace those by formula. `writable` returns
    whether the files to write can express a recipe. Fields that the user set are never changed.

    Raises BadInput for impossible combinations and Unsupported for models that are not modelled.
    """
    tell = progress or (lambda text, share: None)
    cards, base = tuple(cards), check_values(base or Recipe())
    _check(job)
    plan = _answer(job, base, cards, tell, known, writable)
    if any_gpu:
        from memfit.planner.hardware import cheaper

        found, note = cheaper(plan, cards, base, tell, writable)
        plan = replace(plan, alternatives=found, notes=(*plan.notes, note))
    elif plan.judgement.verdict == "misfit" and cards:
        from memfit.planner.hardware import smallest_change

        plan = replace(plan, alternatives=smallest_change(plan, cards, base, writable))
        plan = replace(plan, notes=(*plan.notes, *_same_batch(plan)))
    return plan


def _check(job: Job) -> None:
    """Refuse numbers that no job has, and a model that is not the one its task trains: it would be counted as SFT."""
    check_numbers(job, JOB_SIZES)
    trains = LANGUAGE if task(job.task).language else job.task
    if job.architecture.trained_for != trains:
        name = job.architecture.name
        problem = f"{name} was resolved for {job.architecture.trained_for}, and the job's task is {job.task}"
        raise BadInput(problem, hint=f"memfit plan {name} --task {job.task} {SOME_CARD}")


def plan_by_trace(job: Job, base: Recipe, estimator: TracedEstimator) -> Plan:
    """Return the plan of a job that no formula models, by an estimator that traces recipes.

    Raises BadInput for impossible combinations, and Unsupported where the trainer can run none.
    """
    start = starting_recipe(job, base).but(loss=base.loss, trainer=job.trainer)
    if job.num_gpus == 1:
        estimator.ahead(start)  # the ladder begins with it
    found = search_by_trace(job, start, estimator)
    start = start.but(shard=found.recipe.shard)  # DDP of the whole model is the slowest of all traces
    footprint, judgement = estimator.shown(found.recipe, exact=True)
    fits = judgement.verdict != "misfit"
    estimator.ahead(start)
    limits = _limits(estimator, found.recipe) if fits else {}  # beside the ladder's first
    ladder = walk(job, start, found.recipe, estimator)
    closest = () if fits else (f"nothing fits: the closest recipe is {judgement.shortage}",)
    return Plan(
        job, found.recipe, _with_cut_samples(job, footprint), judgement, ladder, _refused(job, found),
        largest=limits, seconds_per_step=estimator.seconds(found.recipe),
        step_time=ladder[-1].step_time if ladder else 1.0,
        notes=(*closest, *_other_batch(job, found.recipe), *_transitions(job, found), *_left_out(estimator)),
    )  # fmt: skip


def _left_out(estimator: TracedEstimator) -> tuple[str, ...]:
    """Return a note for each reason for which the trainer refused recipes."""
    return tuple(f"left out: {why}" for why in dict.fromkeys(problem.message for problem in estimator.refused.values()))


def _same_batch(plan: Plan) -> tuple[str, ...]:
    """Return a note where a file, whose batch is per card, is offered more cards at the same effective batch."""
    if not plan.job.stated or all(option.num_gpus <= plan.job.num_gpus for option in plan.alternatives):
        return ()
    return (f"more cards are shown at the same effective batch: --effective-batch {plan.job.effective_batch}",)


def _answer(
    job: Job, base: Recipe, cards: tuple[Gpu, ...], tell: Progress, known: Known | None, writable: Writable | None
) -> Plan:
    """Return the plan on the job's own card. `cards` are considered for a job that leaves some of its own idle."""
    estimator = Estimator(job, known, writable)
    start = starting_recipe(job, base)
    found = search(job, start, estimator, lambda share: tell("searching", 0.7 * share))
    tell("explaining", 0.8)
    footprint, judgement = estimator.shown(found.recipe, exact=True)
    ladder = walk(job, start, found.recipe, estimator)
    seconds = estimator.seconds(found.recipe)
    fits = judgement.verdict != "misfit"
    closest = () if fits else (f"nothing fits: the closest recipe is {judgement.shortage}",)
    return Plan(
        job, found.recipe, _with_cut_samples(job, footprint), judgement, ladder, _refused(job, found),
        largest=_limits(estimator, found.recipe) if fits else {}, seconds_per_step=seconds,
        step_time=ladder[-1].step_time,
        notes=(*closest, *_other_batch(job, found.recipe), *_transitions(job, found),
               *(left_out(job, base) if len(ladder) > 1 else ())),
        all_cards=_on_all_cards(job, found, cards, estimator),
    )  # fmt: skip


def _on_all_cards(job: Job, found: Found, cards: tuple[Gpu, ...], estimator: Estimator) -> AllCards | None:
    if found.on_all_cards is None:
        return None
    from memfit.planner.hardware import all_cards

    return all_cards(job, found.on_all_cards.recipe, cards, estimator)


def _refused(job: Job, found: Found) -> tuple[Refusal, ...]:
    """Return what was passed over: the closest recipe of each other method, then the closest of the same method."""
    row = TASKS[job.task]
    tokens = row.language or row.trainer == "SFT"
    closest: dict[str, Candidate] = {}
    for c in sorted(found.passed, key=lambda c: c.judgement.need):
        if c.recipe.method != found.recipe.method:
            closest.setdefault(c.recipe.method, c)
    same = [c for c in found.passed if c.recipe.method == found.recipe.method]
    return tuple(
        Refusal(closest_title(c.recipe, found.recipe, tokens), c.recipe, -c.judgement.headroom, _why(c))
        for c in [*closest.values(), *same][:REFUSED]
    )


def _why(candidate: Candidate) -> str:
    if candidate.judgement.verdict == "misfit":
        return f"{'at least ' if candidate.at_least else ''}{candidate.judgement.shortage}"
    return "too tight to promise"


def _with_cut_samples(job: Job, footprint: Footprint) -> Footprint:
    """Return the footprint with a note on the share of samples that the sequence length cuts."""
    if job.truncated is None:
        return footprint
    cut = f"sequence {job.sequence_length:,} cuts {share_of_samples(job.truncated)} of the samples"
    return replace(footprint, assumptions=(*footprint.assumptions, cut))


def _limits(estimator: Estimates, recipe: Recipe) -> dict[str, int]:
    positions = estimator.job.architecture.max_positions
    longest = positions if positions and estimator.job.architecture.learned_positions else LONGEST_SEQUENCE
    found = {"micro_batch": largest(estimator, recipe, "micro_batch", 4096)}
    if TASKS[estimator.job.task].of_tokens:
        found["sequence_length"] = largest(estimator, recipe, "sequence_length", longest)
    return {name: most for name, most in found.items() if most}  # a tight recipe may fit with none


def _transitions(job: Job, found: Found) -> tuple[str, ...]:
    """Return a note if the plan went from full fine-tuning to LoRA or QLoRA, which changes what is learned."""
    if job.method != "auto" or found.recipe.method == "full" or "adapter" in dict(job.wanted):
        return ()
    full = [c.judgement.headroom for c in found.passed if c.recipe.method == "full" and c.recipe.offload == "none"]
    over = f" (closest: {rough(-max(full))} over)" if full and max(full) < 0 else ""
    what = {"lora": "LoRA trains adapters beside frozen weights", "qlora": "QLoRA trains adapters on a 4-bit base"}
    return (
        f"full fine-tuning does not fit without offloading{over}: {what[found.recipe.method]}; "
        "--method full keeps full fine-tuning",
    )


def _other_batch(job: Job, recipe: Recipe) -> tuple[str, ...]:
    """Return a note if the requested effective batch cannot be split evenly."""
    if recipe.effective_batch == job.effective_batch:
        return ()
    return (f"effective batch {recipe.effective_batch}: {job.effective_batch} cannot be split evenly as asked",)
