"""What `memfit train` refuses before it writes anything: what could not run, or would train what nobody asked for."""

from __future__ import annotations

import math
import os
import re
import shlex
from pathlib import Path

from memfit.cli import terminal
from memfit.cli.one_recipe import PLANNED_TASKS
from memfit.cli.request import check_judged, check_names, check_targets
from memfit.closed_form.host_memory import IMPORTED
from memfit.data.dataset import read_dataset
from memfit.data.files import READERS
from memfit.data.samples import BAD_TOOLS, NO_OBJECT, NO_ROLE, NO_TEXT, UNEVEN
from memfit.errors import TRACE_SCRIPT, BadInput, suggested
from memfit.frameworks.script import missing, task_of
from memfit.frameworks.training_keys import TOKENS
from memfit.models.hub import check_there
from memfit.nouns.job import Job, RecipeFile
from memfit.nouns.plan import Plan
from memfit.train.folder import Run, target_of, writes
from memfit.train.outcome import Settings
from memfit.units import human

# transformers' lr_scheduler_type (5.23, trainer_utils.SchedulerType) -> what it needs beside the recipe
_RATES, _EVALUATION = "lr_scheduler_kwargs, which a recipe.toml cannot say", "evaluation data"
SCHEDULERS = {
    "linear": "", "cosine": "", "cosine_with_restarts": "", "polynomial": "", "constant": "",
    "constant_with_warmup": "", "inverse_sqrt": "", "reduce_lr_on_plateau": _EVALUATION, "greedy": _EVALUATION,
    "cosine_with_min_lr": _RATES, "cosine_warmup_with_min_lr": _RATES, "warmup_stable_decay": _RATES,
}  # fmt: skip
ON_HUB = re.compile(r"[\w.-]+/[\w.-]+")  # owner/name


def check_found(data: str) -> None:
    """Raise BadInput where neither a file nor a dataset on the Hub has that name."""
    if exists(data):
        return
    if not ON_HUB.fullmatch(data):
        raise BadInput(f"there is no file {data}", hint="give an existing file, or a dataset on the Hub: owner/name")
    check_there(data, "dataset")


def check_data(data: str, vocabulary: int | None = None) -> int:
    """Return how many samples there are to learn; 0: not known, as the data are on the Hub.

    Raises BadInput for data that train.py could not read: no such file, broken lines, or mixed layouts. vocabulary: the
    model's, to refuse larger token ids.
    """
    if not exists(data) and Path(data).suffix.lower() not in READERS:
        check_found(data)
        return 0
    found = read_dataset(data)
    if found.empty == found.lengths.count:
        raise BadInput(
            f"every sample of {data} is empty", hint=f"there is nothing to learn in it; see: memfit data {data}"
        )
    if len(found.layouts) > 1:
        mixed = ", ".join(f"{count} with {layout.replace('+', ' and ')}" for layout, count in found.layouts)
        raise BadInput(
            f"the samples of {data} have different layouts: {mixed}",
            hint="train.py reads one layout and would leave the others out: split them into one file each",
        )
    highest, line = found.highest
    if vocabulary is not None and highest >= vocabulary:
        raise BadInput(
            f"{data}, line {line}: token {highest:,} is outside the model's vocabulary of {vocabulary:,}",
            hint="tokenise the data with the model's own tokenizer, or give the text",
        )
    numbers, line = found.numbers
    if 0 < numbers < found.lengths.count:
        raise BadInput(
            f"{data}, line {line}: a number, true or false stands where other samples have text",
            hint=f'write it as text in quotes: "..."; {numbers:,} samples are like it',
        )
    # `memfit data` only counts such lines, but datasets or train.py would fail on them
    fatal = ("not JSON", "not UTF-8", "the text is not valid Unicode", NO_ROLE, NO_OBJECT, NO_TEXT, UNEVEN, BAD_TOOLS)
    for broken in found.reasons:
        if any(words in broken.reason for words in fatal):
            raise BadInput(
                f"{data}, line {broken.line}: {broken.reason}", hint=f"correct that line; see: memfit data {data}"
            )
    return found.lengths.count - found.empty


