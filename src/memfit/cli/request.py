"""Read flags and files into the Job, the Recipe to start from, and notes on what was assumed."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memfit.catalogue import cards, names
from memfit.cli.flags import CARD, FROM, HOST, IGNORE, recipe_values, typed
from memfit.cli.task_flags import asked
from memfit.data.lengths import Lengths, choose_sequence_length, samples_of, truncation
from memfit.errors import BadInput, NotJudged, Refused, UnknownName
from memfit.models import hub
from memfit.nouns.architecture import Architecture
from memfit.nouns.gpu import Gpu
from memfit.nouns.job import AS_USUAL, Job, Recipe, Training, check_values
from memfit.nouns.plan import Judgement, NotUnderstood, Plan, withheld, withheld_plan
from memfit.nouns.task import Task
from memfit.tables import combinations
from memfit.tables.adapters import adapter
from memfit.tables.loading import as_read
from memfit.tables.optimizers import optimizer
from memfit.tables.quantization import QLORA_BASE
from memfit.tables.tasks import TASKS, check_formula, task, usual
from memfit.tables.trainers import trainer
from memfit.units import human, parse_size

if TYPE_CHECKING:
    from memfit.data.dataset import Dataset
    from memfit.frameworks.reading import Adopted
    from memfit.nouns.footprint import Footprint


SETTINGS = (".toml", ".yaml", ".yml")  # endings of what --from reads
EXAMPLE = "for example: memfit plan meta-llama/Llama-3.1-8B --gpu rtx-4090"
LORA_ONLY = ("adapter", "lora_rank", "lora_alpha", "lora_dropout", "lora_targets", "modules_to_save")


@dataclass(slots=True)
class Request:
    """A parsed command line. `wanted`: recipe fields the user typed; `notes`: what was assumed."""

    architecture: Architecture
    gpu: Gpu
    recipe: Recipe
    wanted: dict[str, Any]
    reserve: int = 0
    host_memory: int = 0  # bytes of one machine; 0: not given
    workers: int = 0
    adopted: Adopted | None = None
    dataset: Dataset | None = None
    gpu_words: tuple[str, ...] = ()  # the flags that named the card, for commands to type next
    notes: list[str] = field(default_factory=list)
    not_understood: tuple[NotUnderstood, ...] = ()  # settings of the file for which the verdict is withheld
    tasks: tuple[str, ...] = ()  # those that understand these settings, where no flag names a task

    @property
    def room(self) -> dict[str, Any]:
        """Return what is kept free of the card, and what a machine has: words of `judged_run` and of a sweep."""
        return {"reserve": self.reserve, "host_memory": self.host_memory, "workers": self.workers}

    def judged_run(self, recipe: Recipe) -> tuple[Footprint, Judgement]:
        """Return the footprint of one recipe and its judgement."""
        from memfit.closed_form.judged_run import judged_run

        return judged_run(self.architecture, recipe, self.gpu, **self.room)

    @property
    def lengths(self) -> Lengths | None:
        """Return the tokens of the data's samples; None without data, or where a sample is no text."""
        return self.dataset.lengths if self.dataset and self.dataset.lengths.longest else None


