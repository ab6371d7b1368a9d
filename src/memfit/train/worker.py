"""The process of one attempt: `python -m memfit.train.worker FOLDER`, one per GPU. Events go to stdout as JSON."""

from __future__ import annotations

import json
import os
import signal
import sys
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from memfit.errors import MemfitError
from memfit.train.folder import opened, saved_so_far
from memfit.train.outcome import EVENT, EXIT_OF, FULL_ERRNO, Event, Outcome
from memfit.virtual.process.end_with_parent import end_with_parent

if TYPE_CHECKING:
    from memfit.train.run_callback import RunCallback

# parts of error messages; the first is from PyTorch's file writer, which gives no cause
FULL = ("inline_container.cc", "No space left on device", "File too large", "Disk quota exceeded")


def main(folder: str) -> int:
    """Run one attempt, write its outcome into the folder, and return its exit code."""
    from memfit.train.attempt import attempt

    first = os.environ.get("RANK", "0") == "0"
    _end_with_torchrun()
    run = opened(Path(folder))
    callbacks: list[RunCallback] = []

    def tell(event: Event) -> None:
        if not first:
            return
        try:
            print(EVENT + json.dumps(event), flush=True)
        except BrokenPipeError:  # the supervisor has ended: finish the step and save, as at a signal
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            for callback in callbacks:
                callback.stop = True

    def keep(callback: RunCallback) -> None:
        callbacks.append(callback)
        stop_on_signal(callback)

    try:
        outcome = attempt(run, tell, keep=keep)
    except (Exception, SystemExit) as error:  # train.py raises SystemExit where its data cannot be used
        outcome = saved_so_far(run, Outcome(status="failed", error=_error_line(error)))
        import traceback

        traceback.print_exc()
    # if one process runs out of memory or fails, the others (rank 0 too) fail because they lose it
    if outcome.status == "oom" or (run.outcome is None and (first or outcome.status == "failed")):
        run.write_outcome(outcome)
    tell({"event": "outcome", **asdict(outcome)})
    return EXIT_OF[outcome.status]


def _end_with_torchrun() -> None:
    """Make this process end with torchrun, which holds the run's lock; workers do not inherit it."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        end_with_parent()


def _error_line(error: BaseException) -> str:
    """Return the error in one line, with a hint where there is one."""
    hint = error.hint if isinstance(error, MemfitError) else ""
    if any(word in str(error) for word in FULL) or getattr(error, "errno", 0) in FULL_ERRNO:
        hint = "the disk, a quota or a limit on the size of files is full where checkpoints are written"
    kind = "" if isinstance(error, SystemExit | MemfitError) else f"{type(error).__name__}: "
    return f"{kind}{str(error)[:1800]}{f' (hint: {hint})' if hint else ''}"


def stop_on_signal(callback: RunCallback) -> None:
    """Make SIGINT and SIGTERM finish and save the step, however often they come.

    While model and data are loaded, a signal ends the attempt.
    """
    from memfit.train.run_callback import Stopped

    def stop(number: int, frame: FrameType | None) -> None:
        callback.stop = True
        if callback.reading:
            raise Stopped

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
