"""memfit train: run a recipe; where memory runs out, switch to a smaller one and resume."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from memfit.catalogue.cards import custom_gpu, local_gpu, other_card, planned
from memfit.cli import plan_of_task, task_flags, terminal
from memfit.cli.flags import (
    AUTO,
    BATCH,
    CARD,
    COMMON,
    DATA,
    TASK,
    TRAINING,
    Argument,
    Flag,
    check_ranges,
    takes,
    training_of,
    typed,
)
from memfit.cli.request import Request, job_of, read_request
from memfit.cli.request_data import with_data
from memfit.cli.train_checks import (
    check,
    check_apart,
    check_batch,
    check_cpu,
    check_data,
    check_packages,
    check_unedited,
)
from memfit.cli.train_shown import Shown
from memfit.documents import recipe_file
from memfit.errors import BadInput, MemfitError, Unsupported
from memfit.extras import MissingExtra
from memfit.frameworks.recipe_toml import plan_of
from memfit.frameworks.targets import placed
from memfit.nouns.gpu import Gpu
from memfit.nouns.job import TRAINING_RANGES, Training
from memfit.nouns.plan import Plan
from memfit.nouns.task import Task
from memfit.planner import make_plan
from memfit.tables.cautions import cautions
from memfit.tables.tasks import task
from memfit.train import embedded
from memfit.train.children import in_child
from memfit.train.folder import ASIDE, DAMAGED, TASKS_TRAINED, Run, create, fresh, held, opened
from memfit.train.merge import MERGED, merged
from memfit.train.model_card import has_card, write_card
from memfit.train.outcome import EXIT_OF, FALLS, FULL_ERRNO, Settings
from memfit.train.run_file import RUN_COPY, RUN_FILE
from memfit.train.supervise import supervise
from memfit.units import parse_size

EXAMPLES = (
    "memfit train",
    "memfit train run/recipe.toml --out run-1 --merge",
    "memfit train Qwen/Qwen2.5-0.5B --gpu local --data train.jsonl",
    "memfit train qwen3-0.6b --task dpo --gpu local --data pairs.jsonl",
    "memfit train --out run-1 --resume",
)
WHAT = Argument(
    "what",
    "a recipe.toml, or a model as for 'memfit plan'; without it a small embedded model is trained",
    "RECIPE|MODEL",
)
RUN: tuple[Flag, ...] = (
    Flag("out", str, "The run's folder. Default: memfit-run.", "DIR"),
    Flag("resume", bool, "Continue the run in that folder.", default=False),
    Flag("force", bool, "Replace the run in that folder, and train a recipe even if it does not fit.", default=False),
    Flag("cpu", bool, "Train on the CPU.", default=False),
    *TRAINING,
    Flag("save_steps", float, "Steps between checkpoints; below 1, a share of all steps. Default: 0.1.", "N"),
    Flag("falls", int, "How many times the run may switch to a smaller recipe. Default: 5.", "N"),
    Flag("memory_limit", str, "Limit the device's memory, to see what happens when it runs out.", "4GiB"),
    Flag("merge", bool, "Also write the adapters merged into their base.", default=False),
    Flag("no_rehearsal", bool, "Skip the rehearsal of the largest batch before the first step.", default=False),
)
RANGES = {**TRAINING_RANGES, "falls": (0, 1000)}  # flag -> (lowest, highest)
SAVE_STEPS = 0.1  # ten checkpoints by default
AGAIN = ("out", "resume", "falls", "memory_limit", "merge", *(row.name for row in COMMON))  # flags --resume accepts
OF_A_MODEL = (*TASK, BATCH, *DATA[1:], *AUTO)  # flags whose values a recipe.toml already holds
EXIT_INTERRUPTED = 130  # stopped by Ctrl-C, as shells report it


@takes(*CARD, *TASK, BATCH, *DATA, *RUN, *AUTO, *COMMON, argument=WHAT)
def run(what: str | None = None, **flags: Any) -> int:
    """Fine-tune a model, and survive running out of memory.

    Runs the train.py that 'memfit export' writes. When memory runs out, the run switches to a recipe that needs less by
    at least the missing bytes, keeps the effective batch and the learning rate, and resumes from its last good step.
    """
    need_libraries()
    check_ranges(flags, RANGES)
    folder = Path(flags["out"] or "memfit-run").resolve()
    with _held(folder, flags["resume"]):
        found = _resumed(folder, what, flags) if flags["resume"] else _started(folder, what, flags)
        return _run(found, flags["json"], flags["merge"])


def _run(found: Run, json: bool, merge: bool) -> int:
    """Supervise and show the run, write the model card, merge, and return the exit code.

    merge: merge the adapters again even if they were merged before.
    """
    shown, finished = Shown(found, json), found.finished()
    if finished and (lost := found.lost_model(finished)):
        terminal.note(f"the saved model is damaged ({lost}): it lies in {found.path / DAMAGED}, and is saved again")
        finished = None
    if finished:
        terminal.note("this run is finished, and its files are there: nothing is trained")
    try:
        with shown:
            outcome = finished or supervise(found, in_child, shown.tell)
        if outcome.status == "done" and not (finished and has_card(found)):
            write_card(found, outcome)
    except KeyboardInterrupt:
        shown.broken_off()
        return EXIT_INTERRUPTED
    except OSError as error:
        if error.errno not in FULL_ERRNO:
            raise
        shown.full(error)
        return EXIT_OF["failed"]
    merge |= not (finished and (found.path / MERGED).exists())
    shown.end(outcome)
    if outcome.status == "done" and found.settings.merge and merge:
        _merge(found)
    return EXIT_INTERRUPTED if shown.interrupted and outcome.status == "stopped" else EXIT_OF[outcome.status]


@contextmanager
def _held(folder: Path, resume: bool) -> Iterator[None]:
    """Lock the run's folder for this process, and remove it again if it is new and stays empty."""
    if resume and not folder.is_dir():  # `opened` reports it
        yield
        return
    new = not folder.exists()
    try:
        with held(folder, (RUN_FILE, RUN_COPY, ASIDE)):
            yield
    finally:
        if new and folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()


