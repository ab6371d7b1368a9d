"""The roofline: what must be slower is slower, whatever the card."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from memfit import Recipe, find_gpu, resolve_model
from memfit.closed_form.run.account import Account
from memfit.planner.cost import active_parameters, step_time

MODEL = resolve_model("llama-2-7b")
START = Recipe(micro_batch=4, precision="bf16", checkpointing="none")


def seconds(recipe: Recipe, gpu: str = "a100-80gb") -> float:
    card = find_gpu(gpu)
    return step_time(MODEL, recipe, card, Account(MODEL, recipe, card).static).total


@pytest.mark.parametrize(
    "slower",
    [{"checkpointing": "full"}, {"attention": "eager"}, {"precision": "fp32"}, {"micro_batch": 8}, {"accumulation": 2},
     {"sequence_length": 4096}, {"offload": "optimizer"}, {"loss": "full"}],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("gpu", ["t4", "rtx-4090", "h100", "mi300x"])
def test_what_does_more_takes_longer(slower: dict[str, Any], gpu: str) -> None:
    start = START.but(loss="fused")
    assert seconds(start.but(**slower), gpu) > seconds(start, gpu)


def test_checkpointing_costs_about_a_third() -> None:
    ratio = seconds(START.but(checkpointing="full")) / seconds(START)
    assert 1.2 < ratio < 1.4


def test_lora_skips_the_weight_gradients_of_the_base() -> None:
    assert seconds(START.but(method="lora")) < seconds(START)


def test_a_faster_card_is_faster() -> None:
    assert seconds(START, "h100") < seconds(START, "a100-80gb") < seconds(START, "t4")


@pytest.mark.parametrize("gpu", ["t4", "v100-16gb", "p100", "titan-rtx", "rtx-2080-ti"])
def test_cards_without_bf16_are_timed_by_their_fp16_rate(gpu: str) -> None:
    card = find_gpu(gpu)
    assert card.half_flops == card.fp16_flops > 0
    recipe = START.but(precision="fp16-mixed", accumulation=8)
    slower = replace(card, fp16_flops=card.fp16_flops / 2)
    static = Account(MODEL, recipe, card).static
    assert step_time(MODEL, recipe, slower, static).total > 1.5 * step_time(MODEL, recipe, card, static).total


def test_a_token_passes_only_the_experts_it_is_routed_to() -> None:
    mixtral = resolve_model("mixtral-8x7b")
    assert active_parameters(mixtral) < 0.35 * mixtral.parameters
    assert active_parameters(MODEL) == MODEL.parameters - MODEL.embedding[0].numel
