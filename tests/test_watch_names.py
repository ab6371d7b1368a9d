"""From a tensor that is kept to the program's name for it, and to the line that stores there."""

from __future__ import annotations

import inspect
import sys
import weakref
from pathlib import Path

import pytest
import torch

from memfit.watcher.holders import holders_of
from memfit.watcher.roots import Found, Roots, variables_of
from memfit.watcher.source import keeping_line


def test_looking_at_variables_keeps_nothing_alive() -> None:
    """Before Python 3.13 a frame keeps the copy of its variables that was made for who looked."""
    inner = torch.ones(3)
    last = weakref.ref(inner)
    assert variables_of(sys._getframe())["inner"] is inner
    del inner
    assert last() is None
    asked = locals()
    variables_of(sys._getframe())
    assert asked["last"] is last


SOURCE = """
def keep(out):
    kept["first"] = [out]
    kept.setdefault("a", []).append(out)
    for i in range(3):
        use(kept, kept[i])
        kept[i] = [out]
    plain.append(out)
    while out:
        plain.append(out)
    kept["two words"] = [out]
"""
KEPT = {"kept['two words'][...]": 11, "kept['a'][...]": 4, "kept[...]": 7, "kept['first'][...]": 3, "plain[...]": 10}


@pytest.mark.parametrize("path", KEPT)
def test_the_line_that_stores_under_that_key_and_in_a_loop(tmp_path: Path, path: str) -> None:
    file = tmp_path / "kept.py"
    file.write_text(SOURCE)
    assert keeping_line(Found(path, str(file), 2, "keep"))[0].endswith(f"kept.py:{KEPT[path]}")


def test_the_shortest_way_to_a_name() -> None:
    inner = torch.ones(3)
    outer = {"a": (inner,)}
    found = holders_of([inner], Roots())[0]
    assert found.path == "inner"
    del inner
    (found,) = holders_of([outer["a"][0]], Roots()).values()
    assert found.path == "outer['a'][...]"
    assert found.function == inspect.currentframe().f_code.co_name  # type: ignore[union-attr]