def need_libraries() -> None:
    """Raise MissingExtra if a training library is missing, without importing any."""
    from importlib.util import find_spec

    needed = ("torch", "transformers", "trl", "peft", "accelerate", "datasets")
    missing = [name for name in needed if find_spec(name) is None]
    if missing:
        raise MissingExtra(f"training (with {', '.join(missing)})", "train")


# ---- the run and its plan


def _resumed(folder: Path, what: str | None, flags: dict[str, Any]) -> Run:
    """Open the run in the folder; only --falls, --memory-limit and --merge may change it."""
    if what:
        raise BadInput("--resume continues what is in the folder", hint=f"memfit train --out {folder} --resume")
    given = typed(flags, (row for row in (*CARD, *TASK, BATCH, *DATA, *RUN, *AUTO) if row.name not in (*AGAIN, "cpu")))
    if given:
        raise BadInput(
            f"{given[0]} cannot change in a run that is resumed",
            hint="--resume takes --falls, --memory-limit and --merge",
        )
    found = opened(folder)
    check_unedited(found)
    settings = replace(found.settings, merge=found.settings.merge or flags["merge"])
    if not (settings.cpu or found.finished() or has_gpu()):
        raise BadInput(
            f"the run in {folder} needs a GPU, and there is none in this machine",
            hint="resume it on a machine with one",
        )
    if flags["falls"] is not None:  # on top of the falls so far
        settings = replace(settings, falls=len(found.falls) + flags["falls"])
    if flags["memory_limit"]:
        settings = replace(settings, memory_limit=parse_size(flags["memory_limit"]))
    if not found.finished():
        check_packages(found.plan)
    if found.output.is_dir():
        found.drop_broken()  # before anything is written, in case half a checkpoint fills the disk
    if settings != found.settings:
        found.keep(settings, found.falls)
    return found


