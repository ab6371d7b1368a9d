"""Check the allocator against PyTorch's own: recorded programs, statistic by statistic, and recorded training runs.

    python benchmarks/allocator_programs.py [DIR]

DIR holds files of either kind; the default is ../shared/data/allocator_programs beside the repository.
`NAME.json.gz`: a program that ran on PyTorch's allocator, with its settings, its operations, and what
`torch.cuda.memory_stats()` answered after each: every answer must come out the same.
`NAME.tape.json.gz` with `NAME.json` beside it: a training run's allocations and frees, and what they led to: the
segments taken and given back, in order, every out-of-memory, and the peaks must come out the same.
The first difference is named and the exit status is 1.
"""

from __future__ import annotations

import gzip
import json
import sys
import time
from itertools import zip_longest
from pathlib import Path
from typing import Any

from memfit.allocator import Allocator, Block, OutOfMemory, Stats
from memfit.nouns.alloc_settings import AllocSettings, Torch, parse_alloc_conf
from memfit.nouns.tape import SegmentAlloc

DEFAULT = Path(__file__).resolve().parents[2] / "shared" / "data" / "allocator_programs"
GIVES_BACK, TAKES = "FU", "SM"  # segment_free and segment_unmap, segment_alloc and segment_map


def check_program(program: dict[str, Any]) -> str | None:
    """Run one program; None when all statistics agree, otherwise what differed first."""
    torch = _version(program["torch"])
    allocator = Allocator(program["total_memory"], parse_alloc_conf(program["setting"], torch), torch)
    if program["memory_fraction"] is not None:
        allocator.set_memory_fraction(program["memory_fraction"])
    live: dict[int, Block | None] = {}
    steps = zip(program["ops"], program["stats_after_each_op"], strict=True)
    for number, (operation, recorded) in enumerate(steps):
        done = _step(allocator, live, operation)
        if done != operation[0]:
            return f"operation {number} {operation}: recorded {operation[0]}, here {done}"
        stats = _memory_stats(allocator.stats)
        for key, value in zip(program["stat_keys"], recorded, strict=True):
            if stats.get(key) != value:
                return f"operation {number} {operation}: {key} is {stats.get(key, 'not modelled')}, recorded {value}"
    return None


def _memory_stats(stats: Stats) -> dict[str, int]:
    """The same numbers under the keys of torch.cuda.memory_stats()."""
    sizes = {
        f"{name}_bytes.all.{moment}": getattr(stats, name + suffix)
        for name in ("requested", "allocated", "active", "reserved", "inactive_split")
        for moment, suffix in (("current", ""), ("peak", "_peak"))
    }
    counts = ("num_alloc_retries", "num_ooms", "num_oom_rejections", "num_device_alloc", "num_device_free")
    return sizes | {"segment.all.current": stats.segments} | {name: getattr(stats, name) for name in counts}


def _step(allocator: Allocator, live: dict[int, Block | None], operation: list[Any]) -> str:
    """Do one operation; the name of what happened, which is `oom` where memory ran out."""
    match operation:
        case ["alloc" | "oom", ident, size, *stream]:
            try:
                live[ident] = allocator.malloc(size, *stream)
            except OutOfMemory:
                return "oom"
            return "alloc"
        case ["free", ident]:
            allocator.free(live.pop(ident))
        case ["record_stream", ident, stream]:
            allocator.record_stream(live[ident], stream)
        case ["empty_cache" | "reset_peak_stats" | "set_memory_fraction" as method, *arguments]:
            getattr(allocator, method)(*arguments)
        case _:
            return "an operation unknown here"
    return str(operation[0])


def check_tape(tape: dict[str, Any], record: dict[str, Any]) -> str | None:
    """Replay one training run; None when segments, out-of-memory and peaks agree, otherwise what differed first."""
    settings = AllocSettings(expandable_segments=bool(record["case"]["expandable"]))
    allocator = Allocator(record["device"]["total_memory"], settings, _version(record["versions"]["torch"]))
    live: dict[int, Block | None] = {}
    segments: list[tuple[bool, int]] = []
    for number, (op, size, address) in enumerate(zip(tape["op"], tape["size"], tape["addr"], strict=True)):
        if op in TAKES + GIVES_BACK:
            if op in GIVES_BACK and _is_empty_cache(tape, number, allocator):
                allocator.empty_cache()
            segments.append((op in TAKES, size))
        elif op == "f":
            allocator.free(live.pop(address))
        elif op in "AO":
            try:
                block = allocator.malloc(size)
            except OutOfMemory as error:
                if op == "A" or error.device_free != address:
                    return f"event {number}: out of memory, recorded {'no such thing' if op == 'A' else address}"
            else:
                if op == "O":
                    return f"event {number}: recorded out of memory, here not"
                live[address] = block
    done = [(type(call) is SegmentAlloc, call.size) for call in allocator.driver_calls]
    if done != segments:
        first = next(i for i, (here, there) in enumerate(zip_longest(done, segments)) if here != there)
        return f"segment call {first}: recorded {segments[first : first + 1]}, here {done[first : first + 1]}"
    for level in ("requested", "allocated", "reserved"):
        here, recorded = getattr(allocator, level + "_peak"), record["peak"][level]
        if here != recorded:
            return f"the {level} peak is {here}, recorded {recorded}"
    return None


def _is_empty_cache(tape: dict[str, Any], number: int, allocator: Allocator) -> bool:
    """Tapes hold no empty_cache; segments given back although the next one would have fitted tell of a call."""
    ops = tape["op"]
    if ops[number] == "U" or ops[number - 1] in GIVES_BACK:
        return False
    after = number
    while ops[after] in GIVES_BACK:
        after += 1
    wanted = tape["size"][after] if ops[after] == "S" else 0
    fits: bool = allocator.reserved + wanted <= allocator.capacity
    return fits and ops[after] != "O"


def _version(text: str) -> Torch:
    major, minor = text.split(".")[:2]
    return int(major), int(minor)


def _read(file: Path) -> Any:
    opener = gzip.open if file.suffix == ".gz" else open
    with opener(file, "rt") as stream:
        return json.load(stream)


def main(arguments: list[str]) -> int:
    """Check every file of a folder; 0 when all agree, 1 at the first difference, 2 when there is nothing to check."""
    folder = Path(arguments[0]) if arguments else DEFAULT
    files = sorted(folder.glob("*.json.gz"))
    if not files:
        print(f"no *.json.gz in {folder}", file=sys.stderr)
        return 2
    steps, start = 0, time.perf_counter()
    for file in files:
        content = _read(file)
        if file.name.endswith(".tape.json.gz"):
            difference = check_tape(content, _read(file.with_name(file.name.removesuffix(".tape.json.gz") + ".json")))
            steps += len(content["op"])
        else:
            difference = check_program(content)
            steps += len(content["ops"])
        if difference is not None:
            print(f"{file.name}: {difference}", file=sys.stderr)
            return 1
    print(f"{len(files)} files, {steps} operations, all equal ({time.perf_counter() - start:.1f} s)")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
