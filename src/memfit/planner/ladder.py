"""The ladder: the shortest walk from the plain recipe to the chosen one, and the whole list of techniques."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from memfit.data.lengths import MULTIPLE
from memfit.nouns.architecture import LANGUAGE
from memfit.nouns.job import Job, Recipe
from memfit.nouns.plan import Judgement, Rung
from memfit.planner.rungs import (
    ORDER,
    STEPS,
    LadderStep,
    already,
    backend_precision,
    backwards,
    half_precision,
    sequences_each,
    steps_for,
    taken,
)
from memfit.planner.search import SAME_SPEED, Estimates, Estimator
from memfit.planner.traced import TracedEstimator
from memfit.tables.adapters import adapter
from memfit.tables.combinations import absent, check
from memfit.tables.optimizers import optimizer
from memfit.tables.trainers import trainer

START_BATCH = 8  # the plain recipe has a comfortable micro-batch


def starting_recipe(job: Job, base: Recipe) -> Recipe:
    """Return the first recipe of the ladder: what flags or files set, else fp32 without any technique."""
    wanted = dict(job.wanted)
    if job.stated:  # a file's missing keys have the defaults of its framework
        return base.but(**{k: v for k, v in wanted.items() if k != "method" or v != "auto"})
    per_gpu = sequences_each(job, base.but(num_gpus=job.num_gpus))
    batch = max(b for b in range(1, min(per_gpu, START_BATCH) + 1) if per_gpu % b == 0)
    loss = trainer(job.trainer).default_loss if job.architecture.trained_for == LANGUAGE else base.loss
    plain: dict[str, object] = {
        "precision": "fp32", "optimizer": "adamw", "checkpointing": "none", "loss": loss,
        "offload": "none", "shard": "none",
        "quantization": "none", "method": "full", "micro_batch": batch, "accumulation": per_gpu // batch,
        "sequence_length": job.sequence_length, "num_gpus": job.num_gpus, "trainer": job.trainer,
        "attention": "sdpa" if all(x.attention.sdpa for x in job.architecture.kinds) else "eager",
    }  # fmt: skip
    method = wanted.get("method", job.method)
    method = "lora" if method == "auto" and "adapter" in wanted else method
    if method in ("lora", "qlora"):  # a frozen base is loaded in 16 bits, or quantised
        plain |= {"method": method, "precision": half_precision(job.gpu)}
        plain["quantization"] = "nf4-double" if method == "qlora" else "none"
    if job.longest_sample:  # memory is needed only up to the longest sample; token counts may be estimates
        plain["sequence_length"] = min(job.sequence_length, -(-job.longest_sample // MULTIPLE) * MULTIPLE)
    plain |= {k: v for k, v in wanted.items() if k != "method" or v != "auto"}
    if "micro_batch" in wanted and "accumulation" not in wanted:
        plain["accumulation"] = max(per_gpu // wanted["micro_batch"], 1)
    return base.but(**plain)


# ---- the walk of a plan ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Move:
    """A step of the walk: the recipe fields that it sets to the chosen recipe's values."""

    step: LadderStep
    fields: tuple[str, ...]


def walk(job: Job, start: Recipe, chosen: Recipe, estimator: Estimates) -> tuple[Rung, ...]:
    """Return the rungs from the plain recipe to the chosen one; each can be run, and none undoes another."""
    first = LadderStep("plain", _plain_title(job, start), lambda r, j: r, "")
    if not estimator.possible(start):  # flash attention in fp32
        first, start = STEPS["mixed"], taken(STEPS["mixed"], start, job)
    rungs = [_rung(first, start, (), estimator)] if estimator.possible(start) else []
    recipe, moves = start, _moves(job, start, chosen)
    held: list[Move] = []  # moves that are possible, or buy something, only together with the next one
    before: list[Move] = []  # those of the last row
    for number, move in enumerate(moves, 1):
        held.append(move)
        recipe = _moved(job, recipe, chosen, [f for m in held for f in m.fields]) if number < len(moves) else chosen
        if not estimator.possible(recipe):
            continue
        rung = _rung(_joined(held), recipe, rungs, estimator)
        if _buys_nothing(rung, rungs) and number < len(moves):
            continue
        if _buys_nothing(rung, rungs) and before:
            rungs.pop()
            rung = _rung(_joined([*before, *held]), recipe, rungs, estimator)
        rungs.append(rung)
        before, held = held, []
    return tuple(rungs)


NOTHING = 0.002  # of the need before: a smaller saving is shown as 0.0


def _buys_nothing(rung: Rung, before: Sequence[Rung]) -> bool:
    """Return whether a row saves nothing, or takes more, and is not faster than the one before it."""
    if not before or rung.judgement.host_over < before[-1].judgement.host_over:
        return False
    return rung.saved <= NOTHING * before[-1].judgement.need and rung.step_time > before[-1].step_time / SAME_SPEED


