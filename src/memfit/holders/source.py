"""Find the line of a program that stores into a name by parsing its source; no code is run and nothing is hooked."""

from __future__ import annotations

import ast
import linecache
import os
import re
import sys
from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from memfit.holders.names import CACHE_OF, ITEM, Name, Place, short_line

KEEPS = ("append", "appendleft", "extend", "add", "insert", "put", "put_nowait", "update", "setdefault", "__setitem__")
# functions that store into their first argument
PUSHES = ("heappush", "heappushpop", "heapreplace", "insort", "insort_left", "insort_right")
LOOPS = (ast.For, ast.AsyncFor, ast.While, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
MOST_LINES = 4  # lines listed besides the likeliest
MOST = 2 << 20  # characters of the longest source file that is parsed
EVERY_LINE = range(1, sys.maxsize)


class SourceLine(NamedTuple):
    """A line of a file, and other lines that are as likely."""

    file: str
    number: int
    also: tuple[int, ...] = ()


def storing_line(name: Name, running: Iterable[Place] = ()) -> SourceLine | None:
    """Find the line that stores into a name, or that binds it; None where the source shows neither.

    Every part of the path is tried, innermost first: for `self.cache['a'][...]` first `cache`, then `self`. Lines of
    the function or class that owns the name go before lines of a running function, and those before others of the
    file. A line that binds the name in its owner goes before a line elsewhere that stores into it, unless the path ends
    in an item: then the name is a container's, and something was stored into it.
    """
    if name.path.startswith(CACHE_OF):
        return None
    running, keys, is_item = tuple(running), _keys(name.path), name.path.endswith(ITEM)
    for identifier in identifiers(name.path):
        for place in name.places:
            file = place[0]
            stores, bound = _under(_stores(file).get(identifier, ()), keys), _bound(file).get(identifier, ())
            owner = _extent(*place) if place[2] else range(0)
            near = [_extent(*other) for other in running if other[0] == file and other[2] != "<module>"]
            tried = [(stores, owner), *((stores, span) for span in near), (stores, EVERY_LINE)]
            tried.insert(len(tried) if is_item else 1, (bound, owner))
            for lines, span in (*tried, (bound, EVERY_LINE)):
                if inside := [store for store in lines if store.line in span]:
                    return _likeliest(file, inside)
    return None


def is_carried(name: Name) -> bool:
    """Return whether a line of the owner's file adds to what a name holds, or makes it from what it held before."""
    first = next(iter(identifiers(name.path)), "")
    return any(_stores(file).get(first) for file, _, _ in name.places)


def _under(stores: Sequence[Store], keys: set[str]) -> Sequence[Store]:
    """Keep the lines that store under one of the keys, else those that name no key, else all."""
    under = [store for store in stores if store.key in keys]
    return under or [store for store in stores if store.key is None] or stores


def _likeliest(file: str, lines: Sequence[Store]) -> SourceLine:
    """Choose the last line that is in a loop, else the last."""
    best = [store for store in lines if store.looped] or lines
    *others, number = sorted({store.line for store in best})
    return SourceLine(file, number, tuple(others[:MOST_LINES]))


def line_of(name: Name) -> str:
    """Return the line that stores into a name as "train.py:12"; "" where the source shows none."""
    line = storing_line(name)
    return short_line(line.file, line.number) if line else ""


def keeping_line(name: Name, running: Iterable[Place] = ()) -> tuple[str, str]:
    """Return the line that stores into a name and its code: ("train.py:12", "history.append(loss)").

    Where the source shows none, return the function that owns the name, or only the file. Other lines that are as
    likely are listed after the code.
    """
    file, first, _ = name.places[-1]
    line = storing_line(name, running) or (SourceLine(file, first) if first else None)
    if line is None:
        return _relative(file) if file else "", ""
    also = f" (or line {', '.join(map(str, line.also))})" if line.also else ""
    return f"{_relative(line.file)}:{line.number}", linecache.getline(line.file, line.number).strip() + also


def _relative(file: str) -> str:
    """Return a path relative to the current folder, if it lies inside."""
    try:
        relative = os.path.relpath(file)
    except ValueError:  # another drive
        return file
    return file if relative.startswith("..") else relative


def identifiers(path: str) -> list[str]:
    """Return the names in a path, innermost first: self.cache['a'][...] -> cache, self."""
    return re.findall(r"[A-Za-z_]\w*", re.sub(r"\[('[^']*'|\.\.\.)\]", "", path))[::-1]


def _keys(path: str) -> set[str]:
    """Return the keys in a path: cache['a'][...] -> a."""
    return set(re.findall(r"\['([^']*)'\]", path))


def parsed(file: str) -> ast.Module:
    """Return a file's syntax tree; an empty one where it cannot be parsed."""
    return _tree(file) or ast.Module([], [])


@lru_cache(maxsize=64)
def _tree(file: str) -> ast.Module | None:
    text = "".join(linecache.getlines(file))
    if not text or len(text) > MOST:
        return None
    try:
        return ast.parse(text, filename=Path(file).name)
    except (SyntaxError, ValueError, RecursionError):
        return None


@lru_cache(maxsize=4096)
def _extent(file: str, first: int, function: str) -> range:
    """Return the lines of a function; of a class where `first` is 0."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef) if first else (ast.ClassDef,)
    for node in ast.walk(parsed(file)):
        if isinstance(node, kinds) and node.name == function:
            if isinstance(node, ast.ClassDef):
                return range(node.lineno, (node.end_lineno or node.lineno) + 1)
            start = min([node.lineno, *(d.lineno for d in node.decorator_list)])
            if start <= first <= (node.end_lineno or start):
                return range(start, (node.end_lineno or start) + 1)
    return range(0)


class Store(NamedTuple):
    """A line that stores into a name, or binds it. `key`: the text key it stores under, if any."""

    line: int
    key: str | None = None
    looped: bool = False


@lru_cache(maxsize=64)
def _stores(file: str) -> dict[str, tuple[Store, ...]]:
    """Return for every name the lines that add to what it holds: appends, items, sums."""
    found: dict[str, set[Store]] = {}
    tree = parsed(file)
    looped = {id(node) for loop in ast.walk(tree) if isinstance(loop, LOOPS) for node in ast.walk(loop)}
    for node in ast.walk(tree):
        for name, key in _stored(node):
            found.setdefault(name, set()).add(Store(node.lineno, key, id(node) in looped))  # type: ignore[attr-defined]
    return {name: tuple(stores) for name, stores in found.items()}


@lru_cache(maxsize=64)
def _bound(file: str) -> dict[str, tuple[Store, ...]]:
    """Return for every name the lines that bind it."""
    found: dict[str, list[Store]] = {}
    for node in ast.walk(parsed(file)):
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            parts = (part for target in targets for part in ast.walk(target))
            bound = [part for part in parts if isinstance(getattr(part, "ctx", None), ast.Store)]
            for name in {name for part in bound for name, _ in targets_of(part)}:  # `log.level = 1` binds no `log`
                found.setdefault(name, []).append(Store(node.lineno))
    return {name: tuple(lines) for name, lines in found.items()}


def _stored(node: ast.AST) -> list[tuple[str, str | None]]:
    """Return (name, key) of what a statement stores into."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in KEEPS:
        return targets_of(node)
    if isinstance(node, ast.Call) and node.args and any(name in PUSHES for name, _ in targets_of(node.func)):
        return targets_of(node.args[0])
    if isinstance(node, ast.AugAssign):
        return targets_of(node.target)
    if isinstance(node, ast.Assign):
        targets = [part for target in node.targets for part in getattr(target, "elts", [target])]
        return [
            (name, key)
            for target in targets
            for name, key in targets_of(target)
            if isinstance(target, ast.Subscript) or name in mentioned(node.value)
        ]
    return []


def targets_of(target: ast.AST) -> list[tuple[str, str | None]]:
    """Return the name that is stored into, and the text key: b for a["x"].b[0], d and "k" for d.setdefault("k", [])."""
    key = None
    while True:
        if isinstance(target, ast.Subscript):
            key, target = _text(target.slice), target.value
        elif isinstance(target, ast.Starred):
            target = target.value
        elif isinstance(target, ast.Call) and isinstance(target.func, ast.Attribute):
            key = _text(target.args[0]) if target.func.attr == "setdefault" and target.args else key
            target = target.func.value
        else:
            break
    if isinstance(target, ast.Name):
        return [(target.id, key)]
    return [(target.attr, key)] if isinstance(target, ast.Attribute) else []


def _text(node: ast.AST) -> str | None:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


def mentioned(value: ast.AST) -> set[str]:
    """Return the names and attributes in an expression."""
    return {
        n.id if isinstance(n, ast.Name) else n.attr for n in ast.walk(value) if isinstance(n, ast.Name | ast.Attribute)
    }
