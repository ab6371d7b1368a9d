"""What memfit train refuses before anything is written: data that cannot be read, missing packages, what a CPU cannot do."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from memfit.cli import terminal
from memfit.data.samples import BAD_TOOLS, NO_OBJECT, NO_ROLE, NO_TEXT, UNEVEN
from memfit.errors import BadInput, Refused

if TYPE_CHECKING:
    from memfit.nouns.plan import Plan
    from memfit.train.outcome import Settings

ON_HUB = re.compile(r"[\w.-]+/[\w.-]+")  # owner/name
# broken lines that memfit counts, and that datasets or train.py refuse
UNREADABLE = ("not JSON", "not UTF-8", "the text is not valid Unicode", NO_ROLE, NO_OBJECT, NO_TEXT, UNEVEN, BAD_TOOLS)


def check_data(data: str, vocabulary: int | None = None) -> None:
    """Raises BadInput where train.py could not read it: a file that is not there or that has broken lines; with the model's
    `vocabulary` also for token ids that it has not."""
    from memfit.data import read_dataset
    from memfit.data.files import READERS
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
    for broken in found.reasons:
        if any(words in broken.reason for words in UNREADABLE):
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
    from memfit.frameworks.script import missing
    from memfit.train.folder import target_of

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