def _joined(moves: Sequence[Move]) -> LadderStep:
    """Return the step of moves that make one row: with the titles, settings and caveats of all, tuned if one is."""
    steps = [move.step for move in moves]
    if len(steps) == 1:
        return steps[0]
    titles = " and ".join(step.title.removeprefix("+ ") for step in steps)
    costs = dict.fromkeys(step.caveat for step in steps if step.caveat and not step.caveat.startswith("none"))
    flags = {key: value for step in steps for key, value in step.flags.items()}
    key = "tuned" if any(step.key == "tuned" for step in steps) else steps[-1].key
    return replace(steps[-1], key=key, title=f"+ {titles}", caveat="; ".join(costs) or steps[-1].caveat, flags=flags)


# recipe fields that are set together -> the rung of a value; in the order of the walk, the cheapest change first
_GROUPS: tuple[tuple[str, tuple[str, ...], dict[str, str]], ...] = (
    ("shard", ("shard",), {s: f"shard-{s}" for s in ("optimizer", "gradients", "parameters")}),
    ("loss", ("loss",), {"fused": "fused-loss"}),
    ("checkpointing", ("checkpointing",), {"full": "checkpointing", "offload": "offload-checkpoints"}),
    ("micro_batch", ("micro_batch", "accumulation"), {}),
    ("optimizer", ("optimizer",), {}),
    ("attention", ("attention",), {}),
    ("method", ("method", "quantization", "precision", "optimizer"), {"lora": "lora", "qlora": "qlora"}),
    ("loading", ("loading",), {}),
    ("offload", ("offload", "precision", "optimizer"),
     {"optimizer": "offload-optimizer", "parameters": "offload-parameters"}),
    ("num_gpus", ("num_gpus", "accumulation", "micro_batch"), {}),
)  # fmt: skip


def _moves(job: Job, start: Recipe, chosen: Recipe) -> list[Move]:
    """Return the moves between two recipes."""
    differ = {name for name in start.__dataclass_fields__ if getattr(start, name) != getattr(chosen, name)}
    found: list[Move] = []
    if "precision" in differ and not differ & {"method", "offload"}:
        key = "16-bit-weights" if chosen.precision == "bf16" else "mixed"
        found.append(Move(STEPS[key], ("precision",)))
    if differ & {"method", "offload"}:  # both bring their own optimizer
        differ -= {"optimizer"}
    for name, names, keys in _GROUPS:
        if name == "micro_batch" and "num_gpus" in differ:  # fewer cards train more sequences each
            continue
        if name in differ or (name == "method" and "quantization" in differ):
            step = STEPS.get(keys.get(getattr(chosen, name), ""))
            less = name in ORDER and backwards(start, start.but(**{name: getattr(chosen, name)}))
            found.append(Move(_tuned(name, start, chosen, job) if step is None or less else step, names))
    return found


_TITLES = {
    ("checkpointing", "none"): "no checkpointing",
    ("method", "full"): "full fine-tuning",
    ("shard", "none"): "the whole model on each card",
    ("loading", "host"): "+ weights loaded to host RAM, then sharded",
    ("loading", "sharded"): "+ weights loaded one by one",
    ("loading", "whole"): "whole weights loaded on each card",
}


def _tuned(name: str, start: Recipe, chosen: Recipe, job: Job) -> LadderStep:
    """Return the step to a value that no rung of the ladder stands for."""
    value = getattr(chosen, name)
    if name == "micro_batch" and value == 1:
        return STEPS["accumulation"]
    if name == "micro_batch" and value < start.micro_batch:
        return replace(STEPS["accumulation"], title=f"+ micro-batch {value} x {chosen.accumulation}")
    if name == "optimizer" and optimizer(value).block:
        return STEPS["8-bit-optimizer"]
    if name == "optimizer":
        title = optimizer(value).title
    elif name == "micro_batch":
        title = f"micro-batch {value} x {chosen.accumulation}"
    elif name == "num_gpus":
        title = f"{value} of the {job.num_gpus} cards, micro-batch {chosen.micro_batch} x {chosen.accumulation}"
    else:
        title = _TITLES.get((name, value), f"{name.replace('_', ' ')} {value}")
    return LadderStep("tuned", title, lambda r, j: r, "none")