def read_request(model: str | None, flags: Mapping[str, Any], known: Architecture | None = None) -> Request:
    """Read flags and files without estimating anything; `known` is the model, if it was read before.

    Raises BadInput.
    """
    if model and Path(model).suffix in SETTINGS:
        before = "" if "from_" in flags else "memfit estimate "
        raise BadInput(f"{model} is a settings file, not a model", hint=f"{before}--from {model}")
    adopted = None
    if flags.get("from_"):
        from memfit.frameworks.reading import adopt

        adopted = adopt(Path(flags["from_"]))
        if "task" not in flags and adopted.format == "recipe":
            check_formula(adopted.task, flags["from_"])
    name = model or (adopted.model if adopted else None)
    if not name:
        if adopted:
            like = "stable-diffusion-xl-base-1.0" if adopted.task == "text-to-image" else "llama-3.1-8b"
            hint = f"write it before the flags: MODEL --from {flags['from_']}, for example {like}"
            raise BadInput(f"no model given, and {flags['from_']} names none", hint=hint)
        raise BadInput("no model given", hint=EXAMPLE)
    planning = "effective_batch" in flags
    values = recipe_values(flags, auto=planning)  # the planning commands have both
    gpu, count, words, notes = _card(flags, adopted)
    architecture = known or (hub.resolve_any if "task" in flags else hub.resolve_model)(name)
    if count is not None:
        if values.get("num_gpus", count) != count:
            raise BadInput(f"--gpu asks for {count} GPUs, --num-gpus for {values['num_gpus']}", hint="give one of them")
        values["num_gpus"] = count
    recipe = check_values((adopted.recipe if adopted else Recipe()).but(**values))
    stated = {*values, *(adopted.stated if adopted else ())}
    recipe = _with_adapter(recipe, values, stated)
    if adopted and adopted.format != "recipe" and "loading" not in values:
        recipe = as_read(recipe)
        if recipe.method != "full" and recipe.precision == "bf16-master" and "precision" not in values:
            recipe = recipe.but(precision="bf16")  # a launcher's file does not know that the base is frozen
    if adopted:
        recipe = file_batch(recipe, adopted, set(values), notes)
        recipe = _on_one_gpu(recipe, stated, values, notes)
    if architecture.learned_positions and "sequence_length" not in stated:
        recipe = recipe.but(
            sequence_length=min(recipe.sequence_length, architecture.max_positions or recipe.sequence_length)
        )
    if _half_open(stated, values, adopted) and not gpu.bf16:
        if adopted and recipe.precision.startswith("bf16"):
            from memfit.frameworks.deepspeed import LEFT_OPEN

            notes.append(f"{adopted.format}: counted in fp16, as the {gpu.name} has no bf16 units and the file leaves "
                         "the type open; say fp16: PyTorch emulates bf16 there, slowly")  # fmt: skip
            adopted = replace(adopted, assumed=tuple(line for line in adopted.assumed if line != LEFT_OPEN))
        recipe = recipe.but(precision="fp16-mixed")
    if architecture.model_type in combinations.NOT_BY_TRL and "trainer" not in stated:
        recipe = recipe.but(trainer="transformers")
        notes.append("--trainer transformers: TRL's loss does not run this model")
    if recipe.quantization == "none" and (stored := names.stored_as(name)):
        notes.append(f"{name}: counted with weights of 16 bits, and not as {stored} stores them, which takes less")
    check_names(recipe)
    check_targets(recipe, architecture)
    reserve = parse_size(flags["reserve"]) if flags.get("reserve") else adopted.reserve if adopted else 0
    if reserve >= gpu.usable_bytes():
        raise BadInput(f"--reserve {human(reserve)} leaves nothing of the {gpu.name}", hint="1GiB is usual")
    ram, workers = host(flags, words, adopted)
    request = Request(architecture, gpu, recipe, values, reserve, ram, workers, adopted, gpu_words=words, notes=notes)
    _notes(request, planning, task(flags["task"]) if flags.get("task") else usual(architecture))
    _withhold(request, flags)
    return request


def _card(flags: Mapping[str, Any], adopted: Adopted | None) -> tuple[Gpu, int | None, tuple[str, ...], list[str]]:
    """Return (card, its count where one was given, the flags that name it, notes)."""
    named, memory = flags.get("gpu"), flags.get("gpu_memory")
    if not named and not memory:
        named, memory = _planned_for(adopted, flags.get("from_"))
    words = ("--gpu", named) if named else ()
    notes: list[str] = []
    if memory:
        here = (cards.local_gpu(), 1) if named == "local" else None
        gpu, count = here or (cards.parse_gpu(named) if named else (None, None))
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


LARGEST_WORKERS = 1 << 12


