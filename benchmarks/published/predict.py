"""What memfit predicts for a Case, in bytes, for the level that the row measured."""

from __future__ import annotations

from statistics import mean, pstdev

from memfit.closed_form.run.account import Account
from memfit.closed_form.run.estimate import estimate
from memfit.nouns.alloc_settings import LATEST_TORCH
from published.case import Case
from published.varied import VariedRun

TRAINING = ("load", "first_step", "step")


def predict(case: Case) -> int:
    """The highest level over the phases of a training run; what most orders stay below where lengths vary."""
    if case.orders:
        return _varied(case)
    footprint = estimate(case.architecture, case.recipe, case.gpu, padded=case.padded, profile=case.profile)
    return max(int(getattr(p.levels, case.compared)) for p in footprint.phases if p.phase in TRAINING)


def _varied(case: Case) -> int:
    run = VariedRun(Account(case.architecture, case.recipe, case.gpu, case.padded, case.profile))
    context = case.gpu.context_bytes
    torch = (case.torch[0], case.torch[1]) if len(case.torch) > 1 else LATEST_TORCH
    room = case.gpu.total_bytes - context
    if case.compared == "allocated":
        return max(int(run.levels(order, capacity=room, torch=torch).allocated) for order in case.orders)
    peaks = [run.reserved(order, capacity=room, torch=torch) for order in case.orders]
    return min(room, rather_high(peaks)) + (context if case.compared == "device" else 0)


def rather_high(peaks: list[int]) -> int:
    """Half a standard deviation above the mean: seven of ten possible runs stay below, and too little is worse.

    Which of them the source ran is not known. A quantile of as many runs would be less certain.
    """
    return round(mean(peaks) + pstdev(peaks) / 2)
