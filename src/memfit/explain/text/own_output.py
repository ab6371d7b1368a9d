"""Remove from a log what memfit printed itself: a prediction that memory runs out is no evidence that it did."""

from __future__ import annotations

import re

from memfit.nouns.finding import CAUSES

MOST_LINES = 400  # lines of a traceback or an explanation that are looked at

# the verdict of a trace or an estimate; its reasons follow, indented
_VERDICT = re.compile(r"(?:FITS|TOO TIGHT TO PROMISE|DOES NOT FIT)  (?:peak |out of memory in )")
_LABELLED = re.compile(r"(?:note|hint|smallest): ")
_HANGING = re.compile(r" {4,}\S")
# the end of a traced script that ran out, behind its traceback
_TRACED = re.compile(r"note: out of memory at .{0,400}; a larger --gpu shows what the whole run needs")
_TRACEBACK = re.compile(r"Traceback \(most recent call last\)")
# an explanation: from the cause to the commands it suggests
_CAUSE = re.compile(r"([A-Z][A-Z0-9-]{2,30}|NOT KNOWN)  (?:(?:certain|likely|possible) |\S)")
_NAMES = frozenset(cause.upper() for cause in CAUSES) | {"NOT KNOWN"}
_NEXT = re.compile(r"next: memfit ")
_FURTHER = re.compile(r" {6}memfit ")


def without_own_output(text: str) -> str:
    """Return a log without memfit's verdicts, the tracebacks of scripts that it traced, and its explanations."""
    if "memfit" not in text and not _VERDICT.search(text):
        return text
    lines = text.splitlines(keepends=True)
    own = [False] * len(lines)
    traceback = -1
    for number, line in enumerate(lines):
        if _TRACEBACK.match(line):
            traceback = number
        elif _VERDICT.match(line):
            _mark(own, number, _hanging(lines, number))
        elif _TRACED.match(line):
            _mark(own, traceback if number - MOST_LINES < traceback >= 0 else number, number + 1)
            traceback = -1
        elif _LABELLED.match(line):
            own[number] = True
        elif (found := _CAUSE.match(line)) and found[1] in _NAMES:
            _mark(own, number, _explained(lines, number))
    return "".join(line for line, is_own in zip(lines, own, strict=True) if not is_own)


def _mark(own: list[bool], begin: int, end: int) -> None:
    own[begin:end] = [True] * (end - begin)


def _hanging(lines: list[str], begin: int) -> int:
    """Return the end of the indented lines that follow a line."""
    end = begin + 1
    while end < len(lines) and _HANGING.match(lines[end]):
        end += 1
    return end


def _explained(lines: list[str], begin: int) -> int:
    """Return the end of an explanation: behind the commands it suggests, or its first line where there are none."""
    for number in range(begin, min(begin + MOST_LINES, len(lines))):
        if _NEXT.match(lines[number]):
            end = number + 1
            while end < len(lines) and _FURTHER.match(lines[end]):
                end += 1
            return end
    return begin + 1
