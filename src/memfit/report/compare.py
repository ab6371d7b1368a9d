"""The screen of `memfit compare`: the answer, phases, roles, and the terms that explain the difference."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

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

Side = tuple[str, int | None, int | None]  # a name, and the bytes left and right


def compare_view(left: str, right: str, found: Comparison, next_up: Sequence[str] = ()) -> Group:
    """Show the answer of `memfit compare`."""
    unit = shared_unit(max(found.left_need, found.right_need))
    words, style = WORDS[found.agreement]
    if found.agreement == "less" and found.refused[1]:  # it shows less because it ended early
        words = "LESS UNTIL IT RAN OUT"
    overall = f"{against(found, found.left_need, found.right_need)}, the band is ±{human(found.band)}"
    shown: list[RenderableType] = [
        text(f"{right} (right) against {left} (left)", "bold"),
        "",
        hanging(Text(words, style), list(filter(None, (overall, where_words(found), outside_words(found))))),
    ]
    for title, rows in parts(found, unit):
        shown += ["", _grid(title, rows, unit)]
    if found.notes:
        shown += ["", paragraphs([("note:", note) for note in found.notes])]
    if next_up:
        shown += ["", commands(next_up)]
    return Group(*shown)


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


def parts(found: Comparison, unit: str) -> Iterator[tuple[str, list[Side]]]:
    """Yield the tables of a comparison: a title, and rows of a name with the bytes left and right, None if unknown."""
    field, word = SHOWN[found.level]
    phases: list[Side] = []
    for row in found.phases:
        left, right = (getattr(levels, field) if levels else None for levels in (row.left, row.right))
        phases.append((phase_title(row.phase), left, right))
    yield f"phase, {unit} {word}", phases
    yield "role at the worst instant", [(_roles_title(found, r), r.left, r.right) for r in found.roles]
    if found.terms:
        yield "what explains it", [(f"{ROLE_WORDS[t.role].title}: {t.label}", t.left, t.right) for t in found.terms]


def figures(row: Side, unit: str) -> tuple[str, str, str]:
    """Return the bytes of a row, left and right, and their difference with its sign."""
    _, left, right = row
    gap = "" if left is None or right is None else _difference(right - left, unit)
    return _size(left, unit), _size(right, unit), gap


def _size(size: int | None, unit: str) -> str:
    return "-" if size is None else in_unit(size, unit)


def _difference(size: int, unit: str) -> str:
    shown = in_unit(size, unit)
    return shown.lstrip("-") if not float(shown.replace(",", "")) else f"+{shown}" if size > 0 else shown


def _roles_title(found: Comparison, row: RoleRow) -> str:
    """Return the names of the roles of a row."""
    return ", ".join(ROLE_WORDS[role].title for role in row.roles) if len(found.roles) > 1 else "all roles together"


def _grid(title: str, rows: Sequence[Side], unit: str) -> Grid:
    columns = [Column(title, wraps=24), *(Column(name, right=True) for name in ("left", "right", "difference"))]
    return Grid(columns, [[text(row[0]), *figures(row, unit)] for row in rows])
