"""Run one published row on the virtual GPU and print its peaks as JSON: `python -m published.traced.one ROW CSV`."""

from __future__ import annotations

import importlib
import json
import re
import sys
import warnings
from importlib.metadata import version
from pathlib import Path
from typing import Any

from memfit.closed_form.parallel.sharding import NCCL_BYTES
from memfit.nouns.alloc_settings import AllocSettings, parse_alloc_conf
from memfit.nouns.gpu import Gpu
from memfit.nouns.tape import Tape
from published.case import NotCovered, gpu_of
from published.frameworks import case_of
from published.rows import Row, read_rows

# prefix of a row's id, sharding -> the module that runs it
DRIVERS = (
    ("litgpt", r"|none", "litgpt"), ("torchtune", r"|none", "torchtune"), ("hfdoc", r"|none", "hfdoc"),
    ("peft", r"|none", "peft"), ("trlbench", r"FSDP2 DP=\d+", "trl"), ("titan", r"FSDP2 \d+", "titan"),
    ("fsdpqlora", r"FSDP .+", "fsdpqlora"),
)  # fmt: skip
LEVELS = ("requested", "allocated", "reserved")


def driver_of(row: Row) -> Any:
    """The module that runs a row's framework; None where there is none."""
    source = row.group.split("_")[0]
    names = (name for prefix, sharding, name in DRIVERS if source == prefix and re.fullmatch(sharding, row.sharding))
    return next(names, None)


def card_of(row: Row) -> Gpu:
    """The row's card, with the context that its source measured."""
    try:
        return case_of(row).gpu
    except NotCovered:
        return gpu_of(row, "a100-80gb")


def trace(row: Row) -> dict[str, Any]:
    """Peaks in bytes over the whole run on the row's card, and what ran."""
    from memfit.allocator.replay import replay

    gpu = card_of(row)
    warnings.simplefilter("ignore")
    driver = importlib.import_module(f"published.traced.{driver_of(row)}")
    several = row.number("n_gpus", 1) > 1
    if several:
        tape, oom = driver.tape(row, gpu), False
        settings = parse_alloc_conf(tape.about.get("alloc_conf", ""))
    else:
        tape, settings, oom = _run(driver, row, gpu)
    beside = gpu.context_bytes + NCCL_BYTES * several
    peak = replay(tape.events, capacity=gpu.total_bytes - beside, settings=settings).peak
    return {
        **{level: getattr(peak, level) for level in LEVELS}, "device": peak.reserved + beside, "oom": oom,
        "versions": {p: version(p) for p in ("torch", *driver.PACKAGES)},
    }  # fmt: skip


def _run(driver: Any, row: Row, gpu: Gpu) -> tuple[Tape, AllocSettings, bool]:
    """Run a driver on a virtual card: the tape, the allocator's settings, and whether memory ran out."""
    import torch

    from memfit.virtual.observer import Observer
    from memfit.virtual.virtual_gpu import virtual_gpu

    with virtual_gpu(gpu) as card:
        observer = Observer(card)
        oom = False
        with observer.watching():
            try:
                driver.run(row)
            except torch.OutOfMemoryError:
                oom = True
        return observer.tape({}), card.ledger.allocator.settings, oom


def main() -> None:
    """Command line."""
    wanted, path = sys.argv[1:3]
    row = next(r for r in read_rows(Path(path)) if r.id == wanted)
    print(json.dumps(trace(row)))


if __name__ == "__main__":
    main()