def exists(path: str) -> bool:
    """Return whether a path exists; one that no file system could hold does not."""
    try:
        return Path(path).exists()
    except (OSError, ValueError):
        return False


def check(plan: Plan, force: bool, cpu: bool) -> None:
    """Refuse a plan that could not run."""
    check_names(plan.recipe)
    if plan.recipe.method != "full":
        check_targets(plan.recipe, plan.job.architecture)

    if plan.job.task == "sft" and plan.job.architecture.task not in PLANNED_TASKS:
        name = Path(plan.job.architecture.name).name
        raise BadInput(
            f"memfit trains causal language models, and {name} is of another kind ({plan.job.architecture.task})",
            hint=f"{TRACE_SCRIPT} runs your own script on a virtual card",
        )
    check_training_runs(plan.job)
    if plan.job.task == "sft":
        samples = check_data(plan.job.dataset, plan.job.architecture.vocabulary)
        check_share(plan.job.training.eval_share, samples, plan.job.dataset)
        if plan.job.training.eval_data:
            check_data(plan.job.training.eval_data, plan.job.architecture.vocabulary)
    else:  # train.py knows the layouts of its task
        for data in filter(None, (plan.job.dataset, plan.job.training.eval_data)):
            check_found(data)
    check_packages(plan)
    hint = "--force tries it anyway; memfit plan shows what would fit"
    check_judged(plan.judgement, force, f"the closest recipe does not fit the {plan.job.gpu.name}", hint)
    if not exists(plan.job.architecture.name):
        check_there(plan.job.architecture.name, "model")


def check_packages(plan: Plan) -> None:
    """Raise BadInput where train.py could not import what its recipe and its task need."""
    names = missing(plan.recipe, target_of(plan), filter(None, (task_of(plan).package,)))
    if names:
        other = ", or --loss full" if "liger-kernel" in names else ""
        raise BadInput(
            f"this recipe needs packages that are not installed: {', '.join(names)}",
            hint=f"pip install {' '.join(names)}{other}",
        )


def check_apart(plan: Plan, folder: Path) -> None:
    """Raise BadInput if the run to be replaced holds the model or data that the new one reads."""
    for name in (plan.job.architecture.name, plan.job.dataset, plan.job.training.eval_data):
        inside = name and Path(name).is_relative_to(folder) and Path(name).relative_to(folder).parts
        if inside and writes(inside[0]):
            raise BadInput(
                f"{name} lies in {folder}, which the new run would replace", hint="name another folder: --out DIR"
            )


def check_cpu(plan: Plan, settings: Settings) -> None:
    """Raise BadInput for what PyTorch supports on GPUs only, and note what a CPU does differently."""
    recipe = plan.recipe
    if not settings.cpu:
        return
    there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if recipe.num_gpus * IMPORTED > there:
        raise BadInput(
            f"{recipe.num_gpus:,} processes need {human(recipe.num_gpus * IMPORTED)} for their libraries alone, "
            f"and this machine has {human(there)}",
            hint=f"num_gpus = {max(there // (2 * IMPORTED), 1)} or fewer",
        )
    if recipe.checkpointing == "offload":
        if "checkpointing" not in {*dict(plan.job.wanted), *plan.job.stated}:  # the planner's last resort
            raise BadInput(
                "this run needs more memory than this machine has, and a CPU has nowhere to offload to",
                hint="a smaller --sequence-length, --micro-batch or model",
            )
        raise BadInput("a CPU has no memory to offload activations from", hint="--checkpointing full")
    if recipe.compile:
        raise BadInput("memfit does not train compiled on a CPU", hint="--no-compile, or a machine with a GPU")
    if recipe.precision == "fp16-mixed":
        terminal.note("on a CPU fp16-mixed trains in fp32, without a loss scaler")


