"""Hold traces of Megatron-LM to the memory of every rank that SimuMax's authors recorded on eight B200 cards.

usage: python benchmarks/simumax.py [CSV] --simumax DIR --megatron DIR --transformer-engine DIR [--only TEXT] [--list]

The CSV has a row for each case and rank: max allocated and max reserved as PyTorch reports them, and what SimuMax
itself predicts for the worst rank. SimuMax's repository says how the cases were run (docs/b200): its clone brings the
launchers and training scripts, Megatron-LM is at commit 23e00ed0963c35382dfe8a5a94fb3cda4d21e133 (core_r0.14.0), and
the checkout of Transformer Engine, of which only the Python is used, is 2.11 (c188b533). PyTorch was 2.10. The
interpreter needs what goldens.py needs. Cases that differ only in the number of micro-batches have equal rows: they
were recorded once, and are traced once.

Each launcher is run by bash, with a `torchrun` in front that writes down its words. These are traced as
`memfit trace --gpu 8xb200 --ranks all -- torchrun ...`: the distributed optimizer's shards are cut elsewhere on each
rank, and what is reserved differs by it. Prints a line for each rank, SimuMax's error beside, and the bars: all rows
within half a percent. Exits with 1 where one is missed.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import goldens

DATA = goldens.DATA.with_name("simumax_ranks.csv")
SCRIPTS = Path("simu_tools") / "megatron_scripts"
CARDS, CARD = 8, "b200"
MIB, GIB = 1 << 20, 1 << 30
SEQUENCE = 4096  # of a case whose name has none
WITHIN = 0.005
# model of the CSV -> its launcher, what this calls the model, and the variable for the number of layers
_MODELS = {
    "llama3-70b": ("run_pretrain_llama3.sh", "llama3_70b", "NUM_LAYERS"),
    "llama3-405b": ("run_pretrain_llama3.sh", "llama3_405b", "NUM_LAYERS"),
    "deepseekv2": ("run_pretrain_deepseekv2.sh", "deepseek_v2", "NUM_LAYER"),
    "deepseekv3": ("run_pretrain_deepseekv2.sh", "deepseek_v3", "NUM_LAYER"),
}
# PyTorch 2.10's workspace of cuBLAS on Blackwell, 8.125 MiB: later versions take 32 MiB, as on Hopper
_WORKSPACE = {"CUBLAS_WORKSPACE_CONFIG": ":4096:2:16:8"}
# what _cef in a name means (docs/strategy.md)
_FUSED_LOSS = "--cross-entropy-loss-fusion --cross-entropy-fusion-impl te"


@dataclass(frozen=True, slots=True)
class Recorded:
    """One rank's peaks in bytes."""

    rank: int
    allocated: int
    reserved: int


@dataclass(frozen=True, slots=True)
class Layout:
    """A case, and those that only have other numbers of micro-batches. predicted: SimuMax's peak of the worst rank."""

    names: tuple[str, ...]
    model: str
    parallel: Mapping[str, int]
    layers: int
    micro_batches: int
    ranks: tuple[Recorded, ...]
    predicted: int

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def sequence(self) -> int:
        found = re.search(r"_seq(\d+)", self.name)
        return int(found[1]) if found else SEQUENCE

    def variables(self) -> dict[str, str]:
        """Return the environment that the launcher reads."""
        of = {name: self.parallel.get(name, 1) for name in ("tp", "pp", "cp", "ep")}
        data = CARDS // (of["tp"] * of["pp"] * of["cp"])
        _, model, layers = _MODELS[self.model]
        return {
            **{f"{name.upper()}_SIZE": str(size) for name, size in of.items()},
            "MODEL_TYPE": model, layers: str(self.layers), "SEQ_LEN": str(self.sequence), "MICRO_BATCH_SIZE": "1",
            "GLOBAL_BATCH_SIZE": str(self.micro_batches * data), "EXTRA_ARGS": _FUSED_LOSS * ("_cef" in self.name),
        }  # fmt: skip


