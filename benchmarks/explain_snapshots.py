"""Time and memory of `memfit explain`: `python benchmarks/explain_snapshots.py [DIR] [--big MB [--frames N]] [--page]`.

Each file is read and explained in its own process. The table shows the file's size, CPU seconds (user + system), and by
how much the process grew, as a multiple of the file. --big first makes a snapshot of that many MB: one card, steps of
400 tensors with stacks of N frames (24), in the format of torch. --page drops each file on the page in Chromium
instead: wall time to the shown explanation, and the peak of what the server and its processes hold together. The exit
status is 1 if a file of up to 100 MB takes more than 5 s or more than 4 times its size, or one on the page more than
30 s or 1.5 GB, and 2 if DIR has no snapshots.
"""

from __future__ import annotations

import argparse
import os
import pickle
import resource
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from screenshots import chromium, served

DEFAULT = Path(__file__).resolve().parents[2] / "shared" / "data" / "snapshots"
SECONDS, TIMES, LARGE = 5.0, 4.0, 100 << 20
PAGE_SECONDS, PAGE_BYTES = 30.0, 1_500_000_000  # of a snapshot of up to 1.2 GB
BASE, MIB = 0x7F00_0000_0000, 1 << 20
CHILD = "import sys; sys.path.insert(0, sys.argv[2]); import explain_snapshots as e; e.measured(sys.argv[1])"


def measured(path: str) -> None:
    """Print CPU seconds and bytes of growth; runs in its own process."""
    from memfit.documents.snapshot import read
    from memfit.explain import explain, read_text
    from memfit.explain.history.reading import memory_of

    explain(read_text("CUDA out of memory"))  # imports and compiles what the first use needs
    before, held = resource.getrusage(resource.RUSAGE_SELF), _highest()
    found = explain(read_text("", memory_of(read(Path(path)))))
    after = resource.getrusage(resource.RUSAGE_SELF)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    print(f"{seconds:.2f} {_highest() - held} {found[0].cause} {found[0].confidence}")


def _highest() -> int:
    """Return the peak resident bytes of this process; ru_maxrss would include its parent's."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM"))


def big(path: Path, megabytes: int, depth: int = 24) -> None:
    """Write a snapshot of about that size with a leak of one tensor per step."""
    frames = [{"name": f"call_{n}", "filename": f"/home/me/model_{n % 7}.py", "line": n} for n in range(200)]
    engine = {"name": "torch::autograd::Engine::thread_main", "filename": "??", "line": 0}
    trace: list[dict[str, Any]] = []
    events = megabytes * 1_000_000 // (93 + 3 * depth)  # bytes of an event, as written
    address, kept = BASE, []
    entry = {"stream": 0, "compile_context": "N/A", "user_metadata": "", "pool_id": (0, 0)}
    while len(trace) < events:
        live = []
        for n in range(400):
            stack = [frames[(n + k) % 200] for k in range(depth)]
            if n >= 300:
                stack[-1] = engine
            live.append(address)
            trace.append(
                {"action": "alloc", "addr": address, "size": 2 * MIB, "time_us": len(trace), "frames": stack} | entry
            )
            address += 2 * MIB
        for n, old in enumerate(live[1:]):
            stack = [engine, *(frames[(n + k) % 200] for k in range(depth - 1))]
            for action in ("free_requested", "free_completed"):
                trace.append(
                    {"action": action, "addr": old, "size": 2 * MIB, "time_us": len(trace), "frames": stack} | entry
                )
        kept.append(live[0])
        address = kept[-1] + 2 * MIB
    total = max(e["addr"] for e in trace) + 2 * MIB - BASE
    blocks, place = [], BASE
    for old in [*kept, BASE + total]:
        if old > place:
            blocks.append(
                {"address": place, "size": old - place, "requested_size": 0, "state": "inactive", "frames": []}
            )
        if old < BASE + total:
            blocks.append(
                {"address": old, "size": 2 * MIB, "requested_size": 2 * MIB, "state": "active_allocated", "frames": []}
            )
        place = old + 2 * MIB
    segment = {"device": 0, "address": BASE, "total_size": total, "stream": 0, "segment_type": "large",
    "blocks": blocks,
               "segment_pool_id": (0, 0), "is_expandable": False, "frames": []}  # fmt: skip
    taken = {"action": "segment_alloc", "addr": BASE, "size": total, "time_us": 0, "frames": []} | entry
    path.write_bytes(pickle.dumps({"segments": [segment], "device_traces": [[taken, *trace]]}, 4))


def main(arguments: list[str]) -> int:
    """Measure every snapshot of a folder."""
    parser = argparse.ArgumentParser(description="Time and memory of memfit explain on snapshots.")
    parser.add_argument("folder", nargs="?", type=Path, default=DEFAULT)
    parser.add_argument("--big", type=int, help="make and measure a snapshot of this many MB instead")
    parser.add_argument("--frames", type=int, default=24, help="frames of a stack of that snapshot")
    parser.add_argument("--page", action="store_true", help="drop the files on the page in Chromium")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as made:
        if options.big:
            big(Path(made) / f"big-{options.big}-mb.pickle", options.big, options.frames)
            os.sync()  # a user's file lies on the disk
        files = sorted((Path(made) if options.big else options.folder).glob("*.pickle"))
        if not files:
            print(f"no snapshots in {options.folder}", file=sys.stderr)
            return 2
        over = [_dropped(path) if options.page else _one(path) for path in files]
        return int(any(over))


def _one(path: Path) -> bool:
    """Print the figures of one file and return whether it exceeds a limit."""
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(path), str(Path(__file__).parent)],
        capture_output=True,
        text=True,
        check=False,
    )
    size = path.stat().st_size
    if done.returncode:
        print(f"{path.name}: {done.stderr.strip().splitlines()[-1]}", file=sys.stderr)
        return True
    seconds, grown, *cause = done.stdout.split()
    times = int(grown) / size
    print(
        f"{path.name}: {size / 1e6:.1f} MB, {float(seconds):.2f} s, grew by {times:.1f} times the file; "
        f"{' '.join(cause)}"
    )
    return size <= LARGE and (float(seconds) > SECONDS or times > TIMES)


def _dropped(path: Path) -> bool:
    """Print the figures of one file on the page, and return whether they exceed its limits or nothing was explained."""
    with served() as address, chromium() as browser:
        page, peak, sent = browser.new_page(), 0, 0.0
        page.goto(address)
        page.click("#tab-explain")
        begun = time.monotonic()
        page.set_input_files("#failed-file", path)
        while not page.locator("#explained :is(h2, svg, .problem)").count():
            peak = max(peak, _held())
            if not sent and "reading" in page.inner_text("#status"):
                sent = time.monotonic() - begun
            time.sleep(0.5)  # looking takes time from what is measured
        seconds, failed = time.monotonic() - begun, page.locator("#explained .problem").count() > 0
        print(
            f"{path.name}: {path.stat().st_size / 1e6:.1f} MB, sent in {sent:.1f} s, "
            f"{'refused' if failed else 'shown'} in {seconds:.1f} s, {peak / 1e9:.2f} GB at most"
        )
        return failed or seconds > PAGE_SECONDS or peak > PAGE_BYTES


def _held() -> int:
    """Return the resident bytes of the page's processes: those of Python below this one."""
    total = 0
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            total += process.memory_info().rss if process.exe() == psutil.Process().exe() else 0
    return total


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
