"""A sweep as a JSON document, which codec.py lists among the others, and as CSV."""

from __future__ import annotations

import csv
import io
from typing import Annotated, Literal

from msgspec import Meta, Struct

from memfit.documents import filled
from memfit.nouns.footprint import Levels
from memfit.nouns.gpu import Gpu
from memfit.nouns.job import Recipe
from memfit.nouns.plan import HostJudgement, NotUnderstood, Verdict
from memfit.nouns.sweep import Axis, Cell, Sweep, Value


class CellDoc(Struct, frozen=True, kw_only=True):
    """One combination. What is judged has the values of `memfit estimate --json`; else `refused` says why not."""

    over: Annotated[dict[str, Value], Meta(description="the value of each axis")]
    recipe: Recipe
    verdict: Verdict | None
    fits: bool
    usable: int = 0
    need: Annotated[int, Meta(description="bytes of the reserved peak, NCCL included")] = 0
    band: int = 0
    headroom: Annotated[int, Meta(description="usable - need, in bytes; negative: over")] = 0
    peak: Levels | None = None
    host: HostJudgement | None = None
    seconds_per_step: float = 0.0
    refused: Annotated[str, Meta(description='why the combination is impossible; "": it is judged')] = ""
    hint: str = ""


class SweepDoc(Struct, frozen=True, kw_only=True):
    """`memfit sweep --json`. `cells` in row-major order: the values of the first axis change fastest."""

    schema: Literal["memfit.sweep/1"] = "memfit.sweep/1"
    model: str
    parameters: int
    gpu: Annotated[Gpu, Meta(description="the card of all cells, or of the first where an axis names cards")]
    recipe: Annotated[Recipe, Meta(description="the recipe without the axes")]
    axes: tuple[Axis, ...]
    not_understood: tuple[NotUnderstood, ...] = ()  # settings for which verdicts are not_judged
    cells: tuple[CellDoc, ...]


def sweep_doc(sweep: Sweep) -> SweepDoc:
    """Make the document of a sweep."""
    withheld = next((c.judgement.not_understood for c in sweep.cells if c.verdict == "not_judged" and c.judgement), ())
    cells = tuple(_cell_doc(cell, sweep.values(number)) for number, cell in enumerate(sweep.cells))
    return filled(
        SweepDoc, sweep, model=sweep.architecture.name, parameters=sweep.architecture.parameters, recipe=sweep.base,
        not_understood=withheld, cells=cells,
    )  # fmt: skip


def _cell_doc(cell: Cell, over: dict[str, Value]) -> CellDoc:
    return filled(CellDoc, cell, cell.judgement, over=over, fits=cell.verdict == "fits", peak=cell.levels)


FIGURES = ("usable", "need", "band", "headroom")
LEVELS = ("requested", "allocated", "reserved", "device")


def sweep_csv(sweep: Sweep) -> str:
    """Return a line for each combination under a line of names; what is not known of an impossible one is empty."""
    text = io.StringIO()
    lines = csv.writer(text, lineterminator="\n")
    names = [axis.name for axis in sweep.axes]
    lines.writerow([*names, "verdict", *FIGURES, *LEVELS, "host_need", "seconds_per_step", "refused"])
    for number, cell in enumerate(sweep.cells):
        over = [str(value).lower() if isinstance(value, bool) else value for value in sweep.values(number).values()]
        judged = cell.judgement
        if judged is None:
            lines.writerow([*over, "refused", *[""] * (len(FIGURES) + len(LEVELS) + 2), cell.refused])
            continue
        sizes = [*(getattr(judged, name) for name in FIGURES), *(getattr(cell.levels, name) for name in LEVELS)]
        host = judged.host.need if judged.host else ""
        lines.writerow([*over, judged.verdict, *sizes, host, f"{cell.seconds_per_step:.6g}", ""])
    return text.getvalue()