def _started(folder: Path, what: str | None, flags: dict[str, Any]) -> Run:
    """Write a new run after planning and checking it."""
    settings = _settings(what, flags)
    try:
        if what is None:
            if flags["task"]:
                raise BadInput("--task is for a model that is named",
                               hint=f"memfit train MODEL --task {flags['task']} --data FILE")  # fmt: skip
            if flags["data"]:
                check_data(flags["data"])
            with fresh(folder, flags["force"]):
                plan, notes = _planned(_embedded(folder, flags), flags, settings)
                plan = _trained(plan, flags, embedded.TRAINING)
                check_packages(plan)
                check_cpu(plan, settings)
                found = create(folder, placed(plan), settings)
        else:
            plan, notes = _planned(_recipe_in(what), flags, settings)
            plan = placed(_trained(plan, flags, plan.job.training))
            check(plan, flags["force"], settings.cpu)
            check_cpu(plan, settings)
            check_apart(plan, folder)
            with fresh(folder, flags["force"]):
                found = create(folder, plan, settings)
    except (FileNotFoundError, NotADirectoryError, PermissionError) as error:
        raise BadInput(f"{folder} cannot be written: {error.strerror}", hint="name another folder: --out DIR") from None
    terminal.notes((*notes, *cautions(plan.job.architecture, plan.recipe, plan.job.gpu)))
    return found


def _trained(plan: Plan, flags: dict[str, Any], base: Training) -> Plan:
    """Return the plan with `base` as its training, changed by the flags."""
    steps = base.save_steps or (0.0 if base.save_strategy in ("epoch", "no") else SAVE_STEPS)
    training = training_of(flags, replace(base, save_steps=steps))
    return replace(plan, job=replace(plan.job, training=training))


def _recipe_in(what: str) -> str:
    """Return the recipe.toml in `what` if it is a folder that a plan was written to, else `what`."""
    path = Path(what) / "recipe.toml"
    return str(path) if path.is_file() and not (Path(what) / "config.json").exists() else what


def _settings(what: str | None, flags: dict[str, Any]) -> Settings:
    cpu = flags["cpu"] or (what is None and not has_gpu())
    if not cpu and not has_gpu():
        if what and what.endswith(".toml") and not Path(what).is_file():
            raise BadInput(
                f"there is no file {what}", hint="memfit plan MODEL --gpu CARD --out run/ writes run/recipe.toml"
            )
        raise BadInput(
            "there is no GPU in this machine",
            hint="--cpu trains on the CPU; memfit launch writes a job for a machine with one",
        )
    if flags["eval_data"]:
        check_data(flags["eval_data"])
    return Settings(
        cpu=cpu, memory_limit=parse_size(flags["memory_limit"]) if flags["memory_limit"] else 0,
        falls=FALLS if flags["falls"] is None else flags["falls"], rehearse=not flags["no_rehearsal"],
        merge=flags["merge"],
    )  # fmt: skip


def has_gpu() -> bool:
    """Return whether this machine has a working NVIDIA card."""
    try:
        local_gpu()
    except BadInput:
        return False
    return True


