"""The JSON documents of a watched run and of a comparison; codec.py lists them among the others."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from memfit.allocator.replay import highest
from memfit.documents import filled
from memfit.footprints.compare import Agreement, Comparison, Level, NamedShare, PhaseRow, RoleRow
from memfit.footprints.footprint_of_watch import by_phase
from memfit.nouns.footprint import Levels
from memfit.nouns.sample import Alarm, Header, Leak, Watched
from memfit.nouns.tape import Phase


class CompareDoc(Struct, frozen=True, kw_only=True):
    """`memfit compare --json`. Sizes in bytes; `left` is the first file, `right` the second."""

    schema: Literal["memfit.compare/1"] = "memfit.compare/1"
    left_name: str
    right_name: str
    left_phase: Phase
    right_phase: Phase
    level: Level
    left: int
    right: int
    difference: int
    left_need: Annotated[int, Meta(description="bytes of the whole run, not of left_phase alone")] = 0
    right_need: Annotated[int, Meta(description="bytes of the whole run, not of right_phase alone")] = 0
    band: Annotated[int, Meta(description="bytes that left may be off")]
    agreement: Annotated[Agreement, Meta(description="right_need against left_need")]
    phases: tuple[PhaseRow, ...]
    roles: tuple[RoleRow, ...]
    terms: tuple[NamedShare, ...]
    notes: tuple[str, ...]
    refused: Annotated[
        tuple[int, int],
        Meta(description="bytes of the request at which left and right ran out of memory; 0: they did not"),
    ] = (0, 0)


class WatchedDoc(Struct, frozen=True, kw_only=True):
    """`memfit watch --json`. Sizes in bytes; `exit_code` is the command's, null for a log that was read."""

    schema: Literal["memfit.watched/1"] = "memfit.watched/1"
    header: Header
    steps: int
    seconds: float
    peak: Levels
    phases: dict[Phase, Levels]
    alarms: tuple[Alarm, ...]
    leaks: tuple[Leak, ...]
    exit_code: int | None
    whole_card: Annotated[bool, Meta(description="bytes of other processes are among those of `device`")] = False


def compare_doc(left_name: str, right_name: str, found: Comparison) -> CompareDoc:
    """Return the document of a comparison of two files."""
    return filled(CompareDoc, found, left_name=left_name, right_name=right_name)


def watched_doc(watched: Watched, exit_code: int | None = None) -> WatchedDoc:
    """Return the document of a watched run, its phases by their peaks."""
    peaks = by_phase(watched.samples)
    peak = Levels(0, 0, 0, 0)
    for levels in peaks.values():
        peak = highest(peak, levels)
    last = watched.samples[-1] if watched.samples else None
    return filled(
        WatchedDoc, watched, steps=last.step if last else 0, seconds=last.seconds if last else 0.0, peak=peak,
        phases=peaks, exit_code=exit_code, whole_card=any(sample.whole_card for sample in watched.samples),
    )  # fmt: skip
