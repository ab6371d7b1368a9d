"""Find what bounds a container that grows: a deque's length, the size of a function's cache, a line that takes from it.

Such a container is a window: it grows until it is full and is no leak, though a run of a few steps sees it grow.
"""

from __future__ import annotations

import ast
import functools
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from memfit.holders.names import Name
from memfit.holders.source import identifiers, mentioned, parsed, targets_of

TAKES = ("pop", "popleft", "popitem", "remove", "clear", "get_nowait")


@dataclass(frozen=True, slots=True)
class Window:
    """A container with a bound. room: items that it will take before it is full, None where that is not known."""

    name: str
    place: str
    size: int  # bytes that one item keeps; bytes a step where `room` is not known
    room: int | None


def capacity(box: Any) -> int | None:
    """Return how many items an object holds at most by its own rule; None: any number."""
    if isinstance(box, deque):
        return box.maxlen
    return box.cache_parameters()["maxsize"] if isinstance(box, functools._lru_cache_wrapper) else None


def is_box(value: Any) -> bool:
    """Return whether items are stored into an object one by one."""
    return isinstance(value, list | dict | set | deque | functools._lru_cache_wrapper)


def count(box: Any) -> int:
    """Return how many items an object holds."""
    if isinstance(box, functools._lru_cache_wrapper):
        return box.cache_info().currsize
    return sum(item is not None for item in box) if isinstance(box, list) else len(box)


def room(name: Name) -> tuple[bool, int | None]:
    """Return whether the container behind a name has a bound, and how many more items it takes, where that is known."""
    box = next((box for box in name.boxes if capacity(box) is not None), None)
    if box is not None:
        return True, max((capacity(box) or 0) - count(box), 0)
    box = max(name.boxes, key=count, default=None)
    identifier = next(iter(identifiers(name.path)), "")
    bounds = [bound for place in name.places for bound in _bounds(place[0]).get(identifier, ())]
    if isinstance(box, list) and None in box and any(_is_ring(place[0], identifier) for place in name.places):
        return True, len(box) - count(box)
    most = max((bound for bound in bounds if bound is not None), default=None)
    known = box is not None and most is not None
    return bool(bounds), max(most - count(box), 0) if known and most is not None else None


@lru_cache(maxsize=64)
def _is_ring(file: str, name: str) -> bool:
    """Return whether a file only puts items of a list in the place of others: `buffer[i] = x`, with no append."""
    nodes = list(ast.walk(parsed(file)))
    calls = (n for n in nodes if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute))
    grows = any(n.func.attr in ("append", "extend", "insert") and _ends_in(n.func.value, name) for n in calls)  # type: ignore[attr-defined]
    puts = (n for n in nodes if isinstance(n, ast.Subscript) and isinstance(n.ctx, ast.Store))
    return not grows and any(_ends_in(n.value, name) for n in puts)


@lru_cache(maxsize=64)
def _bounds(file: str) -> dict[str, tuple[int | None, ...]]:
    """Return for every name how many items the lines that bound it leave, None where they do not say."""
    tree = parsed(file)
    numbers = {name: value.value for name, value in _constants(tree)}
    found: dict[str, list[int | None]] = {}

    def number(node: ast.AST | None) -> int | None:
        value = node.value if isinstance(node, ast.Constant) else numbers.get(getattr(node, "id", ""))
        return value if isinstance(value, int) and not isinstance(value, bool) else None

    tests = [n for n in ast.walk(tree) if isinstance(n, ast.If | ast.While)]
    guards = {id(inside): test.test for test in tests for inside in ast.walk(test)}  # the innermost comes last
    for node in ast.walk(tree):
        for name, most in _bounded(node):
            guard = guards.get(id(node))
            found.setdefault(name, []).append(number(most) if most is not None else number(_length(guard, name)))
    return {name: tuple(bounds) for name, bounds in found.items()}


def _constants(tree: ast.Module) -> Iterator[tuple[str, ast.Constant]]:
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
            yield from ((target.id, node.value) for target in node.targets if isinstance(target, ast.Name))


def _bounded(node: ast.AST) -> Iterator[tuple[str, ast.AST | None]]:
    """Yield (name, most) of what a statement takes items from, or stores under a remainder."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in TAKES:
        yield from ((name, None) for name, _ in targets_of(node.func.value))
    elif isinstance(node, ast.Delete):
        cut = (target for target in node.targets if isinstance(target, ast.Subscript))
        yield from ((name, None) for target in cut for name, _ in targets_of(target))
    elif isinstance(node, ast.Assign):
        for target in node.targets:
            for name, _ in targets_of(target):
                yield from ((name, most) for most in _slices(node.value, name))
                if isinstance(target, ast.Subscript) and (most := _remainder(target.slice)) is not None:
                    yield name, most


def _slices(value: ast.AST, name: str) -> Iterator[ast.AST | None]:
    """Yield n for each slice [-n:] or [:n] of what `name` held, where a name is bound to it again."""
    for node in ast.walk(value):
        if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Slice) and name in mentioned(node.value):
            low = node.slice.lower
            yield low.operand if isinstance(low, ast.UnaryOp) else node.slice.upper


def _remainder(index: ast.AST) -> ast.AST | None:
    return index.right if isinstance(index, ast.BinOp) and isinstance(index.op, ast.Mod) else None


def _length(test: ast.AST | None, name: str) -> ast.AST | None:
    """Return n where a test is `len(name) > n`, or >=."""
    if not isinstance(test, ast.Compare) or not isinstance(test.left, ast.Call):
        return None
    of_length = getattr(test.left.func, "id", "") == "len" and any(_ends_in(a, name) for a in test.left.args)
    return test.comparators[0] if of_length and isinstance(test.ops[0], ast.Gt | ast.GtE) else None


def _ends_in(node: ast.AST, name: str) -> bool:
    return any(found == name for found, _ in targets_of(node))
