"""The catalogue: published config.json files with an index of their names and exact parameter counts (package data)."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path

FOLDER = Path(__file__).parent  # importlib.resources would import zipfile and more at every start


@dataclass(frozen=True, slots=True)
class Entry:
    """One model of the catalogue."""

    stem: str  # name of its file, and its short name
    id: str  # Hugging Face id
    aliases: tuple[str, ...]  # other ids of the same architecture, and short names
    family: str  # model_type
    architecture: str  # class whose parameters are counted
    parameters: int | None  # tied weights once; None: the family is refused
    grade: str  # A: copied from a published file; B: rebuilt from a published table; C: class defaults of transformers
    source: str
    note: str
    refused: str = ""  # why its training memory is not modelled

    @property
    def names(self) -> tuple[str, ...]:
        return (self.stem, self.id, *self.aliases)


@cache
def entries() -> tuple[Entry, ...]:
    """Return every model of the catalogue, by name; only the index is read."""
    rows = json.loads((FOLDER / "models.json").read_text(encoding="utf-8"))
    return tuple(Entry(**{**row, "aliases": tuple(row["aliases"])}) for row in rows)


def config(entry: Entry) -> dict[str, object]:
    """Read the config.json of a model of the catalogue."""
    text = (FOLDER / "models" / f"{entry.stem}.json").read_text(encoding="utf-8")
    return dict(json.loads(text))
