"""Estimate one recipe and judge it, by the card and by the host RAM: what `memfit estimate` says of it."""

from __future__ import annotations

from memfit.closed_form.host_memory import with_host
from memfit.closed_form.run.estimate import estimate
from memfit.nouns.architecture import Architecture
from memfit.nouns.footprint import Footprint
from memfit.nouns.gpu import Gpu
from memfit.nouns.job import Recipe
from memfit.nouns.plan import Judgement, judge


def judged_run(
    architecture: Architecture, recipe: Recipe, gpu: Gpu, *, reserve: int = 0, host_memory: int = 0, workers: int = 0
) -> tuple[Footprint, Judgement]:
    """Return the footprint of a run and its judgement. Sizes are bytes; host_memory 0: not given."""
    footprint = estimate(architecture, recipe, gpu, reserve=reserve)
    on_card = judge(footprint, gpu, reserve)
    return footprint, with_host(on_card, architecture, recipe, gpu, given=host_memory, workers=workers)
