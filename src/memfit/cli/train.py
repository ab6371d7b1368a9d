"""memfit train: a recipe run for real, which falls down a rung and resumes where memory runs out."""

from __future__ import annotations

import os
import re
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
from memfit.errors import BadInput, MemfitError, MissingExtra, Refused
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
    from memfit.train import lock
    from memfit.train.folder import ASIDE, RUN_FILE

    if resume and not folder.is_dir():  # `opened` says so
        yield
        return
    new = not folder.exists()
    try:
        with lock.held(folder, (RUN_FILE, ASIDE)):
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
    from memfit.frameworks.plan_of_recipe import plan_of
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


ON_HUB = re.compile(r"[\w.-]+/[\w.-]+")  # owner/name


def check_data(data: str, vocabulary: int | None = None) -> None:
    """Raises BadInput where train.py could not read it: a file that is not there or that has broken lines; with the model's
    `vocabulary` also for token ids that it has not."""
    from memfit.data import read_dataset
    from memfit.data.files import READERS
    from memfit.data.samples import BAD_TOOLS, NO_OBJECT, NO_ROLE, NO_TEXT, UNEVEN
    from memfit.models.hub import check_there

    if not Path(data).exists() and Path(data).suffix.lower() not in READERS:
        if not ON_HUB.fullmatch(data):
            raise BadInput(f"there is no file {data}", hint="a file that is there, or a dataset on the Hub: owner/name")
        check_there(data, "dataset")
        return
    found = read_dataset(data)
    if found.empty == found.lengths.count:
        raise BadInput(
            f"every sample of {data} is empty", hint=f"there is nothing to learn in it; see: memfit data {data}"
        )
    if len(found.layouts) > 1:
        mixed = ", ".join(f"{count} with {layout.replace('+', ' and ')}" for layout, count in found.layouts)
        raise BadInput(
            f"the samples of {data} are laid out in different ways: {mixed}",
            hint="train.py reads one layout and would leave the others out: write them to files of their own",
        )
    highest, line = found.highest
    if vocabulary is not None and highest >= vocabulary:
        raise BadInput(
            f"{data}, line {line}: token {highest:,} is none of the {vocabulary:,} that the model knows",
            hint="tokenise the data with the model's own tokenizer, or give the text",
        )
    numbers, line = found.numbers
    if 0 < numbers < found.lengths.count:
        raise BadInput(
            f"{data}, line {line}: what is text in other samples is a number here, or true or false",
            hint=f'write it as text, between quotes: "..."; samples like it: {numbers:,}',
        )
    # broken lines that `memfit data` only counts, and on which datasets or train.py would fail
    fatal = ("not JSON", "not UTF-8", "the text is not valid Unicode", NO_ROLE, NO_OBJECT, NO_TEXT, UNEVEN, BAD_TOOLS)
    for broken in found.reasons:
        if any(words in broken.reason for words in fatal):
            raise BadInput(
                f"{data}, line {broken.line}: {broken.reason}", hint=f"mend that line; see: memfit data {data}"
            )


def check(plan: Plan, force: bool) -> None:
    """Refuse what could not run, before anything is written."""
    from memfit.models.hub import check_there

    if plan.job.architecture.task not in ("causal-lm", "multimodal"):
        name = Path(plan.job.architecture.name).name
        raise BadInput(
            f"memfit trains language models that write their text on, and {name} is of another kind "
            f"({plan.job.architecture.task})",
            hint="memfit plan, estimate and trace are for it, too",
        )
    check_data(plan.job.dataset, plan.job.architecture.vocabulary)
    if plan.job.training.eval_data:
        check_data(plan.job.training.eval_data, plan.job.architecture.vocabulary)
    check_packages(plan)
    if plan.judgement.verdict == "misfit" and not force:
        raise Refused(
            f"the closest recipe does not fit the {plan.job.gpu.name}",
            hint="--force tries it; memfit plan says what would",
        )
    if not Path(plan.job.architecture.name).exists():
        check_there(plan.job.architecture.name, "model")


def check_packages(plan: Plan) -> None:
    """Raises BadInput where train.py could not import what its recipe needs."""
    from memfit.train.folder import target_of
    from memfit.train.installed import missing

    names = missing(plan.recipe, target_of(plan))
    if names:
        other = ", or --loss full" if "liger-kernel" in names else ""
        raise BadInput(
            f"this recipe needs packages that are not installed: {', '.join(names)}",
            hint=f"pip install {' '.join(names)}{other}",
        )


def check_apart(plan: Plan, folder: Path) -> None:
    """Raises BadInput where the run that makes way holds what the new one reads."""
    from memfit.train.folder import writes

    for name in (plan.job.architecture.name, plan.job.dataset, plan.job.training.eval_data):
        inside = name and Path(name).is_relative_to(folder) and Path(name).relative_to(folder).parts
        if inside and writes(inside[0]):
            raise BadInput(
                f"{name} lies in {folder}, which the new run would start again", hint="name another folder: --out DIR"
            )


def check_cpu(plan: Plan, settings: Settings) -> None:
    """Raises BadInput for what PyTorch has on cards only; says what a CPU does in another way."""
    recipe = plan.recipe
    if not settings.cpu:
        return
    if recipe.checkpointing == "offload":
        if "checkpointing" not in {*dict(plan.job.wanted), *plan.job.stated}:  # the planner's last way out
            raise BadInput(
                "this run needs more memory than this machine has, and a CPU has nowhere to offload to",
                hint="a smaller --sequence-length, --micro-batch or model",
            )
        raise BadInput("a CPU has no memory to offload activations from", hint="--checkpointing full")
    if recipe.compile:
        raise BadInput("memfit does not train compiled on a CPU", hint="--no-compile, or a machine with a GPU")
    if recipe.precision == "fp16-mixed":
        terminal.note("on a CPU fp16-mixed trains in fp32, without a loss scaler")
