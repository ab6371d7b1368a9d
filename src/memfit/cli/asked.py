"""From flags and files to the Job, the Recipe to start from, and notes on what was assumed."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memfit.catalogue import cards
from memfit.cli import terminal
from memfit.cli.flags import recipe_values
from memfit.errors import BadInput, MemfitError, UnknownName
from memfit.models import hub
from memfit.nouns.architecture import Architecture
from memfit.nouns.gpu import Gpu
from memfit.nouns.job import AS_USUAL, Job, Recipe, check_values
from memfit.tables import combinations
from memfit.tables.optimizers import OPTIMIZERS, optimizer
from memfit.tables.trainers import trainer
from memfit.units import human, parse_size, share_of_samples

if TYPE_CHECKING:
    from memfit.data import Dataset
    from memfit.data.lengths import Lengths
    from memfit.frameworks.reading import Adopted


SETTINGS = (".toml", ".yaml", ".yml")  # endings of what --from reads
EXAMPLE = "for example: memfit plan meta-llama/Llama-3.1-8B --gpu rtx-4090"
QLORA_BASE = "nf4-double"
LORA_ONLY = ("lora_rank", "lora_alpha", "lora_dropout", "lora_targets")


@dataclass(slots=True)
class Asked:
    """The meaning of a command line. `wanted`: recipe fields the user typed; `notes`: what was assumed."""

    architecture: Architecture
    gpu: Gpu
    recipe: Recipe
    wanted: dict[str, Any]
    reserve: int = 0
    adopted: Adopted | None = None
    dataset: Dataset | None = None
    gpu_words: tuple[str, ...] = ()  # the flags that named the card, for commands to type next
    notes: list[str] = field(default_factory=list)


def asked(model: str | None, flags: Mapping[str, Any]) -> Asked:
    """Read flags and files. Raises BadInput; nothing is estimated yet."""
    if model and Path(model).suffix in SETTINGS:
        before = "" if "from_" in flags else "memfit estimate "
        raise BadInput(f"{model} is a settings file, not a model", hint=f"{before}--from {model}")
    adopted = _adopted(flags.get("from_"))
    name = model or (adopted.model if adopted else None)
    if not name:
        raise BadInput("no model given", hint=EXAMPLE)
    values = recipe_values(flags, auto="effective_batch" in flags)  # the planning commands have both
    gpu, count, words, notes = _card(flags, adopted)
    architecture = hub.resolve_model(name)
    if count is not None:
        if values.get("num_gpus", count) != count:
            raise BadInput(f"--gpu asks for {count} GPUs, --num-gpus for {values['num_gpus']}", hint="give one of them")
        values["num_gpus"] = count
    recipe = check_values((adopted.recipe if adopted else Recipe()).but(**values))
    stated = {*values, *(adopted.stated if adopted else ())}
    if adopted:
        recipe = file_batch(recipe, adopted, set(values), notes)
        recipe = _on_one_gpu(recipe, stated, values, notes)
    if architecture.learned_positions and "sequence_length" not in stated:
        recipe = recipe.but(
            sequence_length=min(recipe.sequence_length, architecture.max_positions or recipe.sequence_length)
        )
    if "precision" not in stated and not gpu.bf16:
        recipe = recipe.but(precision="fp16-mixed")
    if architecture.model_type in combinations.NOT_BY_TRL and "trainer" not in stated:
        recipe = recipe.but(trainer="transformers")
        notes.append("--trainer transformers: TRL's loss does not run this model")
    _check_names(recipe)
    _check_targets(recipe, architecture)
    reserve = parse_size(flags["reserve"]) if flags.get("reserve") else 0
    if reserve >= gpu.usable_bytes():
        raise BadInput(f"--reserve {flags['reserve']} leaves nothing of the {gpu.name}", hint="1GiB is usual")
    found = Asked(architecture, gpu, recipe, values, reserve, adopted, gpu_words=words, notes=notes)
    _notes(found)
    return found


def _adopted(path: str | None) -> Adopted | None:
    if not path:
        return None
    from memfit.frameworks.reading import adopt

    return adopt(Path(path))


def _card(flags: Mapping[str, Any], adopted: Adopted | None) -> tuple[Gpu, int | None, tuple[str, ...], list[str]]:
    """Return (card, its count where one was given, the flags that name it, notes)."""
    named, memory = flags.get("gpu"), flags.get("gpu_memory")
    if not named and not memory:
        named, memory = _planned_for(adopted, flags.get("from_"))
    words = ("--gpu", named) if named else ()
    notes: list[str] = []
    if memory:
        gpu, count = cards.parse_gpu(named) if named else (None, None)
        size = parse_size(memory)
        if decimal := re.fullmatch(r"(\d+) ?gb", memory.strip().lower()):
            notes.append(f"{memory} is {human(size)}; a card sold as {decimal[1]} GB has nearly {decimal[1]}GiB")
        return (
            cards.custom_gpu(size, gpu),
            count if named and count != 1 else None,
            (*words, "--gpu-memory", memory),
            notes,
        )
    if not named or named == "local":
        gpu = cards.local_gpu()
        notes.append(f"the card in this machine: {gpu.name}")
        return gpu, None, ("--gpu", "local"), notes
    gpu, count = cards.parse_gpu(named)
    if reading := cards.reading(named, gpu):
        notes.append(reading)
    return gpu, count if count != 1 else None, words, notes


def _on_one_gpu(recipe: Recipe, stated: set[str], values: Mapping[str, Any], notes: list[str]) -> Recipe:
    """Drop a file's ZeRO stage on a single GPU, where it shards nothing and is only set to allow offloading."""
    single = recipe.num_gpus == 1 and (recipe.offload != "none" or "num_gpus" in stated)
    if recipe.shard == "none" or "shard" in values or not single:
        return recipe
    notes.append("one GPU: nothing is sharded; --num-gpus sets more")
    return recipe.but(shard="none")


