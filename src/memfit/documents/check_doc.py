"""The JSON documents of `memfit check` and `memfit diff`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from memfit.documents import filled
from memfit.nouns.check import CheckReport, JobDifference, JobFailure, JobResult, PhaseShares
from memfit.nouns.plan import Verdict
from memfit.nouns.sample import Leak
from memfit.nouns.upgrade import LibraryPlace, TensorChange, Upgrade, VersionChange


class BudgetDoc(Struct, frozen=True, kw_only=True):
    """A budget that is not kept."""

    budget: str
    bytes: int


class JobDoc(Struct, frozen=True, kw_only=True):
    """One job; what no answer was found of is null, and `failure` says why."""

    name: str
    gpu: str
    exit_code: Annotated[int, Meta(description="that this job alone would give")]
    verdict: Verdict | None
    usable: int | None
    need: Annotated[int | None, Meta(description="bytes of the reserved peak on a card without a limit")]
    band: int | None
    source: Literal["formula", "traced"] | None
    phases: Annotated[
        tuple[PhaseShares, ...], Meta(description="worst instants with their shares; lines: file:line, innermost first")
    ]
    leaks: tuple[Leak, ...]
    not_understood: tuple[str, ...]
    over_budget: tuple[BudgetDoc, ...]
    ran_out: Annotated[str, Meta(description="the line at which memory ran out")]
    notes: tuple[str, ...]
    failure: JobFailure | None
    kept: Annotated[bool, Meta(description="nothing that it depends on has changed: it was not judged again")]
    seconds: float
    difference: Annotated[JobDifference | None, Meta(description="with --base: what the working tree changes")]
    no_difference: Annotated[str, Meta(description="with --base: why there is no difference")]


# what a job without an answer has in its place
_UNANSWERED = {
    **dict.fromkeys(("verdict", "usable", "need", "band", "source")), "ran_out": "",
    **dict.fromkeys(("phases", "leaks", "not_understood", "notes"), ()),
}  # fmt: skip


class CheckDoc(Struct, frozen=True, kw_only=True):
    """`memfit check --json`."""

    schema: Literal["memfit.check/1"] = "memfit.check/1"
    file: str
    base: Annotated[str, Meta(description="the commit that was compared with; '' for none")]
    exit_code: int
    jobs: tuple[JobDoc, ...]


def check_doc(report: CheckReport) -> CheckDoc:
    """Make the document of a check."""
    return filled(CheckDoc, report, jobs=tuple(map(_job, report.results)))


def _job(result: JobResult) -> JobDoc:
    unanswered: dict[str, Any] = {} if result.answer else _UNANSWERED
    over = tuple(BudgetDoc(budget=b.text, bytes=size) for b, size in result.over)
    return filled(JobDoc, result, result.answer, result.job, over_budget=over, no_difference=result.since, **unanswered)


class SideDoc(Struct, frozen=True, kw_only=True):
    """The answer in one environment; sizes in bytes."""

    environment: str
    verdict: Verdict
    usable: int
    need: Annotated[int, Meta(description="bytes of the reserved peak on a card without a limit")]
    band: int
    ran_out: Annotated[str, Meta(description="the line at which memory ran out")]
    not_understood: tuple[str, ...]
    notes: tuple[str, ...]


class DiffDoc(Struct, frozen=True, kw_only=True):
    """`memfit diff --json`."""

    schema: Literal["memfit.diff/1"] = "memfit.diff/1"
    job: str
    gpu: str
    exit_code: Annotated[int, Meta(description="that of the second environment's verdict")]
    base: SideDoc
    head: SideDoc
    versions: Annotated[tuple[VersionChange, ...], Meta(description="libraries whose version differs")]
    difference: JobDifference
    tensors: Annotated[tuple[TensorChange, ...], Meta(description="by module and operator, the largest change first")]
    places: Annotated[tuple[LibraryPlace, ...], Meta(description="lines that decide, with the bytes of which they do")]


def diff_doc(found: Upgrade) -> DiffDoc:
    """Make the document of a comparison of two environments."""
    sides = zip(found.environments, (found.base, found.head), strict=True)
    base, head = (filled(SideDoc, answer, environment=name) for name, answer in sides)
    return filled(DiffDoc, found, job=found.title, gpu=found.card, base=base, head=head)
