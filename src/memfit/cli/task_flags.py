"""Read the flags of a task: what is trained, how large a sample is, and what a plan by traces refuses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from memfit.errors import BadInput, Unsupported
from memfit.nouns.architecture import Architecture
from memfit.nouns.task import PLAIN, Shape, Task
from memfit.tables.tasks import TASKS, task, usual

if TYPE_CHECKING:
    from memfit.frameworks.keys import Adopted
    from memfit.nouns.job import Recipe

LARGEST_IMAGE, LONGEST_AUDIO = 1 << 14, 24 * 3600.0  # pixels, seconds
_KINDS = {  # flag -> the kinds of sample that it describes
    "image_size": ("image",), "audio_seconds": ("waveform",), "target_length": ("text-to-text", "features"),
}  # fmt: skip
_ABSENT = {  # flag -> what to do instead
    "any_gpu": "name a card: --gpu", "host_memory": "leave it out: host RAM is counted by formula alone",
}  # fmt: skip
_TEXT = ("text", "label", "token-labels", "text-to-text", "pair", "choice")


def asked(flags: Mapping[str, Any], architecture: Architecture, adopted: Adopted | None) -> Task:
    """Return the task that a flag or the file names, else the usual one of the model. Raises UnknownName."""
    of_file = "sft"
    if adopted:
        from memfit.frameworks.task_keys import ignored

        of_file = "sft" if ignored(adopted, flags.get("ignore") or ()) else adopted.task
    if named := flags.get("task") or ("" if of_file == "sft" else of_file):
        return task(named)
    return usual(architecture)


def needs_trace(row: Task, architecture: Architecture) -> bool:
    """Return whether no formula answers for a task on a model."""
    return not row.by_formula or bool(architecture.trainable_memory)


def shape_of(flags: Mapping[str, Any], row: Task, adopted: Adopted | None = None) -> Shape:
    """Return the size of a sample from the flags, else from the file of the same task.

    Raises BadInput for a size that the task does not have, or no size.
    """
    for name, kinds in _KINDS.items():
        if flags.get(name) is not None and row.sample not in kinds:
            flag = f"--{name.replace('_', '-')}"
            having = ", ".join(key for key, other in TASKS.items() if other.sample in kinds)
            raise BadInput(f"{flag} does not describe a sample of {row.title}", hint=f"it is for --task {having}")
    seconds, target = flags.get("audio_seconds"), flags.get("target_length")
    if seconds is not None and not 0.1 <= seconds <= LONGEST_AUDIO:
        raise BadInput(f"--audio-seconds must be from 0.1 to {LONGEST_AUDIO:,.0f}", hint="--audio-seconds 10")
    if target is not None and not 1 <= target <= 1 << 20:
        raise BadInput(f"--target-length must be from 1 to {1 << 20:,}, not {target}", hint="--target-length 128")
    base = adopted.shape if adopted and adopted.task == row.key else PLAIN
    image = _image(flags["image_size"]) if flags.get("image_size") is not None else base.image
    return replace(base, image=image, audio_seconds=seconds or base.audio_seconds, target=target or base.target)


def as_typed(row: Task, shape: Shape, architecture: Architecture) -> list[str]:
    """Return the flags of a task that is not the model's usual one, and of the size of its samples."""
    size = {"image_size": "{}x{}".format(*shape.image), "audio_seconds": f"{shape.audio_seconds:g}"}
    size["target_length"] = str(shape.target)
    plain = {"image_size": "0x0", "audio_seconds": "0", "target_length": str(PLAIN.target)}
    said = [(f"--{name.replace('_', '-')}", text) for name, text in size.items() if text != plain[name]]
    said = said if row == usual(architecture) else [("--task", row.key), *said]
    return [word for pair in said for word in pair]


def _image(text: str) -> tuple[int, int]:
    wide, _, tall = text.lower().partition("x")
    try:
        found = int(wide), int(tall or wide)
    except ValueError:
        found = (0, 0)
    if not all(1 <= n <= LARGEST_IMAGE for n in found):
        raise BadInput(f"--image-size {text} is no size of an image", hint="--image-size 224x224")
    return found


def check_flags(flags: Mapping[str, Any], row: Task, architecture: Architecture) -> None:
    """Refuse what a plan by trace does not do yet, and what this task or machine cannot."""
    from memfit.virtual.supported import check_trace, obstacle

    if reason := obstacle():
        raise BadInput(f"{row.title} is planned by a trace, and there is {reason}", hint="use Linux on x86-64")
    check_trace()
    named = f"--task {row.key}" if row.key != "sft" else f"{architecture.model_type} models"
    for name, hint in _ABSENT.items():
        if flags.get(name):
            flag = f"--{name.rstrip('_').replace('_', '-')}"
            raise Unsupported(f"{flag} is not there for {named}, which a trace plans", hint=hint)
    _check_target(flags.get("target"), row)
    if flags.get("trainer") and flags["trainer"] != trained_by(row):
        raise BadInput(f"--trainer {flags['trainer']} does not run {row.title}", hint=f"--trainer {trained_by(row)}")
    if flags.get("data") and row.sample not in _TEXT:
        raise Unsupported(f"--data is read for texts, not for {row.unit}", hint="leave it out")


def _check_target(key: str | None, row: Task) -> None:
    """Refuse a target that does not run a task."""
    if not key:
        return
    from memfit.frameworks.targets import SCRIPTS, target

    name = target(key).key
    if row.key != "sft" and name != trained_by(row) and (name in SCRIPTS or target(key).trainer):
        raise Unsupported(f"--target {key} does not run {row.title}", hint=f"--target {trained_by(row)}")


def notes_on(row: Task, adopted: Adopted | None) -> list[str]:
    """Return a note where another tool's file is planned with the task's own trainer."""
    if adopted is None or adopted.format not in ("axolotl", "llamafactory"):
        return []
    from memfit.frameworks.task_keys import own_loop

    by = "transformers' Trainer" if row.trainer == "transformers" else f"TRL's {row.trainer}Trainer"
    more = ", which keeps less than its own: --trainer trl judges it as TRL's" if own_loop(adopted, row.key) else ""
    return [f"{adopted.format}: counted as {by} runs it{more}"]


def as_task(recipe: Recipe, row: Task) -> Recipe:
    """Return a recipe with what the task's trainer decides."""
    return recipe.but(trainer=trained_by(row), loss="full", padding="longest")


def trained_by(row: Task) -> str:
    """Return the trainer that runs a task, as a value of --trainer."""
    return "transformers" if row.trainer == "transformers" else "trl"