def host(flags: Mapping[str, Any], words: tuple[str, ...] = (), file: Adopted | Job | None = None) -> tuple[int, int]:
    """Return the bytes of host RAM of one machine (0: not given), and the DataLoader's processes for each card.

    `words`: the flags that named the card; with --gpu local the RAM is this machine's. What no flag sets is as in the
    `file`.
    """
    workers = flags.get("workers")
    if workers is None:
        workers = file.workers if file else 0
    if not 0 <= workers <= LARGEST_WORKERS:
        raise BadInput(f"--workers must be from 0 to {LARGEST_WORKERS}, not {workers}", hint="--workers 4")
    if text := flags.get("host_memory"):
        given = parse_size(text)
        if not given:
            raise BadInput(f"--host-memory {text} is no memory", hint="--host-memory 64GiB")
        return given, workers
    if "host_memory" in flags and words[1:2] == ("local",):
        return cards.local_host_memory(), workers
    return file.host_memory if file else 0, workers


def cards_of(request: Request, count: int) -> list[str]:
    """Return the flags that name so many of the request's cards."""
    words = list(request.gpu_words)
    if words[:1] == ["--gpu"] and (cards.count_in_name(words[1]) or count) != count:
        words[1] = request.gpu.short
    return words


def machine_words(request: Request, flags: Mapping[str, Any]) -> list[str]:
    """Return the flags of what is given and kept free of the machine, as typed or as the file has them."""
    said = dict(flags)
    for row in (*CARD[2:], *HOST):
        read = getattr(request.adopted, row.name, 0)
        if said.get(row.name) is None and read and read == getattr(request, row.name):
            said[row.name] = read if row.kind is int else f"{read}B"
    return typed(said, (*CARD[2:], *HOST))


def card_named(flags: Mapping[str, Any]) -> bool:
    """Return whether flags or a recipe.toml name a card."""
    if flags.get("gpu") or flags.get("gpu_memory"):
        return True
    if not flags.get("from_"):
        return False
    from memfit.frameworks.reading import adopt

    return any(_planned_for(adopt(Path(flags["from_"])), flags["from_"]))


def on_card(request: Request, gpu: Gpu, count: int) -> Request:
    """Return the request on `count` of another card; without bf16 units it computes in fp16, unless told otherwise."""
    stated = {*request.wanted, *(request.adopted.stated if request.adopted else ())}
    recipe, wanted = request.recipe.but(num_gpus=count), request.wanted
    if _half_open(stated, wanted, request.adopted) and not gpu.bf16:
        recipe = recipe.but(precision="fp16-mixed")
    if count > 1:
        wanted = {**wanted, "num_gpus": count}
    name = gpu.short if count == 1 else f"{count}x{gpu.short}"
    return replace(request, gpu=gpu, recipe=recipe, wanted=wanted, gpu_words=("--gpu", name), notes=list(request.notes))


def _half_open(stated: set[str], wanted: Mapping[str, Any], adopted: Adopted | None) -> bool:
    """Return whether neither flags nor the file say which 16-bit type to take."""
    return "precision" not in stated or (adopted is not None and adopted.half_open and "precision" not in wanted)


def _on_one_gpu(recipe: Recipe, stated: set[str], values: Mapping[str, Any], notes: list[str]) -> Recipe:
    """Return a file's recipe without its ZeRO stage on a single GPU, where the stage only allows offloading."""
    single = recipe.num_gpus == 1 and (recipe.offload != "none" or "num_gpus" in stated)
    if recipe.shard == "none" or "shard" in values or not single:
        return recipe
    notes.append("one GPU: nothing is sharded; --num-gpus sets more")
    return recipe.but(shard="none")


def _adapted(request: Request, recipe: Recipe, given: set[str]) -> Recipe:
    """Return the recipe without adapters on routers that PEFT cannot adapt, unless the user named the modules."""
    if request.architecture.model_type not in combinations.ROUTERS or "lora_targets" in given:
        return recipe
    request.notes.append("--lora-targets attention: PEFT's adapter on the router of this model fails")
    return recipe.but(lora_targets=("attention",))


