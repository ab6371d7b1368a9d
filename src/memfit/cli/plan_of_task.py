"""Plan another task than a language model's, or a model without a formula: by formula, else by running its trainer."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memfit.catalogue.cards import list_gpus, prices_read
from memfit.cli import terminal
from memfit.cli.flags import AUTO, BATCH, DATA, FROM, IGNORE, as_flags, typed
from memfit.cli.kept_answers import kept, key, pictured, trained_size
from memfit.cli.request import Request, cards_of, ignoring, job_of, judged_plan, machine_words, same_file
from memfit.cli.task_flags import (
    as_run,
    as_typed,
    length_with,
    needs_trace,
    notes_on,
    shape_of,
    sized,
    trained_by,
)
from memfit.errors import BadInput, Unsupported
from memfit.models import families, hub
from memfit.models.families.towers import images_of
from memfit.nouns.footprint import Footprint
from memfit.nouns.job import Job, Recipe
from memfit.nouns.plan import Judgement, Plan, Rung
from memfit.nouns.task import Images, Task
from memfit.planner import left_out, make_plan, plan_by_trace, techniques
from memfit.planner.search import Writable
from memfit.planner.traced import Answer, TracedEstimator, Work
from memfit.tables.pipelines import pipeline
from memfit.tables.tasks import TASKS

if TYPE_CHECKING:
    from memfit.cli.tracers import Tracers
    from memfit.frameworks.keys import Adopted
    from memfit.frameworks.targets import Target

Tell = Callable[[str, float], None]


@dataclass(frozen=True, slots=True)
class _Asked:
    """What is planned: the job and the recipe to start from, and what traces recipes; None where a formula counts."""

    job: Job
    base: Recipe
    estimator: TracedEstimator | None
    express: Writable | None
    tell: Tell
    written: tuple[str, Adopted | None] | None  # the target of --out, and the user's file where that is written


def plan(
    request: Request, row: Task, name: str, flags: dict[str, Any], progress: Callable[[str, float], None] | None = None
) -> Plan:
    """Return the plan by formula where one counts the task on the model, else by traces.

    progress: told instead of the terminal.
    """
    if flags.get("save_tape"):
        hint = f"memfit trace {name} --task {row.key} --save-tape"
        raise Unsupported(f"--save-tape is not there for a plan of {row.title}", hint=hint)
    with _asked(request, row, name, flags, progress) as asked:
        try:
            return _planned(asked, request, flags)
        except Unsupported:
            if asked.written:
                from memfit.frameworks.targets import check_written

                check_written(asked.job, asked.base, *asked.written)  # says what no file can, if that is why
            raise


def plan_and_techniques(
    request: Request, row: Task, name: str, flags: dict[str, Any]
) -> tuple[Plan, tuple[Rung, ...], tuple[str, ...]]:
    """Return the plan, every technique on top of those before it, and notes on those that are impossible."""
    with _asked(request, row, name, flags) as asked:
        found, rungs = _planned(asked, request, flags), techniques(asked.job, asked.base, asked.estimator)
        return found, rungs, left_out(asked.job, asked.base)


def _planned(asked: _Asked, request: Request, flags: dict[str, Any]) -> Plan:
    if asked.estimator is None:
        found = make_plan(asked.job, base=asked.base, cards=list_gpus(), any_gpu=flags["any_gpu"], progress=asked.tell,
                          writable=asked.express)  # fmt: skip
    else:
        found = plan_by_trace(asked.job, asked.base, asked.estimator)
        if flags["any_gpu"]:
            from memfit.planner.hardware import cheaper_by_trace

            cards, note = cheaper_by_trace(found, list_gpus(), asked.estimator)
            found = replace(found, alternatives=cards, notes=(*found.notes, note))
    return judged_plan(request, replace(found, prices_read=prices_read()))


@contextmanager
def _asked(
    request: Request, row: Task, name: str, flags: dict[str, Any], progress: Tell | None = None
) -> Iterator[_Asked]:
    """Read what is planned, and hold what traces its recipes where no formula counts them."""
    job, base = job_of(request, flags)
    shape = sized(shape_of(flags, row, request.adopted), row, name, request.dataset, flags, request.notes)
    base = as_run(base, row, shape)
    if row.sample == "prompt" and job.effective_batch % shape.generations:
        more = -(-job.effective_batch // shape.generations) * shape.generations
        raise BadInput(
            f"an effective batch of {job.effective_batch} answers is no whole number of prompts with "
            f"{shape.generations} answers each", hint=f"--effective-batch {more}",
        )  # fmt: skip
    job = replace(
        job, task=row.key, shape=shape, trainer=base.trainer,
        sequence_length=base.sequence_length if row.sample == "prompt" else job.sequence_length,
    )  # fmt: skip
    request.notes += notes_on(row, request.adopted)
    by_trace = needs_trace(row, request.architecture, request.recipe, job.method)
    with terminal.progress() as shown:
        tell = progress or shown
        if not by_trace:
            job, base = _counted(job, base, row, name)
            written = _written(job, base, row, request, flags)
            yield _Asked(job, base, None, _express(job, written), tell, written)
            return
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # PyTorch reads it once; silences DDP's advice
        job, base = _sized(job, base, row, name)
        written = _written(job, base, row, request, flags)
        express = _express(job, written)
        with _tracers(name, request, job) as tracers:
            tell("counting the model's work", 0.02)
            estimator = TracedEstimator(job, _telling(tracers, tell), _work(name, job), express, tracers.busy)
            yield _Asked(job, base, estimator, express, tell, written)


def _counted(job: Job, base: Recipe, row: Task, name: str) -> tuple[Job, Recipe]:
    """Return a job and its recipe with the model as the task trains it, which formulas count."""
    config = hub.resolve_config(name)
    if row.sample == "pictures":
        job, base = _with_images(job, base, images_of(config, job.architecture.name, job.shape))
    model = families.trained_for(config, job.architecture.name, row, job.shape)
    if model.fixed_length:
        job = replace(job, sequence_length=model.fixed_length)
        base = base.but(sequence_length=job.sequence_length)
    return replace(job, architecture=model), base


def _telling(tracers: Tracers, tell: Tell) -> Callable[[Recipe], Callable[[], Answer]]:
    """Return what begins to trace a recipe, and tells which one is waited for."""
    said: list[str] = []

    def begin(recipe: Recipe) -> Callable[[], Answer]:
        wait = tracers.begin(recipe)

        def answer() -> Answer:
            what = f"{recipe.method} {recipe.precision}, micro-batch {recipe.micro_batch}"
            said.append(f"trace {len(said) + 1}: {what}")
            tell(said[-1], min(0.05 + 0.06 * len(said), 0.95))
            return wait()

        return answer

    return begin


def _tracers(name: str, request: Request, job: Job) -> Tracers:
    """Return what traces the recipes of a job, in processes of their own."""
    from memfit.cli.tracers import Tracers

    def prepare(recipe: Recipe) -> None:
        from memfit.virtual.tracing import import_ahead

        import_ahead(recipe, hub.resolve_config(name), "" if job.task == "sft" else job.task, job.shape)

    def known(recipe: Recipe) -> Answer | None:
        from memfit.documents import traced_answers

        kind = traced_answers.Answer
        found = traced_answers.read(key(kind, name, job.task, job.shape, **_of(recipe, job)), kind)
        return (found.footprint, found.judgement) if found else None

    return Tracers(lambda recipe: _measured(recipe, name, request, job), known, prepare)


def _of(recipe: Recipe, job: Job) -> dict[str, Any]:
    """Return what the answer of a trace depends on beside the model, its task and the versions."""
    return {"recipe": recipe, "gpu": job.gpu, "reserve": job.reserve}


def target_of(row: Task, recipe: Recipe, flags: dict[str, Any]) -> Target:
    """Return the target that --out writes: the one named, else the script of the task's trainer."""
    from memfit.frameworks.targets import target

    return target(flags["target"] or (trained_by(row, recipe) if row.key == "sft" else row.target))


