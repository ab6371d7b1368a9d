"""Where a program's names are: the variables of running functions, and those of modules that are no library."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

OURS = str(Path(__file__).resolve().parent.parent)  # memfit itself holds what it looks at
LIBRARIES = ("site-packages", "dist-packages", "lib/python3", "<frozen")
WIDEST = 2000  # items of one container that are looked at


Place = tuple[str, int, str]  # of a function: file, first line, name


@dataclass(frozen=True, slots=True)
class Found:
    """A name in the program: `path` as the program would write it, in `file`, inside lines [first, last] of `function`."""

    path: str
    file: str
    first: int
    function: str


class Roots:
    """All names there are now, by the identity of what they are bound to."""

    def __init__(self) -> None:
        self.names: dict[int, Found] = {}
        for module in list(sys.modules.values()):
            self._module(module)
        self.running: list[Place] = []  # innermost first
        for frame in _frames():
            self._frame(frame)

    def _module(self, module: ModuleType) -> None:
        file = _file(module)
        if not file:
            return
        for name, value in list(vars(module).items()):
            if not name.startswith("__") and not isinstance(value, ModuleType):
                self.names.setdefault(id(value), Found(name, file, 0, ""))

    def _frame(self, frame: FrameType) -> None:
        code = frame.f_code
        if code.co_filename.startswith(OURS):
            return
        self.running.append((code.co_filename, code.co_firstlineno, code.co_name))
        whole = code.co_name == "<module>"
        for name, value in list(frame.f_locals.items()):
            if name.startswith("__"):
                continue
            found = Found(name, code.co_filename, 0 if whole else code.co_firstlineno, "" if whole else code.co_name)
            known = self.names.get(id(value))
            if known is None or (_library(known.file) and not _library(code.co_filename)):
                self.names[id(value)] = found

    def variables(self) -> Iterator[tuple[Found, Any]]:
        """Every name with what it is bound to, and what lies one level below: attributes and items."""
        for frame in _frames():
            if not frame.f_code.co_filename.startswith(OURS):
                for value in list(frame.f_locals.values()):
                    yield from self._below(value)
        for module in list(sys.modules.values()):
            if _file(module):
                for value in list(vars(module).values()):
                    yield from self._below(value)

    def _below(self, value: Any) -> Iterator[tuple[Found, Any]]:
        found = self.names.get(id(value))
        if found is None:
            return
        yield found, value
        inside: list[tuple[str, Any]] = []
        if isinstance(value, dict):
            inside = [(key_text(key), item) for key, item in list(value.items())[:WIDEST]]
        elif not isinstance(value, type | ModuleType):
            inside = [(f".{name}", item) for name, item in list(getattr(value, "__dict__", {}).items())[:WIDEST]]
        for step, item in inside:
            yield Found(found.path + step, found.file, found.first, found.function), item


def key_text(key: Any) -> str:
    """How a program writes an item's key; long and unprintable ones are left out."""
    return f"[{key!r}]" if isinstance(key, str) and len(key) < 40 else "[...]"


def _frames() -> Iterator[FrameType]:
    """Every function that is running, in every thread, innermost first."""
    for top in sys._current_frames().values():
        frame: FrameType | None = top
        while frame is not None:
            yield frame
            frame = frame.f_back


def _file(module: Any) -> str:
    """The file of a module of the user's; "" for others."""
    file = getattr(module, "__file__", None) if isinstance(module, ModuleType) else None
    return file if isinstance(file, str) and not file.startswith(OURS) and not _library(file) else ""


def _library(file: str) -> bool:
    return any(word in file.replace("\\", "/") for word in LIBRARIES)
