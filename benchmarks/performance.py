"""Time memfit and its peers in one run and write docs/performance.md.

    python benchmarks/performance.py [--peers-python PYTHON] [--rounds N] [--print]

Peers are looked for in this Python, then in PYTHON (a virtual environment they were installed into); what is not there
gets a row that says how to install it. No network is used. Whole processes take turns, so that whatever else the
machine does falls on all of them alike.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from perf_peers import BATCH, CARD, MODEL, PEERS, RANK, SEQUENCE, offline_hub, python_with, version
from perf_traces import BEGIN, END

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "performance.md"
CONFIG = ROOT / "src" / "memfit" / "catalogue" / "models" / "llama-3.1-8b.json"
PROBES = Path(__file__).with_name("perf_probes.py")
ANSWERED = (0, 1, 3, 4)  # "does not fit" is an answer: 1 with fitcheck, 3 and 4 with memfit
MEGA = 1e6
OURS = ("import", "estimate", "search", "plan", "replay")  # of perf_probes.py

MEMFIT = {
    "memfit plan": ("plan", MODEL, "--gpu", CARD),
    "memfit estimate": (
        "estimate", MODEL, "--gpu", CARD, "--method", "qlora", "--quantization", "nf4-double",
        "--checkpointing", "full", "--micro-batch", str(BATCH), "--sequence-length", str(SEQUENCE),
        "--lora-rank", str(RANK),
    ),
}  # fmt: skip
DOES = {
    "python": "nothing: `python -c pass`",
    "import memfit": "`python -c 'import memfit'`",
    "memfit plan": "searches all recipes, replays the finalists through the allocator",
    "memfit estimate": "one recipe, every phase, replayed through the allocator",
} | {peer.name: peer.answers for peer in PEERS}


@dataclass
class Process:
    """A command with what each of its runs took."""

    command: list[str]
    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    peak: int = 0  # bytes of resident memory, highest of all runs

    def run(self, env: Mapping[str, str]) -> None:
        """Run it once more. wait4 gives the child's own peak, but no less than this process's: so it imports little."""
        start = time.perf_counter()
        child = subprocess.Popen(self.command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        assert child.stderr is not None
        said = child.stderr.read()
        _, status, used = os.wait4(child.pid, 0)
        self.wall.append(time.perf_counter() - start)
        child.returncode = os.waitstatus_to_exitcode(status)
        if child.returncode not in ANSWERED or b"Traceback" in said:
            raise SystemExit(f"{' '.join(self.command)[:200]}\nfailed:\n{said.decode()}")
        self.cpu.append(used.ru_utime + used.ru_stime)
        self.peak = max(self.peak, used.ru_maxrss * (1 if sys.platform == "darwin" else 1024))


def main() -> int:
    """Measure, and write or print the page."""
    parser = argparse.ArgumentParser(description="Time memfit and its peers; writes docs/performance.md.")
    parser.add_argument("--peers-python", default=sys.executable, help="the Python of an environment with the peers")
    parser.add_argument("--rounds", type=int, default=9, help="runs of each command")
    parser.add_argument("--print", action="store_true", help="print the page instead of writing it")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        env = offline_hub(Path(folder), CONFIG)
        # as after an installation: modules are compiled once, in the first round, which is not counted
        env.pop("PYTHONDONTWRITEBYTECODE", None)
        env["PYTHONPYCACHEPREFIX"] = str(Path(folder) / "compiled")
        pythons = {peer.name: python_with(peer.module, [sys.executable, asked.peers_python]) for peer in PEERS}
        processes = _processes(Path(folder), pythons, env, asked.rounds)
        page = _page(processes, _inside(Path(folder), pythons, env), pythons, asked.rounds)
    if asked.print:
        print(page)
    else:
        written = PAGE.with_suffix(".new")
        _, mark, watch = PAGE.read_text().partition("\n<!-- watch -->")  # written by benchmarks/watch.py
        written.write_text(page + mark + watch)
        written.replace(PAGE)
    return 0


def _processes(
    folder: Path, pythons: Mapping[str, str | None], env: Mapping[str, str], rounds: int
) -> dict[str, Process]:
    found = {
        "python": Process([sys.executable, "-c", "pass"]),
        "import memfit": Process([sys.executable, "-c", "import memfit"]),
    }
    found |= {name: Process([sys.executable, "-m", "memfit", *rest]) for name, rest in MEMFIT.items()}
    for peer in PEERS:
        if (python := pythons[peer.name]) is not None:
            words = [str(folder / "model") if word == "CONFIG" else word for word in peer.process]
            found[peer.name] = Process([python, *words])
    for number in range(rounds + 1):
        for process in found.values():
            process.run(env)
            if number == 0:
                process.wall, process.cpu = [], []
    return found


def _inside(folder: Path, pythons: Mapping[str, str | None], env: Mapping[str, str]) -> dict[str, dict[str, float]]:
    """The probes, each in a Python of its own, three times: the best of each number."""
    found = {}
    wanted = dict.fromkeys(OURS, sys.executable)
    wanted |= {name: python for name, python in pythons.items() if python is not None}
    for name, python in wanted.items():
        command = [python, str(PROBES), name, str(folder / "model")]
        runs = []
        for _ in range(3):
            done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
            if done.returncode != 0:
                raise SystemExit(f"the probe {name} failed:\n{done.stderr}")
            runs.append(json.loads(done.stdout.splitlines()[-1]))
        best = {key: min(run[key] for run in runs) for key in runs[0]}
        if "per_second" in best:
            best["per_second"] = max(run["per_second"] for run in runs)
        found[name] = best
    return found


# ---- the page --------------------------------------------------------------------------------------------------------


def _page(
    processes: Mapping[str, Process],
    inside: Mapping[str, Mapping[str, float]],
    pythons: Mapping[str, str | None],
    rounds: int,
) -> str:
    parts = [
        "# Performance",
        "`python benchmarks/performance.py` wrote this page; its numbers are of one run on one machine:",
        f"{_machine()}.",
        "<!-- summary -->\n"
        + _bars(processes, inside)
        + "\n\n"
        + _ratios(processes, inside)
        + "\n<!-- end summary -->",
        "## Whole processes",
        f"Median of {rounds} runs each, taken in turns after one uncounted round (best in brackets). CPU is user + "
        "system time; the peak is the highest resident memory of the process (`wait4`), never less than the measuring "
        "process's own. A megabyte is 10^6 bytes.",
        _whole(processes, pythons),
        "## Inside one process",
        "One answer, asked again and again in a process that has everything imported and read: "
        "median of up to 400 calls, best of three processes.",
        _calls(inside, pythons),
        "## Where the time of `memfit plan` goes",
        _parts(processes, inside),
        _traces(),
        "## Method",
        _method(pythons),
    ]
    return "\n\n".join(parts) + "\n"


def _bars(processes: Mapping[str, Process], inside: Mapping[str, Mapping[str, float]]) -> str:
    plan, search, calls = processes["memfit plan"], inside["search"], inside["estimate"]
    heavy = "neither torch nor transformers" if not inside["import"]["heavy"] else "HEAVY PACKAGES"
    imported = statistics.median(processes["import memfit"].wall) - statistics.median(processes["python"].wall)
    rows = [
        ("`memfit plan`, the whole process", f"{statistics.median(plan.wall):.2f} s", "0.5 s"),
        ("its memory", f"{plan.peak / MEGA:.0f} MB", "80 MB"),
        (f"`import memfit` (loads {heavy})", f"{imported * 1e3:.0f} ms", "50 ms"),
        ("one estimate, every phase", f"{calls['closed'] * 1e6:.0f} µs", "200 µs"),
        ("one estimate as a search compares it", f"{calls['compared'] * 1e6:.0f} µs", "200 µs"),
        (f"searching {search['recipes']:,} recipes", f"{search['search']:.2f} s", "1 s"),
        ("allocator replay", f"{inside['replay']['per_second'] / 1e6:.2f} million events per second", ""),
    ]
    return "\n".join(
        ["| | measured | to stay under |", "|---|---:|---:|", *(f"| {a} | {b} | {c} |" for a, b, c in rows)]
    )


def _ratios(processes: Mapping[str, Process], inside: Mapping[str, Mapping[str, float]]) -> str:
    """Peers against memfit, from the same run."""
    ours, said = processes["memfit estimate"], []
    for peer in PEERS:
        if peer.name in processes:
            theirs = processes[peer.name]
            time_ratio = statistics.median(theirs.wall) / statistics.median(ours.wall)
            call = inside[peer.name]["estimate"] / inside["estimate"]["closed"]
            said.append(
                f"{peer.name} {time_ratio:.1f} times the time, {theirs.peak / ours.peak:.1f} times the memory, and "
                f"{_times(call)} the time of one call in process"
            )
    if not said:
        return "No peer was installed where this ran."
    return (
        f"Against `memfit estimate` in the same run: {'; '.join(said)}. The process of `memfit estimate` also replays "
        "the run through the allocator; calls are compared by closed form alone. Below 1 the peer is the faster or "
        "smaller one."
    )


def _times(ratio: float) -> str:
    return f"{ratio:,.0f} times" if ratio >= 10 else f"{ratio:.2g} times"


def _whole(processes: Mapping[str, Process], pythons: Mapping[str, str | None]) -> str:
    ours = statistics.median(processes["memfit plan"].wall)
    rows = [
        "| process | seconds | CPU seconds | peak | x `memfit plan` | what it does |",
        "|---|---:|---:|---:|---:|---|",
    ]
    for name, process in processes.items():
        wall = statistics.median(process.wall)
        rows.append(
            f"| {name} | {wall:.3f} ({min(process.wall):.3f}) | {statistics.median(process.cpu):.3f} "
            f"| {process.peak / MEGA:.0f} MB | {wall / ours:.2f} | {DOES[name]} |"
        )
    return "\n".join([*rows, *_missing(pythons, columns=6)])


def _calls(inside: Mapping[str, Mapping[str, float]], pythons: Mapping[str, str | None]) -> str:
    calls = inside["estimate"]
    rows = ["| call | one answer | x `estimate` |", "|---|---:|---:|"]
    ours = [
        ("memfit: the training step alone, as a search compares it", calls["compared"]),
        ("memfit: `estimate(..., replay=False)`, every phase by closed form", calls["closed"]),
        ("memfit: `estimate(...)`, through the allocator model", calls["replayed"]),
    ]
    theirs = [(f"{p.name}: {p.call}", inside[p.name]["estimate"]) for p in PEERS if p.name in inside]
    for name, taken in ours + theirs:
        rows.append(f"| {name} | {taken * 1e6:,.0f} µs | {taken / calls['closed']:,.2f} |")
    return "\n".join([*rows, *_missing(pythons, columns=3)])


def _missing(pythons: Mapping[str, str | None], columns: int) -> list[str]:
    absent = [peer for peer in PEERS if pythons[peer.name] is None]
    rest = " |" * (columns - 2)
    return [f"| {p.name} | not installed: `pip install {shlex.join(p.package.split())}` |{rest}" for p in absent]


def _parts(processes: Mapping[str, Process], inside: Mapping[str, Mapping[str, float]]) -> str:
    plan, bare, whole = inside["plan"], processes["python"], processes["memfit plan"]
    known = [
        ("Python starts", min(bare.wall)),
        ("import of planner, families and catalogue", plan["imports"]),
        ("the model's config, its family", plan["model"]),
        ("the table of cards", plan["card"]),
        ("planning: tracing blocks, ladder, search, replays", plan["plan"]),
    ]
    known.append(("the rest: command line (click), rendering (rich), exit", min(whole.wall) - sum(t for _, t in known)))
    rows = ["| part | seconds |", "|---|---:|", *(f"| {name} | {taken:.3f} |" for name, taken in known)]
    return "\n".join(rows) + f"\n\nThe same plan again in the same process: {plan['again']:.3f} s."


def _traces() -> str:
    """The section that perf_traces.py writes, kept as it is."""
    page = PAGE.read_text()
    begin, end = page.find(BEGIN), page.find(END)
    return page[begin : end + len(END)] if 0 <= begin < end else f"{BEGIN}\n{END}"


def _machine() -> str:
    load = f", load average {os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else ""
    day = datetime.now(UTC).strftime("%Y-%m-%d")
    return (
        f"{platform.machine()}, {os.cpu_count()} cores{load}, "
        f"Python {platform.python_version()}, {platform.system()}, {day}{_revision()}"
    )


def _revision() -> str:
    """The commit that was measured, and whether files were changed since; nothing outside a checkout."""
    command = ["git", "describe", "--always", "--dirty=, changed since"]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return ""
    return f", commit {done.stdout.strip()}" if done.returncode == 0 else ""


def _method(pythons: Mapping[str, str | None]) -> str:
    found = [f"{p.name} {version(p, python)}" for p in PEERS if (python := pythons[p.name]) is not None]
    lines = [
        f"- Everybody is asked for QLoRA of {MODEL}, rank {RANK} on all linear layers, micro-batch {BATCH}, {SEQUENCE} "
        "tokens, checkpointing, on an RTX 4090. `memfit plan` is asked for nothing but the model and the card.",
        f"- Peers of this run: {', '.join(found) or 'none installed'}; "
        "`--peers-python` names the Python they are installed in.",
        "- No network: the model's config.json lies in a Hugging Face cache made for the run, `HF_HUB_OFFLINE=1`. "
        "accelerate's question to the Hub, whether the model exists, is answered locally; then its own code runs.",
        "- Modules are compiled in the first round, as pip does when it installs a wheel.",
        "- They answer different questions: how near each comes to measured peaks is in [accuracy](accuracy.md).",
        "- Not a test: no timing is asserted anywhere, because machines differ.",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
