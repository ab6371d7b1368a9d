"""The stylesheet and script of the views, and the files of the page, as they lie in the package."""

from __future__ import annotations

import tomllib
from functools import lru_cache
from importlib.resources import files
from typing import Any

from memfit.report.document_html import Look, stylesheet


def _read(room: str, folder: str, name: str) -> str:
    return (files("memfit") / room / folder / name).read_text(encoding="utf-8")


def look() -> Look:
    """Return the stylesheet and the script of all views."""
    return Look(stylesheet(_read("report", "web", "views.css")), _read("report", "web", "views.js"))


@lru_cache(maxsize=1)
def lesson_texts() -> dict[str, Any]:
    """Return the texts of the view Learn."""
    return tomllib.loads((files("memfit") / "catalogue" / "learn.toml").read_text(encoding="utf-8"))


def page_files() -> tuple[str, dict[str, str]]:
    """Return the page's HTML, and the files that it loads: name -> text."""
    views = look()
    own = {name: _read("page", "static", name) for name in ("page.css", "page.js")}
    return _read("page", "static", "page.html"), {"views.css": views.style, "views.js": views.script, **own}
