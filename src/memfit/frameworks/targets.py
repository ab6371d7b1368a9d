"""Export a plan as files that other tools run: the targets, one row each, and how their files are written."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

from memfit.catalogue import cards
from memfit.data.task_samples import holds_chats, kind_of
from memfit.documents import recipe_file
from memfit.documents.output_files import replace_file
from memfit.errors import BadInput, MemfitError, Refused, UnknownName, Unsupported
from memfit.frameworks import (
    accelerate,
    axolotl,
    diffusers,
    llamafactory,
    own_files,
    process_layout,
    revision,
    script_data,
    task_keys,
    training_keys,
    transformers,
    trl,
)
from memfit.frameworks.data_keys import layout_of
from memfit.frameworks.keys import Adopted
from memfit.frameworks.text import UNESTIMATED, with_environment
from memfit.nouns.job import Job, Recipe
from memfit.nouns.plan import Plan, verdict_of
from memfit.tables.tasks import TASKS
from memfit.tables.trainers import script_of, target_of

RECIPE_FILE = "recipe.toml"
_HERE = Path()


@dataclass(frozen=True, slots=True)
class Target:
    """One row: the value of --target, the files it writes, and the command that starts them."""

    key: str
    export: Callable[[Plan], dict[str, str]]
    command: Callable[[Plan], str]
    trainer: str = ""  # the row of trainers.py by which memory is computed; "": the plan's own


SCRIPTS = {"trl": trl.export, "transformers": transformers.export}  # trainers that memfit writes a train.py for


def _with_launcher(key: str) -> Target:
    """Return a target: the script of the plan's trainer, started by accelerate, with ZeRO for "deepspeed"."""

    def export(plan: Plan) -> dict[str, str]:
        return SCRIPTS[script_of(plan.recipe.trainer)](plan, process_layout.launch_of(plan.recipe, key))

    return Target(key, export, lambda plan: process_layout.launch_of(plan.recipe, key).command)


def _script(plan: Plan) -> str:
    return process_layout.launch_of(plan.recipe).command


TARGETS: dict[str, Target] = {
    row.key: row
    for row in (
        Target("trl", trl.export, _script),
        Target("transformers", transformers.export, _script, "transformers"),
        Target("diffusers", diffusers.export, _script, "torch"),
        Target("axolotl", axolotl.export, axolotl.command, "axolotl"),
        Target("llamafactory", llamafactory.export, llamafactory.command, "llamafactory"),
        _with_launcher("accelerate"),
        _with_launcher("deepspeed"),
    )
}


def frameworks_of(row: Target, trainer: str) -> tuple[str, ...]:
    """Return the frameworks whose settings the files of a target hold, with the plan's trainer."""
    if row.export in (axolotl.export, llamafactory.export):
        return (row.key,)
    launchers = ("deepspeed",) if row.key == "deepspeed" else ("accelerate", "deepspeed")
    return (row.trainer or script_of(trainer), *launchers)


def check_task(plan: Plan, key: str) -> None:
    """Refuse a target whose files cannot say the plan's task. Raises Unsupported."""
    row = TASKS[plan.job.task]
    if row.key != "sft" and target(key).export in (axolotl.export, llamafactory.export):
        raise Unsupported(
            f"memfit writes no {key} file for {row.title}", hint=f"--target {target_of(plan.recipe.trainer)}"
        )


def target(key: str) -> Target:
    """Return the row of a target. Raises UnknownName."""
    name = key.strip().lower().replace("-", "")
    if name not in TARGETS:
        raise UnknownName("export target", key, TARGETS, hint=f"known: {', '.join(TARGETS)}")
    return TARGETS[name]


@dataclass(frozen=True, slots=True)
class Written:
    """Files to write, the command that starts them, and lines on what they keep of the file they come from."""

    files: dict[str, str]
    command: str
    notes: tuple[str, ...] = ()


ARGUMENTS = "arguments"  # the target of a Trainer's own arguments, which the user's script reads


def own_target(adopted: Adopted) -> str:
    """Return the target that writes the framework of a file: the default for what is planned from it."""
    if adopted.format == transformers.NAME:
        return ARGUMENTS
    if adopted.format in own_files.OWN:
        return adopted.format
    packs = adopted.source is not None and adopted.recipe.padding == "packing"  # a script of TRL's does
    return "trl" if packs else target_of(adopted.recipe.trainer)


