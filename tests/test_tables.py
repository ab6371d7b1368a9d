"""The tables of optimizers, quantisations, trainers and combinations: every row is checked, so a new one is too."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import product
from typing import Any, Literal, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memfit import Recipe, errors, estimate, find_gpu, resolve_model
from memfit.closed_form.layers.head import LOSSES
from memfit.models.families import trained_for
from memfit.models.hub import resolve_config
from memfit.nouns.architecture import Architecture, Weight
from memfit.nouns.gpu import Gpu
from memfit.nouns.job import Method, Precision, check_values
from memfit.nouns.task import Shape
from memfit.tables import combinations
from memfit.tables.cuda_kernels import SdpaCall, sdpa_kernel
from memfit.tables.optimizers import OPTIMIZERS, Optimizer, optimizer
from memfit.tables.precisions import BYTES, backend, meaning
from memfit.tables.quantization import QUANTIZATIONS, Quantization
from memfit.tables.tasks import TASKS
from memfit.tables.trainers import TRAINERS, Trainer, taken_as, trainer

BIG = Weight("w", (4096, 1024), "linear")
SMALL = Weight("norm.weight", (1024,), "norm")

# bytes of state per trained element of a large matrix: (16-bit weight, 32-bit weight); bitsandbytes and torch measured
STATE_BYTES = {
    "adamw": (4, 8), "adamw-foreach": (4, 8), "adamw-forloop": (4, 8), "adamw-in-backward": (4, 8),
    "adamw-8bit": (2.03125, 2.03125), "adamw-32bit": (8, 8), "paged-adamw-32bit": (0, 0),
    "paged-adamw-8bit": (0.03125, 0.03125), "adafactor": (0.0049, 0.0049),
    "lion": (4, 4), "lion-8bit": (1.015625, 1.015625), "sgd": (0, 0), "sgd-momentum": (2, 4),
    "adamw-4bit": (1.0625, 1.0625), "adamw-8bit-torchao": (2.03125, 2.03125), "muon": (2, 4),
}  # fmt: skip


@pytest.mark.parametrize("row", OPTIMIZERS.values(), ids=lambda row: row.key)
def test_every_optimizer_is_complete(row: Optimizer) -> None:
    assert row.title and row.package
    for itemsize in (2, 4):
        assert all(size > 0 for size in row.state_tensors(BIG, itemsize))
        assert sum(row.state_tensors(SMALL, itemsize)) <= 8 * SMALL.numel + 4
        assert row.step_bytes([(BIG.numel, itemsize)]) >= 0


@pytest.mark.parametrize("key", STATE_BYTES)
@pytest.mark.parametrize(("column", "itemsize"), [(0, 2), (1, 4)])
def test_state_bytes_are_the_measured_ones(key: str, column: int, itemsize: int) -> None:
    per_element = OPTIMIZERS[key].state_bytes(BIG, itemsize) / BIG.numel
    assert per_element == pytest.approx(STATE_BYTES[key][column], rel=0.01, abs=1e-5)


def test_bitsandbytes_keeps_small_tensors_in_32_bits() -> None:
    assert OPTIMIZERS["adamw-8bit"].state_bytes(SMALL, 2) == 8 * SMALL.numel


@pytest.mark.parametrize(("key", "each"), [("adamw-8bit", 8), ("lion-8bit", 4), ("paged-adamw-8bit", 0)])
def test_transformers_keeps_embedding_states_in_32_bits_paged_ones_in_the_host(key: str, each: int) -> None:
    assert OPTIMIZERS[key].in_32bit().state_bytes(BIG, 2) == each * BIG.numel


def test_foreach_copies_everything_a_loop_only_neighbours_fused_nothing() -> None:
    weights = [(100, 4), (300, 4), (200, 4)]
    assert OPTIMIZERS["adamw"].step_bytes(weights) == 0
    assert OPTIMIZERS["adamw-foreach"].step_bytes(weights) == 600 * 4
    assert OPTIMIZERS["adamw-forloop"].step_bytes(weights) == 2 * 300 * 4 + 100 * 4


@pytest.mark.parametrize("name", ["adamw_torch_fused", "paged_adamw_8bit", "adamw-8bit", "ADAFACTOR"])
def test_hugging_face_names_are_understood(name: str) -> None:
    assert optimizer(name).key


def test_an_unknown_optimizer_is_refused() -> None:
    with pytest.raises(errors.UnknownName):
        optimizer("adamx")


@pytest.mark.parametrize("row", QUANTIZATIONS.values(), ids=lambda row: row.key)
@given(rows=st.integers(1, 512), columns=st.integers(1, 64))
def test_tensors_add_up_to_payload_and_scales(row: Quantization, rows: int, columns: int) -> None:
    n = rows * columns * 64
    assert sum(row.tensors(n, rows)) == row.bytes(n, rows) == row.payload(n) + row.scales(n, rows)


@pytest.mark.parametrize(("key", "each"), [("nf4", 0.5625), ("fp4", 0.5625), ("nf4-double", 0.515869), ("int8", 1.0)])
def test_bytes_per_weight_are_the_measured_ones(key: str, each: float) -> None:
    n = 4096 * 4096
    assert QUANTIZATIONS[key].bytes(n, 4096) / n == pytest.approx(each, rel=0.002)


@pytest.mark.parametrize("row", TRAINERS, ids=lambda t: f"{t.name}>={'.'.join(map(str, t.since))}")
def test_every_trainer_names_losses_that_exist(row: Trainer) -> None:
    for loss in ("full", "chunked", "fused"):
        assert row.head(loss) in LOSSES
    assert row.default_loss in ("full", "chunked", "fused")


@pytest.mark.parametrize(
    ("spec", "loss"), [("trl", "fused"), ("trl==1.8", "chunked"), ("trl==1.3", "full"), ("transformers", "full")]
)
def test_a_version_selects_its_row(spec: str, loss: str) -> None:
    assert trainer(spec).default_loss == loss


@pytest.mark.parametrize(
    ("spec", "known"),
    [
        ("trl", ""),
        ("trl==1.16.3", ""),
        ("trl==99", "1.16"),
        ("trl==0.8", ""),
        ("transformers==4.40", ""),
        ("torch==1.13", "2.13"),
    ],
)
def test_a_version_beyond_what_is_known_is_said(spec: str, known: str) -> None:
    assert taken_as(spec) == known


@pytest.mark.parametrize("spec", ["trl==", "tlr", "trl>=1", "", "trl==x"])
def test_bad_trainers_are_refused_with_a_hint(spec: str) -> None:
    with pytest.raises(errors.BadInput) as caught:
        trainer(spec)
    assert caught.value.hint


GPU, OLD = find_gpu("rtx-4090"), find_gpu("t4")
GEMMA2, GPT2, MIXTURE, UNTIED, LLAMA4 = (
    resolve_model(name)
    for name in ("gemma-2-2b", "gpt2", "qwen3-30b-a3b", "llama-2-7b", "meta-llama/Llama-4-Scout-17B-16E")
)
WHISPER = trained_for(resolve_config("whisper-tiny"), "whisper-tiny", TASKS["speech"])
BROKEN = [
    Recipe(method="qlora", quantization="nf4", shard="parameters", num_gpus=2, loading="sharded"),
    Recipe(shard="parameters", num_gpus=2, loading="whole"),
    Recipe(method="qlora"), Recipe(quantization="nf4"), Recipe(method="lora", quantization="nf4"),
    Recipe(attention="flash", precision="fp32"), Recipe(shard="optimizer"),
    Recipe(method="qlora", quantization="nf4", offload="parameters"),
    Recipe(offload="optimizer", optimizer="adamw-8bit"),
    Recipe(optimizer="adamw-in-backward", trainer="torch", accumulation=2), Recipe(optimizer="adamw-in-backward"),
    Recipe(method="lora", optimizer="galore"), Recipe(method="lora", precision="bf16-master"),
    Recipe(method="qlora", quantization="int8", precision="bf16-mixed"), Recipe(offload="optimizer"),
    Recipe(shard="parameters", num_gpus=2, optimizer="adamw-8bit"),
    Recipe(shard="parameters", num_gpus=2, optimizer="adamw-8bit", precision="bf16-master"),
    Recipe(shard="parameters", num_gpus=2, optimizer="adamw-8bit", method="lora"),
    Recipe(shard="gradients", num_gpus=2, optimizer="galore"),
    Recipe(shard="parameters", num_gpus=2, method="qlora", quantization="int8"),
    Recipe(shard="gradients", num_gpus=2, precision="bf16-mixed"),
    Recipe(offload="optimizer", num_gpus=2, precision="bf16-master"), Recipe(trainer="transformers", loss="fused"),
    Recipe(num_gpus=3, context_parallel=2, shard="parameters"), Recipe(num_gpus=2, context_parallel=2),
    Recipe(num_gpus=2, context_parallel=2, shard="parameters", attention="eager"),
    Recipe(method="qlora", quantization="nf4", adapter="loha"), Recipe(method="lora", adapter="adaption-prompt"),
    Recipe(checkpoint_interval=2), Recipe(checkpoint_stride=4, checkpointing="full"),
    Recipe(checkpoint_interval=2, checkpoint_stride=1, checkpointing="full"),
    Recipe(keep_gradients=True, sequence_length=512), Recipe(optimizer="adamw-bf16", sequence_length=512),
    Recipe(modules_to_save=("lm_head",)),
    Recipe(method="lora", modules_to_save=("lm_head",), num_gpus=2, shard="parameters"),
]  # fmt: skip


def check_hint(recipe: Recipe, model: Architecture, card: Gpu) -> None:
    """Each way that the hint names, typed beside the recipe's own flags, makes a recipe that is possible."""
    if combinations.refusal(recipe, model, card) is None:
        return
    with pytest.raises(errors.BadInput) as caught:
        combinations.check(recipe, model, card)
    hint = caught.value.hint
    ways: list[dict[str, Any]] = [
        dict(re.findall(r"--([a-z-]+) ([\w-]+)", way)) | dict.fromkeys(re.findall(r"--no-([a-z-]+)", way), False)
        for way in re.split(r",? or (?=--)|, (?=--)", hint)
    ]
    assert all(ways), hint
    for way in ways:
        named = {name.replace("-", "_"): int(value) if str(value).isdigit() else value for name, value in way.items()}
        if "target_length" in named:
            model = replace(model, shape=replace(model.shape, target=named.pop("target_length")))
        for modules in named.keys() & {"lora_targets", "modules_to_save"}:
            named[modules] = (named[modules],)
        assert combinations.refusal(check_values(recipe.but(**named)), model, card) is None, f"{hint} for {recipe}"


