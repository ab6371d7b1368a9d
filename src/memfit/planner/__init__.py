"""make_plan() climbs the ladder as far as needed, then searches for the fastest recipe that fits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from memfit.data.lengths import MULTIPLE
from memfit.nouns.footprint import Footprint
from memfit.nouns.gpu import Gpu
from memfit.nouns.job import Job, Recipe
from memfit.nouns.plan import Judgement, Plan, Refusal, Rung
from memfit.planner.rungs import LadderStep, backwards, half_precision, steps_for
from memfit.planner.search import SAME_SPEED, Candidate, Estimator, Known, largest, ranked
from memfit.tables.combinations import absent, check
from memfit.tables.optimizers import optimizer
from memfit.tables.trainers import trainer
from memfit.units import rough, share_of_samples

Progress = Callable[[str, float], None]
START_BATCH = 8  # the ladder starts at a comfortable micro-batch and shrinks it on its own rung
CONFIRMED = 6  # how many of the fastest candidates are replayed before the search gives up
LONGEST_SEQUENCE = 1 << 20
# rungs that are kept even where they save nothing, because later ones build on them
PAYS_LATER = ("mixed", "accumulation", "shard-parameters")


def make_plan(
    job: Job, *, base: Recipe | None = None, cards: Iterable[Gpu] = (), any_gpu: bool = False,
    progress: Progress | None = None, known: Known | None = None,
) -> Plan:  # fmt: skip
    """Return the plan of a job.

    `base` is the recipe from the user's flags or file. `cards` are considered with `any_gpu`. `known` maps recipes to
    traced footprints on the job's own card, which replace those by formula. The ladder is climbed only as far as
    needed; fields that the user set are never changed.

    Raises BadInput for impossible combinations and Unsupported for models that are not modelled.
    """
    tell = progress or (lambda text, share: None)
    cards, base = tuple(cards), base or Recipe()
    plan = _answer(job, base, tell, known)
    if any_gpu:
        from memfit.planner.hardware import cheaper

        found, note = cheaper(plan, cards, lambda j: _answer(j, base, lambda text, share: None), tell)
        plan = replace(plan, alternatives=found, notes=(*plan.notes, note))
    elif plan.judgement.verdict == "misfit":
        from memfit.planner.hardware import smallest_change

        plan = replace(plan, alternatives=smallest_change(plan, cards))
    return plan


def _answer(job: Job, base: Recipe, tell: Progress, known: Known | None = None) -> Plan:
    """Return the plan on the job's own card."""
    estimator = Estimator(job, known)
    start = starting_recipe(job, base)
    tell("climbing the ladder", 0.1)
    rungs = _climb(job, start, estimator)
    worth = [r for r in rungs if not _only_a_start(job, r)] or rungs
    reached = next((r for r in worth if r.judgement.verdict == "fits"), None)
    reached = reached or next((r for r in worth if r.judgement.verdict == "tight"), None)
    tell("searching", 0.5)
    if reached is None:
        return _nothing_fits(job, rungs, estimator, left_out(job, base))
    chosen, refused = _search(job, reached, estimator)
    footprint, judgement = estimator.shown(chosen)
    tell("looking at neighbours", 0.8)
    seconds = estimator.seconds(chosen)
    return Plan(
        job, chosen, _with_cut_samples(job, footprint), judgement, tuple(rungs[: rungs.index(reached) + 1]), refused,
        largest=_limits(estimator, chosen), seconds_per_step=seconds,
        step_time=_relative(seconds, estimator.seconds(rungs[0].recipe)),
        notes=(*_other_batch(job, chosen), *_transitions(job, rungs, reached),
               *(left_out(job, base) if reached is not rungs[0] else ())),
    )  # fmt: skip


def _with_cut_samples(job: Job, footprint: Footprint) -> Footprint:
    """Return the footprint with a note on the share of samples that the sequence length cuts."""
    if job.truncated is None:
        return footprint
    cut = f"sequence {job.sequence_length:,} cuts {share_of_samples(job.truncated)} of the samples"
    return replace(footprint, assumptions=(*footprint.assumptions, cut))


