"""memfit train: a recipe run for real, which falls down a rung and resumes where memory runs out."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memfit.cli import terminal
from memfit.cli.flags import (
    AUTO,
    BATCH,
    CARD,
    COMMON,
    DATA,
    TRAINING,
    Argument,
    Flag,
    check_ranges,
    takes,
    training_of,
    typed,
)
from memfit.errors import BadInput, MemfitError, MissingExtra
from memfit.nouns.job import TRAINING_RANGES, Training

if TYPE_CHECKING:
    from memfit.nouns.gpu import Gpu
    from memfit.nouns.plan import Plan
    from memfit.train.folder import Run
    from memfit.train.outcome import Settings

EXAMPLES = (
    "memfit train",
    "memfit train run/recipe.toml --out run-1 --merge",
    "memfit train Qwen/Qwen2.5-0.5B --gpu local --data train.jsonl",
    "memfit train --out run-1 --resume",
)
WHAT = Argument(
    "what", "a recipe.toml or a model as for 'memfit plan'; without one a small embedded model", "RECIPE|MODEL"
)
RUN: tuple[Flag, ...] = (
    Flag("out", str, "The run's folder. Default: memfit-run.", "DIR"),
    Flag("resume", bool, "Continue the run in that folder.", default=False),
    Flag("force", bool, "Start again in a folder that holds a run.", default=False),
    Flag("cpu", bool, "Train on the CPU.", default=False),
    *TRAINING,
    Flag("save_steps", float, "Steps between checkpoints; below 1 a share of all. Default: 0.1.", "N"),
    Flag("falls", int, "How often memory may run out before the run stops. Default: 5.", "N"),
    Flag("memory_limit", str, "Use only so much of the device: to try what happens.", "4GiB"),
    Flag("merge", bool, "Write the adapters merged into their base as well.", default=False),
    Flag("no_rehearsal", bool, "Do not try the worst batch before the first step.", default=False),
)
RANGES = {**TRAINING_RANGES, "falls": (0, 1000)}  # flag -> (lowest, highest) that makes sense
SAVE_STEPS = 0.1  # ten checkpoints of a run that says nothing else
AGAIN = ("out", "resume", "falls", "memory_limit", "merge", *(row.name for row in COMMON))  # what --resume takes
OF_A_MODEL = (BATCH, *DATA[1:], *AUTO)  # what a recipe.toml has settled
EXIT_INTERRUPTED = 130  # stopped by Ctrl-C, as shells count it


@takes(*CARD, BATCH, *DATA, *RUN, *AUTO, *COMMON, argument=WHAT)
def run(what: str | None = None, **flags: Any) -> int:
    """Fine-tune for real, and survive running out of memory.

    Runs the train.py that 'memfit export' writes. Where memory runs out the plan is made again with what was missing, the
    next rung down is taken with the same effective batch and learning rates, and the run resumes from its last good step.
    """
    need_libraries()
    check_ranges(flags, RANGES)
    folder = Path(flags["out"] or "memfit-run").resolve()
    with _held(folder, flags["resume"]):
        found = _resumed(folder, what, flags) if flags["resume"] else _started(folder, what, flags)
        return _run(found, flags["json"], flags["merge"])


def _run(found: Run, json: bool, merge: bool) -> int:
    """Supervise it, show it, leave the card and merge, with `merge` even what was merged; returns the exit code."""
    from memfit.cli.train_shown import Shown
    from memfit.train.children import in_child
    from memfit.train.merge import MERGED
    from memfit.train.model_card import has_card, write_card
    from memfit.train.outcome import EXIT_OF
    from memfit.train.supervise import supervise

    shown, finished = Shown(found, json), found.finished()
    if finished:
        terminal.note("this run is done, and all that it made is there: nothing is trained")
    try:
        with shown:
            outcome = finished or supervise(found, in_child, shown.tell)
    except KeyboardInterrupt:
        shown.broken_off()
        return EXIT_INTERRUPTED
    if outcome.status == "done" and not (finished and has_card(found)):
        write_card(found, outcome)
    merge |= not (finished and (found.path / MERGED).exists())
    shown.end(outcome)
    if outcome.status == "done" and found.settings.merge and merge:
        _merge(found)
    return EXIT_INTERRUPTED if shown.interrupted and outcome.status == "stopped" else EXIT_OF[outcome.status]


@contextmanager
def _held(folder: Path, resume: bool) -> Iterator[None]:
    """The folder is this process's own; one that stays empty is not left behind."""
    from memfit.train.folder import ASIDE, RUN_FILE, held

    if resume and not folder.is_dir():  # `opened` says so
        yield
        return
    new = not folder.exists()
    try:
        with held(folder, (RUN_FILE, ASIDE)):
            yield
    finally:
        if new and folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()