@given(
    st.fixed_dictionaries({}, optional={
        "method": st.sampled_from(("full", "lora", "qlora")), "precision": st.sampled_from(get_args(Precision)),
        "quantization": st.sampled_from(("none", "nf4", "int8")), "attention": st.sampled_from(("sdpa", "flash")),
        "padding": st.just("packing"), "loss": st.sampled_from(("full", "chunked", "fused")), "num_gpus": st.just(2),
        "shard": st.sampled_from(("optimizer", "parameters")), "offload": st.sampled_from(("optimizer", "parameters")),
        "checkpointing": st.sampled_from(("selective", "offload")), "sequence_length": st.just(512),
        "optimizer": st.sampled_from(("adamw-8bit", "galore", "adamw-in-backward")),
        "trainer": st.sampled_from(("transformers", "llamafactory", "axolotl")),
    }), st.sampled_from(range(4)), st.booleans(),
)  # fmt: skip
def test_every_hint_leads_to_a_recipe_that_is_possible(values: dict[str, Any], model: int, older: bool) -> None:
    models = (GPT2, GEMMA2, UNTIED, replace(UNTIED, trained_for="dpo"))
    check_hint(Recipe(**values), models[model], OLD if older else GPU)


@pytest.mark.parametrize("recipe", BROKEN, ids=lambda r: "")
def test_impossible_combinations_are_refused_with_reason_and_hint(recipe: Recipe) -> None:
    with pytest.raises(errors.BadInput) as caught:
        combinations.check(recipe, GPT2, GPU)
    assert caught.value.hint


