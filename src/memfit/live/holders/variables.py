"""Where a program's names are: the variables of functions (running, or of a traceback) and of modules that are no library."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from inspect import CO_OPTIMIZED
from types import FrameType, ModuleType
from typing import Any

from memfit._package import FOLDER
from memfit.explain.frames import library

OURS = str(FOLDER)  # memfit itself holds what it looks at
OURS_ALONE = 3  # references to a frame's copy of its variables: the frame's, ours, and the call's that counts them
WIDEST = 2000  # items of one container that are looked at

CACHE_OF = "the cache of "  # and a function, in place of a path: what functools.cache keeps has no name
Place = tuple[str, int, str]  # of a function: file, first line, name


@dataclass(frozen=True, slots=True)
class Found:
    """A name in the program: `path` as the program would write it, in `file`, inside `function` that begins at line `first`
    (0: inside the class of that name; no function: anywhere in the file)."""

    path: str
    file: str
    first: int
    function: str


def running() -> Iterator[FrameType]:
    """Every function that is running, in every thread, innermost first."""
    for top in sys._current_frames().values():
        frame: FrameType | None = top
        while frame is not None:
            yield frame
            frame = frame.f_back


def variables_of(frame: FrameType) -> dict[str, Any]:
    """The variables of a running function. Before Python 3.13 looking at them makes a copy that the frame keeps, and with it
    tensors that the function has long let go: the copy is emptied, unless the program asked for it (`locals()`)."""
    kept = frame.f_locals
    found = dict(kept)
    if frame.f_code.co_flags & CO_OPTIMIZED and sys.getrefcount(kept) <= OURS_ALONE and type(kept) is dict:
        kept.clear()
    return found


@lru_cache(maxsize=4096)
def own(file: str) -> bool:
    """Is this file the user's (a notebook's cell, too): no library's, not memfit's, not made by a program?"""
    return file.startswith("<ipython") or not (file.startswith((OURS, "<")) or library(file))


class Roots:
    """All names there are now, by the identity of what they are bound to. A thing with several has its module's, else that
    of the first of `frames`; those of library functions come last."""

    def __init__(self, frames: Callable[[], Iterable[FrameType]] = running) -> None:
        self._frames = frames  # asked anew each time: frames that are kept keep their tensors
        self.names: dict[int, Found] = {}
        for name, value, file in _globals():
            self.names.setdefault(id(value), Found(name, file, 0, ""))
        self.running: list[Place] = []
        for frame in self._others():
            self._frame(frame)

    def _others(self) -> Iterator[FrameType]:
        return (frame for frame in self._frames() if not frame.f_code.co_filename.startswith(OURS))

    def _frame(self, frame: FrameType) -> None:
        code = frame.f_code
        self.running.append((code.co_filename, code.co_firstlineno, code.co_name))
        whole = code.co_name == "<module>"
        for name, value in variables_of(frame).items():
            if name.startswith("__"):
                continue
            found = Found(name, code.co_filename, 0 if whole else code.co_firstlineno, "" if whole else code.co_name)
            known = self.names.get(id(value))
            if known is None or (library(known.file) and not library(code.co_filename)):
                self.names[id(value)] = found

    def named(self) -> Iterator[tuple[Found, Any]]:
        """Every name with what it is bound to."""
        for frame in self._others():
            yield from ((self.names[id(v)], v) for v in variables_of(frame).values() if id(v) in self.names)
        yield from ((self.names[id(value)], value) for _, value, _ in _globals() if id(value) in self.names)

    def variables(self) -> Iterator[tuple[Found, Any]]:
        """Every name with what it is bound to, and what lies one level below: attributes and items."""
        for found, value in self.named():
            yield found, value
            yield from ((replace(found, path=found.path + step), item) for step, item in _below(value))


def _below(value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, dict):
        return [(key_text(key), item) for key, item in list(value.items())[:WIDEST]]
    if isinstance(value, type | ModuleType):
        return []
    return [(f".{name}", item) for name, item in list(getattr(value, "__dict__", {}).items())[:WIDEST]]


def key_text(key: Any) -> str:
    """How a program writes an item's key; long and unprintable ones are left out."""
    return f"[{key!r}]" if isinstance(key, str) and len(key) < 40 else "[...]"


def _globals() -> Iterator[tuple[str, Any, str]]:
    """(name, value, file) of every variable of the user's modules."""
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None) if isinstance(module, ModuleType) else None
        if isinstance(file, str) and own(file):
            for name, value in list(vars(module).items()):
                if not name.startswith("__") and not isinstance(value, ModuleType):
                    yield name, value, file