def need_libraries() -> None:
    """Raises MissingExtra; imports nothing."""
    from importlib.util import find_spec

    needed = ("torch", "transformers", "trl", "peft", "accelerate", "datasets")
    missing = [name for name in needed if find_spec(name) is None]
    if missing:
        raise MissingExtra(f"training (with {', '.join(missing)})", "train")


# ---- what is run


def _resumed(folder: Path, what: str | None, flags: dict[str, Any]) -> Run:
    """The run in the folder; falls and the limit may be said anew, the rest is as it was."""
    from dataclasses import replace

    from memfit.cli.train_checks import check_packages
    from memfit.train.folder import opened
    from memfit.units import parse_size

    if what:
        raise BadInput("--resume continues what is in the folder", hint=f"memfit train --out {folder} --resume")
    given = typed(flags, (row for row in (*CARD, BATCH, *DATA, *RUN, *AUTO) if row.name not in (*AGAIN, "cpu")))
    if given:
        raise BadInput(
            f"{given[0]} cannot change in a run that is resumed",
            hint="--resume takes --falls, --memory-limit and --merge",
        )
    found = opened(folder)
    if found.settings.recipe not in ("", found.recipe()):
        raise BadInput(
            f"{folder}/recipe.toml has been edited since the run wrote it",
            hint="put it back as it was, or start a new run with it: memfit train "
            f"{folder}/recipe.toml --out DIR (what was trained is safe)",
        )
    settings = replace(found.settings, merge=found.settings.merge or flags["merge"])
    if not (settings.cpu or found.finished() or has_gpu()):
        raise BadInput(
            f"the run in {folder} is one for a GPU, and there is none in this machine",
            hint="resume it where there is one",
        )
    if flags["falls"] is not None:  # counted from here on
        settings = replace(settings, falls=len(found.falls) + flags["falls"])
    if flags["memory_limit"]:
        settings = replace(settings, memory_limit=parse_size(flags["memory_limit"]))
    if not found.finished():
        check_packages(found.plan)
    if found.output.is_dir():
        found.drop_broken()  # first of all, in case that it is half a checkpoint that fills the disk
    found.keep(settings, found.falls)
    return found


def _started(folder: Path, what: str | None, flags: dict[str, Any]) -> Run:
    """A new run: planned, judged, written."""
    from memfit.cli.train_checks import check, check_apart, check_cpu, check_data, check_packages
    from memfit.tables.cautions import cautions
    from memfit.train import embedded
    from memfit.train.folder import create, fresh

    settings = _settings(what, flags)
    try:
        if what is None:
            if flags["data"]:
                check_data(flags["data"])
            with fresh(folder, flags["force"]):
                plan, notes = _planned(_embedded(folder, flags), flags, settings)
                plan = _trained(plan, flags, embedded.TRAINING)
                check_packages(plan)
                check_cpu(plan, settings)
                found = create(folder, _from_anywhere(plan), settings)
        else:
            plan, notes = _planned(_recipe_in(what), flags, settings)
            plan = _from_anywhere(_trained(plan, flags, plan.job.training))
            check(plan, flags["force"])
            check_cpu(plan, settings)
            check_apart(plan, folder)
            with fresh(folder, flags["force"]):
                found = create(folder, plan, settings)
    except (FileNotFoundError, NotADirectoryError, PermissionError) as error:
        raise BadInput(f"{folder} cannot be written: {error.strerror}", hint="name another folder: --out DIR") from None
    for line in (*notes, *cautions(plan.job.architecture, plan.recipe, plan.job.gpu)):
        terminal.note(line)
    return found


def _trained(plan: Plan, flags: dict[str, Any], base: Training) -> Plan:
    """The plan with what the flags say of training over `base`."""
    from dataclasses import replace

    training = training_of(flags, replace(base, save_steps=base.save_steps or SAVE_STEPS))
    return replace(plan, job=replace(plan.job, training=training))


def _recipe_in(what: str) -> str:
    """The folder that a plan was written to stands for the recipe in it."""
    path = Path(what) / "recipe.toml"
    return str(path) if path.is_file() and not (Path(what) / "config.json").exists() else what


def _from_anywhere(plan: Plan) -> Plan:
    """The same with whole paths: the run may be resumed from another folder."""
    from dataclasses import replace

    job, name = plan.job, plan.job.architecture.name
    architecture = replace(job.architecture, name=str(Path(name).resolve()) if Path(name).exists() else name)
    training = replace(job.training, eval_data=_whole(job.training.eval_data))
    return replace(plan, job=replace(job, architecture=architecture, dataset=_whole(job.dataset), training=training))


