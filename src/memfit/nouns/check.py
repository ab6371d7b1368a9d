"""The nouns of `memfit check`: the jobs of a repository, the answer to each, and what changed since another commit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from memfit.errors import EXIT_FITS, EXIT_MISFIT, BadInput
from memfit.nouns.footprint import OPTIONAL, Levels, peak_maker
from memfit.nouns.plan import HostJudgement, Verdict
from memfit.nouns.sample import Leak
from memfit.nouns.tape import Phase, Role
from memfit.units import parse_size

Level = Literal["requested", "allocated", "reserved", "device"]
LEVELS: tuple[Level, ...] = ("requested", "allocated", "reserved", "device")


@dataclass(frozen=True, slots=True)
class Budget:
    """A limit that a job sets itself below its card's: `reserved < 70GiB`."""

    level: Level
    limit: int  # bytes
    inclusive: bool
    text: str

    def allows(self, size: int) -> bool:
        """Return whether a size keeps the budget."""
        return size <= self.limit if self.inclusive else size < self.limit


def parse_budget(text: str) -> Budget:
    """Parse 'reserved < 70GiB' or 'allocated <= 60 GiB'. Raises BadInput."""
    level, sign, size = text.partition("<")
    inclusive = size.startswith("=")
    name = next((known for known in LEVELS if known == level.strip()), None)
    if not sign or name is None:
        raise BadInput(f"'{text[:60]}' is no budget", hint=f"reserved < 70GiB; levels: {', '.join(LEVELS)}")
    return Budget(name, parse_size(size.removeprefix("=")), inclusive, " ".join(text.split()))


@dataclass(frozen=True, slots=True)
class CheckJob:
    """One job of a repository: a command line or a framework's file, its card and its budget.

    Words are as the flags of `memfit trace` and `memfit estimate` take them. phases: those that the budgets and the
    difference are about; () for all that every run has. line: where the file of jobs begins it.
    """

    name: str
    gpu: str
    command: tuple[str, ...] = ()
    config: str = ""
    model: str = ""
    folder: str = ""
    budgets: tuple[Budget, ...] = ()
    phases: tuple[Phase, ...] = ()
    host_memory: str = ""
    workers: int | None = None
    reserve: str = ""
    alloc_conf: str | None = None
    steps: int | None = None
    answer: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    line: int = 1

    def matters(self, phase: Phase) -> bool:
        """Return whether budgets and differences are about a phase."""
        return phase in self.phases if self.phases else phase not in OPTIONAL


