"""The answer of `memfit check` as Markdown, for the comment on a pull request."""

from __future__ import annotations

from memfit.nouns.check import CheckReport
from memfit.report.check import (
    cause_words,
    difference_words,
    need_words,
    problems,
    role_words,
    share_words,
    signed,
    verdict_change,
    verdict_words,
)

MARKER = "<!-- memfit check -->"  # by which the comment is found again
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
        said = [_plain(line) for line in problems(result)]
        found = result.difference
        if result.since:
            said.append(_plain(result.since))
        if found is not None and not found.same:
            said.append(_plain(difference_words(found)))
            said += [_plain(verdict_change(result))] if verdict_change(result) else []
            said.append(f"by role: {_plain(role_words(found))}")
            said += [_plain(line) for line in share_words(found)]
            said += [_plain(cause_words(one)) for one in found.causes[1:]]
        if said:
            lines += ["", f"**{_plain(result.job.name)}**", "", *(f"- {line}" for line in said)]
    return "\n".join(lines) + "\n"


def _plain(text: str) -> str:
    """Return text of which Markdown and HTML read nothing, on one line."""
    return " ".join(text.split()).translate(_SPECIAL)


def _code(text: str) -> str:
    return " ".join(text.split()).replace("`", "")
