"""What memfit lists as documents: the models of the catalogue, and what doctor found of an installation."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct


class ModelRowDoc(Struct, frozen=True, kw_only=True):
    """One model of the catalogue. `parameters`: tied weights once, null where the family is refused."""

    stem: str
    id: str
    aliases: tuple[str, ...]
    family: str
    architecture: str
    parameters: int | None
    grade: Literal["A", "B", "C"]
    source: str
    note: str
    refused: str = ""


class ModelsDoc(Struct, frozen=True, kw_only=True):
    """`memfit models --json`."""

    schema: Literal["memfit.models/1"] = "memfit.models/1"
    models: tuple[ModelRowDoc, ...]


class LineDoc(Struct, frozen=True, kw_only=True):
    """One line of doctor: what it is about, and the command that betters it."""

    about: str
    state: Literal["ok", "note", "fault"]
    text: str
    type_next: str = ""


class DoctorDoc(Struct, frozen=True, kw_only=True):
    """`memfit doctor --json`. `versions`: of what answers depend on."""

    schema: Literal["memfit.doctor/1"] = "memfit.doctor/1"
    versions: dict[str, str]
    findings: tuple[LineDoc, ...]
