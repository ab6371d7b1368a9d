"""Split a log at its failures, so that each failure of a restarted run is explained by its own text.

Ranks that fail at the same moment are one failure. So are its consequences: the traceback printed again, and the
messages of NCCL and of the launcher.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from memfit.explain.evidence import HEAD, TAIL
from memfit.explain.frames import frames_of
from memfit.explain.oom_message import begun
from memfit.nouns.finding import CAUSES

AFTER = 16 << 10  # characters after a message that still belong to it
BEFORE = 64 << 10  # characters before a message that contain its traceback
MOST = 1000  # messages that are examined, the last ones
CONSEQUENCES = ("host", "nccl")  # kinds of messages of ranks that another failed rank takes down

_RANK = re.compile(
    r"\W{0,3}(?:default|(?:local_)?rank ?)(\d{1,5})\]?:|\[\d+,(\d{1,5})\]<std\w+>:|(\d{1,5}): |\(\S{1,80} pid=(\d+)"
)
_CARD = re.compile(r"\bgpu:? (\d{1,3})\b")
_REQUEST = re.compile(r"tried to allocate (?:more than )?([\d.]+ ?\w+)")
_LAUNCHER = re.compile(r"torch/distributed/(?:run|launcher|elastic)|torchrun|accelerate/commands")
_TRACEBACK = re.compile(r'traceback \(most recent|file "')
# another run begins
_BEGINS = re.compile(
    r"\bre-?start(?:ing|ed)?\b|\bresum(?:ing|ed)\b|\bretry(?:ing)?\b|\battempt \d|loading checkpoint shards|^\$ ",
    re.MULTILINE,
)
# steps are taken; not the code of a frame
_STEPS = re.compile(r"^(?!\s).*\b(?:loss|epoch|step)['\"]?[ :=/]{1,3}\d", re.MULTILINE)
_BAR = re.compile(r"\d(?:it/s|s/it)\b")
BARS = 2  # progress bars that show steps; a single one may be redrawn at the end
_CHAINED = re.compile(r"during handling of the above|direct cause of the following")


@dataclass(frozen=True, slots=True)
class _Event:
    """A message to the end of its line, with its rank and card, its request and the innermost frame above."""

    begin: int
    end: int
    kind: str
    who: tuple[str, str]  # rank and card, "" where not printed
    request: str
    site: str


def split(text: str) -> tuple[str, ...]:
    """Return the text of each failure in order: the head of the log, and the text from the previous failure to its own.

    A text with one failure or without any message is returned whole; a long one is cut soon after its message.
    """
    low = text.lower()
    if len(low) != len(text):  # lowering turns a few letters into two
        low = "".join(c.lower() if c.isascii() else c for c in text)
    groups = _groups(text, low)
    if not groups or (len(groups) == 1 and len(text) <= HEAD + TAIL):
        return (text,)
    first = groups[0][0].begin
    traceback = _TRACEBACK.search(low, 0, first)
    start = text[: min(HEAD, traceback.start() if traceback else first)]
    found, begin = [], 0
    for number, group in enumerate(groups):
        last = _end(group)
        end = min(last + AFTER, len(text)) if number + 1 == len(groups) else last
        found.append((f"{start}\n" if begin else "") + text[begin:end])
        begin = last
    return tuple(found)


def _end(group: Sequence[_Event]) -> int:
    """Return where the failure ends; what a launcher prints much later is no part of it."""
    end = group[0].end
    for event in group:
        if event.begin > end + AFTER:
            break
        end = max(event.end, end)
    return end


def _groups(text: str, low: str) -> list[list[_Event]]:
    groups: list[list[_Event]] = []
    for event in _events(text, low):
        if groups and _same(groups[-1], event, low[groups[-1][-1].end : event.begin]):
            groups[-1].append(event)
        else:
            groups.append([event])
    return groups


def _same(group: Sequence[_Event], event: _Event, between: str) -> bool:
    """Does the event belong to the same failure as the group?"""
    before_traceback = between[: found.start() if (found := _TRACEBACK.search(between)) else len(between)]
    # output of before the error may be printed after it
    if not event.site and (not event.request or event.kind in CONSEQUENCES):
        return not (_BEGINS.search(before_traceback) and _works(before_traceback))
    # another rank, or the same message printed again
    if any((old.site, old.request) == (event.site, event.request) for old in group):
        return True
    chained = max((hit.end() for hit in _CHAINED.finditer(between)), default=0)
    if chained and not (_BEGINS.search(between, chained) and _works(between[chained:])):
        return True
    if _BEGINS.search(before_traceback) or _works(before_traceback):
        return False
    again = event.who in {old.who for old in group} and any(event.who)  # another request of the same card
    return not (again and event.site and event.request not in {old.request for old in group})


def _works(text: str) -> bool:
    """Were steps taken in this part of a log?"""
    return _STEPS.search(text) is not None or len(_BAR.findall(text)) >= BARS


def _events(text: str, low: str) -> list[_Event]:
    """Return the events of a text; `low` is the text in lower case, of the same length."""
    found: list[_Event] = []
    ends: dict[str, int] = {}  # of the last event of each rank, and of all ranks under ""
    for begin, kind in list(begun(low))[-MOST:]:
        start = low.rfind("\n", 0, begin) + 1
        end = low.find("\n", begin)
        end = len(low) if end < 0 else end
        line = low[begin:end]
        mark = _RANK.match(low, start, end)
        rank = next(filter(None, mark.groups()), "") if mark else ""
        since = max(ends.get(rank, 0), begin - BEFORE)
        above = text[since:start]
        if mark:
            above = "\n".join(part for part in above.splitlines() if part.lower().startswith(mark[0]))
        frames = [frame for frame in frames_of(above) if not _LAUNCHER.search(frame.path)]
        site = f"{frames[-1].path}:{frames[-1].line}" if frames else ""
        card, request = _CARD.search(line), _REQUEST.search(line)
        found.append(_Event(begin, end, kind, (rank, card[1] if card else ""), request[1] if request else "", site))
        ends[rank] = ends[""] = end
    return found


# ---- what memfit printed itself: a prediction that memory runs out is no evidence that it did

MOST_LINES = 400  # lines of a traceback or an explanation that are looked at

# the verdict of a trace or an estimate; its reasons follow, indented
_VERDICT = re.compile(r"(?:FITS|TOO TIGHT TO PROMISE|DOES NOT FIT)  (?:peak |out of memory in )")
_LABELLED = re.compile(r"(?:note|hint|smallest): ")
_HANGING = re.compile(r" {4,}\S")
# the end of a traced script that ran out, behind its traceback
_TRACED = re.compile(r"note: out of memory at .{0,400}; a larger --gpu shows what the whole run needs")
_UNCAUGHT = re.compile(r"Traceback \(most recent call last\)")
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
        if _UNCAUGHT.match(line):
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
