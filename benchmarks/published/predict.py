"""What memfit predicts for a Case, in bytes, for the level that the row measured."""

from __future__ import annotations

from memfit.formula.estimate import estimate
from published.case import Case

TRAINING = ("load", "first_step", "step")


def predict(case: Case) -> int:
    """The highest level over the phases of a training run."""
    footprint = estimate(case.architecture, case.recipe, case.gpu, padded=case.padded, profile=case.profile)
    return max(int(getattr(p.levels, case.compared)) for p in footprint.phases if p.phase in TRAINING)
