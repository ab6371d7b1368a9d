"""Ask both engines about one recipe: the closed form, and the recipe's own trainer on a virtual card."""

from __future__ import annotations

import gc
import json
from dataclasses import dataclass
from functools import cache
from typing import Any

from memfit import Recipe, estimate
from memfit.allocator.replay import replay
from memfit.footprints.footprint_of_trace import footprint_of
from memfit.models.families import architecture
from memfit.models.hub import resolve_config
from memfit.nouns.footprint import Footprint, PhasePeak
from memfit.nouns.gpu import Gpu
from memfit.virtual.tracing import trace_recipe


@dataclass(frozen=True, slots=True)
class Both:
    """The footprints of one recipe by both engines."""

    formula: Footprint
    traced: Footprint

    def off(self, level: str) -> float:
        """Return (formula - traced) / traced of a level, each at the training step that needs most tensor bytes."""
        formula, traced = (getattr(_worst_step(f).levels, level) for f in (self.formula, self.traced))
        return float((formula - traced) / traced)


def both(model: str, recipe: Recipe, gpu: Gpu, **changes: Any) -> Both:
    """Estimate and trace a catalogued model; `changes` replace keys of its config, such as the number of layers."""
    return _both(model, recipe, gpu, json.dumps(changes))


@cache
def _both(model: str, recipe: Recipe, gpu: Gpu, changes: str) -> Both:
    config = {**resolve_config(model), **json.loads(changes)}
    tape, _ = trace_recipe(recipe, config, gpu)
    traced = footprint_of(tape, replay(tape.events), (), (), gpu.context_bytes)
    gc.collect()
    return Both(estimate(architecture(config, model), recipe, gpu), traced)


def _worst_step(footprint: Footprint) -> PhasePeak:
    steps = [p for p in footprint.phases if p.phase in ("first_step", "step")]
    return max(steps, key=lambda p: p.levels.requested)
