"""Ways to load weights under FSDP2: the closed form against the trainers' own code, exports, readers, refusals."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from memfit import Recipe, estimate, find_gpu, resolve_model
from memfit.closed_form.host_memory import needed
from memfit.errors import BadInput, Unsupported
from memfit.frameworks.targets import export
from memfit.nouns.footprint import Footprint, PhasePeak
from memfit.tables import combinations
from memfit.tables.loading import as_read, choices, loading_of
from plans import make_plan
from traced import both

GPU = find_gpu("rtx-4090")
SHARDED = Recipe(shard="parameters", num_gpus=2, sequence_length=256, trainer="transformers", checkpointing="full")
LORA, QLORA = SHARDED.but(method="lora"), SHARDED.but(method="qlora", quantization="nf4-double")
SMALL = {"num_hidden_layers": 8, "hidden_size": 1024, "intermediate_size": 2816, "num_attention_heads": 8,
         "num_key_value_heads": 4, "vocab_size": 32000, "tie_word_embeddings": False}  # fmt: skip


def load(footprint: Footprint) -> PhasePeak:
    return next(p for p in footprint.phases if p.phase == "load")


@pytest.mark.parametrize(
    "recipe",
    [LORA.but(loading="host"), LORA.but(loading="sharded"), QLORA.but(loading="host"), QLORA],
    ids=lambda r: f"{r.method}-{r.loading}",
)
def test_loading_takes_what_the_trainer_takes(recipe: Recipe) -> None:
    pytest.importorskip("transformers")
    found = both("llama-3.2-1b", recipe, GPU, **SMALL)
    formula, traced = load(found.formula).levels, load(found.traced).levels
    assert formula.requested == pytest.approx(traced.requested, rel=0.015)
    assert formula.reserved == pytest.approx(traced.reserved, rel=0.08)


def test_each_way_needs_less_on_the_card_than_the_one_before() -> None:
    model = resolve_model("qwen3-32b")
    whole, host = (load(estimate(model, QLORA.but(loading=w), GPU)).levels.reserved for w in ("whole", "host"))
    assert whole > 1.9 * host
    host, one = (load(estimate(model, LORA.but(loading=w), GPU)).levels.reserved for w in ("host", "sharded"))
    assert host > one


def test_qlora_on_two_cards_needs_less_than_on_one() -> None:
    """Qwen3-32B in 4 bits: more cards must not need more, which they did with the whole model read onto each."""
    model = resolve_model("qwen3-32b")
    alone = estimate(model, QLORA.but(shard="none", num_gpus=1), GPU).peak.levels.reserved
    assert estimate(model, QLORA.but(loading="host"), GPU).peak.levels.reserved < alone
    assert estimate(model, QLORA, GPU).peak.levels.reserved > alone


def test_auto_is_the_usual_way() -> None:
    assert (loading_of(LORA), loading_of(QLORA), loading_of(Recipe())) == ("host", "whole", "auto")
    assert choices(LORA.but(shard="gradients")) == () and loading_of(Recipe(loading="host")) == "auto"


def test_sharded_loading_of_4_bit_weights_is_refused_with_accelerates_line() -> None:
    with pytest.raises(BadInput) as refused:
        combinations.check(QLORA.but(loading="sharded"))
    line = "if fsdp2_plugin.cpu_ram_efficient_loading and not model_has_params4bit"
    assert line in str(refused.value) and "--loading host" in refused.value.hint
    source = pytest.importorskip("accelerate.utils.fsdp_utils").__file__
    assert line in Path(source).read_text()


@pytest.mark.parametrize("target", ["trl", "transformers"])
def test_scripts_load_as_planned(target: str) -> None:
    for recipe, on_cpu, efficient in (
        (QLORA.but(loading="host"), True, False), (QLORA, False, False), (LORA, False, False),
        (LORA.but(loading="sharded"), False, True),
    ):  # fmt: skip
        files = export(make_plan(recipe.but(trainer=target)), target)
        compile(files["train.py"], "train.py", "exec")
        assert ('device_map={"": "cpu"}' in files["train.py"]) == on_cpu
        settings = yaml.safe_load(files["accelerate.yaml"])["fsdp_config"]
        assert settings["fsdp_cpu_ram_efficient_loading"] == efficient


def test_axolotl_cannot_quantise_on_the_host() -> None:
    with pytest.raises(Unsupported):
        export(make_plan(QLORA.but(loading="host")), "axolotl")


def test_a_files_switch_has_no_effect_on_4_bit_weights() -> None:
    assert as_read(QLORA.but(loading="host")) == QLORA
    assert as_read(LORA.but(loading="sharded")).loading == "sharded"


def test_quantising_on_the_host_takes_host_ram() -> None:
    model = resolve_model("qwen3-32b")
    host, whole = needed(model, QLORA.but(loading="host"), GPU), needed(model, QLORA, GPU)
    assert host.phase == "load" and host.bytes > whole.bytes and host.bytes > 2 * 17e9


# ---- CPU offload of a 4-bit base, as in the published recipe of 70B on two cards of 24 GB

OFFLOADED = QLORA.but(offload="parameters")


@pytest.mark.parametrize("way", ["whole", "host"])
def test_offloaded_shards_take_what_the_trainer_takes(way: str) -> None:
    pytest.importorskip("transformers")
    found = both("llama-3.2-1b", OFFLOADED.but(loading=way), GPU, **SMALL)
    formula = {p.phase: p.levels for p in found.formula.phases}
    traced = {p.phase: p.levels for p in found.traced.phases}
    for phase in ("load", "step", "save"):
        assert formula[phase].requested == pytest.approx(traced[phase].requested, rel=0.02)
    assert formula["step"].reserved == pytest.approx(traced["step"].reserved, rel=0.03)


def test_70b_fits_two_cards_of_24_gb_with_the_host_behind_them() -> None:
    model = resolve_model("llama-3.1-70b")
    recipe = OFFLOADED.but(loading="host", sequence_length=2048)
    assert estimate(model, recipe, GPU).peak.levels.reserved < GPU.usable_bytes()
    assert estimate(model, recipe.but(loading="whole"), GPU).peak.levels.reserved > 1.5 * GPU.usable_bytes()
    assert estimate(model, recipe.but(offload="none"), GPU).peak.levels.reserved > GPU.usable_bytes() * 0.8
    host = needed(model, recipe, GPU)
    labels = {line.label: line.bytes for line in host.lines}
    assert host.phase == "load" and labels["shards of the weights"] > 35e9


def test_deepspeed_and_one_card_refuse_it() -> None:
    assert not OFFLOADED.zero and OFFLOADED.but(method="lora", quantization="none").zero
    with pytest.raises(BadInput):
        combinations.check(OFFLOADED.but(shard="none", num_gpus=1))
    for target in ("deepspeed", "llamafactory"):
        with pytest.raises(Unsupported):
            export(make_plan(OFFLOADED), target)
    settings = yaml.safe_load(export(make_plan(OFFLOADED.but(trainer="trl")), "trl")["accelerate.yaml"])["fsdp_config"]
    assert settings["fsdp_offload_params"] and not settings["fsdp_cpu_ram_efficient_loading"]
