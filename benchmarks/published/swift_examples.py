"""What the comments of ms-swift's examples say they take, and what memfit answers to the same commands.

Each row is a command's arguments and a rounded figure per card, which is the "memory(GiB)" of the run's log:
torch.cuda.max_memory_reserved. The command goes through memfit's own reader of shell scripts. Packed rows end with
their last sample, so that what they reserve lies between the answer and what memfit adds for a longer row; in the
others no sample is longer than --max_length, so that the answer is a bound. Most comments were written
from December 2024 to July 2025 (git log), on version 3 of ms-swift and transformers 4.46 to 4.52, whose default
optimizer was AdamW by foreach.
"""

from __future__ import annotations

import csv
import json
import re
import shlex
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from memfit.catalogue.cards import find_gpu
from memfit.catalogue.names import stored_as
from memfit.closed_form.run.account import Account
from memfit.closed_form.run.estimate import estimate, longer_row
from memfit.errors import MemfitError
from memfit.frameworks import swift
from memfit.frameworks.reading import Adopted, adopt
from memfit.frameworks.schemas import concerns
from memfit.models.hub import resolve_model
from memfit.nouns.architecture import Architecture
from memfit.units import GIB
from published.case import NotCovered
from published.predict import TRAINING

TRAINER, OPTIMIZER = "ms-swift==3.3", "adamw-foreach"
CARD = "a100-80gb"  # none is named; what is reserved depends on its architecture, and not on its size
EXACT = 0.5  # GiB: figures are rounded to whole ones
# what a comment says of its run -> arguments that say it
VARIANTS: tuple[tuple[str, Mapping[str, str]], ...] = (
    (r"Not using use_liger_kernel and packing", {"use_liger_kernel": "false", "packing": "false"}),
    (r"Not using use_liger_kernel", {"use_liger_kernel": "false"}),
    (r"without padding_free", {"padding_free": "false"}),
    (r"gc true, vgc false", {"vit_gradient_checkpointing": "false"}),
    (r"gc false, vgc true", {"gradient_checkpointing": "false"}),
    (r"gc false, vgc false", {"gradient_checkpointing": "false", "vit_gradient_checkpointing": "false"}),
)


@dataclass(frozen=True, slots=True)
class Example:
    """One row that memfit answers, in GiB. `bound`: its samples may be shorter; `longer`: with a longer packed row."""

    path: str
    comment: str
    measured: float
    predicted: float
    bound: bool
    longer: float

    @property
    def error(self) -> float:
        """Predicted over measured, minus one."""
        return self.predicted / self.measured - 1


def answered(path: Path) -> tuple[list[Example], Counter[str]]:
    """The rows that memfit answers, and why it does not answer the others."""
    found, refused = list[Example](), Counter[str]()
    with path.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            try:
                found.append(_example(row))
            except NotCovered as reason:
                refused[str(reason)] += 1
    return found, refused


def _example(row: Mapping[str, str]) -> Example:
    adopted, architecture = _read(row)
    left = [key for key in adopted.unknown if concerns(key, architecture)]
    if left:
        raise NotCovered(f"not understood: {', '.join(left)}")
    recipe = adopted.recipe.but(trainer=TRAINER)
    if "optim" not in json.loads(row["args"]):
        recipe = recipe.but(optimizer=OPTIMIZER)
    if "sequence_length" not in adopted.stated:
        raise NotCovered("no --max_length")
    gpu = find_gpu(CARD)
    phases = estimate(architecture, recipe, gpu).phases
    peak = max(phase.levels.reserved for phase in phases if phase.phase in TRAINING)
    bound = recipe.padding != "packing"
    longer = (peak + longer_row(Account(architecture, recipe, gpu))) / GIB
    return Example(row["path"].removeprefix("examples/"), row["comment"], float(row["gib"]), peak / GIB, bound, longer)


def _read(row: Mapping[str, str]) -> tuple[Adopted, Architecture]:
    """The row's command as memfit reads it. Raises NotCovered."""
    if row["command"].startswith("megatron"):
        raise NotCovered("Megatron-SWIFT: no formula has tensor, pipeline or expert parallelism")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "train.sh")
        file.write_text(_command(row), encoding="utf-8")
        try:
            if not swift.from_shell(file.read_text(encoding="utf-8"), file):
                raise NotCovered(f"{row['command']} trains nothing")
            adopted = adopt(file)
            if stored_as(adopted.model or ""):
                raise NotCovered("weights stored in few bits are counted in sixteen")
            return adopted, _architecture(adopted.model or "")
        except MemfitError as error:
            raise NotCovered(re.sub(r".*the Hub cannot be reached", "a model that is not in the catalogue",
                                    error.message)) from error  # fmt: skip


@cache
def _architecture(name: str) -> Architecture:
    return resolve_model(name, offline=True)


def _command(row: Mapping[str, str]) -> str:
    given = json.loads(row["args"]).items()
    cut = ("$(", "{")  # the table has a value up to its first blank
    arguments = {name: value.strip("'\"") for name, value in given if not any(mark in value for mark in cut)}
    arguments |= next((more for said, more in VARIANTS if said in row["comment"]), {})
    words = [word for name, value in arguments.items() for word in (f"--{name}", value)]
    cards = {swift.VISIBLE: row["visible"], swift.CARDS: row["nproc"]}
    before = [f"{name}={value}" for name, value in cards.items() if value]
    return f"{' '.join(before)} {row['command'] or 'swift sft'} {shlex.join(words)}\n"


def covered(path: Path) -> int:
    """How many rows memfit answers."""
    return len(answered(path)[0])


def lines(path: Path) -> Iterator[str]:
    """Markdown: every row that memfit answers, and the reasons of the others; none where the CSV is not there."""
    if not path.exists():
        return
    found, refused = answered(path)
    packed = [one for one in found if not one.bound]
    between = sum(one.predicted - EXACT <= one.measured <= one.longer + EXACT for one in packed)
    held = sum(one.bound and one.error >= 0 for one in found)
    yield from (
        "## ms-swift's examples", "",
        f"{len(found)} commands, read by `--from train.sh`. Of {len(packed)} that pack, whose rows differ by some "
        f"tokens, {between} lie between the prediction for one length and the most that memfit adds for a longer row; "
        f"of {len(found) - len(packed)} whose samples are shorter, {held} answers are bounds: varying lengths reserve "
        "more than one does (docs/decisions.md), and images are not counted. GiB reserved.",
        "", "| example | comment | predicted | with a longer row | measured | error |", "|---|---|---:|---:|---:|---:|",
    )  # fmt: skip
    for one in sorted(found, key=lambda e: (e.bound, e.path)):
        error = "a bound" if one.bound and one.error >= 0 else f"{one.error:+.1%}"
        longer = "-" if one.bound else f"{one.longer:.2f}"
        yield f"| {one.path} | {one.comment} | {one.predicted:.2f} | {longer} | {one.measured:g} | {error} |"
    yield from (
        "",
        "| rows | not answered, as |",
        "|---:|---|",
        *(f"| {n} | {why} |" for why, n in refused.most_common()),
        "",
    )