def test_combinations_that_depend_on_card_or_model() -> None:
    assert combinations.refusal(Recipe(precision="bf16"), GPT2, OLD) is not None
    assert combinations.refusal(Recipe(precision="fp16-mixed", sequence_length=512), GPT2, OLD) is None
    assert combinations.refusal(Recipe(attention="sdpa"), GEMMA2, GPU) is not None
    assert combinations.refusal(Recipe(sequence_length=4096), GPT2, GPU) is not None


@pytest.mark.parametrize(
    ("changes", "names"),
    [({}, {"FSDP2"}), ({"precision": "bf16-master"}, {"ZeRO-3"}), ({"method": "lora"}, {"FSDP2", "ZeRO-3"})],
)
def test_a_refusal_names_the_backend_that_is_refused(changes: dict[str, Any], names: set[str]) -> None:
    recipe = Recipe(shard="parameters", num_gpus=2, optimizer="adamw-8bit").but(**changes)
    found = combinations.refusal(recipe, GPT2, GPU)
    assert found is not None and {name for name in ("FSDP2", "ZeRO-3") if name in found.why} == names


def test_every_rule_can_be_broken() -> None:
    cases = [*((r, GPT2, GPU) for r in BROKEN), (Recipe(), GPT2, OLD),
             (Recipe(attention="flash", precision="fp16-mixed"), GPT2, OLD),
             (Recipe(trainer="transformers", loss="fused", method="lora"), MIXTURE, GPU),
             (Recipe(method="lora"), LLAMA4, GPU),
             (Recipe(trainer="transformers", loss="fused", method="lora", num_gpus=2, shard="parameters"), UNTIED, GPU),
             (Recipe(num_gpus=2, context_parallel=2, shard="parameters"), GEMMA2, GPU),
             (Recipe(method="lora"), replace(GPT2, trained_for="token-classification"), GPU),
             (Recipe(method="lora", precision="fp16-mixed"), replace(GPT2, trained_for="reward"), GPU),
             (Recipe(method="qlora", quantization="nf4"), replace(GPT2, model_type="falcon"), GPU),
             (Recipe(method="qlora", quantization="int8-sdnq"), GPT2, GPU),
             *((changed, replace(GPT2, trained_for="dpo"), GPU) for changed in (
                 Recipe(padding="packing"), Recipe(checkpointing="selective"), Recipe(checkpointing="offload"),
                 Recipe(loss="fused"))),
             (Recipe(sequence_length=256), replace(WHISPER, shape=Shape(target=449)), GPU),
             (Recipe(), GEMMA2, GPU), (Recipe(sequence_length=4096), GPT2, GPU)]  # fmt: skip
    for case in cases:
        check_hint(*case)
    broken = {rule.why for case in cases for rule in combinations.IMPOSSIBLE if rule.when(*case)}
    assert broken == {rule.why for rule in combinations.IMPOSSIBLE}


