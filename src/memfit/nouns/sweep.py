"""The noun Sweep: a recipe judged on a card at every combination of one or two of its fields."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice

from memfit.nouns.architecture import Architecture
from memfit.nouns.footprint import Levels
from memfit.nouns.gpu import Gpu
from memfit.nouns.job import Recipe
from memfit.nouns.plan import Judgement, Verdict

Value = bool | int | float | str
CARDS_AXIS = "gpu"  # the one axis that is no field of Recipe: its values name cards


@dataclass(frozen=True, slots=True)
class Axis:
    """A field of Recipe and the values it takes, or `gpu` and names of cards."""

    name: str
    values: tuple[Value, ...]


@dataclass(frozen=True, slots=True)
class Cell:
    """One combination: its recipe with what `memfit estimate` says of it, or why it is impossible.

    `judgement` and `levels` (of the peak) are None where `refused` holds a reason; `hint` says what works instead.
    """

    recipe: Recipe
    judgement: Judgement | None = None
    levels: Levels | None = None
    seconds_per_step: float = 0.0  # roofline estimate of one optimizer step
    refused: str = ""
    hint: str = ""

    @property
    def verdict(self) -> Verdict | None:
        """Return the verdict; None of a combination that is impossible."""
        return self.judgement.verdict if self.judgement else None


@dataclass(frozen=True, slots=True)
class Sweep:
    """The cells of one or two axes, in row-major order.

    The first axis runs along a row (its values are the columns), the second down the rows; one axis makes one row.
    `gpu` is the card of every cell, or of the first one where an axis names cards.
    """

    architecture: Architecture
    gpu: Gpu
    base: Recipe
    axes: tuple[Axis, ...]
    cells: tuple[Cell, ...]

    @property
    def columns(self) -> Axis:
        """Return the axis along a row."""
        return self.axes[0]

    @property
    def rows(self) -> tuple[tuple[Cell, ...], ...]:
        """Return the cells row by row."""
        cells, width = iter(self.cells), len(self.columns.values)
        return tuple(tuple(islice(cells, width)) for _ in range(len(self.cells) // width))

    def values(self, index: int) -> dict[str, Value]:
        """Return what sets a cell apart: the value of each axis, by its name."""
        down, along = divmod(index, len(self.columns.values))
        places = (along, down)
        return {axis.name: axis.values[place] for axis, place in zip(self.axes, places, strict=False)}