@dataclass(frozen=True, slots=True)
class Share:
    """Bytes alive at a peak: their role, what they are, and the lines of the repository that allocated them.

    lines: "file.py:12", the innermost first; () where no line of the repository did, and for a formula. reads: the
    lines of each operator that reads them, where they were asked for.
    """

    role: Role
    label: str
    bytes: int
    lines: tuple[str, ...] = ()
    reads: tuple[tuple[str, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class PhaseShares:
    """The worst instant of a phase, with the shares that make it; small ones of a role are one share."""

    phase: Phase
    instant: str
    levels: Levels
    shares: tuple[Share, ...]

    @property
    def tensors(self) -> int:
        """Return the bytes of tensors at the instant."""
        return sum(share.bytes for share in self.shares if share.role not in ("context", "fragmentation"))

    @property
    def slack(self) -> int:
        """Return the bytes that the allocator holds beyond them."""
        return sum(share.bytes for share in self.shares if share.role == "fragmentation")


def made_peak(phases: Sequence[PhaseShares]) -> PhaseShares:
    """Return the phase that made the highest reserved level: later ones hold it as cache, so theirs says nothing."""
    return phases[peak_maker((p.levels.reserved, p.tensors) for p in phases)]


@dataclass(frozen=True, slots=True)
class JobAnswer:
    """What was found of a job; sizes in bytes. title: what ran. ran_out: the line at which memory ran out.

    host: the second verdict, of a configuration.
    """

    title: str
    card: str
    source: Literal["formula", "traced"]
    verdict: Verdict
    usable: int
    need: int
    band: int
    phases: tuple[PhaseShares, ...]
    leaks: tuple[Leak, ...] = ()
    notes: tuple[str, ...] = ()
    not_understood: tuple[str, ...] = ()
    ran_out: str = ""
    host: HostJudgement | None = None

    @property
    def peak(self) -> PhaseShares | None:
        """Return the phase that made the highest reserved level among those that every run has."""
        needed = [p for p in self.phases if p.phase not in OPTIONAL]
        return made_peak(needed) if needed else None


@dataclass(frozen=True, slots=True)
class JobFailure:
    """Why a job has no answer."""

    message: str
    hint: str
    exit_code: int


@dataclass(frozen=True, slots=True)
class RoleChange:
    """The bytes of a role before and after."""

    role: Role
    base: int
    head: int

    @property
    def added(self) -> int:
        return self.head - self.base


@dataclass(frozen=True, slots=True)
class ShareChange:
    """The bytes of a share before and after. lines: as the newer side has them."""

    role: Role
    label: str
    base: int
    head: int
    lines: tuple[str, ...] = ()

    @property
    def added(self) -> int:
        return self.head - self.base


@dataclass(frozen=True, slots=True)
class PhaseChange:
    """The reserved bytes of a phase before and after; None on a side without it."""

    phase: Phase
    base: int | None
    head: int | None


# how a place was found: its own line allocates what was added; a key of the configuration that by itself makes the
# change; the only change of a file that the job reads; a change that by itself, made in the old version, makes it; a
# change without which the others do not make it
Found = Literal["allocates", "key", "only", "alone", "without"]


@dataclass(frozen=True, slots=True)
class CausePlace:
    """A place of the change, and the bytes that it adds. code: the line's text.

    removed: the change takes that line away; `line` is where it stood, as the newer side counts. last: the last line of
    a change of several of which none is known to be the one; 0 else.
    """

    file: str
    line: int
    code: str
    added: int
    found: Found
    removed: bool = False
    last: int = 0

    @property
    def place(self) -> str:
        """Return 'train.py:88', or 'train.py:88-91'."""
        return f"{self.file}:{self.line}{f'-{self.last}' if self.last else ''}"


@dataclass(frozen=True, slots=True)
class JobDifference:
    """One job at two commits; sizes are reserved bytes.

    base, head: at the worst instant of `phase`, which `roles` and `shares` explain, the largest changes first.
    host_added: bytes of host RAM, where both sides have them.
    """

    base_need: int
    head_need: int
    base_verdict: Verdict
    phase: Phase
    instant: str
    base: int
    head: int
    phases: tuple[PhaseChange, ...]
    roles: tuple[RoleChange, ...]
    shares: tuple[ShareChange, ...]
    causes: tuple[CausePlace, ...] = ()
    host_added: int = 0

    @property
    def added(self) -> int:
        """Return the bytes that the change adds at the worst instant."""
        return self.head - self.base

    @property
    def same(self) -> bool:
        """Return whether no phase reserves another number of bytes, and the worst instant holds the same by role.

        Nor does the host need another.
        """
        levels = all(change.base == change.head for change in self.phases) and self.base_need == self.head_need
        return levels and not self.host_added and not any(role.added for role in self.roles)


@dataclass(frozen=True, slots=True)
class JobResult:
    """A job with its answer or why there is none. kept: the answer came from the cache. since: why no difference."""

    job: CheckJob
    answer: JobAnswer | None = None
    failure: JobFailure | None = None
    difference: JobDifference | None = None
    since: str = ""
    seconds: float = 0.0
    kept: bool = False

    @property
    def over(self) -> tuple[tuple[Budget, int], ...]:
        """Return the budgets that are not kept, with the bytes that break them."""
        if self.answer is None:
            return ()
        levels = [p.levels for p in self.answer.phases if self.job.matters(p.phase)]
        largest = {level: max((getattr(one, level) for one in levels), default=0) for level in LEVELS}
        return tuple((b, largest[b.level]) for b in self.job.budgets if not b.allows(largest[b.level]))

    @property
    def exit_code(self) -> int:
        """Return the exit code of this job alone."""
        if self.failure is not None or self.answer is None:
            return self.failure.exit_code if self.failure else EXIT_FITS
        if self.over or self.answer.leaks:
            return EXIT_MISFIT
        return EXITS[self.answer.verdict]


EXITS: dict[Verdict, int] = {"fits": 0, "tight": 4, "misfit": 3, "not_judged": 5}


@dataclass(frozen=True, slots=True)
class CheckReport:
    """All jobs of a check. file: that of the jobs, relative to the repository. base: what it was compared with."""

    file: str
    results: tuple[JobResult, ...]
    base: str = ""

    @property
    def exit_code(self) -> int:
        """Return the exit code of the whole: what could not be judged first, then what does not fit."""
        codes = {result.exit_code for result in self.results}
        return next((code for code in (1, 2, 3, 6, 5, 4) if code in codes), EXIT_FITS)
