"""The JSON document of `memfit check`."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from memfit.nouns.check import CheckReport, JobDifference, JobFailure, JobResult, PhaseShares
from memfit.nouns.plan import Verdict
from memfit.nouns.sample import Leak


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


class CheckDoc(Struct, frozen=True, kw_only=True):
    """`memfit check --json`."""

    schema: Literal["memfit.check/1"] = "memfit.check/1"
    file: str
    base: Annotated[str, Meta(description="the commit that was compared with; '' for none")]
    exit_code: int
    jobs: tuple[JobDoc, ...]


def check_doc(report: CheckReport) -> CheckDoc:
    """Make the document of a check."""
    return CheckDoc(
        file=report.file, base=report.base, exit_code=report.exit_code, jobs=tuple(map(_job, report.results))
    )


def _job(result: JobResult) -> JobDoc:
    answer = result.answer
    return JobDoc(
        name=result.job.name, gpu=result.job.gpu, exit_code=result.exit_code,
        verdict=answer.verdict if answer else None, usable=answer.usable if answer else None,
        need=answer.need if answer else None, band=answer.band if answer else None,
        source=answer.source if answer else None, phases=answer.phases if answer else (),
        leaks=answer.leaks if answer else (), not_understood=answer.not_understood if answer else (),
        over_budget=tuple(BudgetDoc(budget=b.text, bytes=size) for b, size in result.over),
        ran_out=answer.ran_out if answer else "", notes=answer.notes if answer else (), failure=result.failure,
        kept=result.kept, seconds=result.seconds, difference=result.difference, no_difference=result.since,
    )  # fmt: skip
