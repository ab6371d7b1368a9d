"""What memfit predicts for a Case, in bytes, for the level that the row measured."""

from __future__ import annotations

from memfit.alloc_conf import LATEST_TORCH
from memfit.allocator import OutOfMemory
from memfit.formula.account import Account
from memfit.formula.estimate import estimate
from memfit.formula.varied import levels_over
from published.case import Case

TRAINING = ("load", "first_step", "step")


def predict(case: Case) -> int:
    """The highest level over the phases of a training run; what most orders stay below where lengths vary."""
    if case.orders:
        return _varied(case)
    footprint = estimate(case.architecture, case.recipe, case.gpu, padded=case.padded, profile=case.profile)
    return max(int(getattr(p.levels, case.compared)) for p in footprint.phases if p.phase in TRAINING)


def _varied(case: Case) -> int:
    account = Account(case.architecture, case.recipe, case.gpu, case.padded, case.profile)
    context = case.gpu.context_bytes
    torch = (case.torch[0], case.torch[1]) if len(case.torch) > 1 else LATEST_TORCH
    room = case.gpu.total_bytes - context
    level = "reserved" if case.compared == "device" else case.compared
    peaks = []
    for order in case.orders:
        try:
            peaks.append(int(getattr(levels_over(account, order, capacity=room, torch=torch), level)))
        except OutOfMemory:  # the card is full to the last block
            peaks.append(room)
    return upper_quartile(peaks) + (context if case.compared == "device" else 0)


def upper_quartile(peaks: list[int]) -> int:
    """Which three of four possible runs do not exceed: the source's own order is not known, and too little is worse."""
    return sorted(peaks)[len(peaks) * 3 // 4]
