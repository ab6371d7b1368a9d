"""The answer of `memfit check` for others: SARIF, JUnit XML, and Markdown for the comment on a pull request."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote
from xml.sax.saxutils import escape, quoteattr

from memfit.nouns.check import CheckReport, JobResult
from memfit.nouns.sample import Leak
from memfit.report.check import (
    cause_words,
    difference_words,
    need_words,
    problems,
    role_words,
    signed,
    told,
    verdict_words,
)

# ---- SARIF 2.1.0, which code hosts show beside the line --------------------------------------------------------------

SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
RULES: dict[str, tuple[str, str]] = {  # rule -> (level, what it finds)
    "misfit": ("error", "A job does not fit its card."),
    "over-budget": ("error", "A job needs more than its budget."),
    "grows": ("error", "A job needs more memory from step to step."),
    "no-answer": ("error", "A job could not be judged."),
    "tight": ("warning", "A job is too close to its card's memory to promise that it fits."),
    "not-judged": ("warning", "A setting that can change memory was not understood."),
    "adds-memory": ("warning", "A change makes a job need more memory."),
    "saves-memory": ("note", "A change makes a job need less memory."),
}
Place = tuple[str, int, int]  # file, line, and the last line of several; 0 for one


def sarif(report: CheckReport, version: str) -> dict[str, Any]:
    """Return the SARIF document. version: that of memfit."""
    results = [one for result in report.results for one in _results(report, result)]
    used = [name for name in RULES if any(one["ruleId"] == name for one in results)]
    for one in results:
        one["ruleIndex"] = used.index(one["ruleId"])
    rules = [
        {"id": name, "shortDescription": {"text": RULES[name][1]}, "defaultConfiguration": {"level": RULES[name][0]}}
        for name in used
    ]
    driver = {"name": "memfit", "version": version, "rules": rules}
    failed = any(result.failure for result in report.results)
    run = {
        "tool": {"driver": driver},
        "columnKind": "unicodeCodePoints",
        "invocations": [{"executionSuccessful": not failed, "exitCode": report.exit_code}],
        "results": results,
    }
    return {"$schema": SCHEMA, "version": "2.1.0", "runs": [run]}


def _results(report: CheckReport, result: JobResult) -> Iterator[dict[str, Any]]:
    answer, found = result.answer, result.difference
    own = _own_line(report, result)
    if answer is None:
        yield _one(result, "no-answer", "; ".join(problems(result)), [_failed_at(report, result)])
        return
    said = list(problems(result))
    rules = [] if answer.verdict == "fits" else [answer.verdict.replace("_", "-")]
    rules += ["over-budget"] * len(result.over) + ["grows"] * len(answer.leaks)
    leaks = iter(answer.leaks)
    for rule, text in zip(rules, said, strict=True):
        places = _kept_at(next(leaks)) if rule == "grows" else []
        yield _one(result, rule, text, places or [own])
    if found is not None and not found.same:
        places = [(one.file, one.line, one.last) for one in found.causes] or [own]
        text = f"{difference_words(found)}. By role: {role_words(found)}"
        if len(found.causes) > 1:
            text += f". Also: {'; '.join(map(cause_words, found.causes[1:]))}"
        yield _one(result, "adds-memory" if found.added >= 0 else "saves-memory", text, places)


def _failed_at(report: CheckReport, result: JobResult) -> Place:
    """Return the line of the script that failed, which its error begins with; else where the job stands."""
    said = re.match(r"([\w./-]+\.py):(\d+): ", result.failure.message if result.failure else "")
    if said is None or said[1].startswith("/"):
        return report.file, result.job.line, 0
    return _inside(report, result, said[1]), int(said[2]), 0


def _inside(report: CheckReport, result: JobResult, file: str) -> str:
    """Return a file that is named relative to the job's folder as it is in the repository."""
    folder = result.job.folder.removeprefix("./").strip("/")
    return "/".join(part for part in (report.file.rpartition("/")[0], "" if folder == "." else folder, file) if part)


