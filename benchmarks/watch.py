"""Measure what memfit.watch costs a training loop and write it into docs/performance.md: `python benchmarks/watch.py`.

The same steps of a small transformer, on the CPU, watched and not, in turns in one process; CPU time of the process, so
that what else the machine does counts little. The cost of one look is the part that a card's step has too.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path

import torch
from torch import nn

import memfit
import page_part
from memfit.live.watch.loop import watch

WIDTH, LAYERS, TOKENS, BATCH = 256, 4, 128, 8


def loop() -> tuple[nn.Module, torch.optim.Optimizer, torch.Tensor]:
    """Return a transformer encoder of some 3 million weights, its optimizer and a batch."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
    return model, torch.optim.AdamW(model.parameters()), torch.randn(BATCH, TOKENS, WIDTH)


def turns(steps: int, log: Path) -> tuple[float, float]:
    """Return the CPU seconds of `steps` steps of two equal loops (plain, watched).

    Their steps alternate, so that other load of the machine affects both. The first step and the count of live tensors
    with which a watch begins are left out.
    """
    loops = loop(), loop()
    handle = watch(*loops[1][:2], log=log, quiet=True)
    took, start = [0.0, 0.0], 0.0
    # counting may take a share of the watched loop's time, not of both loops'
    handle.meter.clock, handle.meter._began = lambda: took[1] + time.process_time() - start, 0.0
    start = time.process_time()
    for step in range(steps + 1):
        for number in (0, 1) if step % 2 else (1, 0):
            model, optimizer, batch = loops[number]
            start = time.process_time()
            model(batch).pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            took[number] += (time.process_time() - start) * (step > 0)
    handle.close()
    return took[0], took[1]


def look(log: Path, rounds: int = 2000) -> float:
    """Return the CPU seconds of one look at a virtual card, with log and alarms."""
    with memfit.virtual_gpu("l4"):
        model = nn.Linear(64, 64).cuda()
        handle = watch(model, log=log, quiet=True, count_every=1)  # a look at every step, however short
        for _ in range(4):
            handle.step()
        start = time.process_time()
        for _ in range(rounds):
            handle.step()
        took = (time.process_time() - start) / rounds
        handle.close()
    return took


def page(rounds: list[tuple[float, float]], one: float, steps: int) -> str:
    """Return the part of docs/performance.md."""
    plain, watched = (sum(column) for column in zip(*rounds, strict=True))
    apart = [b / a - 1 for a, b in rounds]
    today = datetime.now(UTC).date().isoformat()
    return (
        "<!-- watch -->\n## What watching costs\n\n"
        f"`python benchmarks/watch.py`, {today}, PyTorch {torch.__version__.partition('+')[0]}: {len(rounds)} rounds "
        f"of {steps} steps of each, a watched one and one that is not in turns in one process, CPU time.\n\n"
        "| | measured | to stay under |\n|---|---:|---:|\n"
        f"| a step of a 3-million-weight transformer on the CPU | {plain / len(rounds) / steps * 1e3:.1f} ms | |\n"
        f"| the same, watched, against it (rounds from {min(apart):+.2%} to {max(apart):+.2%}) "
        f"| {watched / plain - 1:+.2%} | 1 % |\n"
        f"| one look at a card: counters, alarms, leak test, a line of the log | {one * 1e6:.0f} µs | 100 µs |\n"
        f"| that look as a share of a step of 100 ms | {one / 0.1:.3%} | 1 % |\n\n"
        "The look was timed on the virtual card, whose counters are Python: "
        "the driver's call, once a second, is not in\n"
        "it, and CUDA's counters were not timed. A search for a leak's holder costs three walks over Python's objects\n"
        "(about 0.1 s each for 200,000 of them), once per leak.\n<!-- end watch -->\n"
    )


def measured(asked: argparse.Namespace) -> str:
    """Measure, and return the part."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "run.jsonl"
        turns(5, log)
        rounds = [turns(asked.steps, log) for _ in range(asked.rounds)]
        return page(rounds, look(log), asked.steps)


if __name__ == "__main__":
    raise SystemExit(page_part.main(__doc__, "watch", measured, rounds=7, steps=60))
