"""Read the flags of a task: what is trained, how large a sample is, and what a plan by traces refuses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from importlib.util import find_spec
from math import ceil
from typing import TYPE_CHECKING, Any

from memfit.closed_form.task_runs import by_formula
from memfit.data.lengths import MULTIPLE, choose_sequence_length, samples_of
from memfit.errors import BadInput, Unsupported
from memfit.models.hub import resolve_config
from memfit.nouns.architecture import Architecture
from memfit.nouns.job import Recipe
from memfit.nouns.task import PLAIN, Images, Shape, Task
from memfit.tables.pipelines import pipeline
from memfit.tables.tasks import TASKS, WINDOWED, refuse, task, usual
from memfit.tables.trainers import trainer
from memfit.virtual.supported import check_trace, obstacle

if TYPE_CHECKING:
    from memfit.data.dataset import Dataset
    from memfit.frameworks.keys import Adopted

LARGEST_IMAGE, MOST_IMAGES, LONGEST_AUDIO = 1 << 14, 256, 24 * 3600.0  # pixels a side, a sample, seconds
TEXT, STEP = 256, 256  # least tokens of text beside images where the length is chosen, and what it is a multiple of
_KINDS = {  # flag -> the kinds of sample that it describes
    "images": ("pictures",), "image_size": ("image", "pictures"),
    "resolution": ("noise",), "cache_latents": ("noise",),
    "audio_seconds": ("waveform", "features"), "target_length": ("text-to-text", "features"),
    **dict.fromkeys(("prompt_length", "completion_length", "generations", "reference"), ("prompt",)),
}  # fmt: skip
_ABSENT = {  # flag -> what to do instead
    "any_gpu": "name a card: --gpu", "host_memory": "leave it out: host RAM is counted by formula alone",
}  # fmt: skip
_SET = {"pretrain": {"trainer": "transformers", "method": "full"}}  # flags that a task sets where they are not given


def with_task(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Return the flags with those that the named task sets. Raises BadInput for adapters on weights that are random."""
    named = _SET.get(flags.get("task") or "", {})
    if named.get("method") == "full" and flags.get("method") not in (None, "auto", "full"):
        raise BadInput(f"--method {flags['method']} trains adapters, and --task {flags['task']} the weights themselves",
                       hint="--method full, or --task sft")  # fmt: skip
    given = {name: value for name, value in flags.items() if value not in (None, "auto")}
    return {**flags, **named, **given}


def asked(flags: Mapping[str, Any], architecture: Architecture, adopted: Adopted | None) -> Task:
    """Return the task that a flag or the file names, else the usual one of the model. Raises UnknownName.

    The usual one of a vision-language model is text alone where the user says so, or gives data or a file, which hold
    texts.
    """
    of_file = "sft"
    if adopted:
        from memfit.frameworks.task_keys import ignored

        of_file = "sft" if ignored(adopted, flags.get("ignore") or ()) else adopted.task
    if architecture.model_type in WINDOWED and flags.get("audio_seconds"):
        problem = f"{architecture.name} pads or cuts every recording to its encoder's window"
        raise BadInput(problem, hint="leave --audio-seconds out")
    if named := flags.get("task") or ("" if of_file == "sft" else of_file):
        return task(named)
    row, images = usual(architecture), flags.get("images")
    if row.sample != "pictures":
        if images:
            problem = f"{architecture.name} takes no images"
            raise BadInput(problem, hint="leave --images out; qwen2.5-vl-7b takes them")
        return row
    if flags.get("data"):
        from memfit.data.task_samples import pictured

        return row if images or (images is None and pictured(flags["data"])) else TASKS["sft"]
    texts = adopted
    return TASKS["sft"] if images == 0 or (texts and images is None) else row


def needs_trace(row: Task, architecture: Architecture, recipe: Recipe, method: str | None = None) -> bool:
    """Return whether no formula answers for a task on a model, or for the adapters of a recipe."""
    return not by_formula(row, architecture, recipe, method)


