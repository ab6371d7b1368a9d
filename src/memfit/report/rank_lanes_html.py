"""Draw the traced ranks of a job one below the other, on one scale: where over the schedule each holds its bytes.

It is HTML without script, below the timeline of the worst rank; the title of a phase's band is shown as a tooltip.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from memfit.footprints.rank_peaks import RankPeak
from memfit.nouns.alloc_settings import AllocSettings, Torch
from memfit.nouns.tape import Tape
from memfit.report.ranks import spans
from memfit.report.timeline_html import HEIGHT, WIDTH, areas, bands, sample, top_of
from memfit.report.words import phase_title
from memfit.units import gib


def rank_lanes(
    ranks: Sequence[tuple[RankPeak, Tape]], settings: AllocSettings, torch: Torch, usable: int | None
) -> str:
    """Return a lane for each rank in the order given, with a dashed line where the card of `usable` bytes is full."""
    drawings = [sample(tape, settings, torch) for _, tape in ranks]
    top = max((top_of(drawing, usable) for drawing in drawings), default=1)
    y = "" if usable is None or usable > top else f"{100 - 100 * usable / top:.2f}%"
    full = f'<line class="card" x1="0" x2="100%" y1="{y}" y2="{y}"/>' if y else ""
    made = [f"<h2>{len(ranks)} traced ranks on one scale, the worst first</h2>\n"]
    for (rank, _), drawing in zip(ranks, drawings, strict=True):
        where = f"{rank.instant} ({phase_title(rank.phase)})"
        of = f"stands for {spans(rank.members)}" if len(rank.members) > 1 else ""
        peak = f"{gib(rank.levels.reserved, 2)} GiB reserved, at {where}"
        words = " · ".join(part for part in (f"rank {rank.rank}", rank.what, of, peak) if part)
        made.append(
            f'<div role="img" aria-label="{escape(words, quote=True)}">{escape(words)}'
            f'<div class="plot lane"><svg>{bands(drawing)}<svg viewBox="0 0 {WIDTH} {HEIGHT}" '
            f'preserveAspectRatio="none">{areas(drawing, top)}</svg>{full}</svg></div></div>\n'
        )
    return "".join(made)
