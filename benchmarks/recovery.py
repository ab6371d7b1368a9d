"""Train runs that are killed, starved of memory and disk, and damaged at random, and print how each ended.

usage: python benchmarks/recovery.py [N] [SEED] [--at-once 2] [--keep FOLDER]

Each run is `memfit train` as it is typed, on the CPU, with a model of two layers; its processes are forks of one that
has made the imports. One to four disturbances come first, each during an attempt or after it:
  killed    SIGKILL, SIGTERM or SIGINT at a random moment, to the command, its training process or both
  limit     memory runs out in a random stage and step (see recovery_limits.py)
  full      the disk is full but for some kilobytes (a small tmpfs; without the right to mount: a limit on files' sizes)
  clock     the clock is wrong by up to years, and so are the times of the files
  damage    one to three files of the folder are truncated, zeroed in part, changed by one bit, or removed
Then the user goes on with `--resume`, and does what a refusal's hint says. A run passes when
  - every refusal and every failure names what is wrong: the damaged file, the full disk, the killed process,
  - it ends finished, with the samples of every step equal to an undisturbed run's, except those lines of the record
    that were damaged, which must be counted as missing,
  - if memory never ran out, its weights equal the undisturbed run's to the bit,
  - nothing prints a traceback, and no hint suggests --force.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

STEPS, SAVE = 12, 3
TRIES = 10  # attempts without a disturbance after which a run counts as stuck
PATIENCE = 180  # seconds after which an attempt counts as hanging
DISK = 12 << 20  # bytes of a run's own disk
KILLS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
YEAR = 365 * 86400
SHARED = ("run.json", "run.copy.json")  # with both lost a run cannot go on until one is put back


@dataclass(frozen=True, slots=True)
class Kill:
    """A signal to the command, its training process or both, `after` seconds or a number of recorded steps."""

    number: int
    whom: str
    after: float
    steps: int
    twice: bool


@dataclass(frozen=True, slots=True)
class Attempt:
    """What disturbs one `memfit train`."""

    kill: Kill | None = None
    fault: Any = None  # of recovery_limits.py
    left: int = -1  # bytes that are left on the disk; -1: all
    clock: float = 0.0  # seconds that the clock is wrong


@dataclass(slots=True)
class Result:
    """How one run ended. `log`: what was done to it and what it said."""

    seed: int
    recipe: str
    done: list[str] = field(default_factory=list)
    falls: int = 0
    refused: int = 0
    wrong: list[str] = field(default_factory=list)
    log: list[str] = field(default_factory=list)
    missing: int = 0


# ---- one process tree: the command and its training process, forks of a process that has made the imports


class Forked:
    """Stands for subprocess.Popen in memfit.train.children: the training process is a fork, without its imports."""

    place = Path()

    def __init__(self, words: list[str], *, stderr: Any, env: dict[str, str], **_: Any) -> None:
        read, write = os.pipe()
        self.returncode: int | None = None
        self.pid = os.fork()
        if not self.pid:
            self._work(words[-1], write, stderr.fileno(), env)
        os.close(write)
        self.stdout = os.fdopen(read, errors="replace")
        (self.place / "worker.pid").write_text(str(self.pid))

    def _work(self, folder: str, out: int, err: int, env: dict[str, str]) -> None:
        code = 1
        try:
            from memfit.train import worker

            os.setsid()
            os.dup2(out, 1)
            os.dup2(err, 2)
            os.environ.update(env)
            code = worker.main(folder)
        except BaseException:
            traceback.print_exc()
        finally:
            with contextlib.suppress(OSError, ValueError):
                sys.stdout.flush()
            os._exit(code)

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def wait(self) -> int:
        if self.returncode is None:
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.returncode


def command(place: Path, words: list[str], attempt: Attempt, limited: bool) -> None:
    """Run `memfit train` with these words in this process; `limited`: a full disk is a limit on the sizes of files."""
    import torch

    from memfit import cli
    from memfit.train import children

    Forked.place = place
    gc.freeze()
    torch.set_num_threads(1)
    for number, name in ((1, "stdout"), (2, "stderr")):
        with (place / name).open("wb") as file:
            os.dup2(file.fileno(), number)
    (place / "started").touch()
    os.environ.update(HF_HUB_OFFLINE="1", CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1")
    if limited and attempt.left >= 0:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (attempt.left, resource.RLIM_INFINITY))
    now = time.time
    code = 70
    try:
        with (
            mock.patch.object(children.subprocess, "Popen", Forked),
            mock.patch("time.time", lambda: now() + attempt.clock),
            starved(place, attempt.fault),
        ):
            code = cli.main(["train", *words])
    except KeyboardInterrupt:
        code = 130
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


@contextlib.contextmanager
def starved(place: Path, fault: Any) -> Iterator[None]:
    """Let the training processes of the block run out of memory by a fault; a file remembers that it struck."""
    if fault is None:
        yield
        return
    import recovery_limits
    from memfit.train import attempt

    real, mark = attempt.attempt, place / "struck"
    mark.unlink(missing_ok=True)
    peak = json.loads((place / "peak.json").read_text()) if (place / "peak.json").exists() else 1 << 40

    def start(run: Any, tell: Any, keep: Any) -> Any:
        with mock.patch.object(attempt, "attempt", real):
            injected = recovery_limits.Injected(fault, peak, mark)
        return injected(run, tell, keep)

    with mock.patch.object(attempt, "attempt", start):
        yield


# ---- damage to the files of a folder in which nobody trains


def truncated(path: Path, dice: random.Random) -> None:
    """Cut the end off."""
    os.truncate(path, dice.randrange(path.stat().st_size) if dice.random() < 0.8 else 0)


def zeroed(path: Path, dice: random.Random) -> None:
    """Write zeros over a block, as a power cut leaves it."""
    size = path.stat().st_size
    begin = dice.randrange(size)
    with path.open("r+b") as file:
        file.seek(begin)
        file.write(bytes(min(dice.choice((16, 512, 4096, size)), size - begin)))


def flipped(path: Path, dice: random.Random) -> None:
    """Change one bit."""
    at = dice.randrange(8 * path.stat().st_size)
    with path.open("r+b") as file:
        file.seek(at // 8)
        byte = file.read(1)[0]
        file.seek(at // 8)
        file.write(bytes([byte ^ 1 << at % 8]))


def removed(path: Path, dice: random.Random) -> None:
    """Remove the file."""
    path.unlink()


DAMAGES: tuple[Callable[[Path, random.Random], None], ...] = (truncated, zeroed, flipped, removed)


def damage(run: Path, dice: random.Random) -> list[Path]:
    """Damage one to three files that a run wrote, those of the newest checkpoint most often; return them."""
    found = [p for p in sorted(run.rglob("*")) if p.is_file() and p.name != ".lock" and "damaged" not in p.parts]
    newest = max((p.parent.name for p in found if p.name == "complete.json"), key=lambda n: int(n[11:]), default="")
    harmed = []
    for _ in range(dice.randint(1, 3)):
        among = [p for p in found if newest and newest in p.parts] if dice.random() < 0.4 else found
        path = dice.choice(among) if among else None
        if path is None or path in harmed or not path.stat().st_size:
            continue
        before = path.read_bytes()
        dice.choice(DAMAGES)(path, dice)
        if not path.exists() or path.read_bytes() != before:
            harmed.append(path)
    return harmed


def misdated(run: Path, dice: random.Random) -> None:
    """Give the files times that are years off, in any order."""
    for path in run.rglob("*"):
        if path.is_file():
            at = time.time() + dice.uniform(-5, 5) * YEAR
            os.utime(path, (at, at))


# ---- one run


class Bench:
    """The model and data that all runs share, and what an undisturbed run of each recipe trains."""

    def __init__(self, place: Path) -> None:
        import runs

        self.place, self.made, self.processes = place, runs.assets(place / "assets"), runs.imported()
        self.truths: dict[str, Path] = {}
        self.seconds = 5.0  # of an undisturbed run
        whole = runs.RECIPE
        self.recipes = {
            "full 4x1": whole, "full 2x2": whole.but(micro_batch=2, accumulation=2, checkpointing="full"),
            "lora 8x1": whole.but(method="lora", lora_rank=4, micro_batch=8),
            "lora 4x2": whole.but(method="lora", lora_rank=4, accumulation=2, optimizer="adamw-foreach"),
        }  # fmt: skip
        for name in self.recipes:
            self._truth(name)

    def _truth(self, name: str) -> None:
        from recovery_limits import Fault

        place = self.place / f"whole {name}"
        place.mkdir()
        began = time.monotonic()
        code, error = self.train(
            place, self.first(place, name, place / "run"), Attempt(fault=Fault("none", "", 0, 1.0, 0))
        )
        assert code == 0, error
        self.seconds = time.monotonic() - began
        self.truths[name] = place / "run"

    def first(self, place: Path, name: str, run: Path) -> list[str]:
        """Return the words that start a run in a folder."""
        import runs

        training = runs.Training(max_steps=STEPS, save_steps=SAVE, learning_rate=5e-3, eval_data=str(self.made[1]))
        recipe = runs.recipe_of(place / "recipe.toml", self.made, self.recipes[name], training)
        return [str(recipe), "--cpu", "--gpu-memory", "2GiB", "--out", str(run)]

    def train(self, place: Path, words: list[str], attempt: Attempt, disk: Path | None = None) -> tuple[int, str]:
        """Run one `memfit train` with its disturbance; return its exit code and what it said on stderr."""
        ballast = disk / "ballast" if disk and attempt.left >= 0 else None
        if ballast is not None and disk is not None:
            fill(ballast, disk, attempt.left)
        for name in ("worker.pid", "started"):
            (place / name).unlink(missing_ok=True)
        process = self.processes.Process(target=command, args=(place, words, attempt, disk is None))
        process.start()
        if attempt.kill:
            self._kill(process, place, (disk or place) / "run", attempt.kill)
        process.join(PATIENCE)
        hung = process.exitcode is None
        if hung:
            process.kill()
        if ballast:
            ballast.unlink()
        process.join()
        self._ended(place, 5 if hung else PATIENCE)
        error = (place / "stderr").read_text(errors="replace")
        return (-99 if hung else process.exitcode), error

    def _kill(self, process: Any, place: Path, run: Path, kill: Kill) -> None:
        """Wait for the moment, then send the signal."""
        record, until = run / "samples.jsonl", time.monotonic() + 3 * self.seconds
        while not (place / "started").exists() and process.is_alive():
            time.sleep(0.01)
        begun = record.read_bytes().count(b"\n") if record.exists() else 0
        wanted = max(kill.steps, min(begun + 1, STEPS))
        while kill.steps and time.monotonic() < until and process.is_alive():
            with contextlib.suppress(OSError):
                if record.read_bytes().count(b"\n") >= wanted:
                    break
            time.sleep(0.01)
        process.join(kill.after)
        for _ in range(1 + kill.twice):
            for pid in self._pids(process, place, kill.whom):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, kill.number)
            time.sleep(0.02)

    def _pids(self, process: Any, place: Path, whom: str) -> list[int]:
        worker = place / "worker.pid"
        found = [process.pid] if whom in ("command", "both") and process.is_alive() else []
        if whom in ("worker", "both") and worker.exists() and (text := worker.read_text()):
            found.append(int(text))
        return found

    def _ended(self, place: Path, patience: float) -> None:
        """Wait for a training process that outlived its command: it saves its step and ends."""
        worker, until = place / "worker.pid", time.monotonic() + patience
        pid = int((worker.read_text() if worker.exists() else "") or 0)
        while pid and Path(f"/proc/{pid}").exists() and "Z" not in _state(pid) and time.monotonic() < until:
            time.sleep(0.02)
        if pid and time.monotonic() >= until:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def one(self, seed: int) -> Result:
        """Return how a run under random disturbances ended."""
        dice = random.Random(seed)
        name = dice.choice(sorted(self.recipes))
        result = Result(seed, name)
        place = self.place / f"run {seed}"
        place.mkdir()
        with own_disk(place) as disk:
            peak = max(json.loads((self.truths[name] / "outcome.json").read_text())["peaks"].values())
            (place / "peak.json").write_text(json.dumps(peak))
            try:
                self._disturbed(place, disk, dice, result)
            except Exception:
                result.wrong.append(traceback.format_exc())
            if result.wrong and KEPT:
                shutil.copytree(place, KEPT / f"run {seed}", symlinks=True, dirs_exist_ok=True)
        shutil.rmtree(place, ignore_errors=True)
        return result

    def _disturbed(self, place: Path, disk: Path | None, dice: random.Random, result: Result) -> None:
        run = (disk or place) / "run"
        first = self.first(place, result.recipe, run)
        lost, kept = False, dict[str, bytes]()
        harmed: list[Path] = []
        for _ in range(dice.randint(1, 5)):
            attempt, text = attempt_of(dice, self.seconds)
            result.done += [text] if text else []
            self._resumed(place, first, result, attempt, kept, harmed, disk)
            kept |= {name: (run / name).read_bytes() for name in SHARED if (run / name).exists()}
            if attempt.clock:
                misdated(run, dice)
            new = damage(run, dice) if run.is_dir() and (not text or dice.random() < 0.5) else []
            result.done += [f"damage {p.relative_to(run)}" for p in new]
            lost |= any(p.name == "samples.jsonl" for p in new)
            harmed += new
        for _ in range(TRIES):
            if self._resumed(place, first, result, Attempt(), kept, harmed, disk) == 0:
                break
        else:
            result.wrong.append(f"no end after {TRIES} attempts")
        if not result.wrong:
            self._compare(run, result, lost)

    def _resumed(
        self, place: Path, first: list[str], result: Result, attempt: Attempt, kept: dict[str, bytes],
        harmed: list[Path], disk: Path | None,
    ) -> int:  # fmt: skip
        """Start or resume a run, follow the hints of refusals as a user does, and return the exit code."""
        run = Path(first[-1])
        for _ in range(TRIES):
            begun = kept or any((run / name).exists() for name in SHARED)
            words = ["--out", str(run), "--resume", "--falls", "5"] if begun else first
            code, error = self.train(place, words, attempt, disk)
            self._check(result, attempt, code, error, harmed)
            edited = [p for p in ("recipe.toml", "train.py") if f"{p} was edited" in error]
            lost = "settings of the run" in error or "there is no run in" in error
            if code != 2 or (attempt.left >= 0 and any(word in error for word in FULL)):
                return code
            if edited:
                (run / edited[0]).rename(run / f"{edited[0]}.edited")
            elif lost and kept:
                for name, data in kept.items():
                    (run / name).write_bytes(data)
            else:
                break
            result.refused += 1
        result.wrong.append(f"refused without a way on: {error[-500:]}")
        return code

    def _check(self, result: Result, attempt: Attempt, code: int, error: str, harmed: list[Path]) -> None:
        """Look at what an attempt said and how it ended."""
        result.log += [f"-- {result.done[-4:]} -> {code}", error[-2000:]]
        if "Traceback" in error or "bug in memfit" in error:
            result.wrong.append(f"a traceback: {error[-600:]}")
        if "--force" in error:
            result.wrong.append(f"a hint that destroys work: {error[-300:]}")
        if code == -99:
            result.wrong.append("it hangs")
        if code == 1 and not true_reason(attempt, error):
            result.wrong.append(f"failed without a true reason: {error[-400:]}")
        full = attempt.left >= 0 and any(word in error for word in FULL)
        if code == 2 and harmed and not full and not any(p.name in error for p in harmed):
            gone = "there is no run in" in error and any(p.name in SHARED for p in harmed)
            if not gone:
                result.wrong.append(
                    f"refused without naming what is damaged ({[p.name for p in harmed]}): {error[-300:]}"
                )
        if code == 3 and not attempt.fault:
            result.wrong.append(f"memory ran out without a limit: {error[-300:]}")
        if code not in (0, 1, 2, 3, 75, 130, -2, -9, -15, -99):
            result.wrong.append(f"exit code {code}: {error[-300:]}")

    def _compare(self, run: Path, result: Result, lost: bool) -> None:
        """Compare a finished run with the undisturbed one."""
        from safetensors.torch import load_file

        import recovery_limits
        from memfit.train.folder import Run
        from memfit.train.sample_counts import recorded

        found, truth = Run(run), Run(self.truths[result.recipe])
        lines, true = recovery_limits.lines(found), recovery_limits.lines(truth)
        result.falls, outcome = len(found.falls), found.outcome
        total = sum(line["samples"] for line in true)
        if outcome is None or (outcome.status, outcome.step, outcome.samples) != ("done", STEPS, total):
            result.wrong.append(f"ended as {outcome and (outcome.status, outcome.step, outcome.samples)}, not {total}")
        if any(line not in true for line in lines):
            result.wrong.append(f"other samples: {lines}")
        if lines != true and not lost:
            result.wrong.append(f"the record lacks steps: {[line['step'] for line in lines]}")
        result.missing = total - recorded(run, STEPS)
        marks = {c.step: c.samples for c in found.checkpoints()}
        if any(samples != sum(line["samples"] for line in true[:step]) for step, samples in marks.items()):
            result.wrong.append(f"checkpoints count otherwise: {marks}")
        name = "model.safetensors" if result.recipe.startswith("full") else "adapter_model.safetensors"
        ours, theirs = load_file(found.output / name), load_file(truth.output / name)
        if not result.falls and not all(ours[key].equal(theirs[key]) for key in theirs | ours):
            result.wrong.append("other weights than the undisturbed run's")


def attempt_of(dice: random.Random, seconds: float) -> tuple[Attempt, str]:
    """Return what disturbs an attempt, and in words."""
    from recovery_limits import fault_of

    attempt, texts = Attempt(), []
    if dice.random() < 0.6:
        by_step = dice.random() < 0.6
        after = dice.uniform(0, 0.2) if by_step else dice.uniform(0, 1.1 * seconds)
        steps = dice.randint(1, STEPS) if by_step else 0
        number, whom = dice.choice(KILLS), dice.choice(("command", "worker", "both"))
        kill = Kill(number, whom, after, steps, number == signal.SIGINT and dice.random() < 0.3)
        attempt = replace(attempt, kill=kill)
        texts.append(f"{signal.Signals(number).name} to {whom} at {f'step {steps}' if steps else f'{after:.1f} s'}")
    kind = dice.choice(("limit", "full", "clock", "", ""))
    if kind == "limit":
        fault = fault_of(dice)
        attempt = replace(attempt, fault=fault)
        texts.append(f"limit {fault.kind} in {fault.stage} {fault.step}")
    elif kind == "full":
        left = dice.choice((0, 4096, 65536, 200_000, 500_000)) + dice.randrange(4096)
        attempt = replace(attempt, left=left)
        texts.append(f"full but for {left}")
    elif kind == "clock":
        attempt = replace(attempt, clock=dice.uniform(-5, 5) * YEAR)
        texts.append("clock")
    return attempt, " and ".join(texts)


FULL = ("is full", "No space left", "File too large", "cannot write", "cannot be written")


def true_reason(attempt: Attempt, error: str) -> bool:
    """Return whether a failure names what happened to the attempt."""
    number = int(attempt.kill.number) if attempt.kill else 0
    killed = number and (f"code {-number}" in error or f"signal {number}" in error)
    return bool(killed) or (attempt.left >= 0 and any(word in error for word in FULL))


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "Z"


@contextlib.contextmanager
def own_disk(place: Path) -> Iterator[Path | None]:
    """Mount a small disk of its own for the run's folder; None without the right to."""
    run = place / "disk"
    run.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK}", "tmpfs", run], capture_output=True)
    if mounted.returncode:
        yield None
        return
    try:
        yield run
    finally:
        subprocess.run(["umount", "--lazy", run], check=False)