def apart(row: Task, architecture: Architecture, recipe: Recipe, method: str | None = None) -> bool:
    """Return whether a plan is that of a task or by traces (`plan_of_task`), not a language model's by formula."""
    return not row.language or needs_trace(row, architecture, recipe, method)


def shape_of(flags: Mapping[str, Any], row: Task, adopted: Adopted | None = None) -> Shape:
    """Return the size of a sample from the flags, else from the file of the same task.

    Raises BadInput for a size that the task does not have, or no size.
    """
    for name, kinds in _KINDS.items():
        if flags.get(name) not in (None, 0, False) and row.sample not in kinds:
            flag = f"--{name.replace('_', '-')}"
            having = ", ".join(key for key, other in TASKS.items() if other.sample in kinds)
            raise BadInput(f"{flag} does not describe a sample of {row.title}", hint=f"it is for --task {having}")
    seconds, target = flags.get("audio_seconds"), flags.get("target_length")
    if seconds is not None and not 0.1 <= seconds <= LONGEST_AUDIO:
        raise BadInput(f"--audio-seconds must be from 0.1 to {LONGEST_AUDIO:,.0f}", hint="--audio-seconds 10")
    if target is not None and not 1 <= target <= 1 << 20:
        raise BadInput(f"--target-length must be from 1 to {1 << 20:,}, not {target}", hint="--target-length 128")
    for name, low in (("prompt_length", 1), ("completion_length", 1), ("generations", 2)):
        if flags.get(name) is not None and not low <= flags[name] <= 1 << 20:
            flag, usual = f"--{name.replace('_', '-')}", 8 if low == 2 else 512
            raise BadInput(f"{flag} must be from {low} to {1 << 20:,}, not {flags[name]}", hint=f"{flag} {usual}")
    base = adopted.shape if adopted and adopted.task == row.key else PLAIN
    given: dict[str, Any] = {}
    if row.sample == "pictures" and flags.get("images") is not None:
        given["images"] = _images(flags["images"])
    if flags.get("cache_latents"):
        given["cached"] = True
    name = "resolution" if row.sample == "noise" else "image_size"
    if flags.get(name) is not None:
        given["image"] = _image(name, flags[name])
    found = replace(
        base, audio_seconds=seconds or base.audio_seconds, target=target or base.target,
        prompt=flags.get("prompt_length") or base.prompt, generations=flags.get("generations") or base.generations,
        completion=flags.get("completion_length") or base.completion,
        reference=bool(flags.get("reference")) or base.reference, **given,
    )  # fmt: skip
    if row.sample == "prompt" and flags.get("sequence_length") not in (None, found.prompt + found.completion):
        raise BadInput("--sequence-length is the sum of two lengths here", hint="--prompt-length, --completion-length")
    return found


def sized(
    shape: Shape, row: Task, name: str, dataset: Dataset | None, flags: Mapping[str, Any], notes: list[str]
) -> Shape:  # fmt: skip
    """Return the size of a sample with what the data say of it, where neither a flag nor a file does.

    `name`: the model, whose pipeline may be trained on prepared latents and embeddings alone.
    """
    if row.sample == "noise" and not shape.cached and pipeline(resolve_config(name)).prepared:
        notes.append(
            "--cache-latents: no VAE and text encoders of this model are known, so latents and embeddings are prepared"
        )
        shape = replace(shape, cached=True)
    if dataset is None:
        return shape

    def is_open(name: str, flag: str) -> bool:
        return flags.get(flag) is None and getattr(shape, name) == getattr(PLAIN, name)

    sizes = dataset.sizes
    given: dict[str, Any] = {}
    for name, flag, lengths, kinds in (
        ("target", "--target-length", sizes.targets, _KINDS["target_length"]),
        ("prompt", "--prompt-length", sizes.prompts, _KINDS["prompt_length"]),
    ):
        if lengths and row.sample in kinds and is_open(name, f"{name}_length"):
            given[name] = length = choose_sequence_length(lengths, multiple=8).length
            longer, lost = samples_of(lengths, length).cut, "left out" if name == "prompt" else "cut"
            notes.append(f"{flag} {length} from the data: {longer or 'none'} of {lengths.count:,} is {lost}")
    follows = row.heard and sizes.seconds and not shape.audio_seconds
    if follows and resolve_config(name).get("model_type") not in WINDOWED:
        given["audio_seconds"] = ceil(sizes.seconds * 10) / 10
        notes.append(f"--audio-seconds {given['audio_seconds']:g} from the data: its longest recording")
    if sizes.images and row.sample == "pictures" and is_open("images", "images"):
        given["images"] = sizes.images
        notes.append(f"--images {sizes.images} from the data: the most of one sample")
    if all(sizes.image) and row.sample == "pictures" and is_open("image", "image_size"):
        given["image"] = sizes.image
        notes.append("--image-size {}x{} from the data: the largest".format(*sizes.image))
    if sizes.labels and row.sample in ("label", "token-labels", "image"):
        given["classes"] = max(sizes.labels, PLAIN.classes)
    return replace(shape, **given)