def _planned_for(adopted: Adopted | None, path: str | None) -> tuple[str, str]:
    """Return the card a recipe.toml was planned for, as values of --gpu and --gpu-memory."""
    if adopted is None or adopted.format != "recipe" or not path:
        return "", ""
    from memfit.documents import recipe_file

    file = recipe_file.read(recipe_file.in_folder(Path(path)))
    return "" if file.gpu == cards.CUSTOM else file.gpu, f"{file.gpu_memory}B" if file.gpu_memory else ""


def check_names(recipe: Recipe) -> None:
    """Refuse unknown names of optimizers and trainers before anything is computed."""
    optimizer(recipe.optimizer)
    trainer(recipe.trainer)
    adapter(recipe.adapter)


def _with_adapter(recipe: Recipe, values: Mapping[str, Any], stated: set[str]) -> Recipe:
    """Return the recipe with the usual size of the adapter that was asked for, and a method that has adapters."""
    if "adapter" not in values:
        return recipe
    row = adapter(recipe.adapter)
    if recipe.method == "full":
        if "method" in stated:
            raise BadInput("full fine-tuning has no adapters", hint=f"--method lora --adapter {row.key}, or qlora")
        recipe = recipe.but(method="lora")
    if row.trainer and "trainer" not in stated:
        recipe = recipe.but(trainer=row.trainer)
    return recipe if "lora_rank" in stated else recipe.but(lora_rank=row.usual)


def check_targets(recipe: Recipe, architecture: Architecture) -> None:
    if not architecture.layers:  # of a model without a formula only PEFT knows the modules
        return
    known = {w.module for layer in set(architecture.layers) for w in layer.weights if w.kind == "linear"}
    for name in recipe.lora_targets:
        if name not in known and name not in ("all-linear", "attention"):
            raise UnknownName("LoRA module", name, known, hint=f"this model has {', '.join(sorted(known))}")


def _notes(request: Request, planning: bool, row: Task) -> None:
    """Add notes on what was assumed and on flags that have no effect; `planning` chooses what the user did not set."""
    if (adopted := request.adopted) is not None:
        request.notes += [f"{adopted.format}: {line}" for line in adopted.assumed]
    if request.wanted.get("method") == "full":
        _note_adapters(request)
    sharded = request.recipe.shard == "parameters" or (planning and "shard" not in request.wanted)
    if request.wanted.get("loading", "auto") != "auto" and not (sharded and request.recipe.num_gpus > 1):
        request.notes.append("--loading has no effect: only FSDP2 (--shard parameters) has a choice")
    loop, loss = trainer(request.recipe.trainer), request.wanted.get("loss")
    if loss and loop.one_loss and loss != loop.default_loss and row.trainer == "SFT":
        request.notes.append(
            f"--loss {loss} has no effect: {request.recipe.trainer} always computes a {loop.default_loss} loss"
        )


def _withhold(request: Request, flags: Mapping[str, Any]) -> None:
    """Find the settings of the file that can change the memory of this model and were not understood."""
    if request.adopted is None:
        return
    unknown, ignore = request.adopted.unknown, flags.get("ignore") or ()
    if "task" in flags:
        from memfit.frameworks.task_keys import tasks_of, unknown_for

        row = asked(flags, request.architecture, request.adopted)
        by_trl = "trl" in (flags.get("trainer"), flags.get("target"))
        unknown = unknown_for(request.adopted, row.key, by_trl)
        request.tasks = () if flags["task"] or row.key != "sft" else tasks_of(request.adopted, unknown)
    if not unknown:
        return
    from memfit.frameworks.schemas import concerns, named, reasons

    keys = [key for key in unknown if concerns(key, request.architecture)]
    ignored = [key for key in keys if named(key, ignore)]
    if ignored:
        request.notes.append(f"judged without what {', '.join(ignored)} changes, as --ignore asks")
    left = [key for key in keys if key not in ignored]
    request.not_understood = reasons(left, request.adopted.format, request.adopted.values)
    if left and request.tasks:
        ways = " or ".join(f"--task {key}" for key in request.tasks)
        request.notes.append(f"{request.adopted.format}: {', '.join(left)} belongs to another task: {ways} judges it")


