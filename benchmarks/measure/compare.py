"""Hold runs measured on a real GPU against their traces and the closed form: `python benchmarks/measure/compare.py`.

Traces are kept in the folder --traced, so that a comparison that was stopped goes on. --write makes docs/measured.md,
or --page another one of the records that were named.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parents[1] / "src")]
MEASURED = HERE.parent / "measured"
PAGE = HERE.parents[1] / "docs" / "measured.md"
LEVELS = ("requested", "allocated", "reserved")
GIB = 1 << 30
CLOSED = (
    " {recipes} of them are described by a recipe: the closed form's reserved bytes are\n"
    "{closed_low:+.2%} to {closed_high:+.2%}, {closed_mean:.2%} off on average."
)
PAGE_HEAD = """\
# Runs measured on a real GPU

Made by `python benchmarks/measure/compare.py {source}--write`; the records lie in `benchmarks/measured`. Each run is
two or three optimizer steps, in most an evaluation too, with random weights and the trainers' own code. The trace runs
the same code on the virtual GPU, under the PyTorch that is installed; the closed form is what `memfit estimate` prints.
Sharded runs are rank 0 of 8 under PyTorch's fake process group: no bytes move, while streams, events, copies and
allocations are the card's own. "Slow network": every collective kept its stream busy as 50 GB/s would. Times are of
runs that had the card to themselves, while its memory history was recorded.

Card: {card}. Measured with {versions}.

{runs} runs: the trace's requested bytes are {mean:.2%} off on average and {worst:.2%} at most, its reserved bytes
{low:+.2%} to {high:+.2%}. {recipes} of them are described by a recipe: the closed form's reserved bytes are
{closed_low:+.2%} to {closed_high:+.2%}, {closed_mean:.2%} off on average.

| run | reserved, GiB | traced | requested, traced | closed form | seconds a step |
|---|---:|---:|---:|---:|---:|
"""


@dataclass(frozen=True, slots=True)
class Compared:
    """One case: its record, its trace or why there is none, and the closed form's peaks if a recipe describes it."""

    record: dict[str, Any]
    traced: dict[str, Any] | str
    formula: dict[str, int] | None

    def peak(self, level: str) -> int:
        """Return the highest measured bytes of a level."""
        return max(span[level] for span in self.record["spans"])

    def off(self, level: str) -> float | None:
        """Return (traced - measured) / measured."""
        if isinstance(self.traced, str):
            return None
        return max(span[level] for span in self.traced["spans"]) / self.peak(level) - 1

    def formula_off(self, level: str) -> float | None:
        """Return (closed form - measured) / measured; None for a run that ended out of memory."""
        return None if self.formula is None or self.record["oom"] else self.formula[level] / self.peak(level) - 1

    @property
    def differences(self) -> list[str]:
        """Return one line per instant and level at which the trace differs."""
        if isinstance(self.traced, str):
            return [self.traced]
        real, ours = self.record["spans"], self.traced["spans"]
        if [s["instant"] for s in real] != [s["instant"] for s in ours]:
            return [f"other instants: {len(real)} measured, {len(ours)} traced"]
        return [
            f"{a['phase']} {a['instant']} {level}: {a[level]:,} measured, {b[level]:,} traced "
            f"({b[level] / max(a[level], 1) - 1:+.3%})"
            for a, b in zip(real, ours, strict=True)
            for level in LEVELS
            if a[level] != b[level]
        ]


def records(source: Path) -> list[dict[str, Any]]:
    """Return the records of a file of JSON lines, or of all such files and result files of a folder."""
    files = sorted([*source.glob("*.jsonl"), *source.glob("*.json")]) if source.is_dir() else [source]
    found = []
    for file in files:
        text = file.read_text(encoding="utf-8")
        found += [json.loads(line) for line in text.splitlines()] if file.suffix == ".jsonl" else [json.loads(text)]
    return found


def traced(record: dict[str, Any], kept: Path | None) -> dict[str, Any] | str:
    """Trace the same case on a virtual card with the same facts; return its result, or why there is none."""
    file = kept / f"{record['case'].replace(' ', '-')}.json" if kept else None
    if file and file.exists():
        return dict(json.loads(file.read_text(encoding="utf-8")))
    command = [sys.executable, str(HERE / "one.py"), record["case"], "virtual", json.dumps(record["card"])]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        return (done.stderr.strip().splitlines() or ["no answer"])[-1]
    line = done.stdout.strip().splitlines()[-1]
    if file:
        file.parent.mkdir(parents=True, exist_ok=True)
        part = file.with_suffix(".part")
        part.write_text(line + "\n", encoding="utf-8")
        part.replace(file)
    return dict(json.loads(line))


