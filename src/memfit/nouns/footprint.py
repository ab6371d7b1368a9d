"""The noun Footprint: bytes by role at the worst instant of each phase, whether predicted, traced or measured."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from memfit.nouns.tape import Phase, Role

OPTIONAL: tuple[Phase, ...] = ("resume", "merge")  # phases that not every run has: shown, but not part of the verdict
Source = Literal["formula", "traced", "measured"]
# Managed memory outside PyTorch's allocator: resident as long as the card has room, moved to the host where it has not.
# It is in what nvidia-smi shows and in no verdict.
PAGED = "paged optimizer states, evictable"
PAGED_IN: tuple[Phase, ...] = ("first_step", "step", "save", "eval")  # a resumed run loads them as ordinary tensors


@dataclass(frozen=True, slots=True)
class Levels:
    """The four levels of memory in bytes; requested <= allocated <= reserved <= device always holds."""

    requested: int  # tensor bytes
    allocated: int  # after rounding to blocks: torch.cuda.max_memory_allocated()
    reserved: int  # held by the allocator: torch.cuda.max_memory_reserved()
    device: int  # what nvidia-smi shows: reserved + context (+ NCCL, + paged states while the card has room)


@dataclass(frozen=True, slots=True)
class Line:
    """One named share of a peak, with the formula it comes from."""

    role: Role
    label: str
    bytes: int
    formula: str = ""


@dataclass(frozen=True, slots=True)
class PhasePeak:
    """The worst instant of one phase. `lines` add up to `levels.device`."""

    phase: Phase
    instant: str  # "forward", "loss", "backward of block 32", "optimizer step" ...
    levels: Levels
    lines: tuple[Line, ...]

    @property
    def by_role(self) -> dict[Role, int]:
        """Return bytes by role; the sum is `levels.device`."""
        total: dict[Role, int] = {}
        for line in self.lines:
            total[line.role] = total.get(line.role, 0) + line.bytes
        return total

    @property
    def paged(self) -> int:
        """Return the bytes on the card that move to the host when it is full."""
        return sum(line.bytes for line in self.lines if line.label == PAGED)


@dataclass(frozen=True, slots=True)
class Footprint:
    """All phases of a run. Its peak is the highest phase among those every run has, never a sum."""

    phases: tuple[PhasePeak, ...]
    source: Source
    assumptions: tuple[str, ...] = ()
    unknowns: tuple[str, ...] = ()
    refused: int = 0  # bytes of the request that failed and ended the run, which so needs more than its phases show

    @property
    def peak(self) -> PhasePeak:
        """Return the phase that reserves most (the first one on ties)."""
        return max(self.needed, key=lambda p: p.levels.reserved)

    @property
    def needed(self) -> tuple[PhasePeak, ...]:
        """Return the phases that every run has."""
        return tuple(p for p in self.phases if p.phase not in OPTIONAL) or self.phases
