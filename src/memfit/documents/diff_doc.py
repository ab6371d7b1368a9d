"""The JSON document of `memfit diff`."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from memfit.nouns.check import JobAnswer, JobDifference
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
    base, head = (_side(*pair) for pair in zip(found.environments, (found.base, found.head), strict=True))
    return DiffDoc(
        job=found.title, gpu=found.card, exit_code=found.exit_code, base=base, head=head, versions=found.versions,
        difference=found.difference, tensors=found.tensors, places=found.places,
    )  # fmt: skip


def _side(name: str, answer: JobAnswer) -> SideDoc:
    return SideDoc(
        environment=name, verdict=answer.verdict, usable=answer.usable, need=answer.need, band=answer.band,
        ran_out=answer.ran_out, not_understood=answer.not_understood, notes=answer.notes,
    )  # fmt: skip
