"""Where an allocation of a running program comes from: the user's own line, and what a library made it for."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import lru_cache
from types import CodeType, FrameType

from memfit.documents.snapshot.origins import Origin, made_for, of_both
from memfit.documents.snapshot.passes import Site
from memfit.live.holders.names import own


def birth() -> tuple[str, Origin]:
    """The innermost line on this thread's stack that is no library's, "train.py:41", and what it asked a library for."""
    found: Origin = ""
    for frame in _frames():
        if own(frame.f_code.co_filename):
            return f"{frame.f_code.co_filename.rsplit('/', 1)[-1]}:{frame.f_lineno}", found
        found = of_both(found, _made_for(frame.f_code))
    return "", found


def site() -> Site:
    """All lines on this thread's stack that are no library's, outermost first."""
    lines = [(f.f_code.co_filename, f.f_code.co_name, f.f_lineno) for f in _frames() if own(f.f_code.co_filename)]
    return tuple(reversed(lines))


def _frames() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        yield frame
        frame = frame.f_back


@lru_cache(maxsize=4096)
def _made_for(code: CodeType) -> Origin:
    return made_for(code.co_filename.replace("\\", "/"), code.co_name)
