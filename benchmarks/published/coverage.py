"""How many of the published rows are reproduced, by source, and why the others are not."""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

from published import automodel, cogvideox, prime, simpletuner, swift_examples
from published.rows import Row

MORE = {
    "automodel": automodel.covered,
    "cogvideox": cogvideox.covered,
    "diffusion_simpletuner": simpletuner.covered,
    "ms_swift_examples": swift_examples.covered,
    "prime_rl": prime.covered,
}  # file -> how many of its lines are answered
BY_FORMULA = {"ms_swift_examples"}
NUMBERS = ("no", "one", "two", "three", "four", "five", "six")
WHY = """\
Of the other files cogvideox is traced, and parts of simpletuner. automodel states what each step of rank 0 allocated,
and not how long its samples were: the runs of Gemma 3n are traced, most of whose steps peak whatever the sample is.
cogvideox's four lines under DeepSpeed ran on two cards, and six of full trainings do not state how wide weights are.
simpletuner's other cells are of models whose configurations are not known here, of weights that RamTorch keeps on the
host, of audio and compiled models, or are not traced yet.
ms_swift_examples states what a comment says: 49 of its lines are Megatron-SWIFT's, for which no formula has tensor,
pipeline or expert parallelism (Megatron-LM's own scripts are traced, docs/trace.md), and most others are bounds.
Of prime_rl the dense models of January are traced, with its own fused head.
""".splitlines()
TEXT = """\
A row is reproduced where the closed form predicts it or its own code was traced. "One card" are the rows of quality A
and B on one card without sharding. Runs beyond one-card language models lie in files of their own, with other columns.
Why the other rows are not reproduced stands at the end of the page.
"""


def alone(row: Row) -> bool:
    """Whether a row is of quality A or B, on one card that shards nothing."""
    return row.quality in ("A", "B") and row.n_gpus in ("", "1") and row.sharding in ("", "none")


def figure(rows: Collection[Row], done: Collection[str], more: Path) -> str:
    """The first figure of the page; `more` is the folder of the other files."""
    one = [row for row in rows if alone(row)]
    known, known_one = (sum(row.id in done for row in some) for some in (rows, one))
    tables = [(count, reproduced) for _, count, reproduced in others(more)]
    further, reproduced = (sum(column) for column in zip((0, 0), *tables, strict=True))
    count, every = len(rows) + further, known + reproduced
    return (
        f"{every:,} of {count:,} published rows are reproduced ({every / count:.0%}): {known} of {len(rows)} measured "
        f"runs ({known / len(rows):.0%}), among them {known_one} of the {len(one)}\n"
        f"of quality A and B on one card ({known_one / max(len(one), 1):.0%}), and {reproduced} of {further} rows of "
        f"{NUMBERS[len(tables)]} further tables."
    )


def others(more: Path | None) -> Iterator[tuple[str, int, int]]:
    """Yield the name of each other file, how many rows it has, and how many of them are reproduced."""
    for path in sorted(more.glob("*.csv")) if more and more.is_dir() else []:
        with path.open(newline="", encoding="utf-8") as file:
            count = sum(1 for _ in csv.DictReader(file))
        yield path.stem, count, MORE[path.stem](path) if path.stem in MORE else 0


def lines(rows: Collection[Row], formula: Collection[str], traced: Collection[str], more: Path | None) -> list[str]:
    """Markdown: one line per source; `more` is the folder of the other files."""
    made = [
        "| source | rows | reproduced | by formula | traced | one card, A and B | reproduced |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    done = {*formula, *traced}
    for group in sorted({row.group for row in rows}):
        some = [row for row in rows if row.group == group]
        made.append(_line(group, some, done, formula, traced))
    made.append(_line("**all**", list(rows), done, formula, traced))
    for name, count, known in others(more):
        counted = known if name in BY_FORMULA else 0
        made.append(f"| {name} | {count} | {known} | {counted} | {known - counted} | - | - |")
    return ["## Coverage", "", TEXT, *made, "", *WHY, ""]


def _line(name: str, some: list[Row], done: Collection[str], formula: Collection[str], traced: Collection[str]) -> str:
    one = [row for row in some if alone(row)]
    counts = [sum(row.id in found for row in some) for found in (done, formula, traced)]
    return f"| {name} | {len(some)} | {' | '.join(map(str, counts))} | {len(one)} | {sum(r.id in done for r in one)} |"


def reasons(refused: Mapping[str, str], rows: Collection[Row], done: Collection[str]) -> list[str]:
    """Markdown: why the rows left are not reproduced."""
    groups = {row.id: row.group for row in rows}
    left = Counter((groups[at], why) for at, why in refused.items() if at not in done)
    table = ["| source | rows | reason |", "|---|---:|---|"]
    return table + [f"| {group} | {count} | {why} |" for (group, why), count in sorted(left.items())]
