"""The line of a program that stores into a name, found in its source; no code is run and nothing is hooked."""

from __future__ import annotations

import ast
import linecache
import os
import re
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path

from memfit.watcher.roots import Found, Place

KEEPS = ("append", "appendleft", "extend", "add", "insert", "put", "put_nowait", "update", "setdefault", "__setitem__")
MOST = 2 << 20  # characters of a source file that is parsed


def keeping_line(found: Found, running: Iterable[Place] = ()) -> tuple[str, str]:
    """("train.py:12", "history.append(loss)"): where the program stores into that name; else where the name belongs.

    Of several lines one in the function that owns the name is taken, then one in a function that is running.
    """
    stores = _stores(found.file)
    lines = next((stores[name] for name in _identifiers(found.path) if name in stores), ())
    places = [(found.file, found.first, found.function)] if found.function else []
    places += [place for place in running if place[0] == found.file and place[2] != "<module>"]
    inside = (line for place in places for line in lines if line in _extent(*place))
    number = next(iter((*inside, *lines)), None) or found.first or 1
    return f"{shown(found.file)}:{number}", linecache.getline(found.file, number).strip()


def line_of(found: Found) -> str:
    """ "train.py:12": the last line that adds to the name (or `self.name`), else that binds it; "" where the source is silent.

    Looked at is the function that owns it, and the whole file where that has none.
    """
    name = _identifiers(found.path)[0]
    inside = _extent(found.file, found.first, found.function)
    for span in (inside, None) if inside else (None,):
        for table in (_stores(found.file), _bound(found.file)):
            lines = [line for line in table.get(name, ()) if span is None or line in span]
            if lines:
                return f"{Path(found.file).name}:{max(lines)}"
    return ""


def shown(file: str) -> str:
    """A path as a person in the current folder writes it."""
    try:
        near = os.path.relpath(file)
    except ValueError:  # another drive
        return file
    return file if near.startswith("..") else near


def _identifiers(path: str) -> list[str]:
    """The names in a path, innermost first: self.cache['a'][...] -> cache, self."""
    return re.findall(r"[A-Za-z_]\w*", re.sub(r"\[('[^']*'|\.\.\.)\]", "", path))[::-1]


@lru_cache(maxsize=64)
def _tree(file: str) -> ast.Module | None:
    text = "".join(linecache.getlines(file))
    if not text or len(text) > MOST:
        return None
    try:
        return ast.parse(text, filename=Path(file).name)
    except (SyntaxError, ValueError, RecursionError):
        return None


def _extent(file: str, first: int, function: str) -> range:
    """The lines of a function."""
    for node in ast.walk(_tree(file) or ast.Module([], [])):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == function:
            start = min([node.lineno, *(d.lineno for d in node.decorator_list)])
            if start <= first <= (node.end_lineno or start):
                return range(start, (node.end_lineno or start) + 1)
    return range(0)


@lru_cache(maxsize=64)
def _stores(file: str) -> dict[str, tuple[int, ...]]:
    """Name -> the lines that store into it and keep what was there: appends, items, sums."""
    found: dict[str, list[int]] = {}
    for node in ast.walk(_tree(file) or ast.Module([], [])):
        for name in _stored(node):
            found.setdefault(name, []).append(node.lineno)  # type: ignore[attr-defined]
    return {name: tuple(sorted(set(lines))) for name, lines in found.items()}


@lru_cache(maxsize=64)
def _bound(file: str) -> dict[str, tuple[int, ...]]:
    """Name -> the lines that bind it."""
    found: dict[str, list[int]] = {}
    for node in ast.walk(_tree(file) or ast.Module([], [])):
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for name in {name for target in targets for part in ast.walk(target) for name in _names(part)}:
                found.setdefault(name, []).append(node.lineno)
    return {name: tuple(lines) for name, lines in found.items()}


def _stored(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in KEEPS:
        return _names(node.func.value)
    if isinstance(node, ast.AugAssign):
        return _names(node.target)
    if isinstance(node, ast.Assign):
        names: list[str] = []
        for target in node.targets:
            for name in _names(target):
                if isinstance(target, ast.Subscript) or name in _mentioned(node.value):
                    names.append(name)
        return names
    return []


def _names(target: ast.AST) -> list[str]:
    """The name a store goes to: of a["x"].b[0] it is b."""
    while isinstance(target, ast.Subscript | ast.Starred):
        target = target.value
    if isinstance(target, ast.Call) and isinstance(target.func, ast.Attribute):  # d.setdefault(k, []).append(x)
        return _names(target.func.value)
    if isinstance(target, ast.Name):
        return [target.id]
    return [target.attr] if isinstance(target, ast.Attribute) else []


def _mentioned(value: ast.AST) -> set[str]:
    return {
        n.id if isinstance(n, ast.Name) else n.attr for n in ast.walk(value) if isinstance(n, ast.Name | ast.Attribute)
    }
