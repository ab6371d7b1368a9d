"""Trace the measured cases and print where they differ: `python benchmarks/measure/compare.py [DIR]`."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
MEASURED = HERE.parent / "measured"
LEVELS = ("requested", "allocated", "reserved")


def traced(record: dict[str, Any]) -> dict[str, Any] | str:
    """Trace the same case on a virtual card with the same facts; return its result, or why there is none."""
    command = [sys.executable, str(HERE / "one.py"), record["case"], "virtual", json.dumps(record["card"])]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        return (done.stderr.strip().splitlines() or ["no answer"])[-1]
    return dict(json.loads(done.stdout.strip().splitlines()[-1]))


def differences(real: dict[str, Any], ours: dict[str, Any]) -> list[str]:
    """Return one line per instant and level that differs."""
    if [s["instant"] for s in real["spans"]] != [s["instant"] for s in ours["spans"]]:
        return [f"other instants: {len(real['spans'])} measured, {len(ours['spans'])} traced"]
    return [
        f"{a['phase']} {a['instant']} {level}: {a[level]:,} measured, {b[level]:,} traced "
        f"({b[level] / max(a[level], 1) - 1:+.3%})"
        for a, b in zip(real["spans"], ours["spans"], strict=True)
        for level in LEVELS
        if a[level] != b[level]
    ]


def main() -> int:
    """Run the command line. Exits with 1 if a case differs or cannot be traced."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path, default=MEASURED)
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--lines", type=int, default=6, help="differences shown per case")
    asked = parser.parse_args()
    records = [json.loads(p.read_text(encoding="utf-8")) for p in sorted(asked.folder.glob("*.json"))]
    records = [r for r in records if asked.only in r["case"]]
    if not records:
        print(f"error: no measurements in {asked.folder}\nhint: python benchmarks/measure/run.py", file=sys.stderr)
        return 2
    equal = 0
    with ThreadPoolExecutor(asked.jobs) as pool:
        for record, ours in zip(records, pool.map(traced, records), strict=True):
            wrong = [ours] if isinstance(ours, str) else differences(record, ours)
            equal += not wrong
            print(f"{record['case']}: {'equal to the byte' if not wrong else f'{len(wrong)} differences'}", flush=True)
            print("".join(f"  {line}\n" for line in wrong[: asked.lines]), end="", flush=True)
    real = "stand-in runs" if all(r.get("stand_in") for r in records) else "measured runs"
    print(f"{equal} of {len(records)} {real} equal to the byte")
    return 0 if equal == len(records) else 1


if __name__ == "__main__":
    sys.exit(main())
