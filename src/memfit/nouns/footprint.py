"""The noun Footprint: bytes by role at the instant that made each phase's peak, predicted, traced or measured."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from memfit.nouns.tape import Phase, Role

OPTIONAL: tuple[Phase, ...] = ("resume", "merge")  # phases that not every run has: shown, but not part of the verdict
Source = Literal["formula", "traced", "measured"]
Fit = Literal["fits", "tight", "misfit"]
# The share of the highest reserved level by which a later moment must raise it to be named instead of one with more
# tensors. A smaller raise is within what a prediction may be off by (`nouns.plan.BAND_SHARE`).
SAME_LEVEL = 0.05
# Managed memory outside PyTorch's allocator: resident as long as the card has room, moved to the host where it has not.
# It is in what nvidia-smi shows and in no verdict.
PAGED = "paged optimizer states, evictable"
SLACK = "allocator slack"  # reserved, and in no tensor of the instant
KEPT, WORKING = "kept for backward", "working tensors"  # labels of the sums of modules' tensors
FIRST_BUCKETS = "DDP's first buckets, until gradients are reduced again"  # not among the requested bytes
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
    """The peak of one phase: each level's own maximum, and the bytes at the instant that made the reserved one.

    `lines` add up to `levels.device`.
    """

    phase: Phase
    instant: str  # "forward", "loss", "backward of block 32", "optimizer step" ...
    levels: Levels
    lines: tuple[Line, ...]
    held: int = 0  # bytes reserved when the phase began; 0 where that is not known

    @property
    def tensors(self) -> int:
        """Return the bytes of tensors at the instant."""
        return sum(line.bytes for line in self.lines if line.role not in ("context", "fragmentation"))

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


def peak_maker(moments: Iterable[tuple[int, int]]) -> int:
    """Return the index of the moment that made the highest level; moments are (reserved bytes, tensors) in time order.

    The allocator keeps what it reserved, so the level is as high in every moment after the one that made it. Only
    moments that raised the level count; of those that raised it to within SAME_LEVEL of the highest, the one with the
    most tensors (the first on ties), because these are what the reservation was made for.
    """
    found = list(moments)
    highest = max(reserved for reserved, _ in found)
    least, level, best = highest - int(highest * SAME_LEVEL), -1, -1
    for index, (reserved, tensors) in enumerate(found):
        if reserved > level:
            level = reserved
            if reserved >= least and (best < 0 or tensors > found[best][1]):
                best = index
    return best


@dataclass(frozen=True, slots=True)
class OnCard:
    """How a run does with the bytes its card has for PyTorch's allocator, by replays at and around that capacity."""

    capacity: int  # bytes that the allocator may reserve; NCCL's buffers and what the user keeps free are not in it
    verdict: Fit
    unlimited: int  # bytes it would reserve on a card without a limit
    retries: int = 0  # how often one optimizer step releases all cached blocks to go on
    band: int = 0  # bytes by which the capacity was changed: a run that fits runs with so many less


@dataclass(frozen=True, slots=True)
class Footprint:
    """All phases of a run. Its peak is the highest phase among those every run has, never a sum.

    With `on_card` the phases are those of the run at the card's capacity, or with a band more, where it runs.
    """

    phases: tuple[PhasePeak, ...]
    source: Source
    assumptions: tuple[str, ...] = ()
    unknowns: tuple[str, ...] = ()
    refused: int = 0  # bytes of the request that failed and ended the run, which so needs more than its phases show
    on_card: OnCard | None = None

    @property
    def peak(self) -> PhasePeak:
        """Return the phase that made the highest reserved level.

        Lines of their own hold what the allocator kept from earlier phases, and what later ones added to the level.
        """
        needed = self.needed
        levels = [(p.levels.reserved or p.levels.device, p.tensors or p.levels.allocated) for p in needed]
        at = peak_maker(levels)
        made = needed[at]
        highest = max(needed, key=lambda p: p.levels.reserved)
        more = highest.levels.reserved - made.levels.reserved
        reserved, device = made.levels.reserved + more, made.levels.device + more
        lines = list(made.lines)
        earlier = next((p for p in needed[:at] if p.levels.reserved >= made.held), None)
        slack = next((line for line in lines if line.role == "fragmentation"), None)
        kept = min(made.held - made.tensors, slack.bytes) if slack and earlier else 0
        if slack and earlier and kept > 0:
            lines[lines.index(slack)] = replace(slack, bytes=slack.bytes - kept)
            lines.append(Line("fragmentation", f"cached since {_named(earlier)}", kept))
        if lines and more:
            lines.append(Line("fragmentation", f"added in {_named(highest)}", more))
        return replace(
            made, levels=replace(made.levels, reserved=reserved, device=device),
            lines=tuple(line for line in lines if line.bytes or line in made.lines),
        )  # fmt: skip

    @property
    def needed(self) -> tuple[PhasePeak, ...]:
        """Return the phases that every run has."""
        return tuple(p for p in self.phases if p.phase not in OPTIONAL) or self.phases


def _named(peak: PhasePeak) -> str:
    return f"{peak.phase.replace('_', ' ')}: {peak.instant}"
