"""What performance.py times inside a fresh Python: `python perf_probes.py PROBE` prints seconds as one JSON object.

At the top only the standard library is imported, so that a probe pays for, and is told of, its own imports alone.
"""

from __future__ import annotations

import gzip
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from itertools import islice, product
from pathlib import Path
from typing import Any

TAPES = Path(__file__).resolve().parents[1] / "tests" / "data" / "tapes"
HEAVY = ("torch", "transformers")
CANDIDATES = 5000
ROUNDS, ENOUGH = 400, 2.0  # a short call is repeated this often, or for this many seconds


def each(once: Callable[[], object]) -> float:
    """Median seconds of one call, after a first one that fills the caches."""
    once()
    times: list[float] = []
    end = time.perf_counter() + ENOUGH
    while len(times) < ROUNDS and (time.perf_counter() < end or not times):
        times.append(seconds(once))
    return statistics.median(times)


def seconds(once: Callable[[], object]) -> float:
    """Seconds of one call."""
    start = time.perf_counter()
    once()
    return time.perf_counter() - start


def imported() -> dict[str, float]:
    """How many of the heavy packages come with `import memfit` and a plan."""
    _planned()()
    return {"heavy": sum(name in sys.modules for name in HEAVY)}


def _question() -> tuple[Any, Any, Any]:
    from memfit import Recipe, find_gpu, resolve_model
    from perf_peers import BATCH, CARD, MODEL, RANK, SEQUENCE

    recipe = Recipe(
        method="qlora", quantization="nf4-double", checkpointing="full", lora_rank=RANK, micro_batch=BATCH,
        sequence_length=SEQUENCE,
    )  # fmt: skip
    return resolve_model(MODEL), recipe, find_gpu(CARD)


def _planned() -> Callable[[], object]:
    from memfit import Job, make_plan

    architecture, _, gpu = _question()
    return lambda: make_plan(Job(architecture=architecture, gpu=gpu))


def estimated() -> dict[str, float]:
    """One recipe: what the search compares, every phase by closed form, and with a replay through the allocator."""
    from memfit import estimate
    from memfit.closed_form.run.account import Account
    from memfit.closed_form.run.estimate import closed_form

    a, recipe, gpu = _question()
    return {
        "compared": each(lambda: closed_form(Account(a, recipe, gpu))),
        "closed": each(lambda: estimate(a, recipe, gpu, replay=False)),
        "replayed": each(lambda: estimate(a, recipe, gpu, replay=True)),
    }


def searched() -> dict[str, float]:
    """Distinct recipes through the estimator that the search uses, in a process that has estimated nothing before."""
    from memfit import Job
    from memfit.planner.search import Estimator

    a, _, gpu = _question()
    estimator = Estimator(Job(architecture=a, gpu=gpu))
    recipes = list(islice(_recipes(), CANDIDATES))
    if len(set(recipes)) != CANDIDATES:
        raise SystemExit(f"{len(set(recipes))} distinct recipes, not {CANDIDATES}")
    taken = seconds(lambda: [estimator.quick(recipe) for recipe in recipes])
    return {"recipes": CANDIDATES, "search": taken}


def _recipes() -> Iterator[Any]:
    """Every technique the ladder knows for one card, at 25 sequence lengths and 10 micro-batches."""
    from memfit import Recipe

    full = [{"precision": p, "optimizer": o} for p, o in product(("bf16", "bf16-mixed"), ("adamw", "adamw-8bit"))]
    adapters = [{"method": "lora"}, {"method": "qlora", "quantization": "nf4-double"}]
    for length, batch, learns, checkpointing, loss in product(
        range(256, 6401, 256), (1, 2, 3, 4, 6, 8, 12, 16, 24, 32), full + adapters, ("none", "full"), ("full", "fused")
    ):
        yield Recipe(
            sequence_length=length, micro_batch=batch, accumulation=2, checkpointing=checkpointing, loss=loss, **learns
        )


def planned() -> dict[str, float]:
    """The parts of `memfit plan`, in the order of a process that begins: every import, model, card, search."""
    imports = seconds(lambda: [__import__(f"memfit.{name}") for name in ("planner", "models.hub", "catalogue.cards")])
    from memfit import find_gpu, resolve_model
    from perf_peers import CARD, MODEL

    model, card = seconds(lambda: resolve_model(MODEL)), seconds(lambda: find_gpu(CARD))
    plan = _planned()
    return {"imports": imports, "model": model, "card": card, "plan": seconds(plan), "again": each(plan)}


def replayed() -> dict[str, float]:
    """Events of recorded training runs through the allocator model, per second."""
    runs = [_tape(path) for path in sorted(TAPES.glob("*.tape.json.gz"))]
    taken = sum(min(seconds(play) for _ in range(5)) for play, _ in runs)
    played = sum(events for _, events in runs)
    return {"events": played, "per_second": played / taken}


def _tape(path: Path) -> tuple[Callable[[], object], int]:
    """(what replays a recorded run, its number of events)."""
    from memfit.allocator import QUICK
    from memfit.allocator.compact import ONE_STREAM, play_ops
    from memfit.nouns.alloc_settings import AllocSettings

    with gzip.open(path, "rt") as stream:
        ops = _ops(json.load(stream))
    record = json.loads(path.with_name(path.name.replace(".tape.json.gz", ".json")).read_text())
    settings = AllocSettings(expandable_segments=bool(record["case"]["expandable"]))
    return lambda: play_ops(QUICK[settings](), ops, ONE_STREAM, []), len(ops)


def _ops(tape: dict[str, Any]) -> list[int]:
    """A recorded tape as sizes and frees."""
    ops: list[int] = []
    live: dict[int, int] = {}
    born = 0
    for op, size, address in zip(tape["op"], tape["size"], tape["addr"], strict=True):
        if op == "A":
            live[address], born = born, born + 1
            ops.append(size)
        elif op == "f":
            ops.append(~live.pop(address))
    return ops


def peer(name: str) -> dict[str, float]:
    """One answer of another estimator, called in process."""
    from perf_peers import PEERS

    row = next(p for p in PEERS if p.name == name)
    scope: dict[str, Any] = {}
    exec(row.setup, scope)
    exec(f"def once():\n    {row.once}", scope)
    return {"estimate": each(scope["once"])}


PROBES: dict[str, Callable[[], dict[str, float]]] = {
    "import": imported, "estimate": estimated, "search": searched, "plan": planned, "replay": replayed,
}  # fmt: skip

if __name__ == "__main__":
    found = PROBES[sys.argv[1]]() if sys.argv[1] in PROBES else peer(sys.argv[1])
    print(json.dumps(found))
