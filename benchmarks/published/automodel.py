"""What each step of NVIDIA Automodel's golden runs allocated, and what traces of the same recipes say.

mem_per_step is torch.cuda.max_memory_allocated of rank 0 in each of 100 steps, on eight H100s. How long rank 0's sample
was is not published, only the tokens of all ranks. Traced is a sample of the mean length in the step with the fewest
tokens, whose ranks all have short ones (`python -m published.traced.automodel CSV`); it is compared with every step.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import median

from memfit.units import GIB

DATA = Path(__file__).with_name("automodel.json")
RANKS = 8
NEAR = 0.03
MODELS = {
    "gemma3n_vl_4b_medpix_h100": "full", "gemma3n_vl_4b_medpix_peft_h100": "lora",
}  # fmt: skip
LEFT = (
    ("nemotron_flash_1b_squad_h100, llama3_3_nemotron_super_49B_squad_peft_h100, nemotron_parse_v1_1_h100",
     "model code of its own on the Hub"),
    ("nemotron_nano_9b_squad_h100",
     "its code and Mamba kernels come from the Hub, and no lengths are published (its steps take 20 to 69 GiB)"),
    ("ministral3_3b_medpix_h100",
     "neither the sizes of its images nor its lengths are published, and its steps take 7 to 27 GiB"),
    ("qwen3_5_35b_h100", "Automodel's own classes over DeepEP and grouped products, which are not installed"),
)  # fmt: skip


def rows(path: Path) -> list[Mapping[str, str]]:
    """The rows of the CSV that are traced."""
    csv.field_size_limit(1 << 24)
    with path.open(newline="", encoding="utf-8") as file:
        return [row for row in csv.DictReader(file) if row["case"] in MODELS]


def known() -> dict[str, int]:
    """Case -> allocated bytes of a traced step."""
    return dict(json.loads(DATA.read_text(encoding="utf-8"))) if DATA.exists() else {}


def tokens(row: Mapping[str, str]) -> int:
    """The mean length of a rank's sample in the step with the fewest tokens."""
    return min(map(int, row["tokens_per_step"].split())) // RANKS


def covered(path: Path) -> int:
    """How many rows are traced."""
    return sum(row["case"] in known() for row in rows(path))


def lines(path: Path) -> Iterator[str]:
    """Markdown: every row that was traced, and why the others were not; none where the CSV is not there."""
    made = known()
    told = [(row, made[row["case"]] / GIB) for row in rows(path) if row["case"] in made] if path.exists() else []
    if not told:
        return
    yield from (
        "## Automodel", "",
        "Recipes of NVIDIA's Automodel on eight H100s under FSDP2, traced with transformers' classes, which they use, "
        "and one sample as short as those of the step with the fewest tokens. Most steps peak at the gathered weights "
        "of the root and their gradients, whatever the sample; a longer one, whose length is not published, takes "
        "more. With adapters the output layer is a parameter of its own, which the root gathers too. Allocated GiB.",
        "", f"| run | tokens | traced | median step | error | steps within {NEAR:.0%} | longest sample's step |",
        "|---|---:|---:|---:|---:|---:|---:|",
    )  # fmt: skip
    for row, traced in told:
        steps = [float(text) for text in row["mem_per_step"].split()]
        near = sum(abs(traced / step - 1) <= NEAR for step in steps)
        yield (
            f"| {row['case']} | {tokens(row)} | {traced:.2f} | {median(steps):.2f} | {traced / median(steps) - 1:+.1%} "
            f"| {near} of {len(steps)} | {max(steps):.2f} |"
        )
    yield from ("", "| run | not traced, as |", "|---|---|", *(f"| {case} | {why} |" for case, why in LEFT), "")
