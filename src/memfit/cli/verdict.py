"""Verdicts as exit codes, so that a script can ask; and what NCCL holds beside what was judged."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from memfit.errors import EXIT_FITS, EXIT_MISFIT, EXIT_TIGHT
from memfit.nouns.plan import Verdict

if TYPE_CHECKING:
    from memfit.allocator.capacity import Capacity

EXIT_OF: dict[Verdict, int] = {"fits": EXIT_FITS, "tight": EXIT_TIGHT, "misfit": EXIT_MISFIT}


def with_nccl(answer: Capacity, nccl: int) -> Capacity:
    """The judgement of a run that also holds NCCL's buffers, `nccl` bytes that lie beside PyTorch's."""
    held = answer.judgement
    assert held is not None
    return replace(answer, judgement=replace(held, usable=held.usable + nccl, need=held.need + nccl))