def model_name(model: str | None, request: Request) -> str:
    """Return the model as it was named, by the user or else by the file."""
    return model or (request.adopted.model if request.adopted else "") or ""


def judged(request: Request, judgement: Judgement) -> Judgement:
    """Return the judgement of a request: withheld where a setting was not understood."""
    found = withheld(judgement, request.not_understood)
    if request.not_understood and found is judgement:
        keys = ", ".join(x.key for x in request.not_understood)
        more = "free" if found.verdict == "fits" else "add"
        request.notes.append(f"{keys}: not counted, and can only {more} memory")
    return found


def judged_plan(request: Request, plan: Plan) -> Plan:
    """Return the plan of a request: without verdicts where a setting was not understood."""
    judged(request, plan.judgement)
    fitting = [rung.recipe for rung in plan.ladder[:1] if rung.judgement.verdict == "fits"]
    if request.adopted and not request.not_understood and fitting not in ([], [plan.recipe]):
        request.notes.append("the file fits as it is: what the plan changes makes it faster, and is not needed")
    return withheld_plan(plan, request.not_understood)


def check_judged(judgement: Judgement, force: bool, misfit: str, hint: str) -> None:
    """Refuse to act on a recipe without a verdict, or on one that does not fit, by `misfit` and its hint."""
    if judgement.verdict == "misfit" and not force:
        raise Refused(misfit, hint=hint)
    if judgement.verdict != "not_judged" or force:
        return
    first = judgement.not_understood[0]
    keys = ", ".join(found.key for found in judgement.not_understood)
    raise NotJudged(
        f"NOT JUDGED: {keys} not understood ({first.why})",
        hint=f"memfit trace your script, or {' '.join(ignoring([], judgement))} to go on without it",
    )


def same_file(flags: Mapping[str, Any], request: Request) -> list[str]:
    """Return the model, unless the file names it, and the file of a command, as they are typed."""
    name = request.architecture.name
    own = request.adopted is not None and request.adopted.model == name
    return [*([] if own else [name]), *typed(flags, (FROM, IGNORE))]


def judging(command: list[str], request: Request, judgement: Judgement) -> list[str]:
    """Return a command that judges: by the task that has the settings of the file, else without them."""
    return [*command, "--task", request.tasks[0]] if request.tasks else ignoring(command, judgement)


def ignoring(command: list[str], judgement: Judgement) -> list[str]:
    """Return a command that judges without what was not understood."""
    return [*command, *(word for found in judgement.not_understood for word in ("--ignore", found.key))]


def _note_adapters(request: Request) -> None:
    useless = [f"--{n.replace('_', '-')}" for n in LORA_ONLY if n in request.wanted]
    if useless:
        verb = "have" if len(useless) > 1 else "has"
        request.notes.append(
            f"{', '.join(useless)} {verb} no effect: full fine-tuning has no adapters (--method lora does)"
        )


# ---- estimate ------------------------------------------------------------------------------------------------------


def plan_of(request: Request) -> list[str]:
    """Return the `memfit plan` command for the same model and cards."""
    count = request.recipe.num_gpus
    several = ["--num-gpus", str(count)] if count > 1 else []
    return ["memfit", "plan", request.architecture.name, *request.gpu_words, *several]


def text_alone(architecture: Architecture) -> list[str]:
    """Return the flags with which `memfit plan` leaves the images of a vision-language model out."""
    return ["--images", "0"] if architecture.task == "multimodal" else []


