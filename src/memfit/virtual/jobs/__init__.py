"""Training jobs that run on the card: the trainers' own code, told what a Recipe says."""

from __future__ import annotations

from memfit.virtual.jobs.setup import Setup
from memfit.virtual.observer import Observer

__all__ = ["Setup", "run"]


def run(setup: Setup, observer: Observer) -> None:
    """Run a job to its end. Raises torch.OutOfMemoryError where the card would."""
    if setup.trainer == "torch":
        from memfit.virtual.jobs import loop

        loop.run(setup, observer)
    else:
        from memfit.virtual.jobs import trainers

        trainers.run(setup, observer)
