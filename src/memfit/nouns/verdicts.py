"""A footprint held against a card: fits, too tight to promise, or does not fit."""

from __future__ import annotations

from memfit.nouns.footprint import Footprint
from memfit.nouns.gpu import Gpu
from memfit.nouns.plan import Judgement, Verdict

# How far a prediction may be off and still be believed. Source: docs/accuracy.md, mean error on published runs.
BAND_SHARE = 0.05
# What the allocator can win back by returning cached blocks before it fails. Source: a recorded job that reserved 5.03 GiB
# ran on 4.875 GiB, not on 4.75, and with expandable segments on 4.5.
RECLAIM_SHARE = 0.10


def judge(footprint: Footprint, gpu: Gpu, reserve: int = 0) -> Judgement:
    """Compare the reserved peak with what the card leaves; see `verdict_of` for the rule."""
    levels = footprint.peak.levels
    nccl = levels.device - levels.reserved - gpu.context_bytes
    tensors = max(p.levels.allocated for p in footprint.needed)
    return verdict_of(levels.reserved + max(nccl, 0), tensors + max(nccl, 0), gpu.usable_bytes(reserve))


def verdict_of(need: int, tensors: int, usable: int) -> Judgement:
    """The rule, in bytes.

    fits: even a peak BAND_SHARE higher stays on the card. misfit: more than giving back cached blocks can save: the
    tensors alone (no allocator slack), taken BAND_SHARE lower, or what is reserved, taken RECLAIM_SHARE lower, are more
    than the card has. tight: anything between.
    """
    band = int(need * BAND_SHARE)
    verdict: Verdict = "tight"
    if need + band <= usable:
        verdict = "fits"
    elif max(tensors - int(tensors * BAND_SHARE), need - int(need * RECLAIM_SHARE)) > usable:
        verdict = "misfit"
    return Judgement(verdict, usable, need, band, usable - need)
