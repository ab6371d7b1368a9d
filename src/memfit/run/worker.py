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
from memfit.run.folder import opened
from memfit.run.nouns import EVENT, EXIT_OF, Event, Outcome


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
    except (Exception, SystemExit) as error:  # train.py leaves by SystemExit where its data cannot be used
        hint = f" (hint: {error.hint})" if isinstance(error, MemfitError) else ""
        kind = "" if isinstance(error, SystemExit | MemfitError) else f"{type(error).__name__}: "
        outcome = Outcome(status="failed", error=f"{kind}{error}{hint}"[:2000])
        import traceback

        traceback.print_exc()
    # one process runs out of memory or fails, and the others, the first among them, fail because it is gone
    if outcome.status == "oom" or (run.outcome is None and (first or outcome.status == "failed")):
        run.write_outcome(outcome)
    tell({"event": "outcome", **asdict(outcome)})
    return EXIT_OF[outcome.status]


def _stop_on_signal(keeper: object) -> None:
    """A signal lets the step finish and be saved, however often it comes; who cannot wait uses SIGKILL."""

    def stop(number: int, frame: FrameType | None) -> None:
        keeper.stop = True  # type: ignore[attr-defined]

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