def check_batch(file: RecipeFile, path: Path) -> None:
    """Raise BadInput where the effective batch contradicts its factors.

    A planned batch that cannot be split evenly is rounded down to a whole number of micro-batches; that is none.
    """
    recipe, asked = file.recipe, file.effective_batch
    micro, accumulation, each = recipe.micro_batch, recipe.accumulation, max(asked // recipe.replicas, 1)
    rounded = micro * accumulation <= each and (each // micro == accumulation or each // accumulation == micro)
    if asked in (0, recipe.effective_batch) or rounded:
        return
    raise BadInput(
        f"{path}: effective_batch = {asked:,} contradicts micro_batch {micro:,} x accumulation {accumulation:,}"
        f" x {recipe.replicas:,} GPU, which is {recipe.effective_batch:,}",
        hint=f"effective_batch = {recipe.effective_batch}, or leave it out",
    )


def check_training_runs(job: Job) -> None:
    """Raise BadInput for a schedule, an evaluation or special tokens that the trainer would refuse."""
    training = job.training
    evaluated = bool(training.eval_data or training.eval_share)
    name = training.lr_scheduler
    if name and name not in SCHEDULERS:
        plain = ", ".join(key for key, needs in SCHEDULERS.items() if not needs)
        raise BadInput(
            f"unknown lr_scheduler {name[:80]!r}", hint=suggested(name, SCHEDULERS, f"choose one of {plain}")
        )
    needs = SCHEDULERS.get(name, "")
    if needs and not (needs == _EVALUATION and evaluated):
        raise BadInput(f"lr_scheduler = {name!r} needs {needs}", hint='lr_scheduler = "cosine"')
    if (training.eval_steps or training.eval_strategy in ("steps", "epoch")) and not evaluated:
        what = "eval_steps" if training.eval_steps else "eval_strategy"
        raise BadInput(
            f"{what} is set, and there is nothing to evaluate on",
            hint=f"--eval-data held-out.jsonl, or eval_share = 0.05 under [training], or leave {what} out",
        )
    if training.eval_data and training.eval_share:
        raise BadInput(
            "eval_data and eval_share are both set: evaluated on that file, or on a share of the training data?",
            hint="leave one of them out",
        )
    check_tokens(job)


def check_tokens(job: Job) -> None:
    """Raise BadInput for a special token that the tokenizer of a model on this machine does not have as one."""
    wanted = {name: token for name in TOKENS if (token := getattr(job.training, name))}
    file = Path(job.architecture.name) / "tokenizer.json"
    if not (wanted and file.is_file()):
        return
    from tokenizers import Tokenizer  # of the training libraries

    known = [added.content for added in Tokenizer.from_file(str(file)).get_added_tokens_decoder().values()]
    for name, token in wanted.items():
        if token not in known:
            raise BadInput(
                f"{name} = {token[:80]!r} is no special token of {job.architecture.name}",
                hint=f"one of {', '.join(known[:8])}; or leave {name} out for the tokenizer's own",
            )


def check_share(share: float, samples: int, data: str) -> None:
    """Raise BadInput where the share held out for evaluation leaves nothing to learn or nothing to evaluate."""
    held_out = share if share >= 1 else math.ceil(share * samples)
    if samples and share and not 1 <= held_out < samples:
        raise BadInput(
            f"eval_share = {share:g} holds out {held_out:,.0f} of the {samples:,} samples of {data}",
            hint="eval_share = 0.05",
        )


def check_unedited(run: Run) -> None:
    """Raise BadInput where a file that decides what is trained is not as the run wrote it."""
    for path in run.edited():
        other = (
            f"; or start a new run with it: memfit train {shlex.quote(str(path))} --out DIR"
            if path.suffix == ".toml"
            else ""
        )
        aside = shlex.join(["mv", str(path), f"{path}.edited"])
        raise BadInput(
            f"{path} was edited after the run wrote it",
            hint=f"undo the edit, or put it aside and --resume writes it as it was: {aside}{other} "
            "(what was trained is safe)",
        )
