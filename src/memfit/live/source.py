"""Where a program puts things into a variable: the line, found in its source."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

GROWS = ("append", "extend", "add", "insert", "update", "appendleft", "setdefault", "put")
MAX_SOURCE = 4 << 20  # bytes of a source file


def line_of(path: str, name: str, within: str = "") -> str:
    """ "train.py:12": the last statement that puts something into `name` (or `self.name`), else the one that makes it.

    within: only inside the function of that name, where there is one. "" where the source does not tell.
    """
    tree = _tree(path)
    if tree is None:
        return ""
    places = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef) and n.name == within]
    grows, makes = _statements(places or [tree], name)
    if not grows and not makes:
        grows, makes = _statements([tree], name)
    found = max(grows, default=0) or max(makes, default=0)
    return f"{Path(path).name}:{found}" if found else ""


@lru_cache(maxsize=64)
def _tree(path: str) -> ast.Module | None:
    try:
        source = Path(path)
        if source.stat().st_size > MAX_SOURCE:
            return None
        return ast.parse(source.read_text(encoding="utf-8", errors="replace"))
    except (OSError, SyntaxError, ValueError, RecursionError):
        return None


def _statements(trees: Sequence[ast.AST], name: str) -> tuple[list[int], list[int]]:
    """(lines that add to it, lines that bind it)."""
    grows: list[int] = []
    makes: list[int] = []
    for tree in trees:
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                if node.func.attr in GROWS and _named(node.func.value) == name:
                    grows.append(node.lineno)
            elif isinstance(node, ast.AugAssign) and _named(node.target) == name:
                grows.append(node.lineno)
            elif isinstance(node, ast.Assign | ast.AnnAssign):
                for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                    if isinstance(target, ast.Subscript) and _named(target.value) == name:
                        grows.append(node.lineno)
                    elif any(_named(part) == name for part in ast.walk(target)):
                        reads = node.value is not None and any(_named(part) == name for part in ast.walk(node.value))
                        (grows if reads else makes).append(node.lineno)
    return grows, makes


def _named(node: ast.AST) -> str:
    if isinstance(node, ast.Name):
        return node.id
    return node.attr if isinstance(node, ast.Attribute) else ""
