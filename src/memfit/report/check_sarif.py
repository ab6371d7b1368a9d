"""The answer of `memfit check` as SARIF 2.1.0, which code hosts show beside the line."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from memfit.nouns.check import CheckReport, JobResult
from memfit.report.check import cause_words, difference_words, problems, role_words

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
    for rule, text in zip(rules, said, strict=True):
        places = [own]
        if rule == "grows":
            leak = answer.leaks[len(answer.leaks) - (len(rules) - rules.index("grows"))] if answer.leaks else None
            places = _kept_at(leak) or [own] if leak else [own]
        yield _one(result, rule, text, places)
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


def _kept_at(leak: Any) -> list[Place]:
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
                "artifactLocation": {"uri": _uri(file), "uriBaseId": "%SRCROOT%"},
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


def _uri(file: str) -> str:
    from urllib.parse import quote

    return quote(file.replace("\\", "/"))
