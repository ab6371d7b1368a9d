"""What prime-rl's nightly benchmarks reserved, and what traces of its training step say.

peak_gib is torch.cuda.max_memory_reserved of the last three of four steps, with expandable segments
(.github/workflows/benchmarks.yaml). Traced are its runs of dense models of January 2026
(`python -m published.traced.prime CSV`).
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import mean

from memfit.units import GIB

DATA = Path(__file__).with_name("prime.json")
CARDS = {"NVIDIA RTX A6000": "rtx-a6000", "NVIDIA H100 80GB HBM3": "h100", "NVIDIA H200": "h200",
         "NVIDIA B200": "b200"}  # fmt: skip
DENSE = ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-4B-Instruct-2507")
UNTIL = "2026-02"  # later rows ran prime-rl's own Qwen3, whose blocks do compile, on another fused head
WHY = (
    "Left out: 14 rows of mixtures of experts, in its own classes; two of June, when dense blocks were its own and "
    "compiled, too; three that failed."
)


def rows(path: Path) -> list[Mapping[str, str]]:
    """The rows of the CSV that are traced."""
    with path.open(newline="", encoding="utf-8") as file:
        return [
            row
            for row in csv.DictReader(file)
            if row["model_name"] in DENSE and row["timestamp"] < UNTIL and float(row["peak_gib"])
        ]  # fmt: skip


def known() -> dict[str, int]:
    """File of a row -> reserved bytes of its trace."""
    return dict(json.loads(DATA.read_text(encoding="utf-8"))) if DATA.exists() else {}


def covered(path: Path) -> int:
    """How many rows are traced."""
    return sum(row["file"] in known() for row in rows(path))


def lines(path: Path) -> Iterator[str]:
    """Markdown: every row that was traced; none where the CSV is not there."""
    made = known()
    told = [(row, made[row["file"]] / GIB, float(row["peak_gib"])) for row in rows(path) if row["file"] in made] \
        if path.exists() else []  # fmt: skip
    if not told:
        return
    errors = [traced / measured - 1 for _, traced, measured in told]
    yield from (
        "## prime-rl", "",
        f"{len(told)} runs, traced with its own head and its checkpointed blocks under FSDP2, of which its command "
        f"compiles none (docs/decisions.md): mean absolute error {mean(map(abs, errors)):.1%}, worst "
        f"{min(errors):+.1%} under and {max(errors):+.1%} over. {WHY} Reserved GiB.",
        "", "| task, model, method, length | cards | traced | measured | error |", "|---|---|---:|---:|---:|",
    )  # fmt: skip
    for (row, traced, measured), error in zip(told, errors, strict=True):
        method = f"LoRA r{row['lora_rank']}" if row["lora_rank"] else "full"
        what = f"{row['type']}, {row['model_name']}, {method}, {row['seq_len']}"
        cards = f"{row['num_gpus']}x {CARDS[row['device_name']]}"
        yield f"| {what} | {cards} | {traced:.2f} | {measured:.2f} | {error:+.1%} |"
    yield ""
