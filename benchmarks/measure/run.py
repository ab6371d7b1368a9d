"""Measure every case on this machine's GPU: `python benchmarks/measure/run.py`; a few minutes, one process per case.

A case's result is written when it is done, so a campaign that was stopped resumes where it was (`--again` runs all).
`--virtual h100` is the same campaign on a virtual card, to see without a GPU that every case runs.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parents[1] / "src")]
OUT = HERE.parent / "measured"
LIMIT = 180  # seconds one case may take


def where(virtual: str | None) -> list[str]:
    """Return the arguments of `one.py` that choose the card."""
    if virtual is None:
        return ["real"]
    from memfit.catalogue.cards import find_gpu

    gpu = find_gpu(virtual)
    facts = {
        "name": gpu.name, "capability": gpu.compute_capability, "total_bytes": gpu.total_bytes,
        "multiprocessors": gpu.sm_count,
    }  # fmt: skip
    return ["virtual", json.dumps(facts)]


def one(name: str, words: Sequence[str], out: Path, limit: int, stand_in: bool) -> str:
    """Run a case and write its result; return why it could not be run, or ''."""
    stem = out / name.replace(" ", "-")
    command = [sys.executable, str(HERE / "one.py"), name, *words, f"{stem}.tape.gz"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=limit)
    except subprocess.TimeoutExpired:
        return f"{name}: not done after {limit} s"
    if done.returncode:
        return f"{name}: {(done.stderr.strip().splitlines() or ['no answer'])[-1]}"
    found = json.loads(done.stdout.strip().splitlines()[-1]) | {"stand_in": stand_in}
    part = Path(f"{stem}.part")
    part.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    part.replace(f"{stem}.json")
    reserved = max(s["reserved"] for s in found["spans"]) / 2**30
    print(
        f"{name}: {reserved:.2f} GiB reserved, {found['seconds']} s{', out of memory' if found['oom'] else ''}",
        flush=True,
    )
    return ""


def main() -> int:
    """Run the command line. Exits with 1 if a case could not be run."""
    from measure.cases import CASES

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder of the results; default: benchmarks/measured")
    parser.add_argument("--only", action="append", metavar="TEXT", help="cases whose name contains this; repeatable")
    parser.add_argument("--jobs", type=int, default=4, help="cases at a time on the card")
    parser.add_argument("--limit", type=int, default=LIMIT, help="seconds one case may take")
    parser.add_argument("--again", action="store_true", help="also run cases that have a result")
    parser.add_argument("--virtual", metavar="GPU", help="on a virtual card of that name; needs --out")
    parser.add_argument("--stand-in", action="store_true", help="mark the results as made without a real GPU")
    asked = parser.parse_args()
    if asked.virtual and asked.out is None:
        parser.error("--virtual needs --out, so that no virtual result lies among the measured ones")
    out = asked.out or OUT
    out.mkdir(parents=True, exist_ok=True)
    names = [c.name for c in CASES if any(text in c.name for text in asked.only or [""])]
    left = [n for n in names if asked.again or not (out / f"{n.replace(' ', '-')}.json").exists()]
    words, stand_in = where(asked.virtual), asked.stand_in or bool(asked.virtual)
    with ThreadPoolExecutor(asked.jobs) as pool:
        failed = [t for t in pool.map(lambda n: one(n, words, out, asked.limit, stand_in), left) if t]
    print(f"{len(names) - len(failed)} of {len(names)} cases have a result in {out}")
    print("\n".join(failed), file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
