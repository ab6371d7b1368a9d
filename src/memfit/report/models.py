"""The model catalogue as a table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from rich.console import Group

from memfit.report.layout import table, text
from memfit.units import billions


class Row(Protocol):
    """What a catalogue entry shows."""

    @property
    def stem(self) -> str: ...
    @property
    def id(self) -> str: ...
    @property
    def family(self) -> str: ...
    @property
    def parameters(self) -> int | None: ...


def models_view(rows: Sequence[Row]) -> Group:
    """Name to type, size, family and Hugging Face id."""
    made = table("model", ">parameters", "family", "Hugging Face id")
    for row in rows:
        size = "-" if row.parameters is None else billions(row.parameters)
        made.add_row(text(row.stem), size, text(row.family), text(row.id))
    note = "any other model: org/name on Hugging Face, a folder with a config.json, or the path of one"
    return Group(made, "", text(f"{len(rows)} models; {note}", "dim"))
