"""Virtual cards of several ranks against recorded runs of FSDP2 and DDP: `python benchmarks/oracle_sharded.py [DIR]`.

DIR holds whole records (`*.json`; every phase is compared); without it the levels of tests/data/sharded_runs.json are.
NCCL's watchdog thread lets go of reduced gradients early or late, so a DDP run may equal either of two traces. Prints
a row for every record and phase out of bounds, and a summary; exits 1 if there is one.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

from oracle import BOUNDS, CARDS, LEVELS, MODELS, Outcome, Peaks, compare, peaks_of, recorded

DISTILLED = Path(__file__).resolve().parents[1] / "tests" / "data" / "sharded_runs.json"


def setup_of(case: dict[str, Any], config: dict[str, Any]) -> Any:
    """Return the job of a case: the loop that wraps the model as accelerate does."""
    from memfit.virtual.jobs.recipe import Setup

    full = case["tune"] == "full"
    rank = 16 if full else int(case["tune"].split("_")[0].removeprefix("lora"))
    return Setup(
        config=config, trainer="torch", method="full" if full else "lora", dtype=case["weights"], rank=rank,
        alpha=2 * rank,
        autocast="bf16" if case["mixed"] else "", checkpointing="none" if case["ckpt"] == "none" else "nonreentrant",
        attention=case["attn"], micro_batch=case["mb"], sequence=case["seq"], accumulation=case["accum"],
        clip=case["clip"],
        steps=case["steps"], mask=case["mask"], load="meta", use_cache=False, world_size=case["world"],
        shard="parameters" if case["mode"] == "fsdp2" else "none", reshard=case["reshard"], sync_each=case["sync_each"],
        bucket_view=case["view"], ends_in_root=case.get("ends_in_root", False),
    )  # fmt: skip


def traced(case: dict[str, Any], config: dict[str, Any], *, late: bool) -> Peaks:
    """Trace a case and return its peaks by phase. late: NCCL's watchdog polls as late as it may."""
    from memfit.catalogue.cards import find_gpu
    from memfit.virtual.jobs import run
    from memfit.virtual.observer import Observer
    from memfit.virtual.virtual_gpu import Answers, virtual_gpu

    capacity = case["total_gib"] << 30
    gpu = replace(find_gpu(CARDS[case["cc"]]), total_bytes=capacity, context_bytes=0, sm_count=108)
    with virtual_gpu(gpu, world_size=case["world"], answers=Answers(late_watchdog=late)) as card:
        observer = Observer(card)
        with observer.watching():
            run(setup_of(case, config), observer)
        tape = observer.tape({})
    return peaks_of(tape, capacity, card.ledger.allocator.settings)[0]


def watchdogs(case: dict[str, Any]) -> tuple[bool, ...]:
    """Return the values of `late` that a recorded run may have had."""
    return (False, True) if case["mode"] == "ddp" else (True,)


def compare_whole(real: Peaks, ours: Peaks) -> list[tuple[str, str, int, int]]:
    return compare(Outcome(real, None), Outcome(ours, None))


def distilled(run: dict[str, Any]) -> Peaks:
    """Return a distilled run in the form of a record; levels that it lacks are 0 and are not compared."""
    last = f"s2.m{run['case']['accum']}"
    return {
        f"{last}.forward": (run["forward"], 0, 0), f"{last}.backward": (run["backward"], 0, 0),
        "s2.optimizer": (run["step"], 0, 0), "all": (0, 0, run["reserved"]),
    }  # fmt: skip


def compare_distilled(real: Peaks, ours: Peaks) -> list[tuple[str, str, int, int]]:
    """Compare the levels that a distilled run has."""
    ours = ours | {"all": (0, 0, max(levels[2] for levels in ours.values()))}
    return [
        (phase, level, a, b)
        for phase, levels in real.items()
        for level, a, b in zip(LEVELS, levels, ours[phase], strict=True)
        if a and abs(b - a) > BOUNDS[level] * a
    ]


def main() -> int:
    """Compare all runs; exit with 1 if one is out of bounds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path)
    parser.add_argument("--models", type=Path, default=MODELS, help="folder of config.json files named after models")
    parser.add_argument("--only", default="", help="records whose name contains this")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    runs: list[tuple[dict[str, Any], Peaks]]
    if options.folder:
        records = [json.loads(p.read_text()) for p in sorted(options.folder.glob("*.json"))]
        runs = [(r, recorded(r).peaks) for r in records if r["outcome"] == "ok"]
    else:
        runs = [(r, distilled(r)) for r in json.loads(DISTILLED.read_text())["runs"]]
    runs = [(r, real) for r, real in runs if options.only in r["id"]]
    good = equal = 0
    began = time.perf_counter()
    for run, real in runs:
        config = json.loads((options.models / f"{run['case']['model']}.json").read_text())
        found = []
        for late in watchdogs(run["case"]):
            ours = traced(run["case"], config, late=late)
            found.append((compare_whole if options.folder else compare_distilled)(real, ours))
            key = f"s2.m{run['case']['accum']}.backward"
            equal += ours[key][0] == real[key][0]
            gc.collect()
        wrong = min(found, key=len)
        good += not wrong
        for phase, level, a, b in wrong:
            print(f"{run['id']}: {phase} {level} {a:,} recorded, {b:,} traced ({(b - a) / a:+.2%})")
    print(
        f"{good} of {len(runs)} within {', '.join(f'{k} {v:.1%}' for k, v in BOUNDS.items())}; "
        f"{equal} equal to the byte in the backward of the second step; {time.perf_counter() - began:.0f} s"
    )
    return 0 if runs and good == len(runs) else 1


if __name__ == "__main__":
    sys.exit(main())
