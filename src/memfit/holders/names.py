"""The names of a running program: its variables, what lies below them, and which files are the user's own.

Both searches use them: `retained` starts from these names and measures what each keeps; `referrers` starts from
tensors and climbs until it reaches one of them. A name is written as in the program (`history`,
`model.cache['k'][...]`) and lists the functions or classes in which a line may store into it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache
from inspect import CO_OPTIMIZED
from types import CodeType, FrameType, ModuleType
from typing import Any

from memfit._package import FOLDER
from memfit.explain.frames import library

FRAME_COPY = 3  # references to a frame's copy of its variables: the frame's, ours, and the counting call's
WIDEST = 2000  # items of one container that are inspected
ITEM = "[...]"  # an item whose key is no short text
CACHE_OF = "the cache of "  # begins the name of what functools.cache keeps: no path of the program leads there

# (file, first line, name) of a function; of a class where the line is 0; of the whole file where there is no name
Place = tuple[str, int, str]


@dataclass(frozen=True, slots=True)
class Name:
    """A name in the program. `places`: where lines may store into it, the likeliest first.

    boxes: the containers on the way from it down to a tensor, the innermost first, where the way was walked.
    """

    path: str
    places: tuple[Place, ...] = ()
    boxes: tuple[Any, ...] = field(default=(), compare=False, repr=False)

    @property
    def text(self) -> str:
        """The last part of the path: self.buffer.items -> items."""
        return self.path.rsplit(".", 1)[-1]

    def attribute(self, path: str, kind: type) -> Name:
        """Return the name of an attribute of an object of the class `kind`.

        The class's own code is likelier to store into it than the code that owns the object.
        """
        file, last = file_of(kind), self.places[-1:]
        return Name(f"{self.path}.{path}", ((file, 0, kind.__name__), *last) if file else last)

    def item(self, key: Any) -> Name:
        """Return the name of an item of a dictionary."""
        return replace(self, path=self.path + key_text(key))


def variable(name: str, code: CodeType) -> Name:
    """Return the name of a variable of a function, or of a module where `code` is a module's."""
    in_module = code.co_name == "<module>"
    place = (code.co_filename, 0, "") if in_module else (code.co_filename, code.co_firstlineno, code.co_name)
    return Name(name, (place,))


def short_line(file: str, line: int) -> str:
    """Return a line as explain shows it: train.py:12."""
    return f"{file.rsplit('/', 1)[-1]}:{line}"


def key_text(key: Any) -> str:
    """Return an item's key as a program writes it; ITEM for long keys and those that are no text."""
    return f"[{key!r}]" if isinstance(key, str) and len(key) < 40 else ITEM


# --- which files, classes and frames are the user's ---


@lru_cache(maxsize=4096)
def own(file: str) -> bool:
    """Return whether a file is the user's or a notebook cell: not a library's, not memfit's, not generated code."""
    return file.startswith("<ipython") or not (file.startswith((FOLDER, "<")) or library(file))


def file_of(kind: type) -> str:
    """Return the user's file that a class is written in, by its methods or its module; "" for a library's class."""
    codes = (getattr(member, "__code__", None) for member in vars(kind).values())
    files = [code.co_filename for code in codes if code is not None]
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    return next((f for f in (*files, file) if isinstance(f, str) and own(f)), "")


def of_the_user(kind: type) -> bool:
    """Return whether this is one of the program's own classes."""
    return kind.__module__ == "__main__" or bool(file_of(kind))


def running() -> Iterator[FrameType]:
    """Yield the frame of every running function, in every thread, innermost first."""
    for top in sys._current_frames().values():
        frame: FrameType | None = top
        while frame is not None:
            yield frame
            frame = frame.f_back


def variables_of(frame: FrameType) -> dict[str, Any]:
    """Return the variables of a running function.

    Before Python 3.13 reading them makes a copy that the frame keeps, which would hold tensors that the function
    releases later. The copy is emptied again, unless the program itself uses it (`locals()`).
    """
    kept = frame.f_locals
    found = dict(kept)
    if frame.f_code.co_flags & CO_OPTIMIZED and sys.getrefcount(kept) <= FRAME_COPY and type(kept) is dict:
        kept.clear()
    return found


# --- the roots ---


class Roots:
    """All current names, by the id of the object that they are bound to.

    An object with several names gets the one in its module, else the one in the first of `frames`; names in functions
    of libraries come last.
    """

    def __init__(self, frames: Callable[[], Iterable[FrameType]] = running) -> None:
        self._frames = frames  # called again each time, as a frame that is kept keeps its tensors
        self.names: dict[int, Name] = {}
        for name, value, file in _globals():
            self.names.setdefault(id(value), Name(name, ((file, 0, ""),)))
        self.running: list[Place] = []  # the functions of these frames
        for frame in self._without_memfit():
            self._frame(frame)

    def _without_memfit(self) -> Iterator[FrameType]:
        """Yield the frames of others: neither memfit's nor those of the importer and of runpy, which runs a script."""
        return (frame for frame in self._frames() if not frame.f_code.co_filename.startswith((FOLDER, "<frozen ")))

    def _frame(self, frame: FrameType) -> None:
        code = frame.f_code
        self.running.append((code.co_filename, code.co_firstlineno, code.co_name))
        for text, value in variables_of(frame).items():
            if text.startswith("__"):
                continue
            known = self.names.get(id(value))
            if known is None or (library(known.places[0][0]) and not library(code.co_filename)):
                self.names[id(value)] = variable(text, code)

    def named(self) -> Iterator[tuple[Name, Any]]:
        """Yield every name and the object it is bound to."""
        for frame in self._without_memfit():
            yield from ((self.names[id(v)], v) for v in variables_of(frame).values() if id(v) in self.names)
        yield from ((self.names[id(value)], value) for _, value, _ in _globals() if id(value) in self.names)

    def variables(self) -> Iterator[tuple[Name, Any]]:
        """Yield every name and the object it is bound to, and the attributes and items one level below."""
        for name, value in self.named():
            yield name, value
            if isinstance(value, dict):
                yield from ((name.item(key), item) for key, item in list(value.items())[:WIDEST])
            elif isinstance(value, list | tuple):
                yield from ((name.item(key), item) for key, item in enumerate(value[:WIDEST]))
            elif not isinstance(value, type | ModuleType):
                inside = list(getattr(value, "__dict__", {}).items())[:WIDEST]
                yield from ((name.attribute(key, type(value)), item) for key, item in inside)


def _globals() -> Iterator[tuple[str, Any, str]]:
    """Yield (name, value, file) of every variable of the user's modules."""
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None) if isinstance(module, ModuleType) else None
        if isinstance(file, str) and own(file):
            for name, value in list(vars(module).items()):
                if not name.startswith("__") and not isinstance(value, ModuleType):
                    yield name, value, file
