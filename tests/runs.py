"""A run of seconds for tests: a model of two layers, a few distinct samples of unequal length, on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from memfit.cards import custom_gpu
from memfit.formula.estimate import estimate
from memfit.hub import resolve_model
from memfit.job import Job, Recipe
from memfit.plan import Plan
from memfit.run import embedded, folder
from memfit.run.nouns import Settings
from memfit.units import GIB
from memfit.verdicts import judge

SMALL = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
    "head_dim": 16,
}  # fmt: skip
RECIPE = Recipe(precision="fp32", micro_batch=4, sequence_length=32, loss="fused")
SAMPLES, STEPS = 22, 6  # 22 samples in steps of 4: the last step of an epoch is short


def assets(place: Path) -> tuple[Path, Path]:
    """The model's folder and a data file whose lines all differ."""
    model, data = embedded.write(place, SMALL)
    data.write_text("".join(f"{'abcdefghijklmnop'[: 3 + i % 11]} {i * i}\n" for i in range(SAMPLES)))
    return model, data


def plan_for(model: Path, data: Path, recipe: Recipe = RECIPE) -> Plan:
    """The plan of a recipe on a card of 2 GiB."""
    card = custom_gpu(2 * GIB)
    architecture = resolve_model(str(model))
    footprint = estimate(architecture, recipe, card)
    job = Job(
        architecture=architecture, gpu=card, effective_batch=recipe.effective_batch, method=recipe.method,
        sequence_length=recipe.sequence_length, num_gpus=recipe.num_gpus, dataset=str(data),
    )  # fmt: skip
    return Plan(job, recipe, footprint, judge(footprint, card), ())


def make_run(place: Path, made: tuple[Path, Path], recipe: Recipe = RECIPE, **settings: Any) -> folder.Run:
    """A run that was created and not yet started."""
    folder.prepare(place, force=False)
    told = Settings(**{"cpu": True, "max_steps": STEPS, "save_steps": 2, "learning_rate": 5e-3} | settings)
    return folder.create(place, plan_for(*made, recipe), told)