def revises(request: Request, flags: dict[str, Any]) -> bool:
    """Return whether --out writes the user's own file of an image trainer, which no target does."""
    if request.adopted is None or flags.get("target"):
        return False
    from memfit.frameworks.targets import started_by_its_tool  # every framework, and what their files need

    return started_by_its_tool(request.adopted)


def _written(
    job: Job, recipe: Recipe, row: Task, request: Request, flags: dict[str, Any]
) -> tuple[str, Adopted | None] | None:
    """Return the target that is written, and the user's file where it is that; None where nothing is.

    Raises Unsupported where no recipe can be.
    """
    if not flags["out"]:
        return None
    from memfit.frameworks import diffusers
    from memfit.frameworks.targets import own_target

    if request.adopted and revises(request, flags):
        return own_target(request.adopted), request.adopted
    if row.sample == "noise":
        if job.method == "qlora":
            raise Unsupported("diffusers' scripts load the base of adapters whole", hint="--method lora")
        diffusers.written(job.architecture.name)
    return target_of(row, recipe, flags).key, None


def _express(job: Job, written: tuple[str, Adopted | None] | None) -> Writable | None:
    """Return a test of what can be written; None where nothing is."""
    if written is None:
        return None
    from memfit.frameworks.targets import writable

    return writable(job, *written)


def _sized(job: Job, base: Recipe, row: Task, name: str) -> tuple[Job, Recipe]:
    """Return a job and its recipe with the size of its images, and a sequence that holds those of a text."""
    if row.sample == "noise":
        return replace(job, shape=trained_size(name, job.shape)), base
    if row.sample != "pictures":
        return job, base
    return _with_images(job, base, pictured(name, row.key, job.shape))


