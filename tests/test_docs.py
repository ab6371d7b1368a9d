"""The architecture page names rooms and functions that exist, and every room."""

from __future__ import annotations

import ast
import importlib
import json
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "memfit"
PAGE = (ROOT / "docs" / "architecture.md").read_text()
ROOMS = sorted(path.parent.name for path in PACKAGE.glob("*/__init__.py"))
NAMES = sorted(set(re.findall(rf"`((?:{'|'.join(ROOMS)})(?:\.\w+)+)`", PAGE)))


def _defined(name: str) -> bool:
    """Whether `room.module.name` is a module, or a class or function that its module defines; nothing is imported."""
    *module, last = name.split(".")
    if PACKAGE.joinpath(*module, last).is_dir() or PACKAGE.joinpath(*module, f"{last}.py").is_file():
        return True
    folder = PACKAGE.joinpath(*module)
    source = folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")
    if not source.is_file():
        return False
    body = ast.parse(source.read_text()).body
    return any(getattr(statement, "name", "") == last for statement in body)


@pytest.mark.parametrize("name", NAMES)
def test_named_functions_exist(name: str) -> None:
    assert _defined(name)


def test_every_room_has_its_line_and_its_place_in_the_picture() -> None:
    assert NAMES
    picture = PAGE.partition("```mermaid")[2].partition("```")[0]
    for room in ROOMS:
        assert f"| `{room}/` |" in PAGE
        assert re.search(rf"\b{room}\b", picture)


def test_the_notebook_of_the_api_page_runs(capsys: pytest.CaptureFixture[str]) -> None:
    """Its cells are the page's code, run in order; the names in the page's table are those of `dir(memfit)`."""
    pytest.importorskip("torch")
    import memfit

    text = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    notebook = json.loads((ROOT / "docs" / "api.ipynb").read_text(encoding="utf-8"))
    if find_spec("nbformat"):
        importlib.import_module("nbformat").validate(notebook)
    cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert cells == [block.strip() for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL)]
    names = dict[str, Any]()
    for cell in cells:
        exec(compile(cell, "docs/api.ipynb", "exec"), names)
    assert len(cells) == text.count("\n## ") and "fits" in capsys.readouterr().out
    said = set(re.findall(r"`(\w+)\(", text.partition("\n## ")[0])) | {"MemfitCallback"}
    assert said <= set(dir(memfit))


@pytest.mark.parametrize("source", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_module_gives_a_name_twice(source: Path) -> None:
    """As when one module is moved into another: functions above would silently use what was meant for those below."""
    named = [
        target.id
        for statement in ast.parse(source.read_text()).body
        if isinstance(statement, ast.Assign)
        for target in statement.targets
        if isinstance(target, ast.Name)
    ]
    assert sorted(named) == sorted(set(named))