def _adapted(found: Asked, recipe: Recipe, given: set[str]) -> Recipe:
    """Keep adapters off routers that PEFT cannot adapt, unless the user named the modules."""
    if found.architecture.model_type not in combinations.ROUTERS or "lora_targets" in given:
        return recipe
    found.notes.append("--lora-targets attention: PEFT's adapter on the router of this model fails")
    return recipe.but(lora_targets=("attention",))


def _planned_for(adopted: Adopted | None, path: str | None) -> tuple[str, str]:
    """Return the card a recipe.toml was planned for, as values of --gpu and --gpu-memory."""
    if adopted is None or adopted.format != "recipe" or not path:
        return "", ""
    from memfit.documents import recipe_file

    file = recipe_file.read(Path(path))
    return "" if file.gpu == cards.CUSTOM else file.gpu, f"{file.gpu_memory}B" if file.gpu_memory else ""


def _check_names(recipe: Recipe) -> None:
    """Refuse unknown names of optimizers and trainers before anything is computed."""
    try:
        optimizer(recipe.optimizer)
    except UnknownName as error:
        error.hint = error.hint or f"choose one of {', '.join(OPTIMIZERS)}"
        raise
    trainer(recipe.trainer)


def _check_targets(recipe: Recipe, architecture: Architecture) -> None:
    known = {w.module for layer in set(architecture.layers) for w in layer.weights if w.kind == "linear"}
    for name in recipe.lora_targets:
        if name not in known and name not in ("all-linear", "attention"):
            raise UnknownName("LoRA module", name, known, hint=f"this model has {', '.join(sorted(known))}")


