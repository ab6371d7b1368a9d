"""The stacked bar: bytes by role against the card's limit on one line, or as plain rows without a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from memfit.nouns.footprint import PhasePeak
from memfit.nouns.plan import Judgement
from memfit.report.words import ROLE_WORDS, Word
from memfit.units import cell, gib, shared_unit

NCCL = Word("NCCL buffers", "nccl", "#93e3a0")


@dataclass(frozen=True, slots=True)
class BarPart:
    """One part of the bar, in bytes."""

    word: Word
    bytes: int


def shares(peak: PhasePeak, judgement: Judgement) -> tuple[BarPart, ...]:
    """Return the parts that add up to `judgement.need`: all roles except the CUDA context, which `usable` excludes."""
    found = [BarPart(ROLE_WORDS[role], size) for role, size in peak.by_role.items() if role != "context"]
    nccl = judgement.need - peak.levels.reserved
    found.sort(key=lambda part: list(ROLE_WORDS.values()).index(part.word))
    return tuple(part for part in (*found, BarPart(NCCL, nccl)) if part.bytes > 0)


def cells(sizes: Sequence[int], width: int) -> list[int]:
    """Divide `width` whole columns among the sizes in proportion; the smallest may get none."""
    total = sum(sizes)
    if not total or width <= 0:
        return [0] * len(sizes)
    exact = [size * width / total for size in sizes]
    found = [int(x) for x in exact]
    by_remainder = sorted(range(len(sizes)), key=lambda i: found[i] - exact[i])
    for i in by_remainder[: width - sum(found)]:
        found[i] += 1
    return found


@dataclass(frozen=True)
class StackedBar:
    """The peak's parts against the card's usable bytes, followed by an empty line."""

    parts: tuple[BarPart, ...]
    usable: int
    rows_in_pipes: bool = True  # without a terminal, show one row per role; False where a table follows anyway

    @property
    def need(self) -> int:
        return sum(part.bytes for part in self.parts)

    @property
    def unit(self) -> str:
        return shared_unit(self.need)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if not self.parts:
            return
        if options.is_terminal:
            yield self._bar(options.max_width, options.ascii_only)
            yield self._legend(options.max_width, options.ascii_only)
            yield ""
        elif self.rows_in_pipes:
            for part in self.parts:
                size = cell(part.bytes, self.unit)
                yield Text(f"{part.word.title:<17} {size:>7} {self.unit} {part.bytes / self.need:>4.0%}")
            title = "reserved + NCCL" if any(p.word is NCCL for p in self.parts) else "reserved peak"
            yield Text(f"{title:<17} {cell(self.need, self.unit):>7} {self.unit} of {gib(self.usable)} GiB usable")
            yield ""

    def _bar(self, width: int, ascii_only: bool) -> Text:
        """Draw '│params 12.6 │activ 1.1│      ╎ 23.2'; where the peak is over the limit, the limit cuts the bar."""
        wall, line = ("|", "!") if ascii_only else ("│", "╎")
        label = f" {gib(self.usable)}{'' if self.unit == 'GiB' else ' GiB'}"
        inner = max(width - 2 - len(label), 8)
        scale = max(self.need, self.usable)
        filled = max(round(inner * self.need / scale), 1)
        drawn = Text()
        for part, columns in zip(self.parts, cells([p.bytes for p in self.parts], filled), strict=True):
            if columns:
                drawn.append(wall)
                drawn.append(_inside(part, self.unit, columns - 1), f"black on {part.word.colour}")
        drawn.append(wall)
        drawn.append(" " * (inner + 1 - drawn.cell_len))
        limit = round(inner * self.usable / scale)
        if self.need <= self.usable:
            return Text.assemble(drawn, line, (label, "dim"))
        return Text.assemble(
            drawn[:limit], (line, "bold red"), drawn[limit + 1 :], "\n", " " * limit, (f"{line}{label} usable", "dim")
        )

    def _legend(self, width: int, ascii_only: bool) -> Text:
        """List every part that does not round to 0; a name and its number stay on one line."""
        mark, lines = "#" if ascii_only else "■", [Text()]
        for part in self.parts:
            size = cell(part.bytes, self.unit)
            if size.startswith("<"):
                continue
            item = Text.assemble(
                (mark, part.word.colour), f" {part.word.title} {size}{'' if self.unit == 'GiB' else f' {self.unit}'}"
            )
            if lines[-1] and lines[-1].cell_len + 2 + item.cell_len > width:
                lines.append(Text())
            lines[-1] = Text("  ").join([lines[-1], item]) if lines[-1] else item
        return Text("\n").join(lines)


def _inside(part: BarPart, unit: str, width: int) -> str:
    """Return the longest label that fits: title and number, short name and number, number, or nothing."""
    number = cell(part.bytes, unit)
    for label in (f"{part.word.title} {number}", f"{part.word.short} {number}", number):
        if len(label) <= width:
            return label.center(width)
    return " " * max(width, 0)