@pytest.mark.parametrize(
    "changes",
    [{"micro_batch": 0}, {"micro_batch": -1}, {"sequence_length": 1 << 40}, {"lora_rank": True}, {"accumulation": 1.5},
     {"precision": "bf8"}, {"checkpointing": "yes"}, {"lora_dropout": 1.0}, {"num_gpus": 0}],
    ids=str,
)  # fmt: skip
def test_values_outside_their_domain_are_refused(changes: dict[str, object]) -> None:
    with pytest.raises(errors.BadInput) as caught:
        check_values(Recipe(**changes))  # type: ignore[arg-type]
    assert caught.value.hint


ANY_WIDTH = (64, 80, 96, 128, 192, 256)
# What the real PyTorch 2.13 chose: cards, dtypes, head widths -> without a mask, with a bool mask, grouped heads,
# grouped heads with a mask, dropout of 0.1
MEASURED_KERNELS = [
    (((7, 5),), ("fp16",), ANY_WIDTH, "efficient efficient math math efficient"),
    (((7, 5),), ("bf16",), (36, *ANY_WIDTH), "math math math math math"),
    (((7, 5),), ("fp16",), (36,), "math math math math math"),
    (((8, 0), (8, 6), (8, 9), (12, 0)), ("fp16", "bf16"), ANY_WIDTH[:-1], "flash efficient flash math flash"),
    (((8, 0),), ("fp16", "bf16"), (256,), "flash efficient flash math flash"),
    (((8, 6), (8, 9), (12, 0)), ("fp16", "bf16"), (256,), "flash efficient flash math efficient"),
    (((9, 0),), ("fp16", "bf16"), ANY_WIDTH, "cudnn cudnn cudnn cudnn flash"),
    (((10, 0),), ("fp16", "bf16"), ANY_WIDTH[:-2], "cudnn cudnn cudnn cudnn flash"),
    (((10, 0),), ("fp16", "bf16"), (192, 256), "flash efficient flash math flash"),
    (((8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)), ("fp16", "bf16"), (36,), "flash math flash math flash"),
    (((7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)), ("fp32",), (36, *ANY_WIDTH),
     "efficient efficient math math efficient"),
]  # fmt: skip


