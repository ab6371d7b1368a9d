"""The part of docs/performance.md that one benchmark writes, between two marks of its name."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable
from pathlib import Path

PAGE = Path(__file__).resolve().parents[1] / "docs" / "performance.md"


def write(name: str, text: str) -> None:
    """Replace the part of that name, or add it at the end. The text holds its marks."""
    part = re.compile(rf"<!-- {name} -->\n.*?<!-- end {name} -->\n", re.DOTALL)
    old = PAGE.read_text()
    PAGE.write_text(part.sub(lambda _: text, old) if part.search(old) else old.rstrip("\n") + "\n\n" + text)


def main(about: str | None, name: str, make: Callable[[argparse.Namespace], str], **defaults: int | str) -> int:
    """Measure, and write or print the part. defaults: of the arguments of `make`, which returns its text."""
    parser = argparse.ArgumentParser(description=(about or "").partition("\n")[0])
    for word, value in defaults.items():
        parser.add_argument(f"--{word}", type=type(value), default=value)
    parser.add_argument("--print", action="store_true", help="write nothing")
    asked = parser.parse_args()
    text = make(asked)
    if asked.print:
        sys.stdout.write(text)
    else:
        write(name, text)
    return 0
