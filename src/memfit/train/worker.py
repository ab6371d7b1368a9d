"""The process of one attempt: `python -m memfit.train.worker FOLDER`; one per GPU under torchrun. Events go to stdout as JSON."""

from __future__ import annotations

import errno
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
from memfit.train.outcome import EVENT, EXIT_OF, Event, Outcome

if TYPE_CHECKING:
    from memfit.train.run_callback import Keeper

PR_SET_PDEATHSIG = 1  # of linux/prctl.h
# PyTorch's writer, the first, names no cause
FULL = ("inline_container.cc", "No space left on device", "File too large", "Disk quota exceeded")
FULL_ERRNO = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)


def main(folder: str) -> int:
    """Run one attempt and leave its outcome in the folder; the exit code says how it ended."""
    from memfit.train.attempt import attempt

    first = os.environ.get("RANK", "0") == "0"
    _end_with_torchrun()
    run = opened(Path(folder))
    keepers: list[Keeper] = []

    def tell(event: Event) -> None:
        if not first:
            return
        try:
            print(EVENT + json.dumps(event), flush=True)
        except BrokenPipeError:  # who started this is gone: finish the step and save, as at a signal
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            for keeper in keepers:
                keeper.stop = True

    def keep(keeper: Keeper) -> None:
        keepers.append(keeper)
        stop_on_signal(keeper)

    try:
        outcome = attempt(run, tell, keep=keep)
    except (Exception, SystemExit) as error:  # train.py leaves by SystemExit where its data cannot be used
        outcome = saved_so_far(run, Outcome(status="failed", error=_words(error)))
        import traceback

        traceback.print_exc()
    # one process runs out of memory or fails, and the others, the first among them, fail because it is gone
    if outcome.status == "oom" or (run.outcome is None and (first or outcome.status == "failed")):
        run.write_outcome(outcome)
    tell({"event": "outcome", **asdict(outcome)})
    return EXIT_OF[outcome.status]


def _end_with_torchrun() -> None:
    """Its processes do not inherit the run's lock, which it holds: they must not outlive it."""
    if "TORCHELASTIC_RUN_ID" in os.environ and sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _words(error: BaseException) -> str:
    """The error in a line, with a hint where there is one to give."""
    hint = error.hint if isinstance(error, MemfitError) else ""
    if any(word in str(error) for word in FULL) or getattr(error, "errno", 0) in FULL_ERRNO:
        hint = "the disk, a quota or a limit on the size of files is full where checkpoints are written"
    kind = "" if isinstance(error, SystemExit | MemfitError) else f"{type(error).__name__}: "
    return f"{kind}{str(error)[:1800]}{f' (hint: {hint})' if hint else ''}"


def stop_on_signal(keeper: Keeper) -> None:
    """A signal lets the step finish and be saved, however often it comes; who cannot wait uses SIGKILL.

    Before there is a step to finish it ends the attempt.
    """

    from memfit.train.run_callback import Stopped

    def stop(number: int, frame: FrameType | None) -> None:
        keeper.stop = True
        if keeper.reading:
            raise Stopped

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
