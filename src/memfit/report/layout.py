"""Small renderables that views are built from: a line with two ends, labelled paragraphs, boxless tables."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.table import Table
from rich.text import Text

from memfit.report.words import DOT, visible

GAP = 2  # columns between cells


def text(value: str, style: str = "") -> Text:
    """Text that is never read as markup and never steers the terminal."""
    return Text(visible(value), style)


@dataclass(frozen=True)
class Ends:
    """One line: `left` at its start and `right` at its end; below each other where the width is short."""

    left: Text
    right: Text

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        room = options.max_width - self.left.cell_len - self.right.cell_len
        if not options.is_terminal:
            yield Text.assemble(self.left, DOT, self.right)
        elif room >= GAP:
            yield Text.assemble(self.left, " " * room, self.right)
        else:
            yield self.left
            yield self.right


def paragraphs(rows: Iterable[tuple[str, str]], style: str = "") -> Table:
    """Labels with text that wraps under itself: (label, text); rows without text are left out."""
    grid = Table.grid(padding=(0, 1, 0, 0))
    grid.add_column(no_wrap=True, style="dim")
    grid.add_column(overflow="fold")
    for label, value in rows:
        if value:
            grid.add_row(text(label), text(value, style))
    return grid


def commands(lines: Iterable[str]) -> Group:
    """What to type next, never wrapped by us: a terminal's own wrapping survives being copied."""
    starts = ("next: ", *(" " * len("next: ") for _ in range(99)))
    made = (Text.assemble((start, "dim"), visible(line)) for start, line in zip(starts, lines, strict=False))
    return Group(*(Text.assemble(line, no_wrap=True, overflow="ignore") for line in made))


def hanging(first: Text, rest: Iterable[str]) -> Table:
    """A word, and lines that stand beside it."""
    grid = Table.grid(padding=(0, GAP, 0, 0))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    for number, line in enumerate(rest):
        grid.add_row(Text("") if number else first, text(line))
    return grid


def table(*columns: str, **options: Any) -> Table:
    """A table without lines; a column whose name starts with '>' is right-aligned and never wrapped."""
    made = Table(box=None, pad_edge=False, padding=(0, GAP, 0, 0), header_style="dim", show_edge=False, **options)
    for name in columns:
        right = name.startswith(">")
        made.add_column(
            name.removeprefix(">"), justify="right" if right else "left", no_wrap=right, overflow="fold", vertical="top"
        )
    return made
