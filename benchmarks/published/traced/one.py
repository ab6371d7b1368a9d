"""Run one published row on the virtual GPU and print its peaks as JSON: `python -m published.traced.one ROW CSV`."""

from __future__ import annotations

import importlib
import json
import re
import sys
import warnings
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from memfit.closed_form.parallel.sharding import NCCL_BYTES
from memfit.nouns.alloc_settings import AllocSettings, parse_alloc_conf
from memfit.nouns.gpu import Gpu
from memfit.nouns.tape import Tape
from memfit.units import MIB
from published.case import NotCovered, gpu_of
from published.frameworks import case_of
from published.rows import Row, read_rows

# source of a row, its sharding and its model -> the module that runs it
DRIVERS = (
    ("litgpt", r"|none", "", "litgpt"), ("torchtune", r"|none", "", "torchtune"), ("hfdoc", r"|none", "", "hfdoc"),
    ("peft", r"|none", "", "peft"), ("peftimg", r"|none", "", "peft_images"),
    ("trlbench", r"FSDP2 DP=\d+", "", "trl"), ("titan", r"FSDP2 \d+", "", "titan"),
    ("ultrascale", r"DP .+", "", "nanotron"),
    ("fsdpqlora", r"FSDP .+", "", "fsdpqlora"), ("fsdpqlora", r"none", "", "stages"), ("op", r"|none", "", "operators"),
    ("gpumemnet", r"|none", r"nn\.", "encoders"), ("gpumemnet", r"|none", "", "images"),
    ("ao", r"|none", r"timm/", "images"), ("ao", r"|none", "Llama2", "llama2"),
)  # fmt: skip
# What a source's figures hold beside PyTorch's allocator, where it is not known: source, model, bytes. GPUMemNet read
# the memory of the whole card; the bytes are those of its rows over what is reserved, equal to 2 MiB in five encoders
# and to 27 MiB in its convolutional networks, which load cuDNN.
BESIDE = (("gpumemnet", r"nn\.", 1429 * MIB), ("gpumemnet", "", 1740 * MIB))
# source, card -> its memory, where rows reserve more than such a card has: PEFT's RTX 4090 reserves 26.8 GiB
LARGER = {("peft", "NVIDIA GeForce RTX 4090"): 48 << 30}
LEVELS = ("requested", "allocated", "reserved")


def driver_of(row: Row) -> Any:
    """The module that runs a row's framework; None where there is none."""
    source = row.group.split("_")[0]
    names = (
        name for of, sharding, model, name in DRIVERS
        if source == of and re.fullmatch(sharding, row.sharding) and re.match(model, row.model)
    )  # fmt: skip
    return next(names, None)


def card_of(row: Row) -> Gpu:
    """The row's card, with the context that its source measured."""
    try:
        return case_of(row).gpu
    except NotCovered:
        card = gpu_of(row, "a100-80gb")
        if larger := LARGER.get((row.group, row.gpu)):
            card = replace(card, total_bytes=larger)
        beside = next((size for of, model, size in BESIDE if row.group == of and re.match(model, row.model)), 0)
        return replace(card, context_bytes=beside) if beside else card


def trace(row: Row) -> dict[str, Any]:
    """Peaks in bytes over the whole run on the row's card, and what ran."""
    from memfit.allocator.replay import replay

    gpu = card_of(row)
    warnings.simplefilter("ignore")
    driver = importlib.import_module(f"published.traced.{driver_of(row)}")
    several, told = row.number("n_gpus", 1) > 1, None
    if several:
        tape, oom = driver.tape(row, gpu), False
        settings = parse_alloc_conf(tape.about.get("alloc_conf", ""))
    else:
        tape, settings, oom, told = _run(driver, row, gpu)
    beside = gpu.context_bytes + NCCL_BYTES * several
    peak = replay(tape.events, capacity=gpu.total_bytes - beside, settings=settings).peak
    levels = {level: getattr(peak, level) for level in LEVELS} | (told or {})
    return {
        **levels, "device": peak.reserved + beside, "oom": oom,
        "versions": {p: version(p) for p in ("torch", *driver.PACKAGES)},
    }  # fmt: skip


def _run(driver: Any, row: Row, gpu: Gpu) -> tuple[Tape, AllocSettings, bool, dict[str, int] | None]:
    """Run a driver on a virtual card: the tape, the allocator's settings, whether memory ran out, what it measured.

    A driver whose source measured something else than the peak of the whole run returns those bytes by level.
    """
    import torch

    from memfit.virtual.observer import Observer
    from memfit.virtual.virtual_gpu import virtual_gpu

    with virtual_gpu(gpu) as card:
        observer = Observer(card)
        oom, told = False, None
        with observer.watching():
            try:
                told = driver.run(row)
            except torch.OutOfMemoryError:
                oom = True
        return observer.tape({}), card.ledger.allocator.settings, oom, told


def main() -> None:
    """Command line."""
    wanted, path = sys.argv[1:3]
    row = next(r for r in read_rows(Path(path)) if r.id == wanted)
    print(json.dumps(trace(row)))


if __name__ == "__main__":
    main()