def _with_images(job: Job, base: Recipe, images: Images) -> tuple[Job, Recipe]:
    """Return a job and its recipe with a sequence that holds images and some text."""
    given = any(field == "sequence_length" for field, _ in job.wanted) or "sequence_length" in job.stated
    text = job.sequence_length if job.longest_sample else 0
    length = length_with(images, job.sequence_length, given, text)
    if job.longest_sample:  # which were counted without them
        job = replace(job, longest_sample=job.longest_sample + images.tokens)
    job = replace(job, sequence_length=length, shape=replace(job.shape, image=images.size))
    return job, base.but(sequence_length=length)


def _measured(recipe: Recipe, name: str, request: Request, job: Job) -> tuple[Footprint, Judgement]:
    """Return the answer of a trace, from the cache where the same was traced before."""
    from memfit.cli.trace import traced
    from memfit.documents import traced_answers

    def answer() -> traced_answers.Answer:
        footprint, found, tape, _ = traced(
            recipe, name, request, lambda text, share: None, lean=False, task=job.task, shape=job.shape, brief=True
        )
        assert found.judgement is not None
        traced_answers.write_tape(recipe, footprint, tape)
        return traced_answers.Answer(footprint, found.judgement)

    found = kept(answer, traced_answers.Answer, name, job.task, job.shape, **_of(recipe, job))
    return found.footprint, found.judgement


def _work(name: str, job: Job) -> Work:
    def count() -> Work:
        from memfit.virtual.jobs.work import work_of

        return work_of(hub.resolve_config(name), job)

    return kept(count, Work, name, job.task, job.shape, length=job.sequence_length)


def show(plan: Plan, request: Request, flags: dict[str, Any]) -> None:
    """Show a plan with the command that traces its recipe again."""
    terminal.notes(request.notes)
    if flags["json"]:
        from memfit.documents import codec

        terminal.show_json(codec.plan_doc(plan))
        return
    from memfit.report.plan import plan_view

    recipe, row = plan.recipe, TASKS[plan.job.task]
    cards, machine = cards_of(request, recipe.num_gpus), machine_words(request, flags)
    said = as_typed(row, plan.job.shape, request.architecture)
    words = [plan.job.architecture.name, *cards, *machine, *said, *_own(as_flags(recipe))]
    again = shlex.join(["memfit", "trace", *words])
    if plan.judgement.verdict == "not_judged":
        judge = ["memfit", "plan", *same_file(flags, request), *cards, *machine, *typed(flags, (BATCH, *DATA, *AUTO))]
        own = _own_loop(request, row) and not flags["trainer"]
        following = [shlex.join([*judge, "--trainer", "trl"] if own else ignoring(judge, plan.judgement))]
    elif plan.judgement.verdict == "misfit":
        following = [again]
    elif flags["out"]:
        following = [*_after_writing(plan, request, flags, [*cards, *machine]), again]
    else:
        asked = typed(flags, (BATCH, *DATA, *AUTO, FROM))
        write = ["memfit", "plan", plan.job.architecture.name, *cards, *machine, *said, *asked, "--out", "run/"]
        prepared = row.sample == "noise" and pipeline(hub.resolve_config(plan.job.architecture.name)).prepared
        if revises(request, flags):
            prepared, asked = False, typed(flags, (BATCH, *AUTO))
            write = ["memfit", "plan", *same_file(flags, request), *cards, *machine, *asked, "--out", "run/"]
        following = [again] if prepared else [shlex.join(write), again]
    terminal.show(plan_view(plan, following))


def _own_loop(request: Request, row: Task) -> bool:
    """Return whether the tool of the user's file computes the loss of the task itself."""
    if request.adopted is None:
        return False
    from memfit.frameworks.task_keys import own_loop

    return own_loop(request.adopted, row.key)


def _after_writing(plan: Plan, request: Request, flags: dict[str, Any], machine: list[str]) -> list[str]:
    """Return the commands that train what was written, and trace it."""
    from memfit.frameworks import process_layout
    from memfit.frameworks.script import NO_DATA
    from memfit.frameworks.targets import own_file

    if request.adopted and revises(request, flags):
        file = str(Path(flags["out"], own_file(request.adopted)))
        return [shlex.join(["memfit", "trace", "--from", file, *machine, *typed(flags, (IGNORE,))])]
    folder, data = Path(flags["out"]), [] if plan.job.dataset else ["--data", NO_DATA]
    start = process_layout.launch_of(plan.recipe, flags["target"] or "").command
    traced = ["memfit", "trace", str(folder / "train.py"), *machine, *(["--", *data] if data else [])]
    return [f"cd {shlex.quote(str(folder))} && {' '.join([start, *data])}", shlex.join(traced)]


def _own(words: list[str]) -> list[str]:
    """Return a recipe's flags without those that follow from the task."""
    kept, skip = [], False
    for word in words:
        skip = word in ("--trainer", "--loss") or (skip and not word.startswith("--"))
        kept += [] if skip else [word]
    return kept