def read_layouts(path: Path, only: str = "") -> list[Layout]:
    """Read the cases whose name contains `only`, those that share their rows together."""
    with path.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if only in row["case"]]
    groups: dict[str, dict[str, list[dict[str, str]]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        groups[re.sub(r"_mbc\d+", "", row["case"])][row["case"]].append(row)
    return [_layout(cases) for cases in groups.values()]


def _layout(cases: Mapping[str, list[dict[str, str]]]) -> Layout:
    first = min(cases.values(), key=lambda rows: int(rows[0]["micro_batches"]))
    ranks = tuple(Recorded(int(r["rank"]), _mib(r["allocated_mib"]), _mib(r["reserved_mib"])) for r in first)
    row = first[0]
    parallel = {name: int(size) for name, size in re.findall(r"([a-z]+)(\d+)", row["parallel"])}
    names = tuple(sorted(cases, key=lambda name: int(cases[name][0]["micro_batches"])))
    return Layout(
        names, row["model"], parallel, int(row["layers"]), int(row["micro_batches"]), ranks,
        int(float(row["simumax_alloc_gib"]) * GIB),
    )  # fmt: skip


def _mib(text: str) -> int:
    return int(float(text) * MIB)


# --- the command line ---


def started(layout: Layout, simumax: Path, megatron: Path, folder: Path) -> tuple[list[str], dict[str, str]]:
    """Return the words of the launcher's torchrun, and the environment that it gets."""
    said, shim = folder / "said", folder / "torchrun"
    quoted = shlex.quote(str(said))
    shim.write_text(f'#!/bin/bash\nprintf "%s\\0" "$@" > {quoted}\nenv -0 > {quoted}.env\n')
    shim.chmod(0o755)
    launcher = _MODELS[layout.model][0]
    own = {**layout.variables(), "OUTPUT_DIR": str(folder), "MEGATRON_HOME": str(megatron)}
    path = os.pathsep.join((str(folder), os.environ.get("PATH", "")))
    subprocess.run(
        ["bash", f"scripts/{launcher}"], cwd=simumax / SCRIPTS, env={**os.environ, **own, "PATH": path},
        check=True, capture_output=True,
    )  # fmt: skip
    variables = dict(pair.split("=", 1) for pair in said.with_suffix(".env").read_text().split("\0") if "=" in pair)
    changed = {name: value for name, value in variables.items() if os.environ.get(name) != value}
    return ["torchrun", *said.read_text().split("\0")[:-1]], {n: v for n, v in changed.items() if n != "PATH"}


def command(words: Sequence[str]) -> list[str]:
    """Return the command that traces a job."""
    return [
        sys.executable, "-m", "memfit", "trace", "--gpu", f"{CARDS}x{CARD}", "--ranks", "all",
        "--steps", str(goldens.STEPS), "--answer", goldens.EVEN, "--json", "--", *words,
    ]  # fmt: skip


# --- one layout ---


@dataclass(frozen=True, slots=True)
class Traced:
    """The peaks of ranks that do the same."""

    ranks: tuple[int, ...]
    allocated: int
    reserved: int


def trace(layout: Layout, simumax: Path, megatron: Path, engine: Path) -> list[Traced]:
    """Trace all ranks. Raises RuntimeError that says why a job cannot be traced."""
    with tempfile.TemporaryDirectory(prefix="simumax-") as name:
        folder = Path(name)
        words, variables = started(layout, simumax, megatron, folder)
        done = goldens.run(command(words), simumax / SCRIPTS, folder / "log", engine, variables | _WORKSPACE)
    try:
        ranks = json.loads(done.stdout)["ranks"]
    except (ValueError, KeyError):
        raise RuntimeError(goldens.failure(done.stderr)) from None
    return [Traced(tuple(r["members"]), r["levels"]["allocated"], r["levels"]["reserved"]) for r in ranks]


@dataclass(frozen=True, slots=True)
class Difference:
    """What a rank's trace and recording differ by, as parts of the recorded figures."""

    rank: int
    allocated: float
    reserved: float


def differences(layout: Layout, traced: Sequence[Traced]) -> list[Difference]:
    """Compare every recorded rank with the trace of its class."""
    of = {rank: found for found in traced for rank in found.ranks}
    return [
        Difference(r.rank, of[r.rank].allocated / r.allocated - 1, of[r.rank].reserved / r.reserved - 1)
        for r in layout.ranks if r.rank in of
    ]  # fmt: skip


# --- the tables ---


def show(layout: Layout, traced: Sequence[Traced]) -> None:
    """Print a line for each traced class of ranks."""
    found = {d.rank: d for d in differences(layout, traced)}
    recorded = {r.rank: r for r in layout.ranks}
    worst = max(r.allocated for r in layout.ranks)
    for one in sorted(traced, key=lambda t: t.ranks):
        cells = []
        for level in ("allocated", "reserved"):
            sizes = [getattr(recorded[rank], level) for rank in one.ranks]
            off = sorted((getattr(found[rank], level) for rank in one.ranks), key=abs)
            cells += [_range(sizes), f"{getattr(one, level) / MIB:,.1f}", f"{off[-1]:+.3%}"]
        print(f"| {layout.name} | {_ranks(one.ranks)} | {' | '.join(cells)} | {layout.predicted / worst - 1:+.2%} |")
    sys.stdout.flush()


def _range(sizes: Sequence[int]) -> str:
    low, high = (f"{size / MIB:,.1f}" for size in (min(sizes), max(sizes)))
    return low if low == high else f"{low} to {high}"


def _ranks(ranks: Sequence[int]) -> str:
    return ",".join(map(str, ranks))


def judged(found: Sequence[tuple[Layout, Sequence[Difference]]], failed: int) -> list[tuple[str, bool]]:
    """Return a line for each bar and whether it is met; each case counts its rows, however often they were traced."""
    lines = []
    for level in ("allocated", "reserved"):
        within = rows = 0
        for layout, those in found:
            rows += len(layout.ranks) * len(layout.names)
            within += len(layout.names) * sum(abs(getattr(d, level)) <= WITHIN for d in those)
        met = bool(rows) and within == rows
        lines.append((f"| {level} | all rows within {WITHIN:.1%} | {within} of {rows} | {goldens.verdict(met)} |", met))
    lines.append((f"| layouts that do not run | none | {failed} | {goldens.verdict(not failed)} |", not failed))
    return lines


def main() -> int:
    """Trace the layouts, print the tables; 1 where a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("csv", nargs="?", type=Path, default=DATA)
    parser.add_argument("--simumax", type=Path, required=True, help="a clone of SimuMax")
    parser.add_argument("--megatron", type=Path, required=True, help="a clone of Megatron-LM, at the commit above")
    parser.add_argument("--transformer-engine", type=Path, required=True, help="a checkout of Transformer Engine 2.11")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--list", action="store_true", help="print the command of each layout")
    options = parser.parse_args()
    simumax, megatron = options.simumax.resolve(), options.megatron.resolve()
    engine = options.transformer_engine.resolve()
    if not goldens.is_engine(engine):
        parser.error(f"{engine} is no checkout of Transformer Engine")
    if not (simumax / SCRIPTS).is_dir():
        parser.error(f"{simumax} is no clone of SimuMax")
    layouts = read_layouts(options.csv, options.only)
    if options.list:
        for layout in layouts:
            with tempfile.TemporaryDirectory(prefix="simumax-") as folder:
                print(f"{layout.name}: {shlex.join(command(started(layout, simumax, megatron, Path(folder))[0]))}")
        return 0
    print("| case | ranks | allocated, recorded (MiB) | traced | off | reserved, recorded | traced | off | SimuMax |")
    print("|---|---|---:|---:|---:|---:|---:|---:|---:|")
    found: list[tuple[Layout, Sequence[Difference]]] = []
    reasons: dict[str, str] = {}
    for layout in layouts:
        try:
            traced = trace(layout, simumax, megatron, engine)
        except (RuntimeError, subprocess.SubprocessError) as error:
            reasons[layout.name] = str(error)
            print(f"{layout.name}: {error}", file=sys.stderr)
            continue
        show(layout, traced)
        found.append((layout, differences(layout, traced)))
    print("\n| bar | wanted | found | |\n|---|---|---|---|")
    lines = judged(found, len(reasons))
    print("\n".join(line for line, _ in lines))
    return 0 if all(met for _, met in lines) else 1


if __name__ == "__main__":
    sys.exit(main())