def formula(record: dict[str, Any]) -> dict[str, int] | None:
    """Return the closed form's highest bytes by level, or None where no recipe describes the case."""
    from measure.cases import CASES
    from memfit import estimate, find_gpu
    from memfit.closed_form.task_runs import by_formula
    from memfit.errors import Unsupported
    from memfit.models.families import architecture, trained_for
    from memfit.models.hub import resolve_config
    from memfit.tables.tasks import TASKS

    case = next((c for c in CASES if c.name == record["case"]), None)
    if case is None or case.recipe is None:
        return None
    config, row = resolve_config(case.model), TASKS[case.kind or "sft"]
    try:
        model = trained_for(config, case.model, row, case.shape) if case.kind else architecture(config, case.model)
    except Unsupported:
        return None
    if not by_formula(row, model, case.recipe):
        return None
    recipe = case.recipe
    if row.sample == "prompt":
        recipe = recipe.but(sequence_length=case.shape.prompt + case.shape.completion)
    found = estimate(model, recipe, find_gpu(record["card"]["name"]), at_capacity=False)
    phases = [p for p in found.phases if p.phase in ("load", "first_step", "step", "eval")]
    return {level: max(getattr(p.levels, level) for p in phases) for level in LEVELS}


def timed(record: dict[str, Any]) -> bool:
    """Return whether the times are of steps: of cases that had the card alone, not DeepSpeed's, which steps twice."""
    from measure.cases import CASES

    alone = any(case.name == record["case"] and case.alone for case in CASES)
    return alone and 1 <= len(record["step_seconds"]) <= 2


def title(name: str) -> str:
    """Return the name of a case, and of one that was drawn what it is, too."""
    from measure import drawn

    which, _, number = name.partition(" ")
    if which != "drawn":
        return name
    row = drawn.rows()[int(number)]
    words = [value if isinstance(value, str) else f"{key} {value}" for key, value in row["recipe"].items()]
    return f"{name}: {', '.join(filter(None, (row['model'], row['task'], *words)))}".replace("_", " ")


def percent(share: float | None) -> str:
    """Return a share as it stands in the table."""
    return "" if share is None else f"{share:+.2%}".replace("-0.00%", "+0.00%")


def page(rows: Sequence[Compared], source: str) -> str:
    """Return docs/measured.md. source: the records that were named, as on a command line."""
    first = rows[0].record
    versions = ", ".join(f"{name} {number}" for name, number in first["versions"].items())
    exact = [abs(off) for row in rows if (off := row.off("requested")) is not None]
    held = [off for row in rows if (off := row.off("reserved")) is not None]
    closed = [off for row in rows if (off := row.formula_off("reserved")) is not None]
    head = PAGE_HEAD if closed else PAGE_HEAD.replace(CLOSED, "")
    lines = head.format(
        source=source, card=first["card"]["name"], versions=versions, runs=len(held), mean=mean(exact),
        worst=max(exact),
        low=min(held), high=max(held), recipes=len(closed), closed_low=min(closed, default=0),
        closed_high=max(closed, default=0), closed_mean=mean(map(abs, closed or [0])),
    ).splitlines()  # fmt: skip
    for row in rows:
        name, steps = row.record["case"], row.record["step_seconds"]
        peak = f"{row.peak('reserved') / GIB:.2f}" + (", out of memory" if row.record["oom"] else "")
        lines.append(
            f"| {title(name)} | {peak} | {percent(row.off('reserved'))} | {percent(row.off('requested'))} "
            f"| {percent(row.formula_off('reserved'))} | {f'{min(steps):.2f}' if timed(row.record) else ''} |"
        )
    return "\n".join(lines) + "\n"


def main() -> int:
    """Run the command line. Exits with 1 if a case cannot be traced, or requested bytes are more than 2 % off."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("measured", nargs="?", type=Path, default=MEASURED, help="a file or a folder of records")
    parser.add_argument("--traced", type=Path, help="folder that keeps the traces")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--lines", type=int, default=0, help="differences shown per case")
    parser.add_argument("--write", action="store_true", help="write docs/measured.md")
    parser.add_argument("--page", type=Path, default=PAGE, help="the page that --write makes")
    asked = parser.parse_args()
    found = [r for r in records(asked.measured) if asked.only in r["case"]]
    if not found:
        print(f"error: no measurements in {asked.measured}\nhint: python benchmarks/measure/run.py", file=sys.stderr)
        return 2
    rows: list[Compared] = []
    with ThreadPoolExecutor(asked.jobs) as pool:
        for record, ours in zip(found, pool.map(lambda r: traced(r, asked.traced), found), strict=True):
            row = Compared(record, ours, formula(record))
            rows.append(row)
            told = ours if isinstance(ours, str) else f"reserved {percent(row.off('reserved'))}, requested "
            told += "" if isinstance(ours, str) else percent(row.off("requested"))
            print(f"{record['case']}: {told}", flush=True)
            print("".join(f"  {line}\n" for line in row.differences[: asked.lines]), end="", flush=True)
    if asked.write:
        named = "" if asked.measured == MEASURED else f"{asked.measured} --page {asked.page} "
        asked.page.write_text(page(rows, named), encoding="utf-8")
    return 1 if any((off := row.off("requested")) is None or abs(off) > 0.02 for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