def fill(ballast: Path, disk: Path, left: int) -> None:
    """Fill a disk but for some bytes."""
    with contextlib.suppress(OSError), ballast.open("wb") as file:
        while (room := shutil.disk_usage(disk).free - left) > 0:
            file.write(bytes(min(room, 1 << 16)))
            file.flush()


KEPT: Path | None = None  # where failing runs are kept


def main() -> int:
    """Print a row for each run, what failed, and the sum; 0 when every run passed."""
    global KEPT
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("count", nargs="?", type=int, default=200)
    parser.add_argument("seed", nargs="?", type=int, default=0)
    parser.add_argument("--at-once", type=int, default=2)
    parser.add_argument("--keep", type=Path, help="a folder for the runs that fail")
    parser.add_argument("--log", action="store_true", help="show what every run said")
    args = parser.parse_args()
    KEPT = args.keep
    found: list[Result] = []
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        bench = Bench(Path(folder))
        pool = stack.enter_context(ThreadPoolExecutor(args.at_once))
        print(f"an undisturbed run takes {bench.seconds:.1f} s", flush=True)
        for r in pool.map(bench.one, range(args.seed, args.seed + args.count)):
            found.append(r)
            print(
                f"{r.seed:>4}  {r.recipe:<9} {'WRONG' if r.wrong else 'ok':<6}{r.falls} falls  {r.refused} refused  "
                f"{r.missing:>3} missing  {'; '.join(r.done)}", flush=True,
            )  # fmt: skip
            for line in [*r.wrong, *(r.log if r.wrong or args.log else ())]:
                print("      " + line.replace("\n", "\n      "), flush=True)
    good = sum(not r.wrong for r in found)
    plain = sum(not r.falls for r in found)
    print(
        f"{len(found)} runs: {good} ended finished with exact counts; {sum(r.falls for r in found)} falls in "
        f"{len(found) - plain}, {sum(r.refused for r in found)} refusals followed; "
        f"weights of the {plain} without a fall compared to the bit"
    )
    return 0 if good == len(found) else 1


if __name__ == "__main__":
    sys.exit(main())
