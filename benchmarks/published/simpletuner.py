"""What SimpleTuner's examples took with each way of checkpointing, and what traces of the same jobs say.

Its documentation (documentation/experimental/SEGMENTED_CHECKPOINTING.md) gives peak GiB on an H100 and an L40S, or that
the run ran out of memory. Compared are the cells that diffusers' own loop runs, too: bf16, adapters of PEFT, and all or
none of the blocks checkpointed. SimpleTuner has model code of its own for some families.
"""

from __future__ import annotations

import csv
import json
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median

from memfit.units import GIB

DATA = Path(__file__).with_name("simpletuner.json")
CARDS = {"H100": "h100", "L40S": "l40s"}
MODES = {"none": "none", "layer": "full"}  # as the table has it -> checkpointing


@dataclass(frozen=True, slots=True)
class Example:
    """What the config.json of an example says. side: of its images, as its datasets have them."""

    model: str
    rank: int
    batch: int
    side: int
    optimizer: str = "adamw"


EXAMPLES = {
    "auraflow.peft-lora": Example("auraflow-v0.3", 8, 1, 512, "lion"),
    "kolors.peft-lora": Example("kolors", 16, 1, 512),
    "qwen_image.peft-lora": Example("qwen-image", 8, 1, 1024, "lion"),
    "sd3.peft-lora": Example("stable-diffusion-3.5-medium", 128, 3, 1024),
    "z-image-turbo.peft-lora": Example("z-image-turbo", 64, 1, 512, "lion"),
}


@dataclass(frozen=True, slots=True)
class Cell:
    """One run. measured: GiB; 0 where it ran out of memory."""

    example: str
    mode: str
    card: str
    measured: float

    @property
    def key(self) -> str:
        """What tells it apart from the others."""
        return f"{self.example}, {self.mode}, {self.card}"

    @property
    def command(self) -> list[str]:
        """The words after `memfit` that trace it."""
        e = EXAMPLES[self.example]
        size = ["--micro-batch", str(e.batch), "--accumulation", "1", "--resolution", f"{e.side}x{e.side}"]
        adapter = ["--method", "lora", "--lora-rank", str(e.rank), "--lora-dropout", "0.1",
                   "--lora-targets", "to_k,to_q,to_v,to_out.0"]  # fmt: skip
        kept = ["--checkpointing", MODES[self.mode], "--optimizer", e.optimizer, "--precision", "bf16"]
        return ["trace", e.model, "--gpu", CARDS[self.card], "--cache-latents", *adapter, *size, *kept, "--json"]


def cells(path: Path) -> list[Cell]:
    """The cells of the CSV that the loop runs, too."""
    return [
        Cell(row["example"], row["mode"], row["card"], float(row["peak_gib"] or 0))
        for row in csv.DictReader(path.open(newline="", encoding="utf-8"))
        if row["example"] in EXAMPLES and row["precision"] == "bf16" and row["mode"] in MODES
    ]


def known() -> dict[str, tuple[int, str]]:
    """Key of a cell -> reserved bytes of its trace, and the verdict."""
    return {k: (size, said) for k, (size, said) in json.loads(DATA.read_text("utf-8")).items()} if DATA.exists() else {}


def lines(path: Path) -> list[str]:
    """Markdown: every cell that was traced; none where the CSV is not there."""
    if not path.exists():
        return []
    made = known()
    told = [(cell, *made[cell.key]) for cell in cells(path) if cell.key in made]
    if not told:
        return []
    errors = [size / GIB / cell.measured - 1 for cell, size, _ in told if cell.measured]
    fitted = [said for cell, _, said in told if cell.measured]
    missed = [said for cell, _, said in told if not cell.measured]
    share = f"{fitted.count('fits')} of {len(fitted)} that fitted are said to fit"
    return [
        "## SimpleTuner",
        "",
        f"{len(told)} cells of SimpleTuner's table of checkpointing, traced as diffusers' loop runs them: mean "
        f"absolute error {mean(map(abs, errors)):.1%}, median {median(map(abs, errors)):.1%}, worst "
        f"{min(errors):+.1%} under and {max(errors):+.1%} over. {share}, and {missed.count('fits')} of "
        f"{len(missed)} that ran out of memory. Z-Image's texts are short there, and counted at their longest. "
        "Reserved GiB.",
        "",
        "| example, checkpointing, card | traced | verdict | measured | error |",
        "|---|---:|---|---:|---:|",
        *(
            f"| {cell.key} | {size / GIB:.2f} | {said} | "
            + (f"{cell.measured:.2f} | {size / GIB / cell.measured - 1:+.1%} |" if cell.measured else "OOM | - |")
            for cell, size, said in told
        ),
        "",
    ]


def covered(path: Path) -> int:
    """Return how many cells of the CSV have a trace."""
    made = known()
    return sum(cell.key in made for cell in cells(path))