def starting_recipe(job: Job, base: Recipe) -> Recipe:
    """Return the first recipe of the ladder: what flags or files set, else fp32 without any technique."""
    wanted = dict(job.wanted)
    if job.stated:  # a file's missing keys have the defaults of its framework
        return base.but(**{k: v for k, v in wanted.items() if k != "method" or v != "auto"})
    per_gpu = max(job.effective_batch // job.num_gpus, 1)
    batch = max(b for b in range(1, min(per_gpu, START_BATCH) + 1) if per_gpu % b == 0)
    plain: dict[str, object] = {
        "precision": "fp32", "optimizer": "adamw", "checkpointing": "none", "loss": trainer(job.trainer).default_loss,
        "offload": "none", "shard": "none",
        "quantization": "none", "method": "full", "micro_batch": batch, "accumulation": per_gpu // batch,
        "sequence_length": job.sequence_length, "num_gpus": job.num_gpus, "trainer": job.trainer,
        "attention": "sdpa" if all(x.attention.sdpa for x in job.architecture.kinds) else "eager",
    }  # fmt: skip
    method = wanted.get("method", job.method)
    if method in ("lora", "qlora"):  # a frozen base is loaded in 16 bits, or quantised
        plain |= {"method": method, "precision": half_precision(job.gpu)}
        plain["quantization"] = "nf4-double" if method == "qlora" else "none"
    if job.longest_sample:  # memory is needed only up to the longest sample; token counts may be estimates
        plain["sequence_length"] = min(job.sequence_length, -(-job.longest_sample // MULTIPLE) * MULTIPLE)
    plain |= {k: v for k, v in wanted.items() if k != "method" or v != "auto"}
    if "micro_batch" in wanted and "accumulation" not in wanted:
        plain["accumulation"] = max(per_gpu // wanted["micro_batch"], 1)
    return base.but(**plain)


def techniques(job: Job, base: Recipe | None = None) -> tuple[Rung, ...]:
    """Compute every rung for this run, whether it is needed or not (`memfit techniques`)."""
    return tuple(_climb(job, starting_recipe(job, base or Recipe()), Estimator(job), stop=False))


def left_out(job: Job, base: Recipe | None = None) -> tuple[str, ...]:
    """Return a note for each reason for which rungs are impossible on this card."""
    start, wanted = starting_recipe(job, base or Recipe()), dict(job.wanted)
    why: dict[str, list[str]] = {}
    for step in steps_for(job):
        if _applies(step, start, _method(job), wanted):
            missing = absent(_taken(step, start, job), job.gpu)
            if missing is not None and absent(start, job.gpu) is None:
                why.setdefault(missing.why, []).append(step.title.removeprefix("+ "))
    return tuple(f"left out: {', '.join(titles)} ({reason})" for reason, titles in why.items())


def _method(job: Job) -> str:
    return str(dict(job.wanted).get("method", job.method))


def _taken(step: LadderStep, recipe: Recipe, job: Job) -> Recipe:
    """Return the recipe after a rung; fields the user set stay."""
    return step.change(recipe, job).but(**{k: v for k, v in job.wanted if k != "method"})


def _climb(job: Job, start: Recipe, estimator: Estimator, stop: bool = True) -> list[Rung]:
    """Return the rungs in order; with `stop` no further than the first that fits.

    A start that is impossible by itself (flash attention in fp32) is left out if a later rung makes it possible. A
    recipe from a file is the first rung; if it is impossible there is no ladder.
    """
    plain = LadderStep("plain", _plain_title(job, start), lambda r, j: r, "")
    rungs = [_rung(plain, start, (), estimator)] if estimator.possible(start) else []
    recipe, wanted, method = start, dict(job.wanted), _method(job)
    for step in steps_for(job) if rungs or not job.stated else ():
        if stop and rungs and rungs[-1].judgement.verdict == "fits" and not _only_a_start(job, rungs[-1]):
            break
        changed = _taken(step, recipe, job) if _applies(step, recipe, method, wanted) else recipe
        if changed == recipe or backwards(recipe, changed):
            continue
        if not estimator.possible(changed):
            recipe = recipe if rungs else changed
            continue
        rung = _rung(step, changed, rungs, estimator)
        if rungs and rung.saved <= 0 and stop and changed.method == recipe.method and step.key not in PAYS_LATER:
            continue
        rungs.append(rung)
        recipe = changed
    if not rungs:
        check(start, job.architecture, job.gpu)
    return rungs


def _only_a_start(job: Job, rung: Rung) -> bool:
    """Return whether a rung is the default start in fp32, which is never the answer: it is several times slower."""
    chosen = "precision" in dict(job.wanted) or "precision" in job.stated
    return rung.key == "plain" and rung.recipe.precision == "fp32" and not chosen


def _plain_title(job: Job, start: Recipe) -> str:
    if job.stated:
        return "as in the file"
    if start.method != "full":
        return {"lora": "LoRA", "qlora": "QLoRA"}[start.method] + ", no technique"
    return "fp32, no technique" if start.precision == "fp32" else "as asked"


def _applies(step: LadderStep, recipe: Recipe, method: str, wanted: dict[str, object]) -> bool:
    if step.sets and all(name in wanted for name in step.sets) and "method" not in step.sets:
        return False
    if _already(step, recipe):
        return False
    if step.key in ("lora", "qlora"):
        return method == "auto" or (method == step.learns and recipe.method != step.learns)
    if step.learns == "full" and method in ("lora", "qlora"):
        return step.key not in ("mixed", "8-bit-optimizer", "16-bit-weights", "offload-optimizer")
    if step.key == "offload-optimizer" or (step.key == "offload-parameters" and recipe.method != "full"):
        return recipe.method == "full"
    return True


def _already(step: LadderStep, recipe: Recipe) -> bool:
    """Return whether the recipe already has the effect of a rung that `backwards` does not cover."""
    if step.key == "mixed":
        return recipe.precision != "fp32"
    if step.key == "accumulation":
        return recipe.micro_batch == 1
    return step.key == "8-bit-optimizer" and optimizer(recipe.optimizer).block > 0


def _rung(step: LadderStep, recipe: Recipe, before: Sequence[Rung], estimator: Estimator) -> Rung:
    """Return the rung of a step; the recipe of a file is always replayed, as `memfit estimate` does."""
    footprint, judgement = estimator.shown(recipe, exact=bool(estimator.job.stated and not before))
    saved = before[-1].judgement.need - judgement.need if before else 0
    relative = _relative(estimator.seconds(recipe), estimator.seconds(before[0].recipe)) if before else 1.0
    return Rung(
        step.key, step.title, recipe, footprint, judgement, saved, relative, step.caveat, _why(judgement),
        dict(step.flags),
    )  # fmt: skip


def _relative(seconds: float, reference: float) -> float:
    return seconds / reference if reference else 1.0


def _why(judgement: Judgement) -> str:
    if judgement.verdict == "misfit":
        return judgement.shortage
    if judgement.verdict == "tight":
        return "too tight to promise"
    return f"fits, {rough(judgement.headroom)} headroom"


def _search(job: Job, reached: Rung, estimator: Estimator) -> tuple[Recipe, tuple[Refusal, ...]]:
    """Return the fastest candidate that fits by replay, and as refusals the faster ones that do not."""
    fitting, failing = ranked(job, reached.recipe, estimator)
    refused: list[Refusal] = []
    chosen = reached.recipe
    reached_seconds = estimator.seconds(reached.recipe)
    for candidate in fitting[:CONFIRMED]:
        if candidate.seconds > SAME_SPEED * reached_seconds and reached.judgement.verdict == "fits":
            break
        _, judgement = estimator.shown(candidate.recipe)
        if judgement.verdict == "fits":
            chosen = candidate.recipe
            break
        refused.append(_refusal(candidate, judgement))
    faster = [c for c in failing if c.seconds < estimator.seconds(chosen)]
    refused += [_refusal(c, c.judgement) for c in sorted(faster, key=lambda c: c.judgement.need)[:3]]
    return chosen, tuple(refused[:6])


def _refusal(candidate: Candidate, judgement: Judgement) -> Refusal:
    r = candidate.recipe
    title = (
        f"micro-batch {r.micro_batch} x {r.accumulation}, checkpointing {r.checkpointing}, {r.optimizer}, loss {r.loss}"
        f"{f', shard {r.shard}' if r.num_gpus > 1 else ''}"
    )
    return Refusal(title, r, -judgement.headroom, _why(judgement))


def _limits(estimator: Estimator, recipe: Recipe) -> dict[str, int]:
    positions = estimator.job.architecture.max_positions
    longest = positions if positions and estimator.job.architecture.learned_positions else LONGEST_SEQUENCE
    return {
        "micro_batch": largest(estimator, recipe, "micro_batch", 4096),
        "sequence_length": largest(estimator, recipe, "sequence_length", longest),
    }


def _transitions(job: Job, rungs: list[Rung], reached: Rung) -> tuple[str, ...]:
    """Return a note if the plan went from full fine-tuning to LoRA or QLoRA, which changes what is learned."""
    if job.method != "auto" or reached.recipe.method == "full":
        return ()
    full = next((r for r in reversed(rungs) if r.recipe.method == "full"), None)
    over = f" (closest: {rough(-full.judgement.headroom)} over)" if full else ""
    what = {"lora": "LoRA trains adapters beside frozen weights", "qlora": "QLoRA trains adapters on a 4-bit base"}
    return (
        f"full fine-tuning does not fit without offloading{over}: {what[reached.recipe.method]}; "
        "--method full keeps full fine-tuning",
    )


def _other_batch(job: Job, recipe: Recipe) -> tuple[str, ...]:
    """Return a note if the requested effective batch cannot be split evenly."""
    if recipe.effective_batch == job.effective_batch:
        return ()
    return (f"effective batch {recipe.effective_batch}: {job.effective_batch} cannot be split evenly as asked",)


def _nothing_fits(job: Job, rungs: list[Rung], estimator: Estimator, notes: tuple[str, ...]) -> Plan:
    """Return the plan of the recipe that needs least, for a job that no recipe fits."""
    closest = min(rungs, key=lambda r: r.judgement.need)
    return Plan(
        job, closest.recipe, _with_cut_samples(job, closest.footprint), closest.judgement, tuple(rungs),
        seconds_per_step=estimator.seconds(closest.recipe), step_time=closest.step_time,
        notes=(f"nothing fits: the closest recipe is {closest.judgement.shortage}", *notes),
    )  # fmt: skip
