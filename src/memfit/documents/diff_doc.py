"""The JSON document of `memfit diff`."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from memfit.documents.filled import filled
from memfit.nouns.check import JobDifference
from memfit.nouns.plan import Verdict
from memfit.nouns.upgrade import LibraryPlace, TensorChange, Upgrade, VersionChange


class SideDoc(Struct, frozen=True, kw_only=True):
    """The answer in one environment; sizes in bytes."""

    environment: str
    verdict: Verdict
    usable: int
    need: Annotated[int, Meta(description="bytes of the reserved peak on a card without a limit")]
    band: int
    ran_out: Annotated[str, Meta(description="the line at which memory ran out")]
    not_understood: tuple[str, ...]
    notes: tuple[str, ...]


class DiffDoc(Struct, frozen=True, kw_only=True):
    """`memfit diff --json`."""

    schema: Literal["memfit.diff/1"] = "memfit.diff/1"
    job: str
    gpu: str
    exit_code: Annotated[int, Meta(description="that of the second environment's verdict")]
    base: SideDoc
    head: SideDoc
    versions: Annotated[tuple[VersionChange, ...], Meta(description="libraries whose version differs")]
    difference: JobDifference
    tensors: Annotated[tuple[TensorChange, ...], Meta(description="by module and operator, the largest change first")]
    places: Annotated[tuple[LibraryPlace, ...], Meta(description="lines that decide, with the bytes of which they do")]


def diff_doc(found: Upgrade) -> DiffDoc:
    """Make the document of a comparison of two environments."""
    sides = zip(found.environments, (found.base, found.head), strict=True)
    base, head = (filled(SideDoc, answer, environment=name) for name, answer in sides)
    return filled(DiffDoc, found, job=found.title, gpu=found.card, base=base, head=head)
