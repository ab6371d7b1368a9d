"""The answer of `memfit check` in a terminal, and the sentences that all its formats share."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.text import Text

from memfit.nouns.check import CausePlace, CheckReport, JobDifference, JobResult
from memfit.nouns.plan import Verdict
from memfit.report.layout import Column, Grid, paragraphs, text
from memfit.report.watching import holder_words
from memfit.report.words import POOL, ROLE_WORDS, VERDICT_WORDS, host_over_words, phase_title
from memfit.units import human, rough, several

SHOWN = 4  # roles and shares of a difference that are named
SMALL = 0.02  # of what was added: smaller shares are not named
FOUND: dict[str, str] = {
    "allocates": "allocated there", "key": "by this key alone", "only": "the only change that the job reads",
    "alone": "by this change alone", "without": "gone without this change",
}  # fmt: skip


def verdict_words(result: JobResult) -> tuple[str, str]:
    """Return (words, style) of a job's outcome."""
    if result.answer is None:
        return "NO ANSWER", "bold red"
    if result.answer.verdict == "misfit":
        return VERDICT_WORDS["misfit"]
    if result.answer.leaks:
        return "GROWS", "bold red"
    if result.over:
        return "OVER ITS BUDGET", "bold red"
    return VERDICT_WORDS[result.answer.verdict]


def need_words(result: JobResult) -> str:
    """Return '18.6 GiB of 23.2 GiB', with the line where memory ran out."""
    answer = result.answer
    if answer is None:
        return result.failure.message if result.failure else ""
    size = f"{rough(answer.need)} reserved of {rough(answer.usable)}"
    if answer.verdict == "not_judged":
        return f"{size}, without what {', '.join(answer.not_understood)} changes"
    if answer.host and answer.host.over:
        return f"{size}, {host_over_words(answer.host)}"
    return f"{size}, out of memory at {answer.ran_out}" if answer.ran_out else size


def signed(size: int) -> str:
    """Return bytes with their sign: '+3.10 GiB'."""
    return f"+{human(size)}" if size > 0 else human(size)


def difference_words(found: JobDifference) -> str:
    """Return what a change adds, at which instant, and where: the sentence that a pull request needs."""
    if found.same:
        return "the same bytes in every phase"
    where = f"at {found.instant} ({phase_title(found.phase)})"
    if found.added:
        verb = "adds" if found.added > 0 else "saves"
        said = f"this change {verb} {human(abs(found.added))} {where}"
    elif found.host_added:
        verb = "adds" if found.host_added > 0 else "saves"
        said = f"this change {verb} {human(abs(found.host_added))} of host RAM"
    else:
        said = f"this change moves bytes between roles {where}"
    if not found.causes:
        return said
    return f"{said}, because of {'; '.join(map(cause_words, found.causes[:1]))}"


def cause_words(one: CausePlace) -> str:
    """Return 'train.py:88: logits = logits.float() (+2.00 GiB, allocated there)'."""
    code = f": {one.code.rstrip(',')}" if one.code else ""
    gone = "removed, " if one.removed else ""
    return f"{one.place}{code} ({gone}{signed(one.added)}, {FOUND[one.found]})"


def role_words(found: JobDifference) -> str:
    """Return the roles that changed: 'activations +2.10 GiB, temporaries +1.00 GiB'."""
    most = max((abs(role.added) for role in found.roles), default=0)
    rows = [role for role in found.roles if abs(role.added) >= SMALL * most and role.added]
    said = [f"{ROLE_WORDS[row.role].title} {signed(row.added)}" for row in rows[:SHOWN]]
    return ", ".join([*said, f"host RAM {signed(found.host_added)}"] if found.host_added else said)


def share_words(found: JobDifference) -> list[str]:
    """Return the tensors that changed most, with their line."""
    most = max((abs(share.added) for share in found.shares), default=0)
    rows = [share for share in found.shares if abs(share.added) >= SMALL * most][:SHOWN]
    return [
        f"{signed(row.added)} {ROLE_WORDS[row.role].title}: {row.label}{f' at {row.lines[0]}' if row.lines else ''}"
        for row in rows
    ]


def problems(result: JobResult) -> Iterator[str]:
    """Yield what fails a job, as sentences."""
    if result.failure:
        yield result.failure.message
    answer = result.answer
    if answer is None:
        return
    if answer.verdict == "misfit":
        host = answer.host if answer.need <= answer.usable else None
        where = f"{rough(host.given)} of {POOL[host.shared]}" if host and host.over else answer.card
        yield f"does not fit {where}: {need_words(result)}"
    if answer.verdict == "tight":
        yield f"too tight to promise on {answer.card}: {need_words(result)}, within {rough(answer.band)}"
    if answer.verdict == "not_judged":
        yield f"not judged: {', '.join(answer.not_understood)} can change memory"
    for budget, size in result.over:
        yield f"over its budget {budget.text}: {human(size)} {budget.level}"
    for leak in answer.leaks:
        kept = "; ".join(map(holder_words, leak.holders)) or "no Python name leads to it"
        yield f"grows by {human(leak.per_step)} a {leak.unit}: {kept}"


def verdict_change(result: JobResult) -> str:
    """Return 'fits -> does not fit' where a change moves the verdict; '' where not."""
    found, answer = result.difference, result.answer
    if found is None or answer is None or found.base_verdict == answer.verdict:
        return ""

    def said(verdict: Verdict) -> str:
        return VERDICT_WORDS[verdict][0].lower()

    return f"{said(found.base_verdict)} -> {said(answer.verdict)}"


def check_view(report: CheckReport) -> Group:
    """Show the answer of `memfit check`."""
    against = f", against {report.base}" if report.base else ""
    kept = sum(result.kept for result in report.results)
    from_cache = f", {kept} unchanged and not judged again" if kept else ""
    count = len(report.results)
    parts: list[RenderableType] = [
        text(f"{several(count, 'job')} of {report.file}{against}{from_cache}", "bold"), "", _table(report),
    ]  # fmt: skip
    for result in report.results:
        rows = list(told(result))
        if rows:
            parts += ["", text(result.job.name, "bold"), paragraphs(rows)]
    return Group(*parts)


def _table(report: CheckReport) -> Grid:
    columns = [Column("job"), Column("card"), Column("verdict"), Column("peak, reserved", wraps=20)]
    if report.base:
        columns.append(Column("added", right=True))
    rows: list[list[Text | str]] = []
    for result in report.results:
        row: list[Text | str] = [result.job.name, result.job.gpu, Text(*verdict_words(result)), need_words(result)]
        if report.base:
            found = result.difference
            row.append("-" if found is None else signed(found.head_need - found.base_need))
        rows.append(row)
    return Grid(columns, rows)


def told(result: JobResult) -> Iterator[tuple[str, str]]:
    """Yield what there is to say of a job, as a label and a sentence; "" is the label of the line before."""
    for line in problems(result):
        yield "problem:", line
    if result.failure and result.failure.hint:
        yield "hint:", result.failure.hint
    if result.since:
        yield "note:", result.since
    found = result.difference
    if found is None:
        return
    yield "change:", difference_words(found)
    if moved := verdict_change(result):
        yield "verdict:", moved
    if found.same:
        return
    yield "by role:", role_words(found)
    for number, line in enumerate(share_words(found)):
        yield "" if number else "by tensor:", line
    for one in found.causes[1:]:
        yield "also:", cause_words(one)