def exact_recipe(request: Request, method: str | None) -> Recipe:
    """Return the recipe as it would run: defaults of the trainer, QLoRA and the model are filled in and noted."""
    if method == "auto":
        raise BadInput("--method auto is for memfit plan", hint="choose one of full, lora, qlora")
    recipe, given = request.recipe, {*request.wanted, *(request.adopted.stated if request.adopted else ())}
    if recipe.method == "full" and "method" not in request.wanted:
        _note_adapters(request)
    if recipe.method != "full":
        recipe = _adapted(request, recipe, given)
    if recipe.method == "qlora" and recipe.quantization == "none" and "quantization" not in request.wanted:
        recipe = recipe.but(quantization=QLORA_BASE)
        request.notes.append(f"--quantization {QLORA_BASE}: the default for QLoRA")
    default = trainer(recipe.trainer).default_loss
    if "loss" not in given and recipe.loss != default and request.architecture.task != "diffusion":
        recipe = recipe.but(loss=default)
        request.notes.append(f"--loss {default}: the default of trainer {recipe.trainer}")
    if "attention" not in given and not all(x.attention.sdpa for x in request.architecture.kinds):
        recipe = recipe.but(attention="eager")
        request.notes.append("--attention eager: transformers has no other kernel for this model")
    return recipe


# ---- plan ----------------------------------------------------------------------------------------------------------


