"""The roofline: what must be slower is slower, whatever the card."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from memfit import Gpu, Recipe, find_gpu, resolve_model
from memfit.catalogue.cards import list_gpus
from memfit.closed_form.run.account import Account
from memfit.planner.cost import RANGE, active_parameters, step_time
from memfit.tables.matmul_rates import MEASURED, fp32_share, half_share

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


# ---- sustained rates -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("short", MEASURED)
def test_a_measured_rate_is_of_a_card_in_the_table_and_in_its_published_range(short: str) -> None:
    row, card = MEASURED[short], find_gpu(short)
    assert card.half_flops == pytest.approx(row.sheet * 1e12)
    assert row.low <= row.half <= row.high < 1.2 * row.sheet
    assert row.fp32 < 1.05 * row.half


@pytest.mark.parametrize("card", list_gpus(), ids=lambda g: g.short)
def test_every_card_has_plausible_shares(card: Gpu) -> None:
    assert 0.3 < half_share(card) < 1.2
    assert 0.03 < fp32_share(card) < 1.1


# samples per second of BERT large on SQuAD, and tokens per second of Transformer-XL large, training in fp16:
# lambdal/deeplearning-benchmark, pytorch/pytorch-train-throughput-fp16.csv @0551cb70
LAMBDA = {
    "a10": (42, 5614), "rtx-3090": (52, 7821), "v100-16gb": (57, 6071), "rtx-a6000": (68, 11126),
    "rtx-6000-ada": (79, 16049), "rtx-4090": (93, 14509), "a100-pcie-40gb": (117, 16034),
    "a100-pcie-80gb": (140, 17082), "a100-80gb": (152, 17918), "h100-pcie": (203, 22586), "h100": (301, 30841),
}  # fmt: skip
CLEAR = 1.2  # both workloads must differ by this factor for a pair to count
PAIRS = [
    (fast, slow)
    for fast, (bert, xl) in LAMBDA.items()
    for slow, (other_bert, other_xl) in LAMBDA.items()
    if bert > CLEAR * other_bert and xl > CLEAR * other_xl
]
# 4060 Ti: 43 to 48 TFLOP/s in MM of tables/matmul_rates.py, and T4 24 to 43; L4: a fine-tuning step 2.8 times as fast
# as on a T4, A100: 13 times (mccormickml.com, Colab GPUs, 2024-04-23)
OTHERS = [("rtx-4060-ti-16gb", "t4"), ("l4", "t4"), ("a100-40gb", "t4"), ("a100-40gb", "l4")]
SMALL = resolve_model("qwen2.5-0.5b")


@pytest.mark.parametrize(("fast", "slow"), [*PAIRS, *OTHERS])
def test_cards_are_ordered_as_published_training_throughput_orders_them(fast: str, slow: str) -> None:
    def step(name: str) -> float:
        card = find_gpu(name)
        recipe = Recipe(micro_batch=8, sequence_length=512, precision="fp16-mixed", loss="fused")
        return step_time(SMALL, recipe, card, Account(SMALL, recipe, card).static).total

    assert step(fast) < step(slow)


def test_enough_pairs_are_ordered() -> None:
    assert len(PAIRS) > 30


# Steps per second of Mistral-7B, sequence 4,096, on A100 SXM4 80 GB, flash attention, full checkpointing:
# foundation-model-stack/fms-acceleration, scripts/benchmarks/refs/a100_80gb.csv, without its own kernels
FMS = [
    ("full", 1, 4, 0.187), ("full", 1, 8, 0.096), ("full", 2, 2, 0.339), ("full", 2, 4, 0.184),
    ("lora", 1, 4, 0.203), ("lora", 1, 8, 0.102), ("lora", 2, 2, 0.36), ("lora", 2, 4, 0.193),
    ("qlora", 1, 4, 0.177), ("qlora", 1, 8, 0.091), ("qlora", 2, 2, 0.36), ("qlora", 2, 4, 0.207),
]  # fmt: skip


@pytest.mark.parametrize(("method", "count", "batch", "rate"), FMS)
def test_a_published_step_lies_in_the_range_of_the_roofline(method: Any, count: int, batch: int, rate: float) -> None:
    mistral, card = resolve_model("mistral-7b-v0.1"), find_gpu("a100-80gb")
    recipe = Recipe(
        method=method, micro_batch=batch, sequence_length=4096, num_gpus=count, checkpointing="full", loss="full",
        attention="flash", shard="parameters" if count > 1 else "none", lora_targets=("attention",),
        quantization="nf4" if method == "qlora" else "none",
    )  # fmt: skip
    predicted = step_time(mistral, recipe, card, Account(mistral, recipe, card).static).total
    low, high = RANGE
    assert low <= 1 / rate / predicted <= high