def started_by_its_tool(adopted: Adopted | None) -> bool:
    """Return whether the user's file is revised and started in a way that no target has, as of image trainers."""
    return adopted is not None and adopted.format in own_files.OWN and own_files.OWN[adopted.format].start is not None


def own_file(adopted: Adopted) -> str:
    """Return the name of the user's file as written; "" for a recipe.toml and for files that are only read."""
    if adopted.source is None or adopted.format not in own_files.OWN:
        return ""
    return own_files.OWN[adopted.format].name or adopted.source.path.name


def exported(plan: Plan, key: str, adopted: Adopted | None = None, folder: Path = _HERE) -> Written:
    """Return the files of a target and recipe.toml, from the user's own file where that is of the same framework.

    folder: where they will lie. For another framework the notes name what could not be carried over. Raises
    Unsupported.
    """
    plan = placed(plan)
    recipe = {RECIPE_FILE: recipe_file.dumps(recipe_of(plan))}
    if adopted is None or adopted.source is None:
        return Written(export(plan, key), target(key).command(plan), notes(plan, key))
    if key != own_target(adopted) or not own_file(adopted):
        return Written(export(plan, key), target(key).command(plan), (*notes(plan, key), *_lost(plan, key, adopted)))
    made = revision.revised(plan, adopted)
    if key not in TARGETS:
        return Written(made.files | recipe, _start(plan, adopted, folder), (made.line,))
    row = target(key)
    if own_files.OWN[key].launcher and plan.recipe.context_parallel > 1:  # memfit writes no script for it
        return Written(made.files | recipe, "your script, with this file", (made.line,))
    script = row.export(plan) if own_files.OWN[key].launcher else {}
    if key == accelerate.NAME:  # its own file may name the user's DeepSpeed file instead
        script.pop(process_layout.DEEPSPEED_FILE, None)
    return Written(script | made.files | recipe, row.command(plan), (made.line,))


def _start(plan: Plan, adopted: Adopted, folder: Path) -> str:
    """Return the command that runs a file of arguments: `trl sft` for TRL's own on one card, else the user's script."""
    assert adopted.source is not None
    if start := own_files.OWN[adopted.format].start:
        return with_environment(plan.recipe, start(plan, folder / own_file(adopted)))
    by_trl = plan.recipe.trainer.startswith("trl") and transformers.COMMAND_LINE in adopted.source.data
    if by_trl and plan.recipe.num_gpus == 1:
        return with_environment(plan.recipe, f"trl sft --config {shlex.quote(own_file(adopted))}")
    return "your script, with these arguments"


def _lost(plan: Plan, key: str, adopted: Adopted) -> tuple[str, ...]:
    """Return a line that names the settings of the user's file that the target's files do not hold."""
    assert adopted.source is not None
    training = plan.job.training
    unknown = task_keys.unknown_for(adopted, plan.job.task)
    own = task_keys.own_keys(adopted, plan.job.task)
    left = [*adopted.source.lost, *unknown, *own, *training_keys.not_said(training, key)]
    scripted = plan.job.task == "sft" and key in (*SCRIPTS, accelerate.NAME, "deepspeed")
    if scripted and training.columns is not None and not script_data.reads(training.columns):
        left.append(f"columns {'+'.join(training.columns.fields)}")
    names = ", ".join(dict.fromkeys(left))
    return (f"not carried over from {adopted.source.path.name}: {names}",) if left else ()


def export(plan: Plan, key: str = "trl", how: process_layout.Launch | None = None) -> dict[str, str]:
    """Return {path: text} of the target's files and recipe.toml. Raises Unsupported.

    `how` starts the train.py of the targets in SCRIPTS; None: as the recipe needs on one machine.
    """
    if plan.recipe.context_parallel > 1:
        raise Unsupported("memfit writes no files for GPUs that share sequences", hint="--context-parallel 1")
    check_task(plan, key)
    plan = placed(plan)
    files = SCRIPTS[key](plan, how) if how else target(key).export(plan)
    return files | {RECIPE_FILE: recipe_file.dumps(recipe_of(plan))}


def writable(job: Job, key: str, adopted: Adopted | None = None) -> Callable[[Recipe], bool]:
    """Return a test of whether the target's files, or the user's own file, can express a recipe of the job."""

    def test(recipe: Recipe) -> bool:
        try:
            check_written(job, recipe, key, adopted)
        except MemfitError:
            return False
        return True

    return test


