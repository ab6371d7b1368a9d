"""Measure what whole checkpoints cost and write it into docs/performance.md: `python benchmarks/checkpoint_cost.py`.

A checkpoint of a model in fp32 with AdamW's two states is written as transformers writes it (safetensors, torch.save),
then sealed with and without digests, in turns.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from unittest import mock

import torch
from safetensors.torch import save_file

import page_part
from memfit.train import checkpoints
from memfit.train.run_file import write_json

TENSORS = 20
MARKS = {"step": 1, "samples": 8, "by_process": (8,), "optimizer": "adamw", "evaluate": False}


def written(folder: Path, weights: int) -> float:
    """Write a checkpoint's files, and return the seconds."""
    each = [torch.full((weights // TENSORS,), float(i)).normal_() for i in range(3 * TENSORS)]
    for file in folder.iterdir():
        file.unlink()
    os.sync()
    began = time.perf_counter()
    save_file({f"weight.{i}": each[i] for i in range(TENSORS)}, folder / "model.safetensors")
    states = {i: {"exp_avg": each[TENSORS + i], "exp_avg_sq": each[2 * TENSORS + i]} for i in range(TENSORS)}
    torch.save({"state": states}, folder / "optimizer.pt")
    return time.perf_counter() - began


def sealed(folder: Path) -> tuple[float, float]:
    """Seal a checkpoint, and return the seconds and the CPU seconds."""
    began, cpu = time.perf_counter(), time.process_time()
    checkpoints.seal(folder, MARKS, write_json)
    return time.perf_counter() - began, time.process_time() - cpu


def page(rows: list[tuple[float, float, float, float]], size: int, check: float) -> str:
    """Return the part of docs/performance.md. rows: seconds to write, to seal, to seal without digests; CPU seconds."""
    write, seal, plain, cpu = (median(column) for column in zip(*rows, strict=True))
    more = median((b - c) / (a + c) for a, b, c, _ in rows)
    today = datetime.now(UTC).date().isoformat()
    return (
        "<!-- checkpoints -->\n## What whole checkpoints cost\n\n"
        f"`python benchmarks/checkpoint_cost.py`, {today}, PyTorch {torch.__version__.partition('+')[0]}, load average "
        f"{os.getloadavg()[0]:.1f} on {os.cpu_count()} cores: a model with AdamW's states, {size / 1e6:,.0f} MB in two "
        f"files, median of {len(rows)} rounds, with digests and without in turns.\n\n"
        "| | measured | to stay under |\n|---|---:|---:|\n"
        f"| writing the files, as transformers does | {write:.2f} s | |\n"
        f"| waiting until they are on the disk, without digests | {plain:.2f} s | |\n"
        f"| the same with a digest of every file, which is computed while the disk writes | {seal:.2f} s | |\n"
        f"| the digests as a share of saving (wall time; median of the rounds) | {more:+.1%} | 3 % |\n"
        f"| CPU time of the digests | {cpu:.2f} s | |\n"
        f"| checking every byte before the run goes on | {check:.2f} s | |\n<!-- end checkpoints -->\n"
    )


def measured(asked: argparse.Namespace) -> str:
    """Measure in a folder on the disk to be measured, by default that of temporary files, and return the part."""
    torch.set_num_threads(1)
    rows = []
    with tempfile.TemporaryDirectory(dir=asked.folder or None) as name:
        folder = Path(name)
        for _ in range(asked.rounds):
            write = written(folder, asked.weights)
            with_digests, cpu = sealed(folder)
            found = checkpoints.read(folder)
            assert isinstance(found, checkpoints.Checkpoint)
            began = time.perf_counter()
            assert not checkpoints.damage(found)
            check = time.perf_counter() - began
            written(folder, asked.weights)
            with mock.patch.object(checkpoints, "digest", lambda path, mapped: ""):
                without, cpu_without = sealed(folder)
            rows.append((write, with_digests, without, cpu - cpu_without))
    return page(rows, found.size, check)


if __name__ == "__main__":
    raise SystemExit(page_part.main(__doc__, "checkpoints", measured, rounds=9, weights=100_000_000, folder=""))
