"""The line of a program that stores into a name, found in its source; no code is run and nothing is hooked."""

from __future__ import annotations

import ast
import linecache
import os
import re
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from memfit.live.holders.variables import CACHE_OF, Found, Place

KEEPS = ("append", "appendleft", "extend", "add", "insert", "put", "put_nowait", "update", "setdefault", "__setitem__")
# functions that store into their first argument
PUSHES = ("heappush", "heappushpop", "heapreplace", "insort", "insort_left", "insort_right")
LOOPS = (ast.For, ast.AsyncFor, ast.While, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
MOST_LINES = 4  # that are named besides one
MOST = 2 << 20  # characters of a source file that is parsed


def keeping_line(found: Found, running: Iterable[Place] = ()) -> tuple[str, str]:
    """("train.py:12", "history.append(loss)"): where the program stores into that name; else where the name belongs.

    Lines that store under another key than the path's are left out where others are. Of the rest one in the function that
    owns the name is taken, then one in a function that is running; of several, one that is in a loop. Others that are as
    likely are named behind it.
    """
    stores, names = _stores(found.file), [] if found.path.startswith(CACHE_OF) else _identifiers(found.path)
    found_there = next((stores[name] for name in names if name in stores), ())
    keys = _keys(found.path)
    kept = [store for store in found_there if store.key is None or store.key in keys] or found_there
    lines = [store.line for store in sorted(kept, key=lambda store: (store.key is None, not store.looped, store.line))]
    places = [(found.file, found.first, found.function)] if found.function else []
    places += [place for place in running if place[0] == found.file and place[2] != "<module>"]
    inside = [line for place in places for line in lines if line in _extent(*place)]
    bound = (line for name in names for line in _bound(found.file).get(name, ()))
    number = next(iter((*inside, *lines)), None) or found.first or next(bound, None)
    if number is None:  # nothing in the source stores into it or binds it
        return shown(found.file) if found.file else "", ""
    looped = {store.line: (store.key, store.looped) for store in kept}
    others = [line for line in dict.fromkeys(inside or lines) if line != number and looped[line] == looped[number]]
    also = f" (or line {', '.join(map(str, others[:MOST_LINES]))})" if others else ""
    return f"{shown(found.file)}:{number}", linecache.getline(found.file, number).strip() + also


def line_of(found: Found) -> str:
    """ "train.py:12": the last line that adds to the name (or `self.name`), else that binds it; "" where the source is silent.

    Looked at is the function that owns it, and the whole file where that has none. Lines that store under the path's key
    go before those that name no key, and those before lines that store under another.
    """
    if not (found_names := _identifiers(found.path)):  # a generator expression's own: ".0"
        return ""
    name, keys = found_names[0], _keys(found.path)
    inside = _extent(found.file, found.first, found.function)
    stores = _stores(found.file).get(name, ())
    under = [store for store in stores if store.key in keys] or [store for store in stores if store.key is None]
    stored = [store.line for store in (under if keys and under else stores)]
    for span in (inside, None) if inside else (None,):
        for lines in (stored, _bound(found.file).get(name, ())):
            inside_span = [line for line in lines if span is None or line in span]
            if inside_span:
                return f"{Path(found.file).name}:{max(inside_span)}"
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


def _keys(path: str) -> set[str]:
    """cache['a'][...] -> a."""
    return set(re.findall(r"\['([^']*)'\]", path))


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
    """The lines of a function; of a class where `first` is 0."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef) if first else (ast.ClassDef,)
    for node in ast.walk(_tree(file) or ast.Module([], [])):
        if isinstance(node, kinds) and node.name == function:
            if isinstance(node, ast.ClassDef):
                return range(node.lineno, (node.end_lineno or node.lineno) + 1)
            start = min([node.lineno, *(d.lineno for d in node.decorator_list)])
            if start <= first <= (node.end_lineno or start):
                return range(start, (node.end_lineno or start) + 1)
    return range(0)


class Store(NamedTuple):
    """A line that stores into a name and keeps what was there. `key`: the text it stores under, where it says one."""

    line: int
    key: str | None
    looped: bool


@lru_cache(maxsize=64)
def _stores(file: str) -> dict[str, tuple[Store, ...]]:
    """Name -> the lines that store into it and keep what was there: appends, items, sums."""
    found: dict[str, set[Store]] = {}
    tree = _tree(file) or ast.Module([], [])
    looped = {id(node) for loop in ast.walk(tree) if isinstance(loop, LOOPS) for node in ast.walk(loop)}
    for node in ast.walk(tree):
        for name, key in _stored(node):
            found.setdefault(name, set()).add(Store(node.lineno, key, id(node) in looped))  # type: ignore[attr-defined]
    return {name: tuple(sorted(stores, key=lambda store: store.line)) for name, stores in found.items()}


@lru_cache(maxsize=64)
def _bound(file: str) -> dict[str, tuple[int, ...]]:
    """Name -> the lines that bind it."""
    found: dict[str, list[int]] = {}
    for node in ast.walk(_tree(file) or ast.Module([], [])):
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            parts = (part for target in targets for part in ast.walk(target))
            bound = (
                part for part in parts if isinstance(getattr(part, "ctx", None), ast.Store)
            )  # log.level binds no log
            for name in {name for part in bound for name, _ in _names(part)}:
                found.setdefault(name, []).append(node.lineno)
    return {name: tuple(lines) for name, lines in found.items()}


def _stored(node: ast.AST) -> list[tuple[str, str | None]]:
    """(name, key) that a statement stores into."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in KEEPS:
        return _names(node)
    if isinstance(node, ast.Call) and node.args and any(name in PUSHES for name, _ in _names(node.func)):
        return _names(node.args[0])
    if isinstance(node, ast.AugAssign):
        return _names(node.target)
    if isinstance(node, ast.Assign):
        return [
            (name, key)
            for target in node.targets
            for name, key in _names(target)
            if isinstance(target, ast.Subscript) or name in _mentioned(node.value)
        ]
    return []


def _names(target: ast.AST) -> list[tuple[str, str | None]]:
    """The name a store goes to, and under which text: of a["x"].b[0] it is b, of d.setdefault("k", []).append d, "k"."""
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


def _mentioned(value: ast.AST) -> set[str]:
    return {
        n.id if isinstance(n, ast.Name) else n.attr for n in ast.walk(value) if isinstance(n, ast.Name | ast.Attribute)
    }