def _whole(data: str) -> str:
    """A file by its whole path; what is no file here may be a dataset on the Hub."""
    return str(Path(data).resolve()) if data and Path(data).exists() else data


def _settings(what: str | None, flags: dict[str, Any]) -> Settings:
    from memfit.cli.train_checks import check_data
    from memfit.train.outcome import FALLS, Settings
    from memfit.units import parse_size

    cpu = flags["cpu"] or (what is None and not has_gpu())
    if not cpu and not has_gpu():
        if what and what.endswith(".toml") and not Path(what).is_file():
            raise BadInput(
                f"there is no file {what}", hint="memfit plan MODEL --gpu CARD --out run/ writes run/recipe.toml"
            )
        raise BadInput(
            "there is no GPU in this machine", hint="--cpu trains on the CPU; memfit launch writes a job for others"
        )
    if flags["eval_data"]:
        check_data(flags["eval_data"])
    return Settings(
        cpu=cpu, memory_limit=parse_size(flags["memory_limit"]) if flags["memory_limit"] else 0,
        falls=FALLS if flags["falls"] is None else flags["falls"], rehearse=not flags["no_rehearsal"],
        merge=flags["merge"],
    )  # fmt: skip


def has_gpu() -> bool:
    """This machine has an NVIDIA card that answers."""
    from memfit.catalogue.cards import local_gpu

    try:
        local_gpu()
    except BadInput:
        return False
    return True


def _embedded(folder: Path, flags: dict[str, Any]) -> str:
    """Make the embedded model and its data in the run's folder, in a process of its own; returns the model's folder."""
    from memfit.train import embedded

    assets = folder / "assets"
    done = subprocess.run(
        [sys.executable, "-m", "memfit.train.embedded", str(assets)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise BadInput(f"the embedded model could not be made: {done.stderr.strip().splitlines()[-1:]}", hint="--debug")
    flags["data"] = flags["data"] or str(assets / "prose.txt")
    flags["tokenizer"] = flags["tokenizer"] or "bytes"
    for name, value in (("sequence_length", embedded.SEQUENCE), ("effective_batch", embedded.BATCH)):
        flags[name] = value if flags[name] is None else flags[name]
    return str(assets / embedded.NAME)


def _planned(what: str, flags: dict[str, Any], settings: Settings) -> tuple[Plan, list[str]]:
    """The plan of a recipe.toml as it stands, or of a model by the planner; with what was assumed."""
    from memfit.cli.asked import asked, job_of, with_data
    from memfit.planner import make_plan

    if what.endswith(".toml"):
        return _of_file(Path(what), flags, settings), []
    if settings.cpu:
        if not (flags["gpu"] or flags["gpu_memory"]):
            flags["gpu_memory"] = str(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
        flags["precision"] = flags["precision"] or "fp32"  # a CPU is slow at everything else
    if not flags["data"]:
        raise BadInput("no data to train on", hint="--data train.jsonl")
    found = with_data(asked(what, flags), flags)
    job, base = job_of(found, flags)
    with terminal.progress() as tell:
        return make_plan(job, base=base, progress=tell), found.notes


def _of_file(path: Path, flags: dict[str, Any], settings: Settings) -> Plan:
    from dataclasses import replace

    from memfit.catalogue.cards import custom_gpu, local_gpu, other_card, planned
    from memfit.documents import recipe_file
    from memfit.frameworks.recipe_toml import plan_of
    from memfit.units import parse_size

    given = typed(flags, OF_A_MODEL)
    if given:
        raise BadInput(
            f"{given[0]} is settled by {path}", hint="change it there, or give the model: memfit train MODEL"
        )
    file = recipe_file.read(path)
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
    return plan_of(file, card)


# ---- at the end


def _merge(run: Run) -> None:
    """Write the merged model. The adapters are safe whatever happens here. Raises BadInput saying how to do it again."""
    from memfit.train.merge import merged

    if run.plan.recipe.method == "full":
        terminal.note("--merge without effect: full fine-tuning has no adapters")
        return
    terminal.note("merging the adapters into their base")
    try:
        terminal.note(f"wrote {merged(run)}")
    except MemfitError as error:
        again = shlex.join(["memfit", "train", "--out", str(run.path), "--resume", "--merge"])
        raise BadInput(error.message, hint=f"{error.hint}; try again with: {again}") from None