@pytest.mark.parametrize(("cards", "dtypes", "widths", "kernels"), MEASURED_KERNELS)
def test_attention_kernels_are_the_measured_ones(
    cards: tuple[tuple[int, int], ...],
    dtypes: tuple[Literal["bf16", "fp16", "fp32"], ...],
    widths: tuple[int, ...],
    kernels: str,
) -> None:
    for capability, dtype, width in product(cards, dtypes, widths):
        plain = SdpaCall(capability=capability, dtype=dtype, head_dim=width, value_dim=width)
        masked, grouped = replace(plain, masked=True), replace(plain, grouped=True)
        calls = plain, masked, grouped, replace(grouped, masked=True), replace(plain, dropout=0.1)
        assert " ".join(map(sdpa_kernel, calls)) == kernels, (capability, dtype, width)


def test_a_kernel_that_is_switched_off_is_passed_over() -> None:
    call = SdpaCall(capability=(9, 0), dtype="bf16", head_dim=128, value_dim=128)
    assert sdpa_kernel(call, ("flash", "efficient")) == "flash"
    assert sdpa_kernel(call, ("efficient",)) == "efficient"
    assert sdpa_kernel(call, ()) == "math"
    assert sdpa_kernel(replace(call, broadcast=True)) == "math"


@pytest.mark.parametrize("recipe", [
    Recipe(precision=p, method=m, shard=s, num_gpus=n)
    for p in get_args(Precision) for m in get_args(Method)
    for s, n in (("none", 1), ("none", 2), ("parameters", 2), ("gradients", 2))
], ids=str)  # fmt: skip
def test_every_precision_has_a_meaning_under_every_backend(recipe: Recipe) -> None:
    meant = meaning(recipe)
    assert not meant.master or BYTES[meant.stored] == 2
    assert meant.autocast != "always" or backend(recipe) != "deepspeed" or meant.master
    assert BYTES[meant.stored] >= BYTES[meant.computed]
    assert (meant.autocast == "always") == recipe.precision.endswith("mixed")


@pytest.mark.parametrize(("spec", "widens"), [("transformers", True), ("trl", False), ("llamafactory", False)])
def test_only_pefts_preparation_keeps_fp32_copies(spec: str, widens: bool) -> None:
    model = resolve_model("qwen2.5-7b")
    recipe = Recipe(method="qlora", quantization="nf4-double", trainer=spec)
    step = next(p for p in estimate(model, recipe, find_gpu("rtx-4090")).phases if p.phase == "step")
    copies = sum(line.bytes for line in step.lines if line.label == "fp32 copies (k-bit preparation)")
    ends = 2 * sum(w.numel for w in (*model.embedding, *model.final, *model.head))
    assert (copies >= ends) if widens else copies == 0
