"""Paged optimizer states: in what nvidia-smi shows, in no verdict, and the same by formula and by trace."""

from __future__ import annotations

from dataclasses import replace

import pytest

from memfit import Recipe, estimate, find_gpu, resolve_model
from memfit.nouns.footprint import PAGED, Footprint
from memfit.nouns.plan import judge

GPU = find_gpu("rtx-4090")
LORA = Recipe(method="qlora", quantization="nf4-double", lora_rank=64, trainer="transformers", sequence_length=512)
FULL = Recipe(trainer="transformers", sequence_length=128)


def paged(footprint: Footprint) -> dict[str, int]:
    """The bytes of the row by phase."""
    return {p.phase: sum(x.bytes for x in p.lines if x.label == PAGED) for p in footprint.phases}


@pytest.mark.parametrize(("optimizer", "width"), [("paged-adamw-8bit", 1), ("paged-adamw-32bit", 4)])
def test_paged_states_are_on_the_card_and_in_no_verdict(optimizer: str, width: int) -> None:
    model = resolve_model("llama-2-7b")
    footprint = estimate(model, LORA.but(optimizer=optimizer), GPU)
    adapters = sum(64 * sum(w.shape) for x in model.layers for w in x.weights if w.kind == "linear")
    found = paged(footprint)
    assert found["step"] == found["save"] == 2 * width * adapters  # two moments; every factor has 1e5 elements
    assert not any(found.get(phase) for phase in ("load", "resume", "merge"))
    for phase in footprint.phases:
        assert sum(line.bytes for line in phase.lines) == phase.levels.device
    without = tuple(
        replace(
            p,
            levels=replace(p.levels, device=p.levels.device - p.paged),
            lines=tuple(x for x in p.lines if x.label != PAGED),
        )
        for p in footprint.phases
    )
    assert judge(footprint, GPU) == judge(replace(footprint, phases=without), GPU)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("optimizer", ["paged-adamw-8bit", "paged-adamw-32bit"])
def test_both_engines_find_the_same_paged_states(optimizer: str) -> None:
    pytest.importorskip("trl")
    pytest.importorskip("bitsandbytes")
    from traced import both

    for layers in (2, 9):  # traced whole, and unrolled
        found = both("smollm2-135m", FULL.but(optimizer=optimizer), find_gpu("l4"), num_hidden_layers=layers)
        formula, traced = paged(found.formula), paged(found.traced)
        assert formula["step"] == traced["step"] > 0
        assert formula["eval"] == traced["eval"]
