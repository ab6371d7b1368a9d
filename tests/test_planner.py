"""The planner: how far it climbs, what it chooses, and what it never does."""

from __future__ import annotations

from dataclasses import replace
from io import StringIO
from itertools import pairwise
from typing import Any

import pytest
from rich.console import Console

from memfit import Job, Recipe, estimate, find_gpu, make_plan, resolve_model
from memfit.catalogue.cards import custom_gpu, list_gpus, parse_gpu
from memfit.documents import codec
from memfit.errors import BadInput
from memfit.frameworks.targets import export
from memfit.nouns.plan import judge
from memfit.planner import left_out, techniques
from memfit.planner.rungs import LADDER, SHARDING
from memfit.planner.search import Estimator
from memfit.report.plan import plan_view
from memfit.report.words import VERDICT_WORDS, clock
from memfit.tables.combinations import absent
from memfit.tables.optimizers import optimizer
from memfit.units import MIB


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


def test_the_largest_value_fits_and_a_larger_one_does_not() -> None:
    request = job("qwen2.5-0.5b", "t4")
    plan = make_plan(request)
    estimator = Estimator(request)
    most = plan.largest["micro_batch"]
    assert estimator.shown(plan.recipe.but(micro_batch=most), exact=True)[1].verdict == "fits"
    assert estimator.shown(plan.recipe.but(micro_batch=most + 2 + most // 8), exact=True)[1].verdict != "fits"


@pytest.mark.parametrize(("model", "shard"), [("llama-3.2-3b", "gradients"), ("llama-3.1-8b", "parameters")])
def test_largest_values_of_several_cards_fit_by_the_replay_too(model: str, shard: str) -> None:
    request = job(model, "a100-40gb", num_gpus=4, wanted=(("shard", shard),))
    plan = make_plan(request)
    estimator = Estimator(request)
    for name, value in plan.largest.items():
        assert value >= getattr(plan.recipe, name)
        assert estimator.shown(plan.recipe.but(**{name: value}), exact=True)[1].verdict == "fits"


def test_nothing_fits_names_the_closest_and_the_hardware_that_would_do() -> None:
    plan = make_plan(job("llama-3.1-405b", "rtx-4090", wanted=(("offload", "none"),)), cards=list_gpus())
    assert plan.judgement.verdict == "misfit"
    assert plan.judgement.headroom < 0
    assert plan.judgement.need == min(rung.judgement.need for rung in plan.ladder)
    assert plan.alternatives
    assert all(option.judgement.verdict == "fits" for option in plan.alternatives)


@pytest.mark.parametrize("card", ["h100", "rtx-4090"])
def test_any_gpu_offers_cheaper_cards_by_price_with_the_recipe_each_needs(card: str) -> None:
    own = find_gpu(card)
    plan = make_plan(job("llama-2-7b", card), cards=list_gpus(), any_gpu=True)
    assert plan.alternatives
    prices = [option.price_per_hour or 0.0 for option in plan.alternatives]
    assert prices == sorted(prices)
    assert all(0 < price < (own.price_per_hour or 99) for price in prices)
    for option in plan.alternatives:
        again = make_plan(job("llama-2-7b", find_gpu(option.gpu).short))
        assert (again.recipe, again.judgement) == (option.recipe, option.judgement)
        assert option.judgement.verdict == "fits"
        assert option.price_per_step == pytest.approx((option.price_per_hour or 0) * again.seconds_per_step / 3600)
    assert any(("no price" in note) == (own.price_per_hour is None) and "would do" in note for note in plan.notes)


def test_any_gpu_says_when_nothing_is_cheaper() -> None:
    plan = make_plan(job("llama-2-7b", "v100-16gb"), cards=list_gpus(), any_gpu=True)
    assert plan.alternatives == ()
    assert any("no card below the 0.14 USD per hour" in note for note in plan.notes)


def test_any_gpu_when_nothing_fits_names_the_cheapest_that_would_do() -> None:
    plan = make_plan(
        job("qwen2.5-72b", "l4", method="lora", wanted=(("method", "lora"), ("offload", "none"))),
        cards=list_gpus(),
        any_gpu=True,
    )
    assert plan.judgement.verdict == "misfit"
    assert plan.alternatives
    assert all(option.recipe.method == "lora" for option in plan.alternatives)


# ---- what a card cannot do -------------------------------------------------------------------------------------------

CARDS = [
    "gaudi2",
    "gaudi3",
    "arc-a770",
    "arc-b60",
    "m4-max-128gb",
    "mi300x",
    "rx-7900-xtx",
    "t4",
    "v100-16gb",
    "p100",
    "gb10",
]


@pytest.mark.parametrize("card", CARDS)
def test_no_plan_asks_a_card_for_what_it_does_not_have(card: str) -> None:
    request = job("llama-2-7b", card)
    plan = make_plan(request)
    for recipe in [plan.recipe, *(r.recipe for r in plan.ladder), *(r.recipe for r in techniques(request))]:
        assert absent(recipe, request.gpu) is None
        assert request.gpu.bf16 or not recipe.precision.startswith("bf16")


@pytest.mark.parametrize(
    ("card", "rung", "reason"),
    [
        ("gaudi2", "8-bit optimizer", "bitsandbytes"),
        ("m4-max-128gb", "8-bit optimizer", "bitsandbytes"),
        ("m4-max-128gb", "optimizer states in host RAM", "shares the host's memory"),
        ("gb10", "weights in host RAM", "shares the host's memory"),
        ("t4", "16-bit weights and states", "no bf16 units"),
    ],
)
def test_what_is_left_out_is_said_with_its_reason(card: str, rung: str, reason: str) -> None:
    (line,) = [line for line in left_out(job("llama-2-7b", card)) if rung in line]
    assert reason in line


def test_offloading_is_not_left_out_for_want_of_bf16() -> None:
    assert "host RAM" not in " ".join(left_out(job("llama-2-7b", "v100-16gb")))


@pytest.mark.parametrize("card", ["h100", "mi300x", "arc-b60"])
def test_nothing_is_left_out_where_everything_works(card: str) -> None:
    assert left_out(job("llama-2-7b", card)) == ()


@pytest.mark.parametrize(
    ("wanted", "card"),
    [({"precision": "bf16"}, "t4"), ({"shard": "parameters"}, "h100"), ({"optimizer": "adamw-8bit"}, "gaudi2"),
     ({"attention": "flash"}, "arc-b60"), ({"offload": "optimizer"}, "gb10"),
     ({"quantization": "int8", "method": "qlora"}, "v100-16gb")],
)  # fmt: skip
def test_what_cannot_be_is_refused_and_not_planned(wanted: dict[str, Any], card: str) -> None:
    with pytest.raises(BadInput) as caught:
        make_plan(job("llama-2-7b", card, wanted=tuple(wanted.items())))
    assert caught.value.hint


def test_a_start_that_cannot_be_is_left_out_where_a_rung_makes_it_possible() -> None:
    """Flash attention works in 16 bits, so the ladder begins on its second rung."""
    plan = make_plan(job("llama-2-7b", "rtx-4090", wanted=(("attention", "flash"),)))
    assert plan.ladder[0].key == "mixed"
    assert plan.recipe.attention == "flash"


def test_the_chosen_recipe_has_its_time_on_the_ladders_scale() -> None:
    request = job("llama-2-7b", "rtx-4090")
    plan = make_plan(request)
    reference = Estimator(request).seconds(plan.ladder[0].recipe)
    assert plan.step_time == pytest.approx(plan.seconds_per_step / reference)
    assert plan.step_time <= plan.ladder[-1].step_time * 1.02


def test_several_gpus_are_sharded_before_anything_is_given_up() -> None:
    plan = make_plan(job("llama-3.1-8b", "h100", num_gpus=8))
    assert plan.recipe.method == "full"
    assert plan.recipe.num_gpus == 8


def test_fewer_cards_are_used_only_beside_the_answer_for_all() -> None:
    gpu = custom_gpu(2200 * MIB, find_gpu("t4"))
    plan = make_plan(replace(job("qwen2.5-0.5b", "t4", num_gpus=8, effective_batch=64), gpu=gpu), cards=list_gpus())
    whole = plan.all_cards
    assert whole is not None and (whole.recipe.num_gpus, plan.recipe.num_gpus) == (8, 1)
    assert plan.judgement.verdict == "fits" != whole.judgement.verdict
    assert {rung.recipe.effective_batch for rung in plan.ladder} == {64}
    ways = ((whole.recipe.but(sequence_length=whole.shorter), gpu), (whole.recipe, find_gpu(whole.larger)))
    for recipe, card in ways:
        assert judge(estimate(plan.job.architecture, recipe, card), card).verdict == "fits"
    printed = StringIO()
    Console(width=100, file=printed).print(plan_view(plan))
    said = printed.getvalue()
    assert said.index(VERDICT_WORDS[whole.judgement.verdict][0]) < said.index(VERDICT_WORDS["fits"][0])
    for seconds in (whole.seconds_per_step, plan.seconds_per_step):
        assert clock(seconds) in said.split("reserved peak")[0]
    document = codec.plan_doc(plan)
    assert codec.loads(codec.dumps(document)) == document


def test_all_cards_train_what_one_of_them_would() -> None:
    plan = make_plan(job("deepseek-v3-671b", "h100", num_gpus=64, effective_batch=64))
    assert (plan.judgement.verdict, plan.recipe.num_gpus, plan.all_cards) == ("fits", 64, None)
    for before, after in pairwise(plan.ladder):  # however large, a row is a replay and saves what it says
        assert after.footprint.on_card is not None
        assert after.saved == before.judgement.need - after.judgement.need > 0


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
    for before, rung in pairwise(plan.ladder):
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


@pytest.mark.parametrize(
    "field", [{"micro_batch": 0}, {"micro_batch": "2"}, {"checkpointing": True}, {"precision": "bfloat16"},
              {"lora_rank": -1}, {"method": "lora", "lora_targets": "q_proj"}, {"modules_to_save": ["lm_head"]}],
)  # fmt: skip
def test_a_recipe_that_no_run_can_have_has_no_estimate(field: dict[str, Any]) -> None:
    with pytest.raises(BadInput) as refused:
        estimate(resolve_model("smollm2-135m"), Recipe(**field), find_gpu("h100"))
    assert refused.value.__notes__ == [f"hint: {refused.value.hint}"]  # as a traceback shows it


@pytest.mark.parametrize("field", [{"sequence_length": 0}, {"effective_batch": -1}, {"task": "dpo"}, {"task": "none"}])
def test_a_job_is_planned_as_it_is_stated_or_refused(field: dict[str, Any]) -> None:
    job = Job(architecture=resolve_model("smollm2-135m"), gpu=find_gpu("h100"), **field)
    with pytest.raises(BadInput):
        make_plan(job)
