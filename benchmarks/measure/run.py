"""Measure every case on this machine's GPU: `python benchmarks/measure/run.py`; a few minutes, one process per case."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parents[1] / "src")]
OUT = HERE.parent / "measured"


def main() -> int:
    """Command line. Exits 1 if a case could not be run."""
    from measure.cases import CASES

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=OUT, help="folder of the results")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--jobs", type=int, default=4, help="cases at a time on the card")
    parser.add_argument("--stand-in", action="store_true", help="mark the results as made without a real GPU")
    asked = parser.parse_args()
    asked.out.mkdir(parents=True, exist_ok=True)

    def one(name: str) -> str:
        stem = asked.out / name.replace(" ", "-")
        command = [sys.executable, str(HERE / "one.py"), name, "real", f"{stem}.tape.gz"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            return f"{name}: {(done.stderr.strip().splitlines() or ['no answer'])[-1]}"
        found = json.loads(done.stdout.strip().splitlines()[-1]) | {"stand_in": asked.stand_in}
        part = stem.with_suffix(".part")
        part.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        part.replace(Path(f"{stem}.json"))
        print(
            f"{name}: {max(s['reserved'] for s in found['spans']) / 2**30:.2f} GiB reserved, {found['seconds']} s",
            flush=True,
        )
        return ""

    with ThreadPoolExecutor(asked.jobs) as pool:
        failed = [text for text in pool.map(one, [c.name for c in CASES if asked.only in c.name]) if text]
    print("\n".join(failed), file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