def as_typed(row: Task, shape: Shape, architecture: Architecture) -> list[str]:
    """Return the flags of a task that is not the model's usual one, and of the size of its samples."""
    image = "resolution" if row.sample == "noise" else "image_size"
    size = {image: "{}x{}".format(*shape.image), "audio_seconds": f"{shape.audio_seconds:g}"}
    plain = {image: "0x0", "audio_seconds": "0"}
    counts = {"target_length": "target", "images": "images", "prompt_length": "prompt",
              "completion_length": "completion", "generations": "generations"}  # fmt: skip
    size |= {flag: str(getattr(shape, name)) for flag, name in counts.items()}
    plain |= {flag: str(getattr(PLAIN, name)) for flag, name in counts.items()}
    said = [(f"--{name.replace('_', '-')}", text) for name, text in size.items() if text != plain[name]]
    said = said if row == usual(architecture) else [("--task", row.key), *said]
    switches = [*(["--reference"] if shape.reference else []), *(["--cache-latents"] if shape.cached else [])]
    return [*(word for pair in said for word in pair), *switches]


def _images(count: int) -> int:
    if not 1 <= count <= MOST_IMAGES:
        problem = f"--images must be from 0 to {MOST_IMAGES}, not {count}"
        raise BadInput(problem, hint="--images 1; --task sft takes none")
    return count


