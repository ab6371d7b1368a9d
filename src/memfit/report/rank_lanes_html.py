"""Draw the traced ranks of a job one below the other, on one scale: where over the schedule each holds its bytes.

They stand below the timeline of the worst rank; views.js shows what is alive under the pointer in these as in that.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from memfit.footprints.rank_peaks import RankPeak
from memfit.nouns.alloc_settings import AllocSettings, Torch
from memfit.nouns.tape import Tape
from memfit.report.document_html import clean
from memfit.report.ranks import spans
from memfit.report.timeline_html import lane, sample, top_of
from memfit.report.words import phase_title
from memfit.units import gib

COLUMNS = 300  # columns of a lane; a file may have many


def rank_lanes(
    ranks: Sequence[tuple[RankPeak, Tape]], settings: AllocSettings, torch: Torch, usable: int | None
) -> str:
    """Return a lane for each rank in the order given, with a dashed line where the card of `usable` bytes is full."""
    drawings = [sample(tape, settings, torch, columns=COLUMNS) for _, tape in ranks]
    top = max((top_of(drawing, usable) for drawing in drawings), default=1)
    made = [f"<h2>{len(ranks)} traced ranks on one scale, the worst first</h2>\n"]
    for (rank, _), drawing in zip(ranks, drawings, strict=True):
        where = f"{rank.instant} ({phase_title(rank.phase)})"
        of = f"stands for {spans(rank.members)}" if len(rank.members) > 1 else ""
        peak = f"{gib(rank.levels.reserved, 2)} GiB reserved, at {where}"
        words = " · ".join(part for part in (f"rank {rank.rank}", rank.what, of, peak) if part)
        made.append(f"<p>{escape(words)}</p>{lane(drawing, usable, top, words)}\n")
    return clean("".join(made))  # names come from files
