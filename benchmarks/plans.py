"""Time plans of every kind as whole processes, and write them into docs/performance.md: `python benchmarks/plans.py`.

With `--against SRC`, the `src` folder of another checkout, each plan is made by both in turns, and their CPU seconds
are compared run by run: a loaded machine changes both alike.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from statistics import median

import page_part

PLANS = (
    "llama-3.1-8b --gpu rtx-4090",
    "llama-3.1-8b --gpu rtx-4090 --task dpo",
    "bert-base-uncased --gpu t4 --task classification",
    "google/vit-base-patch16-224 --gpu t4",
    "openai/whisper-large-v3 --gpu t4",
    "google/flan-t5-xl --gpu rtx-4090",
    "Qwen/Qwen2.5-VL-7B-Instruct --gpu rtx-4090 --images 2",
    "llama-3.1-8b --gpu rtx-4090 --out run",
)
ANSWERED = (0, 3, 4)  # fits, is tight, does not fit
OURS = Path(__file__).resolve().parents[1] / "src"


def timed(source: Path, words: str) -> tuple[float, float]:
    """Return the seconds and the CPU seconds of one plan by the package in `source`, whose modules are compiled."""
    env = {**os.environ, "PYTHONPATH": str(source), "HF_HUB_OFFLINE": "1"}
    env.pop("PYTHONDONTWRITEBYTECODE", None)
    began = time.perf_counter()
    command = [sys.executable, "-m", "memfit", "plan", *words.split()]
    with tempfile.TemporaryDirectory() as folder:
        child = subprocess.Popen(command, cwd=folder, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        assert child.stderr is not None
        said = child.stderr.read().decode()
        _, status, used = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode not in ANSWERED:
        raise SystemExit(f"memfit plan {words} failed:\n{said}")
    return time.perf_counter() - began, used.ru_utime + used.ru_stime


def row(words: str, asked: argparse.Namespace) -> str:
    """Return a plan's row of the table, after one round that is not counted."""
    sources = [OURS, *([Path(asked.against).resolve()] if asked.against else [])]
    rounds = [[timed(source, words) for source in sources] for _ in range(asked.rounds + 1)][1:]
    wall, cpu = (median(found[0][which] for found in rounds) for which in (0, 1))
    best = min(found[0][1] for found in rounds)
    ratio = f"{median(ours[1] / theirs[1] for ours, theirs in rounds):.2f}" if asked.against else ""
    return f"| `memfit plan {words}` | {wall:.2f} | {cpu:.2f} ({best:.2f}) | {ratio} |"


def measured(asked: argparse.Namespace) -> str:
    """Measure, and return the part of docs/performance.md."""
    if asked.against and not Path(asked.against, "memfit").is_dir():
        raise SystemExit(f"{asked.against} has no package memfit\nhint: --against takes the src folder of a checkout")
    rows = [row(words, asked) for words in PLANS]
    today = datetime.now(UTC).date().isoformat()
    return "\n".join([
        "<!-- plans -->\n## Plans of every kind\n",
        f"`python benchmarks/plans.py`, {today}, load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores, "
        f"whole processes, median of {asked.rounds} runs (best in brackets). The goal is 0.5 s on an idle machine; on "
        "a loaded one read the CPU seconds, which are then too high as well.\n",
        f"| plan by formula | seconds | CPU seconds | {asked.word} |\n|---|---:|---:|---:|",
        *rows, "<!-- end plans -->\n",
    ])  # fmt: skip


if __name__ == "__main__":
    raise SystemExit(page_part.main(__doc__, "plans", measured, rounds=5, against="", word="x the commit before"))
