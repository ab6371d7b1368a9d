"""A log split at its failures: a run that ran out, was started again and ran out elsewhere has two causes, not a mixture.

Ranks that fail at the same moment are one failure, and so is what follows of it: the traceback printed again, NCCL's and the
launcher's own words.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from memfit.explain.evidence import HEAD, TAIL
from memfit.explain.frames import frames_of
from memfit.explain.oom_message import begun

AFTER = 16 << 10  # characters after a message that still tell of it
BEFORE = 64 << 10  # characters before a message in which its traceback stands
MOST = 1000  # messages looked at: the last
CONSEQUENCES = ("host", "nccl")  # a rank that failed takes the others with it

_RANK = re.compile(
    r"\W{0,3}(?:default|(?:local_)?rank ?)(\d{1,5})\]?:|\[\d+,(\d{1,5})\]<std\w+>:|(\d{1,5}): |\(\S{1,80} pid=(\d+)"
)
_CARD = re.compile(r"\bgpu:? (\d{1,3})\b")
_ASKED = re.compile(r"tried to allocate (?:more than )?([\d.]+ ?\w+)")
_LAUNCHER = re.compile(r"torch/distributed/(?:run|launcher|elastic)|torchrun|accelerate/commands")
_TRACEBACK = re.compile(r'traceback \(most recent|file "')
# another run begins; a run works
_BEGINS = re.compile(
    r"\bre-?start(?:ing|ed)?\b|\bresum(?:ing|ed)\b|\bretry(?:ing)?\b|\battempt \d|loading checkpoint shards|^\$ ",
    re.MULTILINE,
)
_STEPS = re.compile(r"^(?!\s).*\b(?:loss|epoch|step)['\"]?[ :=/]{1,3}\d", re.MULTILINE)  # no code of a frame
_BAR = re.compile(r"\d(?:it/s|s/it)\b")
BARS = 2  # a single one is redrawn where it ends
_CHAINED = re.compile(r"during handling of the above|direct cause of the following")


@dataclass(frozen=True, slots=True)
class _Event:
    """A message from its first word to the end of its line: whose it is, what it asked for, and the innermost frame above it."""

    begin: int
    end: int
    kind: str
    who: tuple[str, str]  # rank and card, "" where not said
    asked: str
    site: str


def split(text: str) -> tuple[str, ...]:
    """The text of each failure in order: what the log begins with, and what stands between the message before and its own.

    A text with one failure, or with none that a message tells of, is that text; a long one ends soon after the message.
    """
    low = text.lower()
    if len(low) != len(text):  # a few letters become two
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
    """Where the failure has been told: what a launcher says much later is no part of it."""
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
    """Is it one more word of the same failure?"""
    before_traceback = between[: found.start() if (found := _TRACEBACK.search(between)) else len(between)]
    # what is printed late may stand behind the error
    if not event.site and (not event.asked or event.kind in CONSEQUENCES):
        return not (_BEGINS.search(before_traceback) and _works(before_traceback))
    # another rank, or the same printed again
    if any((old.site, old.asked) == (event.site, event.asked) for old in group):
        return True
    chained = max((hit.end() for hit in _CHAINED.finditer(between)), default=0)
    if chained and not (_BEGINS.search(between, chained) and _works(between[chained:])):
        return True
    if _BEGINS.search(before_traceback) or _works(before_traceback):
        return False
    again = event.who in {old.who for old in group} and any(event.who)  # the same card asks for something else
    return not (again and event.site and event.asked not in {old.asked for old in group})


def _works(text: str) -> bool:
    """Steps were taken in it."""
    return _STEPS.search(text) is not None or len(_BAR.findall(text)) >= BARS


def _events(text: str, low: str) -> list[_Event]:
    """`low`: the text in small letters, as long as it."""
    found: list[_Event] = []
    ends: dict[str, int] = {}  # of the last event, of all and of each rank
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
        card, asked = _CARD.search(line), _ASKED.search(line)
        found.append(_Event(begin, end, kind, (rank, card[1] if card else ""), asked[1] if asked else "", site))
        ends[rank] = ends[""] = end
    return found
