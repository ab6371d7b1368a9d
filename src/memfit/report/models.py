"""The model catalogue as a table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from rich.console import Group
from rich.text import Text

from memfit.planner.good_for import CatalogueModel
from memfit.report.layout import Column, Grid, paragraphs, text
from memfit.report.words import tokens
from memfit.units import billions


class Row(CatalogueModel, Protocol):
    """What the table shows of it."""

    @property
    def refused(self) -> str: ...


def models_view(rows: Sequence[Row]) -> Group:
    """Name to type, size, family, Hugging Face id, and whether its training is modelled."""
    columns = (
        Column("model"), Column("parameters", right=True), Column("family", spare=2), Column("Hugging Face id", spare=3),
        Column("training", wraps=8, spare=1),
    )  # fmt: skip
    lines = [
        (text(r.stem), "-" if r.parameters is None else billions(r.parameters), text(r.family), text(r.id),
         Text("refused", "yellow") if r.refused else "modelled")
        for r in rows
    ]  # fmt: skip
    why: dict[str, int] = {}
    for row in rows:
        if row.refused:
            why[row.refused] = why.get(row.refused, 0) + 1
    note = "any other model: org/name on Hugging Face, a folder with a config.json, or the path of one"
    refused = [("refused:", f"{reason} ({tokens(n)} model{'s' if n > 1 else ''})") for reason, n in sorted(why.items())]
    return Group(Grid(columns, lines), "", paragraphs([*refused, ("", "")]), text(f"{len(rows)} models; {note}", "dim"))
