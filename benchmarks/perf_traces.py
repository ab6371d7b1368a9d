"""Time `memfit trace` and PyTorch's own MemTracker, and write their section of docs/performance.md.

    python benchmarks/perf_traces.py [--rounds N] [--limit SECONDS] [--print]

Each runs in a process of its own, in turns; one that takes longer than the limit is killed, and the table says so.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import statistics
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

PAGE = Path(__file__).resolve().parents[1] / "docs" / "performance.md"
TRACKERS = str(Path(__file__).with_name("perf_trackers.py"))
BEGIN, END = "<!-- traces -->", "<!-- end traces -->"
ANSWERED = (0, 3, 4)
LORA = ("--method", "lora", "--checkpointing", "full", "--json")


@dataclass
class Traced:
    """A row: a command, the bar it should stay under, and what each of its runs took."""

    name: str
    command: tuple[str, ...]
    bar: str
    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    peak: int = 0  # bytes of resident memory
    failed: str = ""

    def run(self, limit: float) -> None:
        """Run the command once more, unless it has failed before."""
        if self.failed:
            return
        start = time.perf_counter()
        child = subprocess.Popen(
            [sys.executable, *self.command], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
        assert child.stderr is not None
        timer = threading.Timer(limit, child.kill)
        timer.start()
        errors = child.stderr.read().strip()
        _, status, used = os.wait4(child.pid, 0)
        timer.cancel()
        child.returncode = os.waitstatus_to_exitcode(status)
        if child.returncode == -signal.SIGKILL:
            self.failed = f"ended after {limit:.0f} s"
        elif child.returncode not in ANSWERED:
            self.failed = errors.splitlines()[-1][:160] if errors else f"exit code {child.returncode}"
        self.wall.append(time.perf_counter() - start)
        self.cpu.append(used.ru_utime + used.ru_stime)
        self.peak = max(self.peak, used.ru_maxrss * (1 if sys.platform == "darwin" else 1024))


def rows() -> list[Traced]:
    """Return the commands that are timed."""
    trace = ("-m", "memfit", "trace")
    return [
        Traced("`memfit trace`, Llama 2 7B, LoRA, TRL", (*trace, "llama-2-7b", "--gpu", "rtx-4090", *LORA),
        "8 s, 1,500 MB"),
        Traced("`memfit trace`, Llama 3.1 70B, LoRA, TRL", (*trace, "llama-3.1-70b", "--gpu", "h200", *LORA), "12 s"),
        Traced("FSDP2, Llama 3.1 405B, full, 1,024 ranks", (TRACKERS, "fsdp"), "20 s"),
        Traced("MemTracker, Llama 2 7B, full", (TRACKERS, "memtracker-full"), ""),
        Traced("MemTracker, Llama 2 7B, LoRA", (TRACKERS, "memtracker-lora"), ""),
    ]  # fmt: skip


def section(rounds: int, limit: float) -> str:
    """Run everything `rounds` times and return the section of the page."""
    table = rows()
    for _ in range(rounds):
        for row in table:
            row.run(limit)
    lines = [
        "| two optimizer steps, checkpointing | seconds | CPU seconds | peak | to stay under |",
        "|---|---:|---:|---:|---:|",
    ]
    for row in table:
        wall = f"{statistics.median(row.wall):.1f} ({min(row.wall):.1f})"
        cpu = f"{statistics.median(row.cpu):.1f} ({min(row.cpu):.1f})"
        lines.append(f"| {row.name} | {wall} | {cpu} | {row.peak / 1e6:,.0f} MB | {row.bar} |")
        if row.failed:
            lines.append(f"| | {row.failed} | | | |")
    how = (
        f"Median of {rounds} runs each, whole processes, taken in turns (best in brackets), on {os.cpu_count()} cores "
        f"with a load average of {os.getloadavg()[0]:.1f} at the end: where that is above the cores, CPU seconds say "
        "more than seconds. `memfit trace` also evaluates, merges the adapters, replays the tape on the card and looks "
        "for the smallest card with and without expandable segments. MemTracker runs the same model on fake tensors, "
        "which counts tensor bytes only; PEFT's adapters cannot be moved on those, so it has no LoRA."
    )
    return "\n\n".join(["## Traces", how, "\n".join(lines)])


def main() -> int:
    """Measure, and write the section or print it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="runs of each command")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds after which a run is ended")
    parser.add_argument("--print", action="store_true", help="print the section instead of writing it")
    options = parser.parse_args()
    text = section(options.rounds, options.limit)
    if options.print:
        print(text)
        return 0
    page = PAGE.read_text()
    found = re.sub(f"{BEGIN}.*{END}", lambda _: f"{BEGIN}\n{text}\n{END}", page, flags=re.S)
    written = PAGE.with_suffix(".new")
    written.write_text(found)
    written.replace(PAGE)
    return 0


if __name__ == "__main__":
    sys.exit(main())
