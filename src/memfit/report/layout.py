"""The console, and the small renderables of all views: two-ended lines, paragraphs, tables without lines."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from memfit.report.words import DOT, visible

GAP = 2  # columns between cells


def text(value: str, style: str = "") -> Text:
    """Make text that is never parsed as markup and holds no control characters."""
    return Text(visible(value), style)


@dataclass(frozen=True)
class Visible:
    """A view whose text is printed without control characters, which names from files might contain; styles stay."""

    view: RenderableType

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for part in console.render(self.view, options):
            yield part if part.control else Segment("\n".join(map(visible, part.text.split("\n"))), part.style)


@dataclass(frozen=True)
class Ends:
    """One line with `left` at its start and `right` at its end; two lines where the terminal is narrow."""

    left: Text
    right: Text

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        room = options.max_width - self.left.cell_len - self.right.cell_len
        if not options.is_terminal:
            yield Text.assemble(self.left, DOT, self.right) if self.right else self.left
        elif room >= GAP:
            yield Text.assemble(self.left, " " * room, self.right)
        else:
            yield self.left
            yield self.right


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a Grid. A line break in `title` becomes a space in pipes."""

    title: str
    right: bool = False
    wraps: int = 0  # least width to which it may be wrapped; 0: it never wraps
    spare: int = 0  # on a narrow terminal columns are left out, highest number first; 0: never


@dataclass(frozen=True)
class Grid:
    """A table without lines that leaves out its spare columns where the terminal is narrow."""

    columns: Sequence[Column]
    rows: Sequence[Sequence[Text | str]]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        shown = self._shown(options.max_width)
        made = table()
        for i in shown:
            c = self.columns[i]
            title = c.title if options.is_terminal else c.title.replace("\n", " ")
            made.add_column(
                title,
                justify="right" if c.right else "left",
                no_wrap=not c.wraps,
                overflow="fold",
                min_width=c.wraps or None,
            )
        for row in self.rows:
            made.add_row(*(row[i] for i in shown))
        yield made

    def _shown(self, width: int) -> list[int]:
        """Return the indices of the columns that fit."""
        kept = list(range(len(self.columns)))
        while sum(map(self._width, kept)) + GAP * len(kept) > width and any(self.columns[i].spare for i in kept):
            kept.remove(max(kept, key=lambda i: self.columns[i].spare))
        return kept

    def _width(self, i: int) -> int:
        """Return the least width of a column."""
        column = self.columns[i]
        lines = [*column.title.split("\n"), *([] if column.wraps else [str(row[i]) for row in self.rows])]
        return max(column.wraps, *map(cell_len, lines))


def paragraphs(rows: Iterable[tuple[str, str]]) -> Table:
    """Make rows of (label, text) whose text wraps under itself; rows without text are left out."""
    grid = Table.grid(padding=(0, 1, 0, 0))
    grid.add_column(no_wrap=True, style="dim")
    grid.add_column(overflow="fold")
    for label, value in rows:
        if value:
            grid.add_row(text(label), text(value))
    return grid


def commands(lines: Iterable[str]) -> Group:
    """List commands to type next, unwrapped: a line that the terminal wraps can still be copied as one."""
    made = (
        Text.assemble(("      " if number else "next: ", "dim"), visible(line), no_wrap=True, overflow="ignore")
        for number, line in enumerate(lines)
    )
    return Group(*made)


def hanging(first: Text, rest: Iterable[str]) -> Table:
    """Put lines to the right of a word."""
    grid = Table.grid(padding=(0, GAP, 0, 0))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    for number, line in enumerate(rest):
        grid.add_row(Text("") if number else first, text(line))
    return grid


def table(*columns: str, **options: Any) -> Table:
    """Make a table without lines; a column whose name starts with '>' is right-aligned and never wrapped."""
    made = Table(box=None, pad_edge=False, padding=(0, GAP, 0, 0), header_style="dim", show_edge=False, **options)
    for name in columns:
        right = name.startswith(">")
        made.add_column(
            name.removeprefix(">"), justify="right" if right else "left", no_wrap=right, overflow="fold", vertical="top"
        )
    return made


class Output(Console):
    """A rich Console that raises BrokenPipeError, as print does, where rich would end the process with code 1."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError("the output was closed")