def _embedded(folder: Path, flags: dict[str, Any]) -> str:
    """Write the embedded model and its data into the run's folder by a child process; return the model's folder."""
    assets = folder / "assets"
    done = subprocess.run(
        [sys.executable, "-m", "memfit.train.embedded", str(assets)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise BadInput(
            f"the embedded model could not be written: {done.stderr.strip().splitlines()[-1:]}", hint="--debug"
        )
    flags["data"] = flags["data"] or str(assets / "prose.txt")
    flags["tokenizer"] = flags["tokenizer"] or "bytes"
    for name, value in (("sequence_length", embedded.SEQUENCE), ("effective_batch", embedded.BATCH)):
        flags[name] = value if flags[name] is None else flags[name]
    return str(assets / embedded.NAME)


def _planned(what: str, flags: dict[str, Any], settings: Settings) -> tuple[Plan, list[str]]:
    """Return the plan of a recipe.toml, unchanged, or the planner's plan of a model, and notes on what was assumed."""
    if what.endswith(".toml"):
        plan = _of_file(Path(what), flags, settings)
        return plan, list(plan.notes)
    if settings.cpu:
        if not (flags["gpu"] or flags["gpu_memory"]):
            flags["gpu_memory"] = str(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
        flags["precision"] = flags["precision"] or "fp32"  # a CPU is slow in every other precision
    if not flags["data"]:
        raise BadInput("no data to train on", hint="--data train.jsonl")
    request = read_request(what, flags)
    row = task_flags.asked(flags, request.architecture, None)
    _check_task(row, f"{shlex.quote(what)} --task {row.key}")
    task_flags.shape_of(flags, row, None)
    if not row.language:
        return _of_task(request, row, what, flags)
    request = with_data(request, flags)
    job, base = job_of(request, flags)
    with terminal.progress() as tell:
        return make_plan(job, base=base, progress=tell), request.notes


def _of_task(request: Request, row: Task, what: str, flags: dict[str, Any]) -> tuple[Plan, list[str]]:
    """Return the plan of another task than a language model's. Raises Unsupported where only a trace answers."""
    recipe = request.recipe
    if task_flags.needs_trace(row, request.architecture, recipe, flags["method"]):
        problem = f"memfit train runs what a formula counts, and none counts {row.title} of {what}"
        hint = f"memfit plan {shlex.quote(what)} --task {row.key} --out DIR writes a script"
        raise Unsupported(problem, hint=hint)
    task_flags.check_flags(flags, row, request.architecture, recipe, by_trace=False)
    request = with_data(request, flags, row)
    return plan_of_task.plan(request, row, what, {**flags, "out": None, "any_gpu": False}), request.notes


def _check_task(row: Task, named: str) -> None:
    if row.key not in TASKS_TRAINED:
        hint = f"it runs {', '.join(TASKS_TRAINED)}; memfit plan {named} --out DIR writes a script"
        raise Unsupported(f"memfit train does not run {row.title}", hint=hint)


def _of_file(path: Path, flags: dict[str, Any], settings: Settings) -> Plan:
    given = typed(flags, OF_A_MODEL)
    if given:
        raise BadInput(
            f"{given[0]} is decided by {path}", hint="change it there, or give the model: memfit train MODEL"
        )
    file = recipe_file.read(path)
    _check_task(task(file.task), f"--from {path}")
    check_batch(file, path)
    name = flags["gpu"]
    if name:
        card: Gpu | None = local_gpu() if name == "local" else other_card(name, file)
    else:
        card = planned(file.gpu, 0 if flags["gpu_memory"] else file.gpu_memory)
    if flags["gpu_memory"]:
        card = custom_gpu(parse_size(flags["gpu_memory"]), card)
    if card is None:
        card = custom_gpu(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")) if settings.cpu else local_gpu()
    if flags["data"]:
        file = replace(file, data=flags["data"])
    if not file.data:
        raise BadInput(f"{path} names no data", hint="--data train.jsonl")
    if settings.merge and task(file.task).auto != "AutoModelForCausalLM":
        raise BadInput(f"--merge merges adapters of language models, not those of {task(file.task).title}",
                       hint="leave --merge out")  # fmt: skip
    return plan_of(file, card)


# ---- at the end


def _merge(run: Run) -> None:
    """Write the merged model; the adapters stay as they are. Raises BadInput with the command to try again."""
    if run.plan.recipe.method == "full":
        terminal.note("--merge has no effect: full fine-tuning has no adapters")
        return
    terminal.note("merging the adapters into their base")
    try:
        terminal.note(f"wrote {merged(run)}")
    except MemfitError as error:
        again = shlex.join(["memfit", "train", "--out", str(run.path), "--resume", "--merge"])
        raise BadInput(error.message, hint=f"{error.hint}; try again with: {again}") from None
