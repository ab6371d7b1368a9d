"""How long a training on the user's data takes: the Trainer's steps, each at the mean length of batches."""

from __future__ import annotations

from dataclasses import replace
from math import ceil
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memfit import Job, Recipe, find_gpu, resolve_model
from memfit.data.lengths import Lengths
from memfit.nouns.job import Training
from memfit.nouns.plan import Plan
from memfit.planner import make_plan
from memfit.planner.cost import duration

CARD = find_gpu("l4")
PLAN = make_plan(Job(architecture=resolve_model("qwen2.5-0.5b"), gpu=CARD, method="lora"))
LENGTHS = Lengths.counted({100: 900, 2000: 100})


def planned(plan: Plan = PLAN, training: Training | None = None, **recipe: Any) -> Plan:
    job = plan.job if training is None else replace(plan.job, training=training)
    return replace(plan, job=job, recipe=plan.recipe.but(**recipe))


def trainer_steps(samples: int, r: Recipe, training: Training) -> int:
    """Count the optimizer steps as transformers' Trainer does (Trainer.set_initial_training_values)."""
    batches = ceil(samples / (r.micro_batch * r.num_gpus))
    per_epoch = max(batches // r.accumulation + int(batches % r.accumulation > 0), 1)
    return training.max_steps if training.max_steps > 0 else ceil(training.epochs * per_epoch)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 500), st.integers(1, 8), st.integers(1, 8), st.integers(1, 8),
    st.sampled_from((0.5, 1.0, 3.0)), st.sampled_from((-1, 7)),
)  # fmt: skip
def test_steps_are_those_of_the_trainer(
    samples: int, batch: int, accumulation: int, cards: int, epochs: float, most: int
) -> None:
    training = Training(epochs=epochs, max_steps=most)
    plan = planned(training=training, micro_batch=batch, accumulation=accumulation, num_gpus=cards)
    found = duration(plan, Lengths.counted({64: samples}))
    assert found is not None
    assert found.steps == trainer_steps(samples, plan.recipe, training)


def test_twice_the_samples_take_twice_as_long() -> None:
    once, twice = duration(PLAN, LENGTHS), duration(PLAN, Lengths.counted({t: 16 * n for t, n in LENGTHS.counts}))
    assert once and twice
    assert twice.seconds == pytest.approx(16 * once.seconds, rel=0.03)


def test_time_is_for_mean_batches_and_not_for_the_longest() -> None:
    found = duration(planned(micro_batch=1, accumulation=16, sequence_length=2048), LENGTHS)
    assert found
    assert found.mean_tokens == pytest.approx((100 * 900 + 2000 * 100) / 1000)
    assert found.seconds < 0.5 * found.steps * PLAN.seconds_per_step


def test_packing_fills_rows_and_has_no_padding() -> None:
    found = duration(planned(padding="packing", sequence_length=2048), LENGTHS)
    padded = duration(planned(micro_batch=4, accumulation=4, sequence_length=2048), LENGTHS)
    assert found and padded
    assert found.sequences < LENGTHS.count == padded.sequences
    assert 0.9 * 2048 < found.mean_tokens <= 2048
    assert found.seconds < padded.seconds


def test_cost_follows_from_the_hours_and_the_cards() -> None:
    assert CARD.price_per_hour
    found = duration(planned(num_gpus=4), LENGTHS)
    assert found and found.cost == pytest.approx(CARD.price_per_hour * 4 * found.seconds / 3600)
    assert found.range[0] < found.seconds < found.range[1]


def test_without_a_price_or_a_speed_nothing_is_made_up() -> None:
    home, mac = (replace(PLAN, job=replace(PLAN.job, gpu=find_gpu(name))) for name in ("rtx-4090", "m3-max"))
    found = duration(home, LENGTHS)
    assert found and found.cost is None
    assert duration(mac, LENGTHS) is None