def _moved(job: Job, recipe: Recipe, chosen: Recipe, names: Sequence[str]) -> Recipe:
    """Return the recipe with some fields of the chosen one, at the job's effective batch."""
    moved = recipe.but(**{name: getattr(chosen, name) for name in names})
    if moved.precision != chosen.precision:
        moved = backend_precision(moved, job)
    if "accumulation" not in dict(job.wanted):
        moved = moved.but(accumulation=max(sequences_each(job, moved) // moved.micro_batch, 1))
    return moved


def closest_title(recipe: Recipe, chosen: Recipe, tokens: bool) -> str:
    """Return a passed-over recipe in words, with its method where it learns something else than the chosen one.

    tokens: they are what is learned, and their loss is computed in several ways.
    """
    r = recipe
    title = f"micro-batch {r.micro_batch} x {r.accumulation}, checkpointing {r.checkpointing}, {r.optimizer}"
    title += f", loss {r.loss}" if tokens else ""
    title += f", shard {r.shard}" if r.num_gpus > 1 else ""
    title += f", offload {r.offload}" if r.offload != "none" else ""
    title += f", attention {r.attention}" if r.attention != chosen.attention else ""
    if (r.method, r.precision) != (chosen.method, chosen.precision):
        title = f"{r.method} in {r.precision}, {title}"
    return title


# ---- every technique -------------------------------------------------------------------------------------------------


def techniques(job: Job, base: Recipe | None = None, traced: TracedEstimator | None = None) -> tuple[Rung, ...]:
    """Compute every rung for this run, whether it is needed or not, each on top of those before it.

    A start that is impossible by itself (flash attention in fp32) is left out if a later rung makes it possible. A
    recipe from a file is the first rung. traced: measures the recipes of a job that no formula counts; those that its
    trainer refuses are left out. Raises BadInput if no rung is possible.
    """
    start, estimator = starting_recipe(job, base or Recipe()), traced or Estimator(job)
    refused: set[str] = set()
    found = _one_on_another(job, start, estimator, refused)
    while traced:
        traced.ahead(*(recipe for _, recipe in found))
        first = next((step.key for step, recipe in found if traced.tried(recipe) is None), None)
        if first is None:
            break
        refused.add(first)
        found = _one_on_another(job, start, estimator, refused)
    rungs: list[Rung] = []
    for step, recipe in found:
        rungs.append(_rung(step, recipe, rungs, estimator))
    if not rungs:
        check(start, job.architecture, job.gpu)
    if not rungs and traced and traced.refused:
        raise next(iter(traced.refused.values()))
    return tuple(rungs)


def _one_on_another(
    job: Job, start: Recipe, estimator: Estimates, refused: Collection[str]
) -> list[tuple[LadderStep, Recipe]]:
    """Return each rung that is possible, with its recipe. refused: rungs that a trainer does not run."""
    plain = LadderStep("plain", _plain_title(job, start), lambda r, j: r, "")
    found = [(plain, start)] if plain.key not in refused and estimator.possible(start) else []
    recipe, by_trace = start, isinstance(estimator, TracedEstimator)
    for step in steps_for(job) if found or not job.stated else ():
        changed = taken(step, recipe, job) if step.key not in refused and _applies(step, recipe, job) else recipe
        if changed == recipe or backwards(recipe, changed) or (by_trace and changed.offload != "none"):
            continue  # a trace does not count host RAM
        if estimator.possible(changed):
            found.append((step, changed))
            recipe = changed
        elif not found:
            recipe = changed
    return found


def left_out(job: Job, base: Recipe | None = None) -> tuple[str, ...]:
    """Return a note for each reason for which rungs are impossible on this card."""
    start = starting_recipe(job, base or Recipe())
    why: dict[str, list[str]] = {}
    for step in steps_for(job):
        if _applies(step, start, job):
            missing = absent(taken(step, start, job), job.gpu)
            if missing is not None and absent(start, job.gpu) is None:
                why.setdefault(missing.why, []).append(step.title.removeprefix("+ "))
    return tuple(f"left out: {', '.join(titles)} ({reason})" for reason, titles in why.items())


def _applies(step: LadderStep, recipe: Recipe, job: Job) -> bool:
    """Return whether a rung changes what this job leaves open."""
    wanted = dict(job.wanted)
    method = wanted.get("method", job.method)
    if step.sets and all(name in wanted for name in step.sets) and "method" not in step.sets:
        return False
    if already(step, recipe):
        return False
    if step.key == "lora" and recipe.method == "lora":
        return False
    if step.key in ("lora", "qlora"):
        return method == "auto" or (method == step.learns and recipe.method != step.learns)
    if step.learns == "full" and method in ("lora", "qlora"):
        return step.key not in ("mixed", "8-bit-optimizer", "16-bit-weights", "offload-optimizer")
    return recipe.method == "full" or not step.key.startswith(("offload-optimizer", "offload-parameters"))


# ---- rungs -----------------------------------------------------------------------------------------------------------


def _plain_title(job: Job, start: Recipe) -> str:
    title = "fp32, no technique" if start.precision == "fp32" else "as asked"
    if start.method != "full":
        title = {"lora": adapter(start.adapter).title, "qlora": "QLoRA"}[start.method] + ", no technique"
    return f"{'as in the file' if job.stated else title}, micro-batch {start.micro_batch} x {start.accumulation}"


def _rung(step: LadderStep, recipe: Recipe, before: Sequence[Rung], estimator: Estimates) -> Rung:
    """Return the rung of a step, replayed however far it is from the card, as `memfit estimate` answers."""
    footprint, judgement = estimator.shown(recipe, exact=True)
    saved = before[-1].judgement.need - judgement.need if before else 0
    first = estimator.seconds(before[0].recipe) if before else 0.0
    relative = estimator.seconds(recipe) / first if first else 1.0
    return Rung(
        step.key, step.title, recipe, footprint, judgement, saved, relative, step.caveat, _why(judgement),
        dict(step.flags),
    )  # fmt: skip


def _why(judgement: Judgement) -> str:
    if judgement.verdict == "misfit":
        return judgement.shortage
    if judgement.verdict == "tight":
        return "too tight to promise"
    return f"fits, {judgement.room}"
