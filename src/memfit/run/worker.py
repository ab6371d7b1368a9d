"""The process of one attempt: `python -m memfit.run.worker FOLDER`; one per GPU under torchrun. Events go to stdout as JSON."""

from __future__ import annotations

import json
import os
import signal
import sys
from dataclasses import asdict
from pathlib import Path
from types import FrameType

from memfit.errors import MemfitError
from memfit.run.folder import Run, opened
from memfit.run.nouns import EVENT, Event, Outcome

EXIT_DONE, EXIT_FAILED, EXIT_OOM, EXIT_STOPPED = 0, 1, 75, 76  # 75: EX_TEMPFAIL, worth trying again
CODES = {"done": EXIT_DONE, "failed": EXIT_FAILED, "oom": EXIT_OOM, "stopped": EXIT_STOPPED}


def main(folder: str) -> int:
    """Run one attempt and leave its outcome in the folder; the exit code says how it ended."""
    from memfit.run.attempt import attempt

    first = os.environ.get("RANK", "0") == "0"
    run = opened(Path(folder))

    def tell(event: Event) -> None:
        if first:
            print(EVENT + json.dumps(event), flush=True)

    try:
        outcome = attempt(run, tell, keep=_stop_on_signal)
    except Exception as error:
        hint = f" (hint: {error.hint})" if isinstance(error, MemfitError) else ""
        outcome = Outcome(status="failed", error=f"{type(error).__name__}: {error}{hint}"[:2000])
        import traceback

        traceback.print_exc()
    if outcome.status == "oom" or (first and not _ran_out(run)):  # the process that ran out need not be the first
        run.write_outcome(outcome)
    tell({"event": "outcome", **asdict(outcome)})
    return CODES[outcome.status]


def _ran_out(run: Run) -> bool:
    """Another process of this attempt has said that its memory ran out."""
    return run.outcome is not None and run.outcome.status == "oom"


def _stop_on_signal(keeper: object) -> None:
    """The first Ctrl-C or SIGTERM lets the step finish and be saved, the second ends the process at once.

    Several processes would have to agree on the step: there a signal ends them, and the last checkpoint stands.
    """
    if os.environ.get("WORLD_SIZE", "1") != "1":
        return

    def stop(number: int, frame: FrameType | None) -> None:
        if getattr(keeper, "stop", False):
            raise KeyboardInterrupt
        keeper.stop = True  # type: ignore[attr-defined]

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