def job_of(request: Request, flags: Mapping[str, Any]) -> tuple[Job, Recipe]:
    """Return the job and the recipe to start from.

    The method and length of a `--from` file are part of the job; the planner may change the rest.
    """
    adopted, wanted = request.adopted, request.wanted
    stated = set(adopted.stated) if adopted else set()
    # a file's missing keys have the defaults of its framework, which exact_recipe fills in
    recipe = exact_recipe(request, None) if adopted else request.recipe
    method: Any = flags.get("method") or (recipe.method if "method" in stated else "auto")
    if method == "auto" and wanted.get("quantization", "none") != "none":
        method = "qlora"  # the only method with a quantised base
    if method == "qlora" and recipe.quantization == "none" and "quantization" not in wanted:
        recipe = recipe.but(quantization=QLORA_BASE)
    if method != "full" and not adopted:  # a file's recipe was made exact above
        recipe = _adapted(request, recipe, {*wanted})
    lengths = request.lengths
    if lengths and "sequence_length" not in {*wanted, *stated}:
        recipe = recipe.but(sequence_length=length_for(request, lengths))
    batch, recipe = effective_batch(recipe, adopted, wanted, flags.get("effective_batch"))
    if flags.get("effective_batch") and "accumulation" in wanted:  # the micro-batch follows
        wanted = {**wanted, "micro_batch": batch // (wanted["accumulation"] * recipe.replicas)}
    samples = samples_of(lengths, recipe.sequence_length) if lengths else None
    of_file = adopted.task if adopted and TASKS[adopted.task].language else "sft"  # others are planned as tasks
    data = str(Path(request.dataset.path).resolve()) if request.dataset else (adopted.data if adopted else None) or ""
    job = Job(
        architecture=request.architecture, gpu=request.gpu, num_gpus=recipe.num_gpus,
        sequence_length=recipe.sequence_length, effective_batch=batch,
        method=method, trainer=recipe.trainer, task=flags.get("task") or of_file, wanted=tuple(wanted.items()),
        stated=tuple(sorted(stated - set(wanted))), reserve=request.reserve,
        host_memory=request.host_memory, workers=request.workers,
        longest_sample=lengths.longest if lengths else None,
        truncated=samples.cut / samples.count if samples else None,
        samples=samples,
        dataset=data,
        training=_training(request),
    )  # fmt: skip
    return job, recipe


def length_for(request: Request, lengths: Lengths) -> int:
    """Choose the sequence length that holds nearly every sample of the data, within the model's positions."""
    from memfit.report.words import cut_words

    assert request.dataset is not None
    cut, positions = choose_sequence_length(lengths), request.architecture.max_positions
    by = ", by the estimated token counts" if request.dataset.estimate else ""
    why = " from the data"
    if 0 < positions < cut.length:
        cut, why = truncation(lengths, positions), ", the number of positions the model has"
    lost = cut_words(samples_of(lengths, cut.length))
    what = f"{cut.length} tokens of text beside the images" if request.dataset.sizes.images else ""
    request.notes.append(f"{what or f'--sequence-length {cut.length}'}{why}: {lost}{by}")
    return cut.length


def _training(request: Request) -> Training:
    """Return how the file trains; the columns of its data are not those of other data."""
    if request.adopted is None:
        return AS_USUAL
    training = request.adopted.training
    return training if request.dataset is None else replace(training, columns=None)


DEFAULT_BATCH = 16
LARGEST_BATCH = 1 << 24
SHARES = {"micro_batch", "accumulation", "num_gpus"}  # their product is the effective batch


def file_batch(recipe: Recipe, adopted: Adopted, wanted: set[str], notes: list[str]) -> Recipe:
    """Return a `--from` file's recipe with its batch filled in: a total and two of its factors give the third."""
    given = (set(adopted.stated) | wanted) & SHARES
    total = adopted.effective_batch
    if adopted.format == "recipe" or wanted & (SHARES - {"num_gpus"}):
        return recipe
    if total:
        return _solved(recipe, total, given, notes, adopted.format)
    if not given & {"micro_batch", "accumulation"}:
        accumulation = max(DEFAULT_BATCH // recipe.replicas, 1)
        notes.append(f"{adopted.format}: no batch size is given, so micro-batch 1 x {accumulation} is assumed")
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
    each = f"micro-batch {recipe.micro_batch} x accumulation {recipe.accumulation} x {recipe.replicas} GPUs"
    raise BadInput(f"{where}: a batch of {total} is not {each}", hint="give the number of GPUs: --gpu 8xh100")


def effective_batch(
    recipe: Recipe, adopted: Adopted | None, wanted: Mapping[str, Any], total: int | None
) -> tuple[int, Recipe]:
    """Return the sequences per step over all GPUs, and the recipe to start from.

    The number is `total` (--effective-batch), else the product of the factors from flags or file, else 16.
    """
    if total is not None and not 1 <= total <= LARGEST_BATCH:
        raise BadInput(f"--effective-batch must be from 1 to {LARGEST_BATCH}, not {total}", hint="16 is usual")
    if "micro_batch" in wanted and "accumulation" in wanted:
        if total not in (None, recipe.effective_batch):
            raise BadInput(
                f"--micro-batch x --accumulation x GPUs is {recipe.effective_batch}, not --effective-batch {total}",
                hint="leave one of them out",
            )
        return recipe.effective_batch, recipe
    least: int = wanted.get("micro_batch", 1) * wanted.get("accumulation", 1) * recipe.replicas
    if total is not None and total % least:
        hint = f"for example {least * 2}"
        raise BadInput(f"--effective-batch {total} is not a multiple of {least} sequences", hint=hint)
    if adopted is None:
        return total or max(DEFAULT_BATCH, least), recipe
    if total is None:
        kept = adopted.effective_batch if adopted.format == "recipe" and not SHARES & set(wanted) else None
        return kept or recipe.effective_batch, recipe
    return total, _resized(recipe, total // recipe.replicas, wanted)


def _resized(recipe: Recipe, per_gpu: int, wanted: Mapping[str, Any]) -> Recipe:
    """Return the file's recipe at another batch, with its micro-batch or the largest smaller one that divides it."""
    if "accumulation" in wanted:
        return recipe.but(micro_batch=per_gpu // recipe.accumulation)
    micro = max(b for b in range(1, min(recipe.micro_batch, per_gpu) + 1) if per_gpu % b == 0)
    return recipe.but(micro_batch=micro, accumulation=per_gpu // micro)
