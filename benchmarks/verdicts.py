"""Hold published runs without a figure to the verdict: what ran out of memory may not fit, what ran not misfit."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from memfit.closed_form.run.estimate import estimate
from memfit.nouns.plan import judge
from memfit.units import GIB
from published.case import NotCovered
from published.rows import read_rows
from published.verdict_cases import Outcome, fits, out_of_memory

DATA = Path(__file__).resolve().parents[2] / "shared" / "data"
VERDICTS = ("fits", "tight", "misfit")
FORBIDDEN = {(False, "fits"), (True, "misfit")}  # (it ran, what memfit says)


def verdict(run: Outcome) -> tuple[str, str]:
    """(verdict, what to print of it)."""
    footprint = estimate(run.architecture, run.recipe, run.gpu, padded=False, profile=run.profile)
    found = judge(footprint, run.gpu)
    return found.verdict, f"{found.need / GIB:6.1f} of {found.usable / GIB:5.1f} GiB  {run.name}"


def main() -> int:
    """Print a table and every violation; 1 when there is one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--oom", type=Path, default=DATA / "measured_oom.csv", help="runs that ran out of memory")
    parser.add_argument("--fits", type=Path, default=DATA / "measured_fits.csv", help="runs that fitted")
    options = parser.parse_args()
    runs, refused = list(fits(options.fits)), Counter[str]()
    for row in read_rows(options.oom):
        try:
            runs.append(out_of_memory(row))
        except NotCovered as reason:
            refused[str(reason)] += 1
    counts, wrong = Counter[tuple[bool, str]](), []
    for run in runs:
        answer, text = verdict(run)
        counts[run.fitted, answer] += 1
        if (run.fitted, answer) in FORBIDDEN:
            wrong.append(f"{answer}, but it {'ran' if run.fitted else 'ran out of memory'}: {text}")
    print("| published run | " + " | ".join(VERDICTS) + " |\n|---|" + "---:|" * len(VERDICTS))
    for fitted, name in ((True, "ran"), (False, "out of memory")):
        print(f"| {name} | " + " | ".join(str(counts[fitted, v]) for v in VERDICTS) + " |")
    for reason, number in sorted(refused.items()):
        print(f"not covered, {number}: {reason}")
    print("\n".join(wrong))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
