"""The screen of `memfit compare`: the answer, phases, roles, and the terms that explain the difference."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from memfit.footprints.compare import Agreement, Comparison, Level, RoleRow
from memfit.report.layout import Column, Grid, commands, hanging, paragraphs, text
from memfit.report.words import ROLE_WORDS, phase_title
from memfit.units import human, in_unit, shared_unit

WORDS: dict[Agreement, tuple[str, str]] = {
    "agrees": ("AGREE", "bold green"),
    "more": ("MORE THAN EXPECTED", "bold red"),
    "less": ("LESS THAN EXPECTED", "bold yellow"),
}
OUTSIDE: dict[Agreement | None, str] = {"more": "above", "less": "below"}

SHOWN: dict[Level, tuple[str, str]] = {  # the level's field, and the word after its bytes
    "reserved": ("reserved", "reserved"), "device": ("device", "device"), "tensors": ("reserved", "of tensors"),
    "resident": ("device", "resident"),
}  # fmt: skip


def compare_view(left: str, right: str, found: Comparison, next_up: Sequence[str] = ()) -> Group:
    """Show the answer of `memfit compare`."""
    unit = shared_unit(max(found.left_need, found.right_need))
    words, style = WORDS[found.agreement]
    if found.agreement == "less" and found.refused[1]:  # it shows less because it ended early
        words = "LESS UNTIL IT RAN OUT"
    overall = f"{against(found, found.left_need, found.right_need)}, the band is ±{human(found.band)}"
    parts: list[RenderableType] = [
        text(f"{right} (right) against {left} (left)", "bold"),
        "",
        hanging(Text(words, style), list(filter(None, (overall, where_words(found), outside_words(found))))),
        "",
        _phases(found, unit),
        "",
        _roles(found, unit),
    ]
    if found.terms:
        parts += ["", _terms(found, unit)]
    if found.notes:
        parts += ["", paragraphs([("note:", note) for note in found.notes])]
    if next_up:
        parts += ["", commands(next_up)]
    return Group(*parts)


def against(found: Comparison, left: int, right: int) -> str:
    """Return 'right bytes against left bytes: difference (share)'."""
    share = f" ({(right - left) / left:+.1%})" if left else ""
    sign = "+" if right > left else ""
    return f"{human(right)} {SHOWN[found.level][1]} against {human(left)}: {sign}{human(right - left)}{share}"


def where_words(found: Comparison) -> str:
    """Return the compared phases, with their sizes where they differ from the needs of the whole runs."""
    same = (found.left, found.right) == (found.left_need, found.right_need)
    sizes = "" if same else f": {against(found, found.left, found.right)}"
    if found.left_phase == found.right_phase:
        return f"at the worst instant of the {phase_title(found.left_phase)}{sizes}"
    return f"{phase_title(found.right_phase)} against {phase_title(found.left_phase)}{sizes}"


def outside_words(found: Comparison) -> str:
    """List the phases outside their own band."""
    rows = [f"{phase_title(row.phase)} {OUTSIDE[row.agreement]}" for row in found.phases if row.agreement in OUTSIDE]
    return f"outside their own band: {', '.join(rows)}" if rows else ""


def difference(size: int, unit: str) -> str:
    """Return a difference with its sign."""
    shown = in_unit(size, unit)
    return shown.lstrip("-") if not float(shown.replace(",", "")) else f"+{shown}" if size > 0 else shown


def _phases(found: Comparison, unit: str) -> Grid:
    columns = [
        Column(f"phase, {unit} {SHOWN[found.level][1]}"),
        Column("left", right=True),
        Column("right", right=True),
    ]
    cells: list[Sequence[Text | str]] = []
    field, _ = SHOWN[found.level]
    for row in found.phases:
        left, right = (getattr(levels, field) if levels else None for levels in (row.left, row.right))
        sizes = [in_unit(size, unit) if size is not None else "-" for size in (left, right)]
        gap = difference(right - left, unit) if left is not None and right is not None else ""
        cells.append([phase_title(row.phase), *sizes, gap])
    return Grid([*columns, Column("difference", right=True)], cells)


def roles_title(found: Comparison, row: RoleRow) -> str:
    """Return the names of the roles of a row."""
    return ", ".join(ROLE_WORDS[role].title for role in row.roles) if len(found.roles) > 1 else "all roles together"


def _roles(found: Comparison, unit: str) -> Grid:
    columns = [Column("role", wraps=16), *(Column(name, right=True) for name in ("left", "right", "difference"))]
    rows = [
        [
            roles_title(found, row),
            in_unit(row.left, unit),
            in_unit(row.right, unit),
            difference(row.difference, unit),
        ]
        for row in found.roles
    ]
    return Grid(columns, rows)


def _terms(found: Comparison, unit: str) -> Grid:
    columns = [Column("what explains it", wraps=24)]
    columns += [Column(name, right=True) for name in ("left", "right", "difference")]
    rows: list[list[Text | str]] = [
        [
            text(f"{ROLE_WORDS[term.role].short}: {term.label}"),
            in_unit(term.left, unit),
            in_unit(term.right, unit),
            difference(term.difference, unit),
        ]
        for term in found.terms
    ]
    return Grid(columns, rows)
