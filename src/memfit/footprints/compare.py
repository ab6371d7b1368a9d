"""Compare two footprints by phase and role, and list the terms that explain the difference."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from memfit.footprints.footprint_of_watch import REST, cardless
from memfit.nouns.footprint import SAME_LEVEL, Footprint, Levels, PhasePeak
from memfit.nouns.plan import BAND_SHARE
from memfit.nouns.sample import METERS
from memfit.nouns.tape import ROLES, Phase, Role
from memfit.units import human

Agreement = Literal["agrees", "more", "less"]
Level = Literal["reserved", "device", "tensors", "resident"]
CARDLESS: dict[Level, Level] = {"reserved": "tensors", "device": "resident"}  # names of levels without a card
MOST_TERMS = 12
TELLING = 0.01  # of the peak: roles that differ by less are not split, because sources divide them differently
OUTSIDE: tuple[Role, ...] = ("context",)  # roles on the card that are not reserved bytes


@dataclass(frozen=True, slots=True)
class PhaseRow:
    """One phase on both sides, None on a side without it; `agreement` is judged by the phase's own band."""

    phase: Phase
    left: Levels | None
    right: Levels | None
    agreement: Agreement | None = None


class _Sides:
    """Bytes on a left and a right side."""

    __slots__ = ()
    left: int
    right: int

    @property
    def difference(self) -> int:
        return self.right - self.left


@dataclass(frozen=True, slots=True)
class RoleRow(_Sides):
    """Bytes of a role, or of several together where one side does not separate them."""

    roles: tuple[Role, ...]
    left: int
    right: int


@dataclass(frozen=True, slots=True)
class NamedShare(_Sides):
    """The bytes of one label on both sides."""

    role: Role
    label: str
    left: int
    right: int


@dataclass(frozen=True, slots=True)
class Comparison(_Sides):
    """Right against left; sizes in bytes.

    `left_need` and `right_need` are the largest bytes of each whole run, and agree if they differ by `band` at most.
    They are bytes of `level`: reserved bytes, or device bytes if a side was seen from outside; tensors or resident
    bytes if both ran without a card. `left` and `right` are the bytes at the worst instants of `left_phase` and
    `right_phase`, whose difference is explained: `roles` sum to it, except for NCCL's buffers, which are not reserved.
    """

    phases: tuple[PhaseRow, ...]
    left_phase: Phase
    right_phase: Phase
    level: Level
    left: int
    right: int
    left_need: int
    right_need: int
    band: int
    agreement: Agreement
    roles: tuple[RoleRow, ...]
    terms: tuple[NamedShare, ...]
    notes: tuple[str, ...]
    refused: tuple[int, int] = (0, 0)  # bytes of the request at which left and right ran out of memory; 0: they did not


def compare(left: Footprint, right: Footprint) -> Comparison:
    """Compare `right`, such as a measured footprint, with `left`, such as a predicted one."""
    level: Level = "reserved" if left.peak.levels.reserved and right.peak.levels.reserved else "device"
    size = _size_of(level)
    need, needed = (max(map(size, side.needed)) for side in (left, right))
    a, b, notes = _instants(left, right, size)
    left_out = OUTSIDE if level == "reserved" else ()
    rows = [RoleRow(group, _sum(a, group), _sum(b, group)) for group in _groups(a, b, left_out)]
    rows = sorted((row for row in rows if row.left or row.right), key=lambda row: -abs(row.difference))
    least = int(max(size(a), size(b)) * TELLING)
    notes += _lump(a, b, rows, least)
    titles = {facts.title for facts in METERS.values()}
    for name, side in (("left", left), ("right", right)):
        if side.source == "measured":
            notes += [f"{name}: {text}" for text in side.assumptions if text not in titles]
        if side.refused:
            notes.append(
                f"the {name} ran out of memory asking for {human(side.refused)} more: it needs more than it shows"
            )
    called = CARDLESS[level] if cardless(left) and cardless(right) else level
    return Comparison(
        _phases(left, right, size), a.phase, b.phase, called, size(a), size(b), need, needed,
        int(need * BAND_SHARE), _agreement(need, needed), tuple(rows), _terms(a, b, rows, least), tuple(notes),
        (left.refused, right.refused),
    )  # fmt: skip


def _size_of(level: Level) -> Callable[[PhasePeak], int]:
    return lambda peak: int(getattr(peak.levels, level))


def _agreement(left: int, right: int) -> Agreement:
    if abs(right - left) <= int(left * BAND_SHARE):
        return "agrees"
    return "more" if right > left else "less"


