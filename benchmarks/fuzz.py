"""Feed damaged files to every reader of memfit: nothing executes, nothing is written, nothing ends in a traceback.

    python benchmarks/fuzz.py [--minutes 60] [--seed 0] [--keep DIR]

Each input is a file of tests/data/fuzz with a few bytes changed, parts doubled, cut or swapped, numbers extreme, or
parts of another file put in. It is given to a command that reads its kind, in a process with an audit hook that notes
programs that are started, sockets, and files opened for writing. The command must end by itself with an exit code that
is no bug, within the memory and time of docs/tapes.md. Inputs that break a rule are kept, and the exit status is 1.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import io
import os
import random
import re
import resource
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CORPUS = Path(__file__).resolve().parents[1] / "tests" / "data" / "fuzz"
# ending of a file of the corpus -> the commands that read it; {} is the file
COMMANDS: dict[str, tuple[str, ...]] = {
    ".pickle": ("explain {}", "replay {}", "explain {} --json", "compare {} {}"),
    ".tape": ("replay {} --gpu rtx-4090", "explain {}", "compare {} {} --json"),
    ".recording": ("replay {}", "explain {}"),
    ".log": ("explain {}",),
    ".watch.jsonl": ("watch {}", "explain {}", "compare {} {}"),
    ".doc.json": ("compare {} {}", "explain {}"),
    ".recipe.toml": ("estimate --from {}", "compare {} {}"),
    ".yaml": ("estimate --from {} --gpu h100 --model llama-2-7b",),
    ".json": ("estimate --from {} --gpu h100 --model llama-2-7b",),
    ".config.json": ("estimate {} --gpu h100",),
    ".data.jsonl": ("data {}",),
    ".data.json": ("data {}",),
    ".data.csv": ("data {}",),
    ".data.txt": ("data {}",),
}
CODES = (0, 2, 3, 4, 5, 6)
SECONDS, PER_MB = 5.0, 10.0  # docs/tapes.md
FLOOR, TIMES = 64 << 20, 40
CAMPAIGN = 60  # seconds of CPU that one process tries inputs
FORBIDDEN = ("os.system", "os.exec", "os.posix_spawn", "os.fork", "subprocess.", "socket.connect", "shutil.", "ctypes.")
SPICE = (
    b"-1", b"0", b"1e999", b"NaN", b"9" * 30, b"9" * 4400, b"null", b"[]", b"{}", b'""', b"\\ud800", b"\xff", b"\0",
    b"true", b"0x" + b"f" * 900, b"<<: *a", b"&a ", b"*a", b"'" * 3, b"\n", b"1:1:1", b"!!int ''", b"\x80\x04",
)  # fmt: skip
_NUMBER = re.compile(rb"-?\d{1,20}(?:\.\d{1,20})?")


@dataclass(frozen=True)
class Broken:
    """A rule that an input broke."""

    command: str
    rule: str
    content: bytes


def corpus() -> dict[Path, bytes]:
    """Return the files to start from, unpacked."""
    return {path: path.read_bytes() for path in sorted(CORPUS.iterdir())}


def ending(path: Path) -> str:
    """Return the ending that chooses the commands, the longest that is known."""
    return max((known for known in COMMANDS if path.name.endswith(known)), key=len)


def mutated(content: bytes, other: bytes, chance: random.Random) -> bytes:
    """Return a damaged copy."""
    found = bytearray(content)
    for _ in range(chance.choice((1, 1, 1, 2, 3, 8))):
        at, size = chance.randrange(len(found) + 1), chance.choice((1, 2, 4, 16, 200))
        what = chance.randrange(10)
        if what == 0 and found:
            found[min(at, len(found) - 1)] ^= 1 << chance.randrange(8)
        elif what == 1:
            found[at : at + size] = chance.randbytes(min(size, 16))
        elif what == 2:
            del found[at : at + size]
        elif what == 3:
            found[at:at] = found[at : at + size] * chance.choice((1, 2, 50))
        elif what == 4:
            begin = chance.randrange(len(other) + 1)
            found[at : at + size] = other[begin : begin + size]
        elif what == 5:
            del found[at:]
        elif what in (6, 7):
            found[at : at + chance.choice((0, 1, 4))] = chance.choice(SPICE)
        else:
            numbers = list(_NUMBER.finditer(found))
            if numbers:
                place = chance.choice(numbers)
                found[place.start() : place.end()] = chance.choice(SPICE[:5])
    return bytes(found)


def inputs(chance: random.Random) -> Iterator[tuple[str, bytes]]:
    """Yield (ending, content) without an end."""
    files = list(corpus().items())
    while True:
        path, content = chance.choice(files)
        made = mutated(content, chance.choice(files)[1], chance)
        yield ending(path), gzip.compress(made) if chance.random() < 0.05 else made


WATCHING: list[str] | None = None


def watch(event: str, args: tuple[Any, ...]) -> None:
    """Note what a reader must not do; an audit hook."""
    if WATCHING is None:
        return
    writes = event == "open" and isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
    if event.startswith(FORBIDDEN) or (writes and args[0] != os.devnull):
        WATCHING.append(f"{event} {args[:1]}")


def tried(command: str, path: Path) -> str:
    """Run a command on a file in this process; return the rule that it broke, "" where it broke none."""
    global WATCHING
    from memfit import cli

    size, before = path.stat().st_size, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    out, err = io.StringIO(), io.StringIO()
    begun, WATCHING = time.process_time(), []
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = cli.main([word.format(path) for word in command.split()])
    except BaseException as error:
        return f"{type(error).__name__} escaped: {str(error)[:200]}"
    finally:
        done, WATCHING = WATCHING, None
    seconds = time.process_time() - begun
    more = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10
    if done:
        return f"did {done[0]}"
    if code not in CODES or "a bug in memfit" in err.getvalue() or "Traceback" in err.getvalue():
        return f"exit {code}: {err.getvalue()[-300:]}"
    if code == 2 and not err.getvalue():
        return "exit 2 without a word"
    if seconds > SECONDS + PER_MB * size / 1e6:
        return f"{seconds:.1f} s for {size} bytes"
    return f"{more >> 20} MiB for {size} bytes" if more > max(FLOOR, TIMES * size) else ""


def campaign(seed: int, seconds: float, folder: Path, most: int = 1 << 60) -> tuple[int, list[Broken]]:
    """Try inputs for some seconds of CPU, `most` at most; return how many, and what broke a rule."""
    chance, broken, count = random.Random(seed), list[Broken](), 0
    begun = time.process_time()
    for name, content in inputs(chance):
        if time.process_time() - begun > seconds or count >= most:
            return count, broken
        path = folder / f"x{name}"
        path.write_bytes(content)
        command = chance.choice(COMMANDS[name])
        if rule := tried(command, path):
            broken.append(Broken(command, rule, content))
        count += 1
    return count, broken


def main(arguments: list[str]) -> int:
    """Run campaigns of some seconds, each in a process of its own, until the time is over."""
    parser = argparse.ArgumentParser(description="Feed damaged files to every reader of memfit.")
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, default=Path("fuzz-found"))
    asked = parser.parse_args(arguments)
    end, seed, count, failed = time.monotonic() + 60 * asked.minutes, asked.seed, 0, 0
    while time.monotonic() < end:
        tries, found = _in_child(seed, asked.keep)
        count, failed, seed = count + tries, failed + found, seed + 1
    print(f"{count} inputs, {failed} broke a rule")
    return 1 if failed else 0


def _in_child(seed: int, keep: Path) -> tuple[int, int]:
    reading, writing = os.pipe()
    child = os.fork()
    if child:
        os.close(writing)
        with os.fdopen(reading) as answers:
            words = answers.read().split()
        _, status = os.waitpid(child, 0)
        if status or len(words) < 2:
            print(f"seed {seed}: ended by signal {status & 127} at the input in {keep / str(seed)}", file=sys.stderr)
            return 0, 1
        return int(words[0]), int(words[1])
    # a command that hangs ends the process, within C as well: one that computes, and one that waits
    signal.setitimer(signal.ITIMER_PROF, 2 * CAMPAIGN)
    signal.alarm(100 * CAMPAIGN)
    sys.addaudithook(watch)
    folder = keep / str(seed)
    folder.mkdir(parents=True, exist_ok=True)
    tries, broken = campaign(seed, CAMPAIGN, folder)
    shutil.rmtree(folder)
    for number, one in enumerate(broken):
        (keep / f"{seed}-{number}").write_bytes(one.content)
        print(f"{keep}/{seed}-{number}: memfit {one.command}: {one.rule}", file=sys.stderr, flush=True)
    os.write(writing, f"{tries} {len(broken)}".encode())
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
