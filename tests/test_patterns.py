"""Every compiled pattern of the package is linear: on 100 KB of what it likes it takes no longer than it should."""

from __future__ import annotations

import importlib
import pkgutil
import re
import signal
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import fields, is_dataclass
from pathlib import Path
from re import _parser  # type: ignore[attr-defined]
from typing import Any

import pytest

import memfit
from memfit.errors import MemfitError

SHORT, LONG = 2_000, 100_000  # characters
NOTICED = 0.002  # seconds on the short line, far above linear; such a pattern is tried on the long one
ALLOWED = 2  # seconds on the long line, where one that is quadratic takes minutes
OF_LOGS = tuple(f"memfit.explain.{name}." for name in ("text", "remedies", "phases"))
WORD = 299  # characters of the longest word of a log that these see: longer ones are data, and left out before
ELSEWHERE = ("memfit.live.watch.lightning", "memfit.__main__", "memfit.virtual.libraries")  # need what they stand for


def patterns() -> dict[re.Pattern[Any], str]:
    """Return the patterns of all modules with the name of each, those in tables of theirs as well."""
    found: dict[re.Pattern[Any], str] = {}

    def walk(value: object, name: str, depth: int = 0) -> None:
        if isinstance(value, re.Pattern):
            found.setdefault(value, name)
        elif depth < 4 and isinstance(value, dict):
            walk([*value, *value.values()], name, depth + 1)
        elif depth < 4 and isinstance(value, list | tuple | set | frozenset):
            for one in value:
                walk(one, name, depth + 1)
        elif depth < 4 and is_dataclass(value) and not isinstance(value, type):
            walk([getattr(value, field.name, None) for field in fields(value)], name, depth + 1)

    for module in pkgutil.walk_packages(memfit.__path__, "memfit."):
        if not module.name.startswith(ELSEWHERE):
            with suppress(ImportError, MemfitError):  # of an extra that is not installed
                for name, value in list(vars(importlib.import_module(module.name)).items()):
                    walk(value, f"{module.name}.{name}")
    return found


def methods(names: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Return how each name is used: those that only match from the first character on need not be searched with."""
    text = "\n".join(path.read_text() for path in Path(memfit.__file__).parent.rglob("*.py"))
    only = re.compile(r"\b(\w+)\.(\w+)\(")
    used: dict[str, set[str]] = {}
    for name, method in only.findall(text):
        used.setdefault(name, set()).add(method)
    anchored = {name for name, ways in used.items() if ways <= {"match", "fullmatch"}}
    return {name: ("fullmatch",) if name.rpartition(".")[2] in anchored else ("search", "fullmatch") for name in names}


def liked(pattern: re.Pattern[Any]) -> set[str]:
    """Return what a pattern may run along: the characters it names, alone and joined, and those most patterns like."""
    letters: list[str] = []

    def walk(value: Any) -> None:
        if isinstance(value, tuple) and len(value) == 2 and str(value[0]) in ("LITERAL", "NOT_LITERAL"):
            letters.append(chr(value[1]))
        elif isinstance(value, tuple) and len(value) == 2 and str(value[0]) == "RANGE":
            letters.append(chr(value[1][0]))
        elif isinstance(value, list | tuple | _parser.SubPattern):
            for one in value:
                walk(one)

    walk(_parser.parse(pattern.pattern, pattern.flags))
    joined = "".join(letters)[:60]
    return {*letters, *(f"{one} " for one in letters), *(f"{one}a" for one in letters), joined, *"a1-_ B"} - {""}


def lines(unit: str, size: int, name: str) -> Iterator[str]:
    """Yield a line of a unit over and over, one that ends well and one that does not, as the callers have it."""
    line = (unit * size)[:size]
    if name.startswith(OF_LOGS):
        line = " ".join(line[:WORD].strip() for _ in range(size // WORD))
    yield line
    yield line + "\0"


def taken(pattern: re.Pattern[Any], line: str, ways: Iterable[str]) -> float:
    """Return the most seconds of CPU that the pattern takes on a line."""
    text = line.encode(errors="replace") if isinstance(pattern.pattern, bytes) else line
    most = 0.0
    for way in ways:
        begun = time.process_time()
        getattr(pattern, way)(text)
        most = max(most, time.process_time() - begun)
    return most


@pytest.mark.skipif(sys.platform == "win32", reason="a timer ends what would take minutes")
def test_every_pattern_is_linear() -> None:
    def late(*_: object) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGVTALRM, late)
    slow, found = [], patterns()
    ways = methods(found.values())
    try:
        for pattern, name in found.items():
            for unit in liked(pattern):
                if max(taken(pattern, line, ways[name]) for line in lines(unit, SHORT, name)) < NOTICED:
                    continue
                signal.setitimer(signal.ITIMER_VIRTUAL, ALLOWED)
                try:
                    for line in lines(unit, LONG, name):
                        taken(pattern, line, ways[name])
                except TimeoutError:
                    slow.append((name, pattern.pattern, unit))
                    print(slow[-1], flush=True)
                    break
                finally:
                    signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    finally:
        signal.signal(signal.SIGVTALRM, before)
    assert len(found) > 300 and not slow
