"""Properties of the byte account that hold for every recipe."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from memfit import Recipe, errors, estimate, find_gpu, resolve_model
from memfit.closed_form.run.account import Account
from memfit.closed_form.run.estimate import closed_form
from memfit.nouns.architecture import Architecture
from memfit.nouns.tape import PHASES, ROLES
from memfit.tables import combinations
from memfit.tables.quantization import CHECKPOINTS

GPU = find_gpu("a100-80gb")
GROUPED = resolve_model("qwen2.5-0.5b")
MODELS = {name: resolve_model(name) for name in ("smollm2-135m", "qwen2.5-0.5b", "pythia-160m", "gemma-3-1b-text")}
names = st.sampled_from(sorted(MODELS))

recipes = st.builds(
    Recipe,
    method=st.sampled_from(["full", "lora", "qlora"]),
    precision=st.sampled_from(["bf16", "bf16-mixed", "bf16-master", "fp16-mixed", "fp32"]),
    quantization=st.sampled_from(["none", "nf4", "nf4-double", "fp4"]),
    lora_rank=st.sampled_from([4, 16, 64]),
    optimizer=st.sampled_from(
        ["adamw", "adamw-foreach", "adamw-forloop", "adamw-8bit", "adafactor", "sgd-momentum", "lion"]
    ),
    micro_batch=st.integers(1, 4),
    accumulation=st.integers(1, 3),
    sequence_length=st.sampled_from([64, 128, 512, 1000]),
    checkpointing=st.sampled_from(["none", "full", "offload"]),
    attention=st.sampled_from(["eager", "sdpa", "flash"]),
    loss=st.sampled_from(["full", "fused"]),
    offload=st.sampled_from(["none", "optimizer"]),
    trainer=st.sampled_from(["trl", "transformers", "torch"]),
)
some = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow]
)


def requested(model: Architecture, recipe: Recipe, padded: bool = True) -> int:
    worst = closed_form(Account(model, recipe, GPU, padded))
    return worst.requested + worst.idle  # by which the worst is chosen


def sensible(recipe: Recipe, model: Architecture) -> Recipe:
    recipe = recipe.but(
        quantization="nf4-double" if recipe.method == "qlora" and recipe.quantization == "none" else recipe.quantization
    )
    recipe = recipe.but(quantization=recipe.quantization if recipe.method == "qlora" else "none")
    assume(combinations.refusal(recipe, model, GPU) is None)
    return recipe


@some
@given(recipe=recipes, name=names)
def test_lines_add_up_to_the_device_level_and_levels_are_ordered(recipe: Recipe, name: str) -> None:
    model = MODELS[name]
    footprint = estimate(model, sensible(recipe, model), GPU, replay=False)
    for peak in footprint.phases:
        levels = peak.levels
        assert sum(line.bytes for line in peak.lines) == levels.device
        assert sum(peak.by_role.values()) == levels.device
        assert 0 < levels.requested <= levels.allocated <= levels.reserved <= levels.device
        assert all(line.bytes > 0 and line.role in ROLES for line in peak.lines)
    assert [p.phase for p in footprint.phases] == [p for p in PHASES if p in {x.phase for x in footprint.phases}]


@some
@given(recipe=recipes, name=names, more=st.integers(1, 4))
def test_a_larger_batch_never_needs_less(recipe: Recipe, name: str, more: int) -> None:
    model = MODELS[name]
    recipe = sensible(recipe, model)
    assert requested(model, recipe.but(micro_batch=recipe.micro_batch + more)) >= requested(model, recipe)


@some
@given(recipe=recipes, name=names, more=st.sampled_from([1, 64, 500]))
def test_more_tokens_never_need_less(recipe: Recipe, name: str, more: int) -> None:
    model = MODELS[name]
    recipe = sensible(recipe, model)
    longer = recipe.but(sequence_length=recipe.sequence_length + more)
    assert requested(model, longer) >= requested(model, recipe)


@some
@given(recipe=recipes, name=names, more=st.integers(1, 64))
def test_a_higher_rank_never_needs_less(recipe: Recipe, name: str, more: int) -> None:
    model = MODELS[name]
    # not with 8-bit states: bitsandbytes keeps tensors below 4096 elements in fp32, so a rank just above needs less
    recipe = sensible(recipe.but(optimizer="adamw"), model)
    assert requested(model, recipe.but(lora_rank=recipe.lora_rank + more)) >= requested(model, recipe)


@some
@given(recipe=recipes, name=names)
def test_more_layers_never_need_less(recipe: Recipe, name: str) -> None:
    model = MODELS[name]
    recipe = sensible(recipe, model)
    shallow = replace(model, layers=model.layers[:-1], layer_names=model.layer_names[:-1])
    assert requested(model, recipe) >= requested(shallow, recipe)


BATCH8 = Recipe(micro_batch=8)
LEAN = Recipe(checkpointing="full", loss="fused", micro_batch=1)  # the optimizer step is its worst instant


@pytest.mark.parametrize(
    ("start", "technique"),
    [
        (BATCH8, {"checkpointing": "full"}),
        (LEAN.but(method="lora", micro_batch=8), {"checkpointing": "offload"}),
        (BATCH8.but(trainer="transformers"), {"loss": "fused"}),
        (BATCH8.but(attention="eager"), {"attention": "sdpa"}),
        (BATCH8.but(precision="fp32"), {"precision": "bf16-mixed"}),
        (BATCH8, {"micro_batch": 1, "accumulation": 8}),
        (LEAN.but(optimizer="adamw-foreach"), {"optimizer": "adamw"}),
        (LEAN.but(optimizer="adamw-forloop"), {"optimizer": "adamw"}),
        (LEAN, {"optimizer": "adamw-8bit"}),
        (LEAN.but(precision="bf16-mixed"), {"precision": "bf16"}),
        (LEAN, {"method": "lora"}),
        (LEAN.but(method="lora"), {"method": "qlora", "quantization": "nf4"}),
        (LEAN.but(method="qlora", quantization="nf4"), {"quantization": "nf4-double"}),
        (LEAN, {"offload": "optimizer"}),
        (LEAN.but(offload="optimizer"), {"offload": "parameters"}),
        (LEAN.but(num_gpus=8), {"shard": "optimizer"}),
        (LEAN.but(num_gpus=8, shard="gradients"), {"shard": "parameters"}),
    ],
    ids=str,
)
def test_every_technique_saves_something_on_a_seven_billion_model(start: Recipe, technique: dict[str, Any]) -> None:
    model = resolve_model("llama-2-7b")
    assert requested(model, start.but(**technique)) < requested(model, start)


def test_lora_without_checkpointing_can_need_more_activations_than_full_fine_tuning() -> None:
    """fp32 adapters make PEFT keep an fp32 copy of each adapted input, which no other calculator knows."""
    model = resolve_model("llama-2-7b")
    kept = {}
    for method in ("full", "lora"):
        recipe = Recipe(method=method, micro_batch=1, sequence_length=2048, trainer="torch")
        account = Account(model, recipe, GPU)
        _, backward = account.passes("step", states=True)[:2]
        assert backward.peak is not None
        kept[method] = account.meter.bytes(backward.peak.by_role["activations"])
    assert kept["lora"] > kept["full"]


def test_accumulation_keeps_gradients_through_the_forward() -> None:
    model = resolve_model("llama-2-7b")
    one, four = (Recipe(precision="bf16", accumulation=n, micro_batch=1) for n in (1, 4))
    assert requested(model, four) > requested(model, one)


def test_the_replay_agrees_with_the_closed_form_on_requested_bytes() -> None:
    recipe = Recipe(method="lora", checkpointing="full", loss="fused", micro_batch=2, sequence_length=512)
    quick = estimate(GROUPED, recipe, GPU, replay=False).peak.levels
    exact = estimate(GROUPED, recipe, GPU, replay=True).peak.levels
    assert exact.requested == quick.requested
    assert exact.allocated >= exact.requested


def test_the_step_peak_is_not_in_the_first_step() -> None:
    footprint = estimate(resolve_model("llama-2-7b"), Recipe(checkpointing="full", precision="bf16"), GPU, replay=False)
    by_phase = {p.phase: p.levels.requested for p in footprint.phases}
    assert by_phase["step"] >= by_phase["first_step"]


# bytes per trained element: (adapter, gradient, fp32 master, AdamW's states)
TRAINED = [
    ({"method": "lora"}, (4, 4, 0, 8)),
    ({"method": "lora", "shard": "gradients"}, (2, 2, 4, 8)),  # DeepSpeed casts adapters too, and keeps a master copy
    ({"method": "lora", "offload": "optimizer", "precision": "bf16-mixed"}, (2, 2, 4, 8)),
    ({"method": "lora", "shard": "parameters"}, (4, 4, 0, 8)),
    ({"method": "qlora", "quantization": "nf4"}, (2, 2, 0, 4)),  # TRL's cast
    ({"method": "qlora", "quantization": "nf4", "precision": "fp16-mixed"}, (4, 4, 0, 8)),  # the loss scaler's need
    (
        {"method": "qlora", "quantization": "nf4", "shard": "parameters"},
        (2, 2, 0, 4),
    ),  # accelerate widens none where weights are 4-bit
    ({"method": "lora", "precision": "fp32", "shard": "gradients"}, (4, 4, 0, 8)),
]


@pytest.mark.parametrize(("changes", "widths"), TRAINED, ids=str)
def test_what_trained_adapters_are_stored_in(changes: dict[str, Any], widths: tuple[int, ...]) -> None:
    s = Account(resolve_model("llama-3.1-8b"), Recipe(num_gpus=2, **changes), GPU).static
    counters = 4 * len(s.state_tensors)  # AdamW's step, per tensor
    found = (s.adapter, s.gradients, s.master, s.states - counters)
    assert found == tuple(width * s.trained for width in widths)


@pytest.mark.parametrize("loss", ["full", "chunked"])
def test_trl_computes_every_loss_through_its_fused_head(loss: str) -> None:
    fused = Recipe(micro_batch=4, loss="fused")
    assert requested(resolve_model("llama-3.1-8b"), fused.but(loss=loss)) == requested(
        resolve_model("llama-3.1-8b"), fused
    )


@pytest.mark.parametrize(
    ("recipe", "ddp"),
    [
        (Recipe(method="lora", num_gpus=2), True),
        (Recipe(num_gpus=2, shard="gradients"), False),
        (Recipe(precision="bf16-master", offload="parameters"), False),
    ],
)
def test_only_ddp_has_ddps_buckets(recipe: Recipe, ddp: bool) -> None:
    said = estimate(resolve_model("llama-2-7b"), recipe, find_gpu("h100"))
    assert any("DDP" in text for text in said.unknowns) == ddp
    assert not any("e+0" in text for text in (*said.assumptions, *said.unknowns))


def test_qlora_without_a_quantisation_is_refused_with_one_to_type() -> None:
    with pytest.raises(errors.BadInput) as refused:
        estimate(resolve_model("smollm2-135m"), Recipe(method="qlora"), find_gpu("l4"))
    assert "nf4-double" in refused.value.hint
    estimate(resolve_model("smollm2-135m"), Recipe(method="qlora", quantization="nf4-double"), find_gpu("l4"))


@pytest.mark.parametrize("stored", CHECKPOINTS)
def test_a_downloaded_format_is_counted_though_no_flag_chooses_it(stored: str) -> None:
    model, gpu, own = resolve_model("qwen2.5-7b"), find_gpu("rtx-4090"), Recipe(method="qlora", quantization="nf4")
    sizes = [
        sum(line.bytes for line in estimate(model, own.but(quantization=key), gpu).peak.lines
            if line.role == "parameters") for key in ("nf4", stored)
    ]  # fmt: skip
    assert 0.9 < sizes[1] / sizes[0] < 2  # a scale for 128 weights instead of 64
    with pytest.raises(errors.BadInput):
        estimate(model, own.but(quantization=f"{stored}-x"), gpu)
