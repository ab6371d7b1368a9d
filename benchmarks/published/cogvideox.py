"""The runs of cogvideox-factory's README, and what traces of them took.

The README (November 2024) gives the highest reserved bytes before validation. They include the text encoder and the
VAE, which lie on the card until the loop begins.
"""

from __future__ import annotations

import csv
import json
import re
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

from memfit.units import GIB

DATA = Path(__file__).with_name("cogvideox.json")


@dataclass(frozen=True, slots=True)
class Run:
    """One line of cogvideox.csv. rank: of the adapters."""

    model: str
    rank: int
    checkpointing: bool
    batch: int
    optimizer: str
    measured: float  # GiB

    @property
    def key(self) -> str:
        """What tells it apart from the others."""
        kept = "checkpointing" if self.checkpointing else "no checkpointing"
        return f"{self.model.partition('/')[2]}, LoRA r{self.rank}, {self.optimizer}, batch {self.batch}, {kept}"


def runs(path: Path) -> list[Run]:
    """The lines of one card with adapters.

    Those under DeepSpeed ran on two. Of full trainings the dtype of the weights is not stated: neither 16 nor 32 bits
    give what both models take.
    """
    found = []
    for line in csv.DictReader(path.open(newline="", encoding="utf-8")):
        context = line["context"]
        if "DeepSpeed" in context or not line["lora rank"]:
            continue
        optimizer = re.search(r"AdamW(?: \(8-bit| \+ CPU)?", context)
        batch = re.findall(r"train_batch_size = (\d+)", context)
        found.append(Run(
            line["model"], int(line["lora rank"]), line["gradient_checkpointing"] == "True", int(batch[-1]),
            {"AdamW (8-bit": "AdamW 8-bit", "AdamW + CPU": "AdamW offloaded"}.get(optimizer[0], "AdamW")
            if optimizer else "AdamW",
            float(line["memory_before_validation"]),
        ))  # fmt: skip
    return found


def known() -> dict[str, int]:
    """Key of a run -> traced bytes."""
    return dict(json.loads(DATA.read_text(encoding="utf-8"))) if DATA.exists() else {}


def lines(path: Path) -> list[str]:
    """Markdown: every run that was traced; none where the CSV is not there."""
    if not path.exists():
        return []
    made = known()
    told = [(run, made[run.key] / GIB) for run in runs(path) if run.key in made]
    if not told:
        return []
    errors = [size / run.measured - 1 for run, size in told]
    return [
        "## CogVideoX",
        "",
        f"{len(told)} runs of cogvideox-factory, traced with today's diffusers: mean absolute error "
        f"{mean(map(abs, errors)):.1%}, worst {min(0.0, *errors):+.1%} under and {max(0.0, *errors):+.1%} over. "
        "Reserved GiB.",
        "",
        "| run | traced | measured | error |",
        "|---|---:|---:|---:|",
        *(f"| {run.key} | {size:.2f} | {run.measured:.2f} | {size / run.measured - 1:+.1%} |" for run, size in told),
        "",
    ]


def covered(path: Path) -> int:
    """Return how many lines of the CSV have a traced figure."""
    made = known()
    return sum(run.key in made for run in runs(path))
