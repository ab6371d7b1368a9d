"""Run one published row on the virtual GPU and print its peaks as JSON: `python -m published.traced.one ROW CSV`."""

from __future__ import annotations

import importlib
import json
import sys
import warnings
from importlib.metadata import version
from pathlib import Path
from typing import Any

from memfit.nouns.gpu import Gpu
from published.case import NotCovered, gpu_of
from published.frameworks import case_of
from published.rows import Row, read_rows

DRIVERS = (("litgpt", "litgpt"), ("torchtune", "torchtune"), ("hfdoc", "hfdoc"), ("peft", "peft"))
LEVELS = ("requested", "allocated", "reserved")


def driver_of(row: Row) -> Any:
    """The module that runs a row's framework; None where there is none."""
    return next((name for prefix, name in DRIVERS if row.group.split("_")[0] == prefix), None)


def card_of(row: Row) -> Gpu:
    """The row's card, with the context that its source measured."""
    try:
        return case_of(row).gpu
    except NotCovered:
        return gpu_of(row, "a100-80gb")


def trace(row: Row) -> dict[str, Any]:
    """Peaks in bytes over the whole run on the row's card, and what ran."""
    import torch

    from memfit.allocator.replay import replay
    from memfit.virtual.observer import Observer
    from memfit.virtual.virtual_gpu import virtual_gpu

    gpu = card_of(row)
    warnings.simplefilter("ignore")
    with virtual_gpu(gpu) as card:
        driver = importlib.import_module(f"published.traced.{driver_of(row)}")
        observer = Observer(card)
        oom = False
        with observer.watching():
            try:
                driver.run(row)
            except torch.OutOfMemoryError:
                oom = True
        tape, settings = observer.tape({}), card.ledger.allocator.settings
    timeline = replay(tape.events, capacity=gpu.usable_bytes(), settings=settings)
    peak = timeline.peak
    return {
        **{level: getattr(peak, level) for level in LEVELS}, "device": peak.reserved + gpu.context_bytes, "oom": oom,
        "versions": {p: version(p) for p in ("torch", *driver.PACKAGES)},
    }  # fmt: skip


def main() -> None:
    """Command line."""
    wanted, path = sys.argv[1:3]
    row = next(r for r in read_rows(Path(path)) if r.id == wanted)
    print(json.dumps(trace(row)))


if __name__ == "__main__":
    main()