def _notes(found: Asked) -> None:
    """Note what was assumed, and which flags have no effect."""
    if (adopted := found.adopted) is not None:
        found.notes += [f"{adopted.format}: {line}" for line in adopted.assumed]
        if adopted.unknown:
            found.notes.append(f"{adopted.format}: unknown keys that may change memory: {', '.join(adopted.unknown)}")
    if found.wanted.get("method") == "full":
        _note_adapters(found)
    loop, loss = trainer(found.recipe.trainer), found.wanted.get("loss")
    if loss and loop.one_loss and loss != loop.default_loss:
        found.notes.append(
            f"--loss {loss} has no effect: {found.recipe.trainer} always computes a {loop.default_loss} loss"
        )


def _note_adapters(found: Asked) -> None:
    useless = [f"--{n.replace('_', '-')}" for n in LORA_ONLY if n in found.wanted]
    if useless:
        verb = "have" if len(useless) > 1 else "has"
        found.notes.append(
            f"{', '.join(useless)} {verb} no effect: full fine-tuning has no adapters (--method lora does)"
        )


# ---- estimate ------------------------------------------------------------------------------------------------------


def plan_of(found: Asked) -> list[str]:
    """Return the command that looks for a recipe of the same model that fits on the same cards."""
    count = found.recipe.num_gpus
    several = ["--num-gpus", str(count)] if count > 1 else []
    return ["memfit", "plan", found.architecture.name, *found.gpu_words, *several]


def exact_recipe(found: Asked, method: str | None) -> Recipe:
    """Return the recipe as it would run, with what the trainer and QLoRA decide themselves filled in and noted."""
    if method == "auto":
        raise BadInput("--method auto is for memfit plan", hint="choose one of full, lora, qlora")
    recipe, given = found.recipe, {*found.wanted, *(found.adopted.stated if found.adopted else ())}
    if recipe.method == "full" and "method" not in found.wanted:
        _note_adapters(found)
    if recipe.method != "full":
        recipe = _adapted(found, recipe, given)
    if recipe.method == "qlora" and recipe.quantization == "none" and "quantization" not in found.wanted:
        recipe = recipe.but(quantization=QLORA_BASE)
        found.notes.append(f"--quantization {QLORA_BASE}: the default for QLoRA")
    default = trainer(recipe.trainer).default_loss
    if "loss" not in given and recipe.loss != default:
        recipe = recipe.but(loss=default)
        found.notes.append(f"--loss {default}: the default of trainer {recipe.trainer}")
    if "attention" not in given and not all(x.attention.sdpa for x in found.architecture.kinds):
        recipe = recipe.but(attention="eager")
        found.notes.append("--attention eager: transformers has no other kernel for this model")
    return recipe


# ---- plan ----------------------------------------------------------------------------------------------------------


