"""Trace every row that a driver runs, each in a process of its own, and keep the peaks in traced.json."""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from pathlib import Path
from typing import Any

from published.rows import DEFAULT, Row, read_rows
from published.traced import stacks
from published.traced.one import driver_of

DATA = Path(__file__).resolve().parents[1] / "traced.json"
BENCHMARKS = DATA.parents[1]
STACKS = BENCHMARKS.parent / "build" / "stacks"


def known() -> dict[str, Any]:
    """Row id -> {"own": figures, "current": figures}."""
    return dict(json.loads(DATA.read_text(encoding="utf-8"))) if DATA.exists() else {}


def trace(row: Row, csv: Path, stack: str, root: Path) -> dict[str, Any] | str:
    """A row's figures under a stack, or why there are none."""
    paths = [stacks.folder(stack, root), BENCHMARKS, BENCHMARKS.parent / "src"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths))}
    command = [sys.executable, "-m", "published.traced.one", row.id, str(csv)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    lines = (done.stdout if not done.returncode else done.stderr).strip().splitlines() or ["no answer"]
    if done.returncode:
        return lines[-1]
    return {**json.loads(lines[-1]), "date": date.today().isoformat()}


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("csv", nargs="?", type=Path, default=DEFAULT, help="rows to trace")
    parser.add_argument("--only", default="", help="a regular expression found in a row's id")
    parser.add_argument("--stack", choices=("own", "current", "both"), default="both", help="whose releases run it")
    parser.add_argument("--stacks", type=Path, default=STACKS, help="where they are installed")
    parser.add_argument("--jobs", type=int, default=2, help="rows at a time")
    parser.add_argument("--missing", action="store_true", help="only rows that have no figures yet")
    asked = parser.parse_args()
    rows = [r for r in read_rows(asked.csv) if re.search(asked.only, r.id)]
    kinds = ("own", "current") if asked.stack == "both" else (asked.stack,)
    fill(rows, asked.csv, kinds, asked.stacks, asked.jobs, missing=asked.missing)
    return 0


def fill(
    rows: Iterable[Row], csv: Path, kinds: Sequence[str] = ("own",), root: Path = STACKS, jobs: int = 2,
    missing: bool = True,
) -> None:  # fmt: skip
    """Trace the rows of a CSV that a driver runs, and keep their peaks; `missing`: only those without any yet."""
    data, chosen = known(), {"own": stacks.own, "current": stacks.current}
    run = [row for row in rows if driver_of(row)]
    wanted = [
        (r, k) for r in run for k in kinds if chosen[k](r) is not None and not (missing and k in data.get(r.id, {}))
    ]
    for stack in {chosen[kind](row) for row, kind in wanted}:
        stacks.folder(str(stack), root)
    with ThreadPoolExecutor(jobs) as pool:
        found = pool.map(lambda job: trace(job[0], csv, str(chosen[job[1]](job[0])), root), wanted)
        for (row, kind), figures in zip(wanted, found, strict=True):
            if isinstance(figures, str):
                print(f"{row.id} {kind}: {figures}", flush=True)
                continue
            data.setdefault(row.id, {})[kind] = figures
            level = {"smi": "device", "unknown": "allocated"}.get(row.quantity, row.quantity)
            error = figures[level] / row.measured - 1
            print(
                f"{row.id} {kind}: {figures[level] / 2**30:.2f} of {row.measured / 2**30:.2f} GiB ({error:+.1%})",
                flush=True,
            )
            write(data)


def write(data: dict[str, Any]) -> None:
    """The file, whole or not at all."""
    part = DATA.with_suffix(".part")
    part.write_text(json.dumps(data, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    part.replace(DATA)


if __name__ == "__main__":
    sys.exit(main())
