"""The part of docs/performance.md that one benchmark writes, between two marks of its name."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).resolve().parents[1] / "docs" / "performance.md"


def write(name: str, text: str) -> None:
    """Replace the part of that name, or add it at the end. The text holds its marks."""
    part = re.compile(rf"<!-- {name} -->\n.*?<!-- end {name} -->\n", re.DOTALL)
    old = PAGE.read_text()
    PAGE.write_text(part.sub(lambda _: text, old) if part.search(old) else old.rstrip("\n") + "\n\n" + text)