def _instants(
    left: Footprint, right: Footprint, size: Callable[[PhasePeak], int]
) -> tuple[PhasePeak, PhasePeak, list[str]]:
    """Return the phases whose difference is explained, and a note if they are two different ones.

    If the runs differ, it is the phase that differs most among those that make one side need more, and of those that
    differ almost as much the one with most tensors: later phases keep the level and not what made it. If they agree, it
    is the left side's peak; without such a phase on both sides, the peak of each.
    """
    peak, other = left.peak, right.peak
    agreement = _agreement(size(peak), size(other))
    if len(left.phases) > 1 and len(right.phases) > 1:
        theirs = {p.phase: p for p in right.needed}
        pairs = [(p, theirs[p.phase]) for p in left.needed if p.phase in theirs]
        makes: dict[Agreement, Callable[[PhasePeak, PhasePeak], bool]] = {
            "agrees": lambda a, _: a.phase == peak.phase,
            "more": lambda _, b: _agreement(size(peak), size(b)) == "more",
            "less": lambda a, _: _agreement(size(a), size(other)) == "less",
        }
        pairs = [pair for pair in pairs if makes[agreement](*pair)]
        if pairs:
            gap = {pair: abs(size(pair[1]) - size(pair[0])) for pair in pairs}
            telling = [pair for pair in pairs if gap[pair] >= max(gap.values()) * (1 - SAME_LEVEL)]
            return *max(telling, key=lambda pair: (pair[0].tensors + pair[1].tensors, gap[pair])), []
    if peak.phase == other.phase:
        return peak, other, []
    note = f"the peaks of {_named(peak)} and {_named(other)} are compared: no phase of both tells the difference"
    return peak, other, [note]


def _named(peak: PhasePeak) -> str:
    return f"{peak.phase.replace('_', ' ')} ({peak.instant})"


def _phases(left: Footprint, right: Footprint, size: Callable[[PhasePeak], int]) -> tuple[PhaseRow, ...]:
    mine, theirs = ({p.phase: p for p in side.phases} for side in (left, right))
    rows = []
    for phase in dict.fromkeys((*mine, *theirs)):
        a, b = mine.get(phase), theirs.get(phase)
        agreement = _agreement(size(a), size(b)) if a and b else None
        rows.append(PhaseRow(phase, a.levels if a else None, b.levels if b else None, agreement))
    return tuple(rows)


def _groups(a: PhasePeak, b: PhasePeak, left_out: Iterable[Role]) -> tuple[tuple[Role, ...], ...]:
    """Return the groups of roles that are compared: several roles that a side counts in one line are one group."""
    shown = [role for role in ROLES if role not in left_out]
    lumped: set[Role] = set()
    for peak in (a, b):
        roles = {line.role for line in peak.lines}
        if any(line.label == REST for line in peak.lines) or roles <= {"temporaries", "context", "fragmentation"}:
            separate = {line.role for line in peak.lines if line.label != REST and line.role != "temporaries"}
            lumped |= {role for role in shown if role not in separate}
    if len(lumped) > 1:
        rest = tuple(role for role in shown if role in lumped)
        return (*((role,) for role in shown if role not in lumped), rest)
    return tuple((role,) for role in shown)


def _sum(peak: PhasePeak, roles: tuple[Role, ...]) -> int:
    return sum(line.bytes for line in peak.lines if line.role in roles)


def _terms(a: PhasePeak, b: PhasePeak, rows: Iterable[RoleRow], least: int) -> tuple[NamedShare, ...]:
    """Return the labels of the roles that differ by `least` bytes or more, largest difference first."""
    differing = {row.roles[0] for row in rows if len(row.roles) == 1 and abs(row.difference) >= least}
    mine, theirs = (_labels(peak, differing) for peak in (a, b))
    terms = [NamedShare(*key, mine[key], theirs[key]) for key in dict.fromkeys((*mine, *theirs))]
    terms = [term for term in terms if term.difference]
    return tuple(sorted(terms, key=lambda term: -abs(term.difference))[:MOST_TERMS])


def _labels(peak: PhasePeak, roles: Iterable[Role]) -> Counter[tuple[Role, str]]:
    """Return bytes by (role, label); a label may stand on several lines."""
    sizes: Counter[tuple[Role, str]] = Counter()
    for line in peak.lines:
        if line.bytes and line.role in roles and line.label and line.label != REST:
            sizes[line.role, line.label] += line.bytes
    return sizes


def _lump(a: PhasePeak, b: PhasePeak, rows: Iterable[RoleRow], least: int) -> list[str]:
    """Return notes on roles that one side does not separate, with the largest labels of a side that does."""
    notes = []
    for row in rows:
        if len(row.roles) > 1:
            notes.append("roles that one side cannot tell apart are taken together")
        if len(row.roles) > 1 and abs(row.difference) >= least:
            for side, peak in (("left", a), ("right", b)):
                largest = _labels(peak, row.roles).most_common(3)
                if len(largest) > 1:
                    named = ", ".join(f"{label} {human(size)}" for (_, label), size in largest)
                    notes.append(f"of these the {side} names, largest first: {named}")
    return notes
