"""Ask both engines about one recipe: the closed form, and the recipe's own trainer on a virtual card."""

from __future__ import annotations

import gc
import json
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from memfit import Recipe, estimate, find_gpu
from memfit.allocator.replay import replay
from memfit.footprints.footprint_of_trace import footprint_of
from memfit.models.families import architecture
from memfit.models.hub import resolve_config
from memfit.nouns.footprint import Footprint, PhasePeak
from memfit.nouns.gpu import Gpu
from memfit.virtual.tracing import trace_recipe

if TYPE_CHECKING:
    from memfit.virtual.jobs.recipe import Setup

RECORDS = Path(__file__).parents[1] / "benchmarks" / "measured" / "h100-tasks-2026-11-26.jsonl"


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


def check_as_measured(setup: Setup, case: str) -> None:
    """Hold the steps of a job to those of a run of benchmarks/measure/tasks.py on an H100."""
    from memfit.virtual.jobs import import_libraries, run
    from memfit.virtual.observer import Observer
    from memfit.virtual.process.host import hollow_host
    from memfit.virtual.virtual_gpu import virtual_gpu

    measured = next(r for line in RECORDS.read_text().splitlines() if (r := json.loads(line))["case"] == case)
    gpu = replace(find_gpu("h100"), total_bytes=measured["card"]["total_bytes"])
    with virtual_gpu(gpu, capacity=None) as card:
        import_libraries(setup)
        observer = Observer(card)
        with hollow_host(), observer.watching():
            run(setup, observer)
        tape = observer.tape({})
    found = replay(tape.events).by_phase()
    steps = [s for s in measured["spans"] if s["phase"] in ("first_step", "step")]
    for level, most in (("requested", 0.01), ("reserved", 0.02)):
        ours = max(getattr(found[phase], level) for phase in ("first_step", "step"))
        assert ours == pytest.approx(max(s[level] for s in steps), rel=most)
