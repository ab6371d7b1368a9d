"""Run an attempt in child processes: a single one, or one per GPU under torchrun with accelerate's environment."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import IO

from memfit.frameworks import process_layout
from memfit.frameworks.accelerate import environment
from memfit.nouns.job import Recipe
from memfit.train.folder import LOG_FILE, OUTCOME_FILE, Run, saved_so_far
from memfit.train.outcome import EVENT, WARNING, Event, Outcome

# By default OpenMP's threads spin between operators, which makes small models eight times slower on shared cores.
# DeepSpeed would use a GPU if it found one.
ON_CPU = {"OMP_WAIT_POLICY": "PASSIVE", "DS_ACCELERATOR": "cpu"}
KILLED = " (signal 9: the host may have run out of memory)"
_SIGKILL = re.compile(rb"exitcode\s*: -9\b")


def in_child(run: Run, tell: Callable[[Event], None]) -> Outcome:
    """Run one attempt in a process of its own; its other output goes to log.txt.

    Ctrl-C and SIGTERM are passed on once; the child then finishes and saves its step. A second Ctrl-C ends the attempt
    at once and is raised as KeyboardInterrupt.
    """
    recipe, kind, before = run.plan.recipe, run.plan.job.architecture.model_type, run.outcome
    (run.path / OUTCOME_FILE).unlink(missing_ok=True)
    with (run.path / LOG_FILE).open("a", encoding="utf-8") as log:
        began = os.fstat(log.fileno()).st_size
        child = subprocess.Popen(
            command(run, recipe), stdout=subprocess.PIPE, stderr=log, text=True, errors="replace",
            env={
                **(ON_CPU if run.settings.cpu else {}), **os.environ, **quiet(), **environment(recipe, kind, run.path),
            },
            start_new_session=True, close_fds=False,  # the child inherits the run's lock
        )  # fmt: skip
        assert child.stdout is not None
        with _stopping(child, tell) as signals:
            _listen(child, child.stdout, log, tell)
    outcome = run.outcome or _without_outcome(child.returncode, bool(signals), run)
    if outcome.status == "failed" and _one_was_killed(run.path / LOG_FILE, began):
        outcome = replace(outcome, error=f"one of the training processes was killed{KILLED}, and the others lost it")
    outcome = with_earlier(outcome, before)
    # a stopped run makes no further attempt
    return replace(outcome, status="stopped") if signals and outcome.status == "oom" else outcome


def with_earlier(outcome: Outcome, before: Outcome | None) -> Outcome:
    """Return the outcome with the peaks of the earlier attempts under the same recipe."""
    if before is None or before.status == "oom":
        return outcome
    peaks = {name: max(size, before.peaks.get(name, 0)) for name, size in (before.peaks | outcome.peaks).items()}
    host, reserved = max(outcome.host, before.host), max(outcome.reserved, before.reserved)
    return replace(outcome, peaks=peaks, host=host, reserved=reserved, steps=outcome.steps or before.steps)


def command(run: Run, recipe: Recipe) -> list[str]:
    """Return the command that starts an attempt."""
    worker = ["-m", "memfit.train.worker", str(run.path)]
    if process_layout.backend(recipe) == "plain":
        return [sys.executable, *worker]
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(recipe.num_gpus)]
    return [sys.executable, *torchrun, *worker]


def quiet() -> dict[str, str]:
    """Return environment variables that keep libraries from printing."""
    return {"TOKENIZERS_PARALLELISM": "false", "TRANSFORMERS_VERBOSITY": "error", "PYTHONUNBUFFERED": "1"}


@contextlib.contextmanager
def _stopping(child: subprocess.Popen[str], tell: Callable[[Event], None]) -> Iterator[list[int]]:
    """Pass this process's signals on to the child during the block; yield the list of received ones."""
    signals: list[int] = []

    def stop(number: int, frame: FrameType | None) -> None:
        if signals and number == signal.SIGINT:
            raise KeyboardInterrupt
        if not signals:
            child.send_signal(signal.SIGTERM)
            with contextlib.suppress(RuntimeError):  # raised if the signal interrupted another print
                tell({"event": "stopping", "signal": number})
        signals.append(number)

    if threading.current_thread() is not threading.main_thread():  # Python delivers signals to the main thread only
        yield signals
        return
    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield signals
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _listen(child: subprocess.Popen[str], lines: IO[str], log: IO[str], tell: Callable[[Event], None]) -> None:
    """Report the child's events until it ends; an exception here kills the child and its processes."""
    try:
        warned = set[str]()
        for line in lines:
            if line.startswith(EVENT):
                tell(json.loads(line.removeprefix(EVENT)))
                continue
            with contextlib.suppress(OSError):  # a full disk ends the log, not the training
                os.write(log.fileno(), line.encode(errors="replace"))
            if line.startswith(WARNING) and line not in warned:  # every process prints the same warnings
                warned.add(line)
                tell({"event": "warning", "text": line.removeprefix(WARNING).strip()})
        child.wait()
    except BaseException:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        raise


def _one_was_killed(log: Path, began: int) -> bool:
    """Return whether torchrun logged that a process was killed; other processes only report a lost connection."""
    with log.open("rb") as file:
        file.seek(began)
        return _SIGKILL.search(file.read()) is not None


def _without_outcome(code: int, stopped: bool, run: Run) -> Outcome:
    """Return the outcome of a child that ended without writing one."""
    if stopped:
        return saved_so_far(run, Outcome(status="stopped"))
    killed = KILLED if code in (-9, 137) else ""
    return saved_so_far(run, Outcome(status="failed", error=f"the training process ended with code {code}{killed}"))
