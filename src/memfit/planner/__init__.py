"""make_plan(): climb the ladder as far as needed, then search for the fastest recipe that fits."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from memfit.gpu import Gpu
from memfit.job import Job, Recipe
from memfit.optimizers import optimizer
from memfit.plan import Alternative, Judgement, Plan, Refusal, Rung
from memfit.planner.engine import Candidate, Estimator
from memfit.planner.rungs import Step, half_precision, steps_for
from memfit.planner.search import SAME_SPEED, largest, ranked
from memfit.trainers import trainer
from memfit.units import gib

Progress = Callable[[str, float], None]
START_BATCH = 8  # the ladder starts at a comfortable micro-batch and shrinks it on its own rung
CONFIRMED = 6  # how many of the fastest candidates are replayed before the search gives up
LONGEST_SEQUENCE = 1 << 20
PAYS_LATER = ("mixed", "accumulation", "shard-parameters")  # rungs that later ones build on, whatever they buy at once


def make_plan(
    job: Job, *, base: Recipe | None = None, cards: Iterable[Gpu] = (), any_gpu: bool = False,
    progress: Progress | None = None,
) -> Plan:  # fmt: skip
    """Answer a job. `base` holds what the user's flags or file said; `cards` are considered when `any_gpu`.

    The ladder is climbed only as far as needed; what the user named is never altered. Raises BadInput for impossible
    combinations and Unsupported for models that are not modelled.
    """
    tell = progress or (lambda text, share: None)
    estimator = Estimator(job)
    start = starting_recipe(job, base or Recipe())
    tell("climbing the ladder", 0.1)
    rungs = _climb(job, start, estimator)
    worth = [r for r in rungs if not _only_a_start(job, r)] or rungs
    reached = next((r for r in worth if r.judgement.verdict == "fits"), None)
    reached = reached or next((r for r in worth if r.judgement.verdict == "tight"), None)
    tell("searching", 0.5)
    if reached is None:
        closest = min(rungs, key=lambda r: r.judgement.need)
        return _nothing_fits(job, closest, rungs, estimator, tuple(cards))
    chosen, refused = _search(job, reached, estimator)
    footprint, judgement = estimator.shown(chosen)
    tell("looking at neighbours", 0.8)
    plan = Plan(
        job, chosen, footprint, judgement, _marked(rungs, reached), refused,
        largest=_limits(estimator, chosen), seconds_per_step=estimator.seconds(chosen), 
        notes=(*_other_batch(job, chosen), *_transitions(job, rungs, reached), *_host_memory(estimator, chosen)),
    )  # fmt: skip
    return replace(plan, alternatives=cheaper(plan, cards)) if any_gpu else plan


def starting_recipe(job: Job, base: Recipe) -> Recipe:
    """Where the ladder starts: what flags and files said, everything else plain: fp32, no technique, a comfortable batch."""
    wanted = dict(job.wanted)
    if job.stated:  # a file says everything, its silence means its framework's defaults
        return base.but(**{k: v for k, v in wanted.items() if k != "method" or v != "auto"})
    per_gpu = max(job.effective_batch // job.num_gpus, 1)
    batch = max(b for b in range(1, min(per_gpu, START_BATCH) + 1) if per_gpu % b == 0)
    plain: dict[str, object] = {
        "precision": "fp32", "optimizer": "adamw", "checkpointing": "none", "loss": trainer(job.trainer).default_loss, "offload": "none", "shard": "none",
        "quantization": "none", "method": "full", "micro_batch": batch, "accumulation": per_gpu // batch,
        "sequence_length": job.sequence_length, "num_gpus": job.num_gpus, "trainer": job.trainer,
        "attention": "sdpa" if all(x.attention.sdpa for x in job.architecture.kinds) else "eager",
    }  # fmt: skip
    method = wanted.get("method", job.method)
    if method in ("lora", "qlora"):  # a frozen base is loaded in 16 bits, or quantised
        plain |= {"method": method, "precision": half_precision(job.gpu)}
        plain["quantization"] = "nf4-double" if method == "qlora" else "none"
    if job.longest_sample:  # a sequence length that no sample reaches costs nothing
        plain["sequence_length"] = min(job.sequence_length, job.longest_sample)
    plain |= {k: v for k, v in wanted.items() if k != "method" or v != "auto"}
    if "micro_batch" in wanted and "accumulation" not in wanted:
        plain["accumulation"] = max(per_gpu // wanted["micro_batch"], 1)
    return base.but(**plain)


def techniques(job: Job, base: Recipe | None = None) -> tuple[Rung, ...]:
    """Every rung computed for this run, whether needed or not: the cheat sheet."""
    return tuple(_climb(job, starting_recipe(job, base or Recipe()), Estimator(job), stop=False))


def _climb(job: Job, start: Recipe, estimator: Estimator, stop: bool = True) -> list[Rung]:
    """Rungs in order; with `stop` no further than the first that fits."""
    wanted = dict(job.wanted)
    method = "auto" if job.method == "auto" and "method" not in wanted else wanted.get("method", job.method)
    recipe, rungs = start, [_rung(Step("plain", _plain_title(job, start), lambda r, j: r, ""), start, None, estimator)]
    for step in steps_for(job):
        if stop and rungs[-1].judgement.verdict == "fits" and not _only_a_start(job, rungs[-1]):
            break
        if not _applies(step, recipe, method, wanted):
            continue
        changed = step.change(recipe, job).but(**{k: v for k, v in wanted.items() if k not in ("method",)})
        if changed == recipe or not estimator.possible(changed):
            continue
        rung = _rung(step, changed, rungs[-1], estimator, rungs[0])
        if rung.saved <= 0 and stop and changed.method == recipe.method and step.key not in PAYS_LATER:
            continue  # it buys nothing here
        rungs.append(rung)
        recipe = changed
    return rungs


def _only_a_start(job: Job, rung: Rung) -> bool:
    """fp32 that nobody asked for is where the ladder starts, not an answer: it is several times slower."""
    asked = "precision" in dict(job.wanted) or "precision" in job.stated
    return rung.key == "plain" and rung.recipe.precision == "fp32" and not asked


def _plain_title(job: Job, start: Recipe) -> str:
    if job.stated:
        return "as in the file"
    if start.method != "full":
        return {"lora": "LoRA", "qlora": "QLoRA"}[start.method] + ", no technique"
    return "fp32, no technique" if start.precision == "fp32" else "as asked"


def _applies(step: Step, recipe: Recipe, method: str, wanted: dict[str, object]) -> bool:
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


def _already(step: Step, recipe: Recipe) -> bool:
    """The recipe does at least as much as the rung would."""
    shards = ("none", "optimizer", "gradients", "parameters")
    if step.key == "mixed":
        return recipe.precision != "fp32"
    if step.sets == ("shard",):
        return shards.index(recipe.shard) >= shards.index(step.key.removeprefix("shard-"))
    if step.key == "accumulation":
        return recipe.micro_batch == 1
    return step.key == "8-bit-optimizer" and optimizer(recipe.optimizer).block > 0


def _rung(step: Step, recipe: Recipe, before: Rung | None, estimator: Estimator, first: Rung | None = None) -> Rung:
    footprint, judgement = estimator.shown(recipe)
    seconds = estimator.seconds(recipe)
    reference = estimator.seconds(first.recipe) if first else seconds
    saved = before.judgement.need - judgement.need if before else 0
    return Rung(
        step.key, step.title, recipe, footprint, judgement, saved, seconds / reference if reference else 1.0, step.caveat,
        _why(judgement), dict(step.flags),
    )  # fmt: skip


def _why(judgement: Judgement) -> str:
    if judgement.verdict == "misfit":
        return f"{gib(-judgement.headroom)} GiB over"
    if judgement.verdict == "tight":
        return "too tight to promise"
    return f"fits, {gib(judgement.headroom)} GiB headroom"


def _search(job: Job, reached: Rung, estimator: Estimator) -> tuple[Recipe, tuple[Refusal, ...]]:
    """The fastest candidate that is confirmed to fit; candidates that were faster but did not are the refusals."""
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
    )
    return Refusal(title, r, -judgement.headroom, _why(judgement))


def _marked(rungs: list[Rung], reached: Rung) -> tuple[Rung, ...]:
    return tuple(rungs[: rungs.index(reached) + 1])


def _limits(estimator: Estimator, recipe: Recipe) -> dict[str, int]:
    positions = estimator.job.architecture.max_positions
    longest = positions if positions and estimator.job.architecture.learned_positions else LONGEST_SEQUENCE
    return {
        "micro_batch": largest(estimator, recipe, "micro_batch", 4096),
        "sequence_length": largest(estimator, recipe, "sequence_length", longest),
    }


def _transitions(job: Job, rungs: list[Rung], reached: Rung) -> tuple[str, ...]:
    """What is learned changes at LoRA and QLoRA: said, never silent."""
    if job.method != "auto" or reached.recipe.method == "full":
        return ()
    full = next((r for r in reversed(rungs) if r.recipe.method == "full"), None)
    over = f" (closest: {gib(-full.judgement.headroom)} GiB over)" if full else ""
    what = {"lora": "LoRA trains adapters beside frozen weights", "qlora": "QLoRA trains adapters on a 4-bit base"}
    return (
        f"full fine-tuning does not fit without offloading{over}: {what[reached.recipe.method]}; --method full keeps full fine-tuning",
    )


def _other_batch(job: Job, recipe: Recipe) -> tuple[str, ...]:
    """An effective batch that cannot be split evenly is said, not hidden."""
    if recipe.effective_batch == job.effective_batch:
        return ()
    return (f"effective batch {recipe.effective_batch}: {job.effective_batch} cannot be split evenly as asked",)


def _host_memory(estimator: Estimator, recipe: Recipe) -> tuple[str, ...]:
    """What offloading asks of the host, in pinned memory over all processes."""
    need = estimator.host_bytes(recipe)
    return (f"host RAM: about {gib(need)} GiB for what is offloaded",) if need else ()


def _nothing_fits(job: Job, closest: Rung, rungs: list[Rung], estimator: Estimator, cards: tuple[Gpu, ...]) -> Plan:
    plan = Plan(
        job, closest.recipe, closest.footprint, closest.judgement, tuple(rungs),
        seconds_per_step=estimator.seconds(closest.recipe),
        notes=(f"nothing fits: the closest recipe is {gib(-closest.judgement.headroom)} GiB over",),
    )  # fmt: skip
    return replace(plan, alternatives=smallest_change(plan, cards))


def smallest_change(plan: Plan, cards: Iterable[Gpu]) -> tuple[Alternative, ...]:
    """More of the same card, then larger cards: the smallest change of hardware that would do."""
    job, found = plan.job, []
    for count in (2, 4, 8):
        if count > job.num_gpus:
            several = replace(job, num_gpus=count)
            sharded = plan.recipe.but(num_gpus=count, shard="parameters", accumulation=max(job.effective_batch // count, 1),
                                      micro_batch=1, offload="none")  # fmt: skip
            if (option := _alternative(several, sharded, job.gpu)) is not None:
                found.append(option)
                break
    larger = sorted(
        (g for g in cards if g.total_bytes > job.gpu.total_bytes and g.vendor == job.gpu.vendor), key=_size_and_price
    )
    for gpu in larger:
        if (option := _alternative(replace(job, gpu=gpu), plan.recipe, gpu)) is not None:
            found.append(option)
            break
    return tuple(found)


def cheaper(plan: Plan, cards: Iterable[Gpu]) -> tuple[Alternative, ...]:
    """Other cards that run the job, cheapest per step first; unpriced ones come last, smallest first."""
    found = []
    for gpu in cards:
        if gpu.short != plan.job.gpu.short and gpu.vendor in ("NVIDIA", "AMD"):
            option = _alternative(replace(plan.job, gpu=gpu), plan.recipe, gpu)
            if option is not None:
                found.append(option)
    return tuple(
        sorted(found, key=lambda x: (x.price_per_hour is None, x.price_per_hour or 0.0, x.judgement.usable))[:6]
    )


def _size_and_price(gpu: Gpu) -> tuple[int, float]:
    return gpu.total_bytes, gpu.price_per_hour or float("inf")


def _alternative(job: Job, recipe: Recipe, gpu: Gpu) -> Alternative | None:
    estimator = Estimator(job)
    if not estimator.possible(recipe):
        return None
    candidate = estimator.quick(recipe)
    if candidate.judgement.verdict != "fits":
        return None
    return Alternative(gpu.name, recipe.num_gpus, recipe, candidate.judgement, gpu.price_per_hour, candidate.seconds)