def length_with(images: Images, length: int, given: bool, text: int = 0) -> int:
    """Return a sequence length with room for images and some text: the one given, else the usual one or a longer one.

    text: tokens of the longest text, where the data say so.

    Raises BadInput where a given one has no room.
    """
    least = (images.tokens + TEXT + STEP - 1) // STEP * STEP
    if given and images.tokens >= length:
        raise BadInput(f"the images take {images.tokens:,} tokens, and a sequence has {length:,}",
                       hint=f"--sequence-length {least}, or a smaller --image-size")  # fmt: skip
    if text and not given:
        return -(-(images.tokens + text) // MULTIPLE) * MULTIPLE
    return length if given else max(length, least)


def _image(name: str, text: str) -> tuple[int, int]:
    wide, _, tall = text.lower().partition("x")
    try:
        found = int(wide), int(tall or wide)
    except ValueError:
        found = (0, 0)
    if not all(1 <= n <= LARGEST_IMAGE for n in found):
        flag, size = f"--{name.replace('_', '-')}", "512x512" if name == "resolution" else "224x224"
        raise BadInput(f"{flag} {text} is no size of an image", hint=f"{flag} {size}")
    return found


def check_flags(
    flags: Mapping[str, Any], row: Task, architecture: Architecture, recipe: Recipe, by_trace: bool = True
) -> None:
    """Refuse what the plan of a task does not do yet, and what this task cannot or a machine that traces it."""
    alone = "; --images 0 plans the text alone by formula" if _has_formula(row, architecture) else ""
    if by_trace:
        if reason := obstacle():
            problem = f"{row.title} is planned by a trace, and there is {reason}"
            raise BadInput(problem, hint=f"use Linux on x86-64{alone}")
        try:
            check_trace()
        except BadInput as missing:
            raise BadInput(missing.message, hint=f"{missing.hint}{alone}") from None
    named = f"--task {row.key}" if row.key != "sft" else f"{architecture.model_type} models"
    if row.language and not architecture.trainable_memory:
        named = f"--adapter {recipe.adapter}"
    for name, hint in _ABSENT.items():
        if flags.get(name) and (by_trace or name != "host_memory"):
            flag = f"--{name.rstrip('_').replace('_', '-')}"
            raise Unsupported(f"{flag} is not there for {named}", hint=f"{hint}{alone}")
    if (architecture.task == "diffusion") != (row.sample == "noise"):
        raise refuse(row, architecture.name, [usual(architecture).key])
    if row.sample == "noise" and recipe.adapter not in ("lora", "lokr"):
        raise Unsupported("diffusers' scripts train LoRA, and SimpleTuner LoKr", hint="--adapter lora")
    if row.sample == "noise" and find_spec("diffusers") is None:
        raise BadInput(f"{row.title} needs diffusers, which is not installed", hint="pip install diffusers")
    check_target(flags.get("target"), row)
    if flags.get("trainer") and flags["trainer"] != (by := trained_by(row, recipe)):
        raise BadInput(f"--trainer {flags['trainer']} does not run {row.title}", hint=f"--trainer {by}")


def _has_formula(row: Task, architecture: Architecture) -> bool:
    """Return whether a formula answers for a task's texts without their images."""
    return row.sample == "pictures" and not architecture.trainable_memory


def check_target(key: str | None, row: Task) -> None:
    """Refuse a target that does not run a task."""
    if not key:
        return
    from memfit.frameworks.targets import SCRIPTS, target

    name, own = target(key).key, row.target
    started = row.sample != "noise" and name not in SCRIPTS and not target(key).trainer  # by a launcher
    if row.key != "sft" and name != own and not started:
        raise Unsupported(f"--target {key} does not run {row.title}", hint=f"--target {own}")


def notes_on(row: Task, adopted: Adopted | None) -> list[str]:
    """Return notes on what the task's own trainer does otherwise than another tool's file says."""
    if adopted is None or adopted.format == "recipe":
        return []
    from memfit.frameworks.task_keys import own_loop

    by = "transformers' Trainer" if row.trainer == "transformers" else f"TRL's {row.trainer}Trainer"
    notes = []
    if adopted.format in ("axolotl", "llamafactory"):
        more = ", which keeps less than its own: --trainer trl judges it as TRL's" if own_loop(adopted, row.key) else ""
        notes.append(f"{adopted.format}: counted as {by} runs it{more}")
    if row.trainer != "SFT":
        recipe = adopted.recipe
        packs, loss = recipe.padding == "packing", recipe.loss != "full" and "loss" in adopted.stated
        without = ["packing"] * packs + [f"the {recipe.loss} loss"] * loss
        if without:
            notes.append(f"{adopted.format}: judged without {' and '.join(without)}, as memfit counts {by}")
    return notes


def trained_by(row: Task, recipe: Recipe) -> str:
    """Return the trainer that runs a task, as a value of --trainer; language models have a choice."""
    return trainer(recipe.trainer).loop if row.key == "sft" else row.by


def as_run(recipe: Recipe, row: Task, shape: Shape) -> Recipe:
    """Return the recipe as the task's trainer runs it, on samples of the given shape."""
    by = trained_by(row, recipe)
    if row.sample == "prompt":
        recipe = recipe.but(sequence_length=shape.prompt + shape.completion)
    if row.key == "sft":
        return recipe.but(trainer=by, loss=trainer(by).default_loss)
    loss = trainer(by).default_loss if row.trainer == "SFT" else "full"
    return recipe.but(trainer=by, loss=loss, padding="longest")
