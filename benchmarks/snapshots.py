"""Check the allocator against snapshots of torch.cuda.memory: every segment, in order, and every block at the end.

    python benchmarks/snapshots.py [DIR] [--torch 2.12]

DIR holds files written by `torch.cuda.memory._dump_snapshot`, as they are or gzipped; the default is
../shared/data/snapshots beside the repository. Each history is played on the allocator model, from the state it began
with, on a card of the capacity it shows: the segments taken and given back must come out the same, in order, and at the
end every block must have the recorded size and state, segment by segment. DIR may also hold recorded runs
(NAME.tape.json.gz with NAME.json): their segments must come out the same, and the three peaks of every phase.
Differences are named; the exit status is 1 when there is one, 2 when there is nothing to check.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
from pathlib import Path
from typing import Any

from memfit.allocator import Allocator
from memfit.allocator.blocks import ALLOCATED, FREE, PENDING, UNMAPPED
from memfit.allocator.replay import replay, retrace
from memfit.documents.snapshot import pickles
from memfit.documents.snapshot import read as read_tape
from memfit.documents.snapshot.history import tape_of
from memfit.errors import BadInput
from memfit.nouns.alloc_settings import Torch, parse_alloc_conf

DEFAULT = Path(__file__).resolve().parents[2] / "shared" / "data" / "snapshots"
STATES = {ALLOCATED: "active_allocated", PENDING: "active_pending_free", FREE: "inactive"}
Blocks = list[tuple[int, str]]


def check(content: bytes, torch: Torch | None = None) -> str:
    """What differs first between a snapshot and its replay; "" when nothing does."""
    data = pickles.loads(content)
    tape = tape_of(data, torch=torch)
    torch = torch or tuple(map(int, tape.about["torch"].split(".")))  # type: ignore[assignment]
    difference, allocator = retrace(tape, parse_alloc_conf(tape.about.get("alloc_conf", ""), torch), torch)
    if difference:
        return difference
    here, there = final_blocks(allocator), recorded_blocks(data, int(tape.about["device"]))
    if here != there:
        first = next((pair for pair in zip(here, there, strict=False) if pair[0] != pair[1]), (len(here), len(there)))
        return f"final segments: here {first[0]}, recorded {first[1]}"
    return ""


def check_record(path: Path) -> str:
    """The same for a recorded run and the phases of its record."""
    tape = read_tape(path)
    settings = parse_alloc_conf(tape.about.get("alloc_conf", ""))
    difference, _ = retrace(tape, settings)
    if difference:
        return difference
    capacity = tape.about.get("capacity")
    timeline = replay(tape.events, capacity=int(capacity) if capacity else None, settings=settings)
    beside = path.with_name(path.name.removesuffix(".tape.json.gz") + ".json")
    rows = json.loads(beside.read_text()).get("phases", []) if beside.is_file() else []
    for span, row in zip(timeline.spans, rows, strict=False):
        here = {f"{level}_peak": getattr(span.peak, level) for level in ("requested", "allocated", "reserved")}
        there = {key: row[key] for key in here}
        if here != there:
            return f"phase {row['phase']}: here {here}, recorded {there}"
    return ""


def final_blocks(allocator: Allocator) -> list[Blocks]:
    """Every contiguous mapped range as its blocks' sizes and states, in an order of its own."""
    found: list[Blocks] = []
    for chain in allocator.blocks():
        ranges: list[Blocks] = [[]]
        for block in chain:
            if block.state == UNMAPPED:
                ranges.append([])
            else:
                ranges[-1].append((block.size, STATES[block.state]))
        found += filter(None, ranges)
    return sorted(found)


def recorded_blocks(data: Any, device: int) -> list[Blocks]:
    """The same of a snapshot."""
    segments = (s for s in data["segments"] if s["device"] == device)
    return sorted([(block["size"], block["state"]) for block in s["blocks"]] for s in segments)


def read(path: Path) -> bytes:
    """A file's content, unpacked."""
    content = path.read_bytes()
    return gzip.decompress(content) if path.suffix == ".gz" else content


def main(arguments: list[str]) -> int:
    """Check every snapshot of a folder."""
    parser = argparse.ArgumentParser(description="Replay snapshots of torch.cuda.memory and compare.")
    parser.add_argument("folder", nargs="?", type=Path, default=DEFAULT)
    parser.add_argument("--torch", help="the version they were made with, where they do not tell: 2.12")
    asked = parser.parse_args(arguments)
    torch = tuple(map(int, asked.torch.split(".")[:2])) if asked.torch else None
    files = sorted(path for kind in ("*.pickle", "*.pickle.gz", "*.tape.json.gz") for path in asked.folder.glob(kind))
    wrong = 0
    for path in files:
        try:
            recorded = path.name.endswith(".tape.json.gz")
            difference = check_record(path) if recorded else check(read(path), torch)  # type: ignore[arg-type]
        except BadInput as error:
            difference = error.message
        wrong += bool(difference)
        print(f"{path.name}: {difference or 'the same'}", file=sys.stderr if difference else sys.stdout)
    if not files:
        print(f"no snapshots in {asked.folder}", file=sys.stderr)
    return 2 if not files else 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