def check_written(job: Job, recipe: Recipe, key: str, adopted: Adopted | None = None) -> None:
    """Refuse a recipe that the target's files, or the user's own file, cannot express. Raises Unsupported."""
    exported(Plan(job, recipe, UNESTIMATED, verdict_of(0, 0, 1), ()), key, adopted)


def notes(plan: Plan, key: str) -> tuple[str, ...]:
    """Return notes on the files: whose numbers the answer has, and a chat template for a base model."""
    return (*_other_backend(plan.recipe, key), *_chat_template(plan))


def _other_backend(recipe: Recipe, key: str) -> tuple[str, ...]:
    """Return a note where DeepSpeed runs what was counted without it."""
    if key != "deepspeed" or recipe.zero:
        return ()
    counted = "FSDP2" if recipe.shard == "parameters" else "DDP" if recipe.num_gpus > 1 else "a single process"
    masters = "the trained weights" if recipe.method == "full" else "the adapters"
    return (f"these files run under DeepSpeed, the answer is that of {counted}: DeepSpeed keeps {masters} in fp32 too",)


def _chat_template(plan: Plan) -> tuple[str, ...]:
    row, data = TASKS[plan.job.task], plan.job.dataset
    layout = layout_of(data, plan.job.training.columns)
    own = not row.language and holds_chats(data, kind_of(row.key, row.sample))
    chats = data and (own or (row.language and (layout.chat or layout.fields[0] == "instruction")))
    if not chats or llamafactory.template(plan.job.architecture.name) != "default":
        return ()
    return ("chats on what looks like a base model: the files set a plain chat template, needed again to talk to it",)


def placed(plan: Plan) -> Plan:
    """Return the plan with paths that exist made absolute, so that its files run from any folder."""
    model, data = plan.job.architecture.name, plan.job.dataset
    folder = model.removesuffix("config.json") or "."
    if absolute(f"{folder}/config.json"):
        model = absolute(folder) or model
    architecture = replace(plan.job.architecture, name=model)
    training = replace(plan.job.training, eval_data=_absolute_data(plan.job.training.eval_data))
    return replace(
        plan, job=replace(plan.job, architecture=architecture, dataset=_absolute_data(data), training=training)
    )


def _absolute_data(data: str) -> str:
    """Return the absolute path of a file; another name may be a dataset on the Hub and stays as it is."""
    return (data and absolute(data)) or data


def absolute(path: str) -> str | None:
    """Return the absolute path of something that exists, None for anything else."""
    found = revision.local(path, Path())
    return str(found.resolve()) if found else None


def recipe_of(plan: Plan) -> recipe_file.RecipeFile:
    """Return the plan's recipe with what is needed to trace or train it again."""
    job = plan.job
    return recipe_file.RecipeFile(
        model=job.architecture.name, recipe=plan.recipe, gpu=job.gpu.short, gpu_memory=cards.memory_to_say(job.gpu),
        data=job.dataset, effective_batch=job.effective_batch, longest_sample=job.longest_sample or 0,
        reserve=job.reserve, host_memory=job.host_memory, workers=job.workers,
        not_understood=tuple(x.key for x in plan.judgement.not_understood), task=job.task, shape=job.shape,
        training=job.training,
    )  # fmt: skip


def check_free(folder: Path, files: Iterable[str], force: bool) -> None:
    """Raise Refused where one of the files exists and `force` is not set."""
    taken = [name for name in files if os.path.lexists(folder / name)]
    if taken and not force:
        raise Refused(
            f"{folder} already holds {', '.join(taken)}", hint="add --force to overwrite, or name another folder"
        )


def write(files: dict[str, str], folder: Path, force: bool = False) -> tuple[Path, ...]:
    """Write the files under `folder`, each atomically, and return their paths.

    Raises Refused, before anything is written, when one of them exists and `force` is not set.
    """
    paths = {folder / _inside(name): text for name, text in files.items()}
    check_free(folder, files, force)
    try:
        for path, text in paths.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(path, text.encode("utf-8"))
    except UnicodeEncodeError:
        raise BadInput("a name in the plan is not valid text", hint="rename the model or data folder") from None
    except OSError as error:
        raise BadInput(
            f"cannot write to {folder}: {error.strerror or error}", hint="name a folder you may write to"
        ) from None
    return tuple(paths)


def _inside(name: str) -> PurePosixPath:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or not path.parts:
        raise BadInput(f"'{name}' would be written outside the folder", hint="export paths are relative")
    return path
