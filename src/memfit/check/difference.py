"""What changed between two answers to one job: by phase, role, module and line, and the places of the change."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol, TypeVar

from memfit.check.git import Hunk
from memfit.nouns.check import (
    CausePlace,
    CheckJob,
    JobAnswer,
    JobDifference,
    PhaseChange,
    PhaseShares,
    RoleChange,
    ShareChange,
    made_peak,
)
from memfit.nouns.tape import PHASES, Role

MOST = 12  # shares that are listed
LONGEST = 200  # characters of a line that are shown
TELLING = 0.5  # of what was added: a place that explains less is not the cause
OUTSIDE: tuple[Role, ...] = ("context",)  # on the card, and not among the reserved bytes
Moved = Callable[[str], str]


def difference(
    job: CheckJob, base: JobAnswer, head: JobAnswer, moved: Moved = str, hunks: Sequence[Hunk] = (),
    root: Path | None = None,
) -> JobDifference:  # fmt: skip
    """Compare a job's answer with that of another commit.

    moved: where a line of that commit stands now. hunks: what was changed in files that the job reads; a changed line
    that allocates is the cause. root: where these files lie.
    """
    olds, news = ({p.phase: p for p in one.phases} for one in (base, head))
    phases = tuple(
        PhaseChange(name, _reserved(olds.get(name)), _reserved(news.get(name)))
        for name in PHASES
        if (name in olds or name in news) and job.matters(name)
    )
    old, new = _explained(job, base, head)
    roles = _roles(old, new)
    shares = _shares(old, new, moved)
    host = head.host.need - base.host.need if base.host and head.host else 0
    found = JobDifference(
        base.need, head.need, base.verdict, new.phase, new.instant, old.levels.reserved, new.levels.reserved, phases,
        roles, shares[:MOST], host_added=host,
    )  # fmt: skip
    causes = _allocating(found, shares, hunks, root) if not found.same else ()
    return replace(found, causes=causes)


def _reserved(phase: PhaseShares | None) -> int | None:
    return phase.levels.reserved if phase else None


def _explained(job: CheckJob, base: JobAnswer, head: JobAnswer) -> tuple[PhaseShares, PhaseShares]:
    """Return the worst instants that are compared.

    They are of the phase that made the peak of the side that needs more, if its tensors changed there; else of that
    whose change is least one of free and cached bytes.
    """
    olds = {p.phase: p for p in base.phases}
    pairs = [(olds[p.phase], p) for p in head.phases if p.phase in olds and job.matters(p.phase)]
    if not pairs:
        one, other = base.peak or base.phases[0], head.peak or head.phases[0]
        return one, other

    def gap(pair: tuple[PhaseShares, PhaseShares]) -> int:
        return abs(pair[1].levels.reserved - pair[0].levels.reserved)

    def slack(pair: tuple[PhaseShares, PhaseShares]) -> int:
        return abs(pair[1].slack - pair[0].slack)

    makers = [made_peak(side) for side in zip(*pairs, strict=True)]
    larger = max(makers, key=lambda p: p.levels.reserved)
    top = next(pair for pair in pairs if larger in pair)
    changed = [pair for pair in pairs if gap(pair) >= TELLING * max(map(gap, pairs))]
    return top if top in changed and slack(top) <= TELLING * gap(top) else min(changed, key=slack)


def _roles(old: PhaseShares, new: PhaseShares) -> tuple[RoleChange, ...]:
    sums = [Counter[Role](), Counter[Role]()]
    for total, side in zip(sums, (old, new), strict=True):
        for share in side.shares:
            total[share.role] += share.bytes
    names = dict.fromkeys((*sums[0], *sums[1]))
    rows = [RoleChange(role, sums[0][role], sums[1][role]) for role in names if role not in OUTSIDE]
    return tuple(sorted(rows, key=lambda row: -abs(row.added)))


def _shares(old: PhaseShares, new: PhaseShares, moved: Moved) -> tuple[ShareChange, ...]:
    """Return the shares that changed, the largest first; one whose label alone changed has not."""
    sizes: dict[tuple[Role, str, tuple[str, ...]], tuple[int, int]] = {}
    for side, phase in enumerate((old, new)):
        for share in phase.shares:
            lines = share.lines if side else tuple(moved(line) for line in share.lines)
            old_bytes, new_bytes = sizes.get(key := (share.role, share.label, lines), (0, 0))
            sizes[key] = (old_bytes, new_bytes + share.bytes) if side else (old_bytes + share.bytes, new_bytes)
    rows = [
        ShareChange(role, label, *both, lines)
        for (role, label, lines), both in sizes.items()
        if both[0] != both[1] and role not in OUTSIDE
    ]
    return tuple(sorted(without_renamed(rows), key=lambda row: -abs(row.added)))


class Row(Protocol):
    """Bytes of a kind of tensor on both sides."""

    @property
    def role(self) -> Role: ...

    @property
    def base(self) -> int: ...

    @property
    def head(self) -> int: ...


Rows = TypeVar("Rows", bound=Row)


def without_renamed(rows: Sequence[Rows]) -> list[Rows]:
    """Leave out pairs of a row that went and one that came with the same role and bytes: only a name changed."""
    gone: dict[tuple[Role, int], list[int]] = {}
    for number, row in enumerate(rows):
        if not row.head:
            gone.setdefault((row.role, row.base), []).append(number)
    left = set(range(len(rows)))
    for number, row in enumerate(rows):
        if not row.base and (others := gone.get((row.role, row.head))):
            left -= {number, others.pop()}
    return [rows[number] for number in sorted(left)]


def _allocating(
    found: JobDifference, shares: Iterable[ShareChange], hunks: Sequence[Hunk], root: Path | None
) -> tuple[CausePlace, ...]:
    """Return the changed lines that allocate what was added, the one that adds most first."""
    sums: Counter[tuple[str, int]] = Counter()
    for share in shares:
        for place in share.lines:
            file, _, number = place.rpartition(":")
            if any(hunk.covers(file, int(number)) for hunk in hunks):
                sums[file, int(number)] += share.added
                break
    least = TELLING * abs(found.added or max((abs(role.added) for role in found.roles), default=0))
    wanted = [(place, added) for place, added in sums.most_common() if added * (found.added or 1) > 0]
    if abs(sum(added for _, added in wanted)) < least:
        return ()
    return tuple(
        CausePlace(file, line, line_text(root / file, line) if root else "", added, "allocates")
        for (file, line), added in wanted[:3]
    )


def line_text(path: Path, line: int) -> str:
    """Return a line of a file without its indentation; '' where there is none."""
    lines = path.read_text(errors="replace").splitlines() if path.is_file() else []
    return lines[line - 1].strip()[:LONGEST] if 0 < line <= len(lines) else ""