def job_of(found: Asked, flags: Mapping[str, Any]) -> tuple[Job, Recipe]:
    """Return the job and the recipe to start from.

    The method and length of a `--from` file are part of the job; the planner may change the rest.
    """
    adopted, wanted = found.adopted, found.wanted
    stated = set(adopted.stated) if adopted else set()
    # keys that a file leaves out have its framework's defaults, which exact_recipe fills in
    recipe = exact_recipe(found, None) if adopted else found.recipe
    method: Any = flags.get("method") or (recipe.method if "method" in stated else "auto")
    if method == "auto" and wanted.get("quantization", "none") != "none":
        method = "qlora"  # nothing else has a quantised base
    if method == "qlora" and recipe.quantization == "none" and "quantization" not in wanted:
        recipe = recipe.but(quantization=QLORA_BASE)
    if method != "full" and not adopted:  # a file's recipe was made exact above
        recipe = _adapted(found, recipe, {*wanted})
    if found.dataset is not None and "sequence_length" not in {*wanted, *stated}:
        recipe = recipe.but(sequence_length=_length_for(found))
    batch, recipe = effective_batch(recipe, adopted, wanted, flags.get("effective_batch"))
    if flags.get("effective_batch") and "accumulation" in wanted:  # the micro-batch follows
        wanted = {**wanted, "micro_batch": batch // (wanted["accumulation"] * recipe.num_gpus)}
    lengths = found.dataset.lengths if found.dataset else None
    job = Job(
        architecture=found.architecture, gpu=found.gpu, num_gpus=recipe.num_gpus,
        sequence_length=recipe.sequence_length, effective_batch=batch,
        method=method, trainer=recipe.trainer, wanted=tuple(wanted.items()),
        stated=tuple(sorted(stated - set(wanted))), reserve=found.reserve,
        longest_sample=lengths.longest if lengths else None,
        truncated=_truncated(lengths, recipe.sequence_length) if lengths else None,
        dataset=str(Path(found.dataset.path).resolve()) if found.dataset else (adopted.data if adopted else None) or "",
        training=adopted.training if adopted else AS_USUAL,
    )  # fmt: skip
    return job, recipe


def _truncated(lengths: Lengths, length: int) -> float:
    from memfit.data.lengths import truncation

    return truncation(lengths, length).truncated


def _length_for(found: Asked) -> int:
    """Choose the sequence length that holds nearly every sample of the data, within the model's positions."""
    from memfit.data.lengths import choose_sequence_length, truncation

    assert found.dataset is not None
    cut, positions = choose_sequence_length(found.dataset.lengths), found.architecture.max_positions
    by = ", by the estimate of its tokens" if found.dataset.estimate else ""
    why = " from the data"
    if 0 < positions < cut.length:
        cut, why = truncation(found.dataset.lengths, positions), ", the number of positions the model has"
    found.notes.append(
        f"--sequence-length {cut.length}{why}: {share_of_samples(cut.truncated)} of the samples are cut{by}"
    )
    return cut.length


def longest_batch(found: Asked, recipe: Recipe) -> Recipe:
    """Return the recipe at the length of the longest batch of its data; unchanged without data."""
    if found.dataset is None:
        return recipe
    if "sequence_length" not in {*found.wanted, *(found.adopted.stated if found.adopted else ())}:
        recipe = recipe.but(sequence_length=_length_for(found))
    if recipe.padding == "packing":
        return recipe
    return recipe.but(sequence_length=min(recipe.sequence_length, found.dataset.lengths.longest))


def with_data(found: Asked, flags: Mapping[str, Any]) -> Asked:
    """Read the training file (`--data`, or the one the `--from` file names, if it exists)."""
    path = flags.get("data")
    if not path:
        if flags.get("tokenizer"):
            raise BadInput("--tokenizer needs --data", hint="--data train.jsonl --tokenizer path/to/model")
        return found
    from memfit.data import read_dataset

    own = None if flags.get("tokenizer") else _own_tokenizer(found.architecture.name)
    with terminal.progress() as tell:

        def read(tokenizer: str | Path | None) -> Dataset:
            return read_dataset(
                path, tokenizer, progress=lambda done, size: tell("reading the data", done / max(size, 1))
            )

        try:
            dataset = read(own or flags.get("tokenizer"))
        except MemfitError:
            if own is None:
                raise
            dataset = read(None)  # the model's own tokenizer was not asked for, so an estimate replaces it
    found.notes += dataset.notes
    if dataset.estimate:
        found.notes.append(f"{path}: token counts are an estimate (--tokenizer PATH counts exactly)")
    if dataset.empty:
        found.notes.append(f"{path}: {dataset.empty} of its samples are empty, and training leaves them out")
    if dataset.broken:
        records = f"{dataset.broken} record{'s' if dataset.broken > 1 else ''}"
        found.notes.append(f"{path}: {records} could not be used (see: memfit data {path})")
    return replace(found, dataset=dataset)


def _own_tokenizer(model: str) -> Path | None:
    """Return the folder of a local model that holds the tokenizer.json training will read; None if there is none."""
    return Path(model) if (Path(model) / "tokenizer.json").is_file() else None


DEFAULT_BATCH = 16
LARGEST_BATCH = 1 << 24
SHARES = {"micro_batch", "accumulation", "num_gpus"}  # their product is the effective batch


def file_batch(recipe: Recipe, adopted: Adopted, wanted: set[str], notes: list[str]) -> Recipe:
    """Return a `--from` file's recipe with its framework's batch: a total and two factors give the third."""
    given = (set(adopted.stated) | wanted) & SHARES
    total = adopted.effective_batch
    if adopted.format == "recipe" or wanted & (SHARES - {"num_gpus"}):
        return recipe
    if total:
        return _solved(recipe, total, given, notes, adopted.format)
    if not given & {"micro_batch", "accumulation"}:
        accumulation = max(DEFAULT_BATCH // recipe.num_gpus, 1)
        notes.append(f"{adopted.format}: it names no batch size, so micro-batch 1 x {accumulation} is assumed")
        return recipe.but(accumulation=accumulation)
    return recipe


def _solved(recipe: Recipe, total: int, given: set[str], notes: list[str], where: str) -> Recipe:
    """Solve micro_batch x accumulation x num_gpus = total as DeepSpeed does, and check it."""
    missing = next((name for name in ("accumulation", "micro_batch", "num_gpus") if name not in given), None)
    if missing == "accumulation" and "micro_batch" not in given:
        missing, recipe = "micro_batch", recipe.but(accumulation=1)
    if missing is None:
        if recipe.effective_batch == total:
            return recipe
    else:
        rest = recipe.but(**{missing: 1}).effective_batch
        if total % rest == 0 and total >= rest:
            if missing == "num_gpus" and total != rest:
                notes.append(f"{where}: {total // rest} GPUs, as its batch of {total} is {rest} per GPU")
            return recipe.but(**{missing: total // rest})
    each = f"micro-batch {recipe.micro_batch} x accumulation {recipe.accumulation} x {recipe.num_gpus} GPUs"
    raise BadInput(f"{where}: a batch of {total} is not {each}", hint="give the number of GPUs: --gpu 8xh100")


def effective_batch(
    recipe: Recipe, adopted: Adopted | None, wanted: Mapping[str, Any], asked_for: int | None
) -> tuple[int, Recipe]:
    """Return the sequences per step over all GPUs, and the recipe to start from.

    They are what was asked for, else the product of the flags' or the file's factors, else 16.
    """
    if asked_for is not None and not 1 <= asked_for <= LARGEST_BATCH:
        raise BadInput(f"--effective-batch must be from 1 to {LARGEST_BATCH}, not {asked_for}", hint="16 is usual")
    if "micro_batch" in wanted and "accumulation" in wanted:
        if asked_for not in (None, recipe.effective_batch):
            raise BadInput(
                f"--micro-batch x --accumulation x GPUs is {recipe.effective_batch}, not --effective-batch {asked_for}",
                hint="leave one of them out",
            )
        return recipe.effective_batch, recipe
    least: int = wanted.get("micro_batch", 1) * wanted.get("accumulation", 1) * recipe.num_gpus
    if asked_for is not None and asked_for % least:
        hint = f"for example {least * 2}"
        raise BadInput(f"--effective-batch {asked_for} is not a multiple of {least} sequences", hint=hint)
    if adopted is None:
        return asked_for or max(DEFAULT_BATCH, least), recipe
    if asked_for is None:
        kept = adopted.effective_batch if adopted.format == "recipe" and not SHARES & set(wanted) else None
        return kept or recipe.effective_batch, recipe
    return asked_for, _resized(recipe, asked_for // recipe.num_gpus, wanted)


def _resized(recipe: Recipe, per_gpu: int, wanted: Mapping[str, Any]) -> Recipe:
    """Return the file's recipe at another batch, with its micro-batch or the largest smaller one that divides it."""
    if "accumulation" in wanted:
        return recipe.but(micro_batch=per_gpu // recipe.accumulation)
    micro = max(b for b in range(1, min(recipe.micro_batch, per_gpu) + 1) if per_gpu % b == 0)
    return recipe.but(micro_batch=micro, accumulation=per_gpu // micro)
