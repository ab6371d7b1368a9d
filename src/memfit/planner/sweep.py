"""Judge a recipe at every combination of one or two of its fields, each exactly as `memfit estimate` judges it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import product

from memfit.closed_form.judged_run import judged_run
from memfit.closed_form.run.account import Account
from memfit.errors import SOME_CARD, BadInput, UnknownName
from memfit.nouns.architecture import Architecture
from memfit.nouns.gpu import Gpu
from memfit.nouns.job import RECIPE_FIELDS, Recipe
from memfit.nouns.plan import NotUnderstood, withheld
from memfit.nouns.sweep import Axis, Cell, Sweep, Value
from memfit.planner.cost import step_time
from memfit.tables import combinations

MOST_CELLS = 400
MOST_AXES = 2
Values = Mapping[str, Value]
Made = Callable[[Values], tuple[Recipe, Gpu]]
Each = Callable[[Callable[[Values], Cell], Sequence[Values]], Iterable[Cell]]


def sweep(
    architecture: Architecture, base: Recipe, gpu: Gpu, axes: Sequence[Axis], made: Made, *, reserve: int = 0,
    host_memory: int = 0, workers: int = 0, not_understood: Sequence[NotUnderstood] = (),
    progress: Callable[[float], None] | None = None, each: Each = map,
) -> Sweep:  # fmt: skip
    """Return the map of a recipe over one or two axes; see `nouns.sweep.Sweep` for the order of its cells.

    `made` returns the recipe and the card of a combination of values. One that no trainer runs, or that no formula
    counts, is a cell with the reason. Verdicts are withheld where settings were `not_understood`. `progress` is called
    with the share that is done. `each` calls a function with every combination and returns the results in their order,
    as `map` does.

    Raises BadInput for too many cells.
    """
    _check(axes)
    names, count = [axis.name for axis in axes], _count(axes)

    ram = {"host_memory": host_memory, "workers": workers}

    def cell(values: Values) -> Cell:
        recipe = _plainly(base, values)
        try:
            recipe, card = made(values)
            combinations.check(recipe, architecture, card)
            footprint, judgement = judged_run(architecture, recipe, card, reserve=reserve, **ram)
        except UnknownName:
            raise
        except BadInput as error:
            return Cell(recipe, refused=error.message, hint=error.hint.replace(SOME_CARD, f"--gpu {gpu.short}"))
        seconds = step_time(architecture, recipe, card, Account(architecture, recipe, card).static).total
        return Cell(recipe, withheld(judgement, not_understood), footprint.peak.levels, seconds)

    cells: list[Cell] = []
    for found in each(cell, [dict(zip(names, values, strict=True)) for values in _combinations(axes)]):
        cells.append(found)
        if progress:
            progress(len(cells) / count)
    return Sweep(architecture, gpu, base, tuple(axes), tuple(cells))


def _combinations(axes: Sequence[Axis]) -> Iterator[tuple[Value, ...]]:
    """Yield the values of every cell in the order of the axes: the first axis changes fastest."""
    for backwards in product(*(axis.values for axis in reversed(axes))):
        yield backwards[::-1]


def _count(axes: Sequence[Axis]) -> int:
    count = 1
    for axis in axes:
        count *= len(axis.values)
    return count


def _check(axes: Sequence[Axis]) -> None:
    """Refuse axes that a sweep cannot go over. Raises BadInput."""
    if not 1 <= len(axes) <= MOST_AXES or len({axis.name for axis in axes}) < len(axes):
        named = ", ".join(axis.name for axis in axes) or "none"
        raise BadInput(f"a sweep goes over one or two different axes, not {named}", hint="sequence_length, micro_batch")
    for axis in axes:
        if not axis.values:
            raise BadInput(f"the axis {axis.name} has no values", hint="give it one or more")
    if (count := _count(axes)) > MOST_CELLS:
        raise BadInput(f"a sweep of {count:,} cells is too large: at most {MOST_CELLS}", hint="take fewer values")


def _plainly(base: Recipe, values: Values) -> Recipe:
    """Return the recipe with these values and nothing else changed, whether or not they make sense."""
    fields = {name: value for name, value in values.items() if name in RECIPE_FIELDS}
    if "lora_targets" in fields:
        fields["lora_targets"] = (fields["lora_targets"],)  # type: ignore[assignment]
    return base.but(**fields)