def _kept_at(leak: Leak) -> list[Place]:
    places = []
    for holder in leak.holders:
        file, _, line = holder.place.rpartition(":")
        if file and line.isdecimal():
            places.append((file, int(line), 0))
    return places


def _own_line(report: CheckReport, result: JobResult) -> Place:
    """Return the line of the repository that holds most at the peak; else where the job stands in its file."""
    peak = result.answer.peak if result.answer else None
    sums: dict[str, int] = {}
    for share in peak.shares if peak else ():
        if share.lines:
            sums[share.lines[0]] = sums.get(share.lines[0], 0) + share.bytes
    if not sums:
        job = result.job
        return (_inside(report, result, job.config), 1, 0) if job.config else (report.file, job.line, 0)
    file, _, line = max(sums, key=lambda place: sums[place]).rpartition(":")
    return file, int(line), 0


def _one(result: JobResult, rule: str, text: str, places: list[Place]) -> dict[str, Any]:
    locations = [
        {
            "physicalLocation": {
                "artifactLocation": {"uri": quote(file.replace("\\", "/")), "uriBaseId": "%SRCROOT%"},
                "region": {"startLine": max(line, 1)} | ({"endLine": last} if last else {}),
            }
        }
        for file, line, last in places
    ]  # fmt: skip
    return {
        "ruleId": rule,
        "level": RULES[rule][0],
        "message": {"text": f"{result.job.name}: {text}"},
        "locations": locations[:1],
        "relatedLocations": [{"id": n, **one} for n, one in enumerate(locations[1:], 1)],
        "partialFingerprints": {"memfitJob/v1": f"{result.job.name}:{rule}"},
        "properties": {"job": result.job.name},
    }


# ---- JUnit XML, which every continuous integration shows: a test case a job ------------------------------------------


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
    shown = [f"{verdict_words(result)[0]}: {need_words(result)}"]
    shown += [f"{label} {line}".strip() for label, line in told(result) if label != "problem:"]
    lines.append(f"<system-out>{_text(chr(10).join(shown))}</system-out>")
    return [*lines, "</testcase>"]


def _clean(text: str) -> str:
    """Return text without what XML cannot hold."""
    return "".join(c if c in "\n\t" or (c.isprintable() and not 0xD800 <= ord(c) < 0xE000) else "\ufffd" for c in text)


def _text(text: str) -> str:
    return escape(_clean(text))


def _attribute(text: str) -> str:
    return quoteattr(" ".join(_clean(text).split()))


# ---- Markdown --------------------------------------------------------------------------------------------------------

MARKER = "<!-- memfit check -->"  # by which the comment is found again
LABELLED = ("hint:", "by role:")  # sentences that need their label
_SPECIAL = str.maketrans({c: f"\\{c}" for c in "\\`*_[]<>|#~"})


def markdown(report: CheckReport) -> str:
    """Return the whole comment."""
    against = f" against `{_code(report.base)}`" if report.base else ""
    lines = [MARKER, f"### memfit check{against}", ""]
    head = ["job", "card", "verdict", "peak, reserved", *(["added"] if report.base else [])]
    lines += [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    for result in report.results:
        found = result.difference
        cells = [
            f"**{_plain(result.job.name)}**", _plain(result.job.gpu), verdict_words(result)[0],
            _plain(need_words(result)),
        ]  # fmt: skip
        if report.base:
            cells.append(signed(found.head_need - found.base_need) if found else "-")
        lines.append(f"| {' | '.join(cells)} |")
    for result in report.results:
        same = result.difference is not None and result.difference.same  # most jobs; the comment is on what changes
        rows = [(label, _plain(line)) for label, line in told(result) if label != "change:" or not same]
        said = [f"{label} {line}" if label in LABELLED else line for label, line in rows]
        if said:
            lines += ["", f"**{_plain(result.job.name)}**", "", *(f"- {line}" for line in said)]
    return "\n".join(lines) + "\n"


def _plain(text: str) -> str:
    """Return text of which Markdown and HTML read nothing, on one line."""
    return " ".join(text.split()).translate(_SPECIAL)


def _code(text: str) -> str:
    return " ".join(text.split()).replace("`", "")
