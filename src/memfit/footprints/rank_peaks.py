"""What each traced rank of a job needs of its card: its peak, the instant of it, and what lives there by role."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from memfit.allocator.player import alive_at
from memfit.allocator.replay import Timeline
from memfit.nouns.footprint import Levels
from memfit.nouns.tape import ROLES, Phase, Role, Tape


@dataclass(frozen=True, slots=True)
class RankPeak:
    """The peak of one rank. members: ranks of its class, which do the same; what: their place in the job's groups.

    levels: each level's maximum over the run. roles: bytes alive when the highest reserved level was made. nccl: bytes
    counted for its communicators, beside PyTorch's. communicators: name, ranks and collectives of each. usable: bytes
    of the card. died: whether the script ran out of memory.
    """

    rank: int
    members: tuple[int, ...]
    what: str
    phase: Phase
    instant: str
    levels: Levels
    roles: Mapping[Role, int]
    nccl: int
    communicators: tuple[tuple[str, int, int], ...]
    usable: int
    died: bool = False

    @property
    def need(self) -> int:
        """Return the reserved bytes, with NCCL's."""
        return self.levels.reserved + self.nccl

    @property
    def headroom(self) -> int:
        return self.usable - self.need


def peak_of_rank(
    rank: int, members: Sequence[int], what: str, tape: Tape, timeline: Timeline, usable: int,
    communicators: Sequence[tuple[str, int, int]], nccl: int, died: bool,
) -> RankPeak:  # fmt: skip
    """Return the peak of a rank from its replayed tape."""
    phases = timeline.by_phase()
    phase = max(phases, key=lambda name: phases[name].reserved)
    span, at = timeline.peak_of(phase)
    return RankPeak(
        rank, tuple(members), what, phase, span.instant, timeline.peak, _roles(tape, at), nccl,
        tuple(communicators), usable, died,
    )  # fmt: skip


def _roles(tape: Tape, at: int) -> dict[Role, int]:
    """Return the bytes alive after event `at`, by role."""
    alive = alive_at(tape.events, at, tape.start)
    return {role: size for role in ROLES if (size := sum(e.size for e in alive if e.role == role))}


def worst_first(ranks: Sequence[RankPeak]) -> list[RankPeak]:
    """Order ranks by need, those that ran out of memory before all others."""
    return sorted(ranks, key=lambda r: (not r.died, -r.need, r.rank))


def differences(ranks: Sequence[RankPeak]) -> dict[Role, tuple[int, int]]:
    """Return the least and the most bytes of each role that the ranks hold at their peaks, where these differ."""
    found: dict[Role, tuple[int, int]] = {}
    for role in ROLES:
        sizes = [rank.roles.get(role, 0) for rank in ranks]
        if sizes and min(sizes) != max(sizes):
            found[role] = min(sizes), max(sizes)
    return found
