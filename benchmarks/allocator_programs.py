"""Check the allocator against recorded programs: every statistic after every operation must be the recorded one.

    python benchmarks/allocator_programs.py [DIR]

DIR holds `*.json.gz` files, each a program that ran on PyTorch's own allocator: its settings, its operations and what
`torch.cuda.memory_stats()` answered after each. The first difference is named and the exit status is 1.
"""

from __future__ import annotations

import dataclasses
import gzip
import json
import sys
import time
from pathlib import Path
from typing import Any

from memfit.alloc_conf import parse_alloc_conf
from memfit.allocator import Allocator, Block, OutOfMemory

DEFAULT = Path(__file__).resolve().parents[1] / ".." / "shared" / "data" / "allocator_programs"


def check_program(program: dict[str, Any]) -> str | None:
    """Run one program; None when all statistics agree, otherwise what differed first."""
    version = program["torch"].split("+")[0].split(".")
    torch = (int(version[0]), int(version[1]))
    settings = parse_alloc_conf(program["setting"], torch)
    if program["memory_fraction"] is not None:
        settings = dataclasses.replace(settings, per_process_memory_fraction=program["memory_fraction"])
    allocator = Allocator(program["total_memory"], settings, torch)
    live: dict[int, Block | None] = {}
    steps = zip(program["ops"], program["stats_after_each_op"], strict=True)
    for number, (operation, recorded) in enumerate(steps):
        done = _step(allocator, live, operation)
        if done != operation[0]:
            return f"operation {number} {operation}: recorded {operation[0]}, here {done}"
        stats = allocator.stats.as_memory_stats()
        for key, value in zip(program["stat_keys"], recorded, strict=True):
            if stats[key] != value:
                return f"operation {number} {operation}: {key} is {stats[key]}, recorded {value}"
    return None


def _step(allocator: Allocator, live: dict[int, Block | None], operation: list[Any]) -> str:
    """Do one operation; the name of what happened, which is `oom` where memory ran out."""
    match operation:
        case ["alloc" | "oom", ident, size]:
            try:
                live[ident] = allocator.malloc(size)
            except OutOfMemory:
                return "oom"
            return "alloc"
        case ["free", ident]:
            allocator.free(live.pop(ident))
            return "free"
        case ["empty_cache"]:
            allocator.empty_cache()
            return "empty_cache"
    return f"an operation unknown here, {operation[0]}"


def main(arguments: list[str]) -> int:
    """Check every program of a folder; 0 when all agree, 1 at the first difference, 2 when there is nothing to check."""
    folder = Path(arguments[0]) if arguments else DEFAULT
    files = sorted(folder.glob("*.json.gz"))
    if not files:
        print(f"no *.json.gz in {folder}", file=sys.stderr)
        return 2
    operations, start = 0, time.perf_counter()
    for file in files:
        with gzip.open(file, "rt") as stream:
            program = json.load(stream)
        difference = check_program(program)
        if difference is not None:
            print(f"{file.name}: {difference}", file=sys.stderr)
            return 1
        operations += len(program["ops"])
    seconds = time.perf_counter() - start
    print(f"{len(files)} programs, {operations} operations, all statistics equal ({seconds:.1f} s)")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
