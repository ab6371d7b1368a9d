"""The answer of `memfit check` as JUnit XML, which every continuous integration shows: a test case a job."""

from __future__ import annotations

from xml.sax.saxutils import escape, quoteattr

from memfit.nouns.check import CheckReport, JobResult
from memfit.report.check import difference_words, need_words, problems, role_words, share_words, verdict_words


def junit(report: CheckReport) -> str:
    """Return the XML document."""
    results = report.results
    errors = sum(result.answer is None for result in results)
    failures = sum(result.answer is not None and result.exit_code != 0 for result in results)
    seconds = sum(result.seconds for result in results)
    counts = f'tests="{len(results)}" failures="{failures}" errors="{errors}"'
    lines = [
        '<?xml version="1.0" encoding="UTF-8"?>',
        f'<testsuites name="memfit check" {counts} time="{seconds:.3f}">',
        f'<testsuite name="memfit check" {counts} skipped="0" time="{seconds:.3f}">',
        *(line for result in results for line in _case(report, result)),
        "</testsuite>",
        "</testsuites>",
    ]
    return "\n".join(lines) + "\n"


def _case(report: CheckReport, result: JobResult) -> list[str]:
    name, suite = _attribute(result.job.name), _attribute(report.file)
    lines = [f'<testcase name={name} classname={suite} time="{result.seconds:.3f}">']
    said = list(problems(result))
    if said:
        kind = "error" if result.answer is None else "failure"
        if result.exit_code:
            what = _attribute(verdict_words(result)[0])
            lines.append(f"<{kind} message={_attribute(said[0])} type={what}>{_text(chr(10).join(said))}</{kind}>")
    lines.append(f"<system-out>{_text(chr(10).join(_told(result)))}</system-out>")
    return [*lines, "</testcase>"]


def _told(result: JobResult) -> list[str]:
    told = [f"{verdict_words(result)[0]}: {need_words(result)}"]
    if result.since:
        told.append(result.since)
    if result.difference is not None:
        told.append(difference_words(result.difference))
        if not result.difference.same:
            told += [f"by role: {role_words(result.difference)}", *share_words(result.difference)]
    return told


def _clean(text: str) -> str:
    """Return text without what XML cannot hold."""
    return "".join(c if c in "\n\t" or (c.isprintable() and not 0xD800 <= ord(c) < 0xE000) else "\ufffd" for c in text)


def _text(text: str) -> str:
    return escape(_clean(text))


def _attribute(text: str) -> str:
    return quoteattr(" ".join(_clean(text).split()))
