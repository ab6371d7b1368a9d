"""The run as a whole: attempt, and where memory ran out fall one rung and resume, until it is done or cannot go lower."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from memfit.train.cause import cause
from memfit.train.folder import Run, evidence, fallen
from memfit.train.inputs import check_unchanged, digests
from memfit.train.oom_recovery import Rung, changes, lower
from memfit.train.outcome import Event, Fall, Outcome, Shortage

Start = Callable[[Run, Callable[[Event], None]], Outcome]


def supervise(run: Run, start: Start, tell: Callable[[Event], None]) -> Outcome:
    """Attempt until the run is done, is stopped, or has fallen as often as its settings allow; returns the last outcome.

    Raises BadInput, and leaves all as it is, where what the run reads has changed.
    """
    while True:
        if run.last_good():
            check_unchanged(run.plan, run.settings.inputs, lambda text: tell({"event": "warning", "text": text}))
        else:  # nothing was learned from what was there before
            run.keep(replace(run.settings, inputs=digests(run.plan)), run.falls)
        outcome = start(run, tell)
        run.write_outcome(outcome)
        if outcome.status != "oom" or outcome.shortage is None:
            return outcome
        if len(run.falls) >= run.settings.falls:
            times = len(run.falls) + 1
            why = f"memory ran out {times} time{'s' * (times != 1)}, the most allowed (--falls)"
            return _stop(run, outcome, outcome.shortage, tell, why)
        below = lower(run, outcome.shortage)
        if below is None:
            why = f"nothing that learns the same needs less memory in {outcome.shortage.stage}"
            return _stop(run, outcome, outcome.shortage, tell, why)
        fall = fall_of(run, outcome.shortage, below)
        fallen(run, fall, below.plan, below.settings)
        tell({"event": "fall", "cause": list(fall.cause), "changed": list(fall.changed), "step": fall.resumed_at})


def _stop(run: Run, outcome: Outcome, shortage: Shortage, tell: Callable[[Event], None], why: str) -> Outcome:
    """The last time is explained as every other, and its evidence kept."""
    stopped = replace(outcome, error=why)
    run.write_outcome(stopped)
    kept = evidence(run, shortage)
    tell({"event": "cause", "cause": list(cause(shortage)), "kept": str(kept)})
    return stopped


def fall_of(run: Run, shortage: Shortage, below: Rung) -> Fall:
    """What happened and what changes."""
    before, after, last = run.plan.recipe, below.plan.recipe, run.last_good()
    return Fall(
        shortage=shortage, cause=cause(shortage), changed=changes(run, below), resumed_at=last.step if last else 0,
        moments_lost=last is not None and before.optimizer != after.optimizer,
    )  # fmt: skip
