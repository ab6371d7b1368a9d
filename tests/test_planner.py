"""The planner: how far it climbs, what it chooses, and what it never does."""

from __future__ import annotations

from typing import Any

import pytest

from memfit import Job, Recipe, find_gpu, make_plan, resolve_model
from memfit.cards import list_gpus, parse_gpu
from memfit.export import export
from memfit.optimizers import optimizer
from memfit.planner import techniques
from memfit.planner.rungs import LADDER, SHARDING


def job(model: str, gpu: str, **changes: Any) -> Job:
    return Job(architecture=resolve_model(model), gpu=find_gpu(gpu), **changes)


def test_a_seven_billion_model_on_a_24_gb_card_ends_in_lora_and_says_so() -> None:
    plan = make_plan(job("llama-2-7b", "rtx-4090"))
    assert plan.judgement.verdict == "fits"
    assert plan.recipe.method == "lora"
    assert any("full fine-tuning does not fit" in note for note in plan.notes)
    assert plan.ladder[-1].key == "lora"
    assert all(rung.judgement.verdict != "fits" for rung in plan.ladder[:-1])


def test_method_full_is_never_silently_changed() -> None:
    plan = make_plan(job("llama-2-7b", "rtx-4090", method="full", wanted=(("method", "full"),)))
    assert all(rung.recipe.method == "full" for rung in plan.ladder)
    assert plan.recipe.method == "full"


def test_what_the_user_named_is_never_altered() -> None:
    wanted = (("optimizer", "sgd"), ("micro_batch", 2), ("checkpointing", "none"))
    plan = make_plan(job("qwen2.5-0.5b", "rtx-4090", wanted=wanted))
    for recipe in [plan.recipe, *(rung.recipe for rung in plan.ladder)]:
        assert (recipe.optimizer, recipe.micro_batch, recipe.checkpointing) == ("sgd", 2, "none")


@pytest.mark.parametrize("batch", [1, 6, 16, 17])
def test_the_effective_batch_is_kept(batch: int) -> None:
    plan = make_plan(job("qwen2.5-0.5b", "rtx-4090", effective_batch=batch))
    assert plan.recipe.effective_batch == batch
    assert all(rung.recipe.effective_batch == batch for rung in plan.ladder)


def test_the_chosen_recipe_fits_and_is_no_slower_than_the_rung_that_fits() -> None:
    plan = make_plan(job("llama-3.2-3b", "rtx-4090"))
    assert plan.judgement.headroom > 0
    assert plan.seconds_per_step > 0


def test_largest_values_fit_and_one_more_does_not() -> None:
    from memfit.planner.engine import Estimator

    request = job("qwen2.5-0.5b", "t4")
    plan = make_plan(request)
    estimator = Estimator(request)
    most = plan.largest["micro_batch"]
    assert estimator.quick(plan.recipe.but(micro_batch=most)).judgement.verdict == "fits"
    assert estimator.quick(plan.recipe.but(micro_batch=most + 1)).judgement.verdict != "fits"


def test_nothing_fits_names_the_closest_and_the_hardware_that_would_do() -> None:
    plan = make_plan(job("llama-3.1-405b", "rtx-4090"), cards=list_gpus())
    assert plan.judgement.verdict == "misfit"
    assert plan.judgement.headroom < 0
    assert plan.judgement.need == min(rung.judgement.need for rung in plan.ladder)
    assert plan.alternatives
    assert all(option.judgement.verdict == "fits" for option in plan.alternatives)


def test_any_gpu_offers_cards_by_price() -> None:
    plan = make_plan(job("llama-2-7b", "h100"), cards=list_gpus(), any_gpu=True)
    prices = [option.price_per_hour for option in plan.alternatives]
    assert prices and all(a is not None for a in prices)
    assert prices == sorted(prices)  # type: ignore[type-var]


def test_several_gpus_are_sharded_before_anything_is_given_up() -> None:
    plan = make_plan(job("llama-3.1-8b", "h100", num_gpus=8))
    assert plan.recipe.method == "full"
    assert plan.recipe.num_gpus == 8


def test_a_card_without_bf16_gets_fp16() -> None:
    plan = make_plan(job("qwen2.5-0.5b", "t4"))
    assert plan.recipe.precision == "fp16-mixed"


def test_techniques_lists_every_rung_whether_needed_or_not() -> None:
    keys = [rung.key for rung in techniques(job("qwen2.5-0.5b", "h100"))]
    assert keys[0] == "plain"
    assert {"checkpointing", "8-bit-optimizer", "lora", "qlora"} <= set(keys)


@pytest.mark.parametrize("step", [*LADDER, *SHARDING], ids=lambda s: s.key)
def test_every_rung_changes_a_recipe_and_names_its_price_and_its_flag(step: Any) -> None:
    start = Recipe(precision="fp32", micro_batch=4, accumulation=4, num_gpus=2)
    assert step.change(start, job("llama-2-7b", "rtx-4090")) != start
    assert step.caveat and step.flags and step.sets


def test_the_rungs_save_what_their_footprints_say() -> None:
    plan = make_plan(job("llama-2-7b", "rtx-4090"))
    for before, rung in zip(plan.ladder, plan.ladder[1:], strict=False):
        assert rung.saved == before.judgement.need - rung.judgement.need


@pytest.mark.parametrize("method", ["lora", "qlora"])
@pytest.mark.parametrize("card", ["rtx-3090", "t4"])
def test_a_method_that_is_asked_for_is_climbed_from_its_own_start(method: str, card: str) -> None:
    plan = make_plan(job("qwen2.5-7b", card, method=method, wanted=(("method", method),)))
    assert all(rung.recipe.method == method for rung in plan.ladder)
    assert len(plan.ladder) > 1
    if method == "qlora":
        assert plan.judgement.verdict == "fits"
        assert plan.recipe.quantization == "nf4-double"


def test_a_file_is_where_the_ladder_starts_and_stays_free_to_change() -> None:
    stated = ("precision", "micro_batch", "checkpointing", "optimizer", "accumulation")
    base = Recipe(precision="bf16", micro_batch=16, accumulation=1, optimizer="adamw-foreach")
    plan = make_plan(job("llama-3.2-3b", "rtx-4090", stated=stated), base=base)
    first = plan.ladder[0].recipe
    assert (first.precision, first.micro_batch, first.optimizer) == ("bf16", 16, "adamw-foreach")
    assert plan.ladder[-1].recipe != first


@pytest.mark.parametrize("method", ["auto", "full", "qlora"])
@pytest.mark.parametrize("gpu", ["t4", "8xt4", "rtx-4090", "8xrtx-4090"])
def test_what_is_chosen_can_be_written_as_a_script(gpu: str, method: Any) -> None:
    card, count = parse_gpu(gpu)
    model = resolve_model("llama-3.1-8b")
    plan = make_plan(Job(architecture=model, gpu=card, num_gpus=count, sequence_length=512, method=method))
    assert "train.py" in export(plan, "trl")
    for rung in plan.ladder:  # FSDP2's weights take no bitsandbytes optimizer, and TRL has one loss
        assert not (rung.recipe.shard == "parameters" and optimizer(rung.recipe.optimizer).package == "bitsandbytes")
        assert rung.recipe.loss == "fused"
