"""Adopting other tools' files: what they say in memfit's words, what was left over, and no harm from hostile ones."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from memfit.documents.recipe_file import SIZE_LIMIT
from memfit.errors import BadInput, Unsupported
from memfit.frameworks.reading import FORMATS, adopt
from memfit.frameworks.targets import export, write
from memfit.nouns.job import RECIPE_FIELDS, Recipe
from memfit.tables.combinations import refusal
from plans import CHOICES, GRID, SINGLES, make_plan

AXOLOTL = """
base_model: NousResearch/Meta-Llama-3.1-8B
load_in_4bit: true
adapter: qlora
datasets:
  - path: tatsu-lab/alpaca
    type: alpaca
val_set_size: 0.05
sequence_len: 4096
sample_packing: true
pad_to_sequence_len: true
lora_r: 32
lora_alpha: 16
lora_dropout: 0.05
lora_target_linear: true
gradient_accumulation_steps: 4
micro_batch_size: 2
num_epochs: 4
optimizer: paged_adamw_32bit
lr_scheduler: cosine
learning_rate: 0.0002
bf16: auto
tf32: false
gradient_checkpointing: true
flash_attention: true
torch_compile: true
special_tokens:
  pad_token: "<|end_of_text|>"
"""
LLAMAFACTORY = """
### model
model_name_or_path: Qwen/Qwen3-4B-Instruct-2507
trust_remote_code: true
stage: sft
do_train: true
finetuning_type: lora
lora_rank: 16
lora_target: q_proj, v_proj
dataset: identity,alpaca_en_demo
template: qwen3_nothink
cutoff_len: 3072
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
learning_rate: 1.0e-4
bf16: true
ddp_timeout: 180000000
neat_packing: true
image_max_pixels: 262144
"""
TRAINER = {
    "output_dir": "out", "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "optim": "adamw_bnb_8bit",
    "bf16": True, "gradient_checkpointing": True, "learning_rate": 1e-5, "logging_steps": 1, "save_strategy": "steps",
    "label_smoothing_factor": 0.1,
}  # fmt: skip
SFT = {
    "output_dir": "out", "max_length": 4096, "packing": True, "per_device_train_batch_size": 2,
    "optim": "adamw_torch_fused", "gradient_checkpointing_kwargs": {"offload": True},
    "model_init_kwargs": {"dtype": "bfloat16", "attn_implementation": "flash_attention_2"},
}  # fmt: skip
DEEPSPEED = {
    "train_batch_size": 64, "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 4, "bf16": {"enabled": True},
    "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"},
                          "overlap_comm": True, "stage3_max_live_parameters": 2e9},
}  # fmt: skip
ACCELERATE = """
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
fsdp_config:
  fsdp_version: 2
  fsdp_reshard_after_forward: true
  fsdp_offload_params: false
  fsdp_activation_checkpointing: true
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
mixed_precision: bf16
num_processes: 8
dynamo_config: {dynamo_backend: INDUCTOR}
"""
QLORA = {
    "method": "qlora",
    "quantization": "nf4-double",
    "optimizer": "paged-adamw-32bit",
    "lora_rank": 32,
    "lora_alpha": 16,
}
KNOWN: list[tuple[str, Any, dict[str, Any], tuple[str, ...]]] = [
    ("axolotl", AXOLOTL,
     QLORA | {"lora_dropout": 0.05, "sequence_length": 4096, "padding": "packing", "micro_batch": 2, "accumulation": 4,
              "checkpointing": "full", "attention": "flash", "trainer": "axolotl", "compile": True}, ()),
    ("llamafactory", LLAMAFACTORY,
     {"method": "lora", "lora_rank": 16, "lora_alpha": 32, "lora_targets": ("q_proj", "v_proj"),
      "sequence_length": 3072, "padding": "packing", "micro_batch": 1, "accumulation": 8, "checkpointing": "full",
      "trainer": "llamafactory"},
     ("image_max_pixels",)),
    ("transformers", TRAINER,
     {"micro_batch": 4, "accumulation": 2, "optimizer": "adamw-8bit", "checkpointing": "full",
      "trainer": "transformers"},
     ("label_smoothing_factor",)),
    ("transformers", SFT,
     {"micro_batch": 2, "sequence_length": 4096, "padding": "packing", "checkpointing": "offload", "attention": "flash",
      "loss": "fused"}, ()),
    ("deepspeed", DEEPSPEED,
     {"micro_batch": 2, "accumulation": 4, "shard": "parameters", "offload": "optimizer", "precision": "bf16-master",
      "zero_conf": "reduce_bucket_size:500000000,max_live_parameters:2000000000"}, ()),
    ("accelerate", ACCELERATE,
     {"num_gpus": 8, "shard": "parameters", "precision": "bf16-mixed", "checkpointing": "full", "compile": True}, ()),
]  # fmt: skip


def file(folder: Path, data: Any, name: str = "given.yaml") -> Path:
    path = folder / name
    path.write_text(data if isinstance(data, str) else json.dumps(data))
    return path


@pytest.mark.parametrize(
    ("name", "data", "said", "unknown"), KNOWN, ids=lambda v: v if isinstance(v, str) and "\n" not in v else ""
)
def test_known_files(tmp_path: Path, name: str, data: Any, said: dict[str, Any], unknown: tuple[str, ...]) -> None:
    found = adopt(file(tmp_path, data))
    assert found.format == name
    assert found.recipe == Recipe(**said)
    assert found.unknown == unknown
    assert set(said) <= set(found.stated) <= set(RECIPE_FIELDS)


def test_model_data_and_batch(tmp_path: Path) -> None:
    found = adopt(file(tmp_path, AXOLOTL))
    assert (found.model, found.data) == ("NousResearch/Meta-Llama-3.1-8B", "tatsu-lab/alpaca")
    assert {"learning_rate", "lr_scheduler", "tf32", "val_set_size"} <= set(found.ignored)
    found = adopt(file(tmp_path, LLAMAFACTORY))
    assert (found.model, found.data) == ("Qwen/Qwen3-4B-Instruct-2507", "identity,alpaca_en_demo")
    assert adopt(file(tmp_path, DEEPSPEED)).effective_batch == 64
    assert adopt(file(tmp_path, SFT | {"model_name_or_path": "org/m", "dataset_name": "d"})).model == "org/m"


# (what is added to the file, what changes in the recipe)
AXOLOTL_CASES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {}),
    ({"bf16": False, "fp16": True}, {"precision": "fp16-mixed"}),
    ({"bf16": False}, {"precision": "fp32"}),
    ({"batch_size": 12, "micro_batch_size": 3}, {"micro_batch": 3, "accumulation": 4}),
    ({"adapter": "lora", "load_in_8bit": True, "lora_r": 4},
     {"method": "qlora", "quantization": "int8", "lora_rank": 4, "lora_alpha": 8}),
    ({"gradient_checkpointing": "offload"}, {"checkpointing": "offload"}),
    ({"gradient_checkpointing": True, "activation_offloading": "legacy"}, {"checkpointing": "offload"}),
    ({"gradient_checkpointing": True, "selective_checkpointing": {"save": ["attention"]}},
     {"checkpointing": "selective"}),
    ({"plugins": ["axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin"]},
     {"loss": "fused", "trainer": "axolotl-loss"}),
    ({"liger_fused_linear_cross_entropy": True, "liger_rms_norm": True}, {"loss": "fused", "trainer": "axolotl-loss"}),
    ({"liger_fused_linear_cross_entropy": True, "liger_rms_norm": True,
      "liger_glu_activation": True, "liger_rope": True},
     {"loss": "fused"}),
    ({"chunked_cross_entropy": True}, {"loss": "chunked"}),
    ({"deepspeed": "deepspeed_configs/zero3_bf16_cpuoffload_all.json"},
     {"shard": "parameters", "offload": "parameters", "precision": "bf16-master",
      "zero_conf": "reduce_bucket_size:auto,prefetch_bucket_size:auto,param_persistence_threshold:auto"}),
    ({"deepspeed": "deepspeed_configs/zero1.json"},
     {"shard": "optimizer", "precision": "bf16-master", "zero_conf": "reduce_bucket_size:500000000"}),
    ({"deepspeed": {"zero_optimization": {"stage": 2}, "bf16": {"enabled": "auto"}}},
     {"shard": "gradients", "precision": "bf16-master", "zero_conf": "reduce_bucket_size:500000000"}),
    ({"fsdp_version": 2, "fsdp_config": {"offload_params": True}},
     {"shard": "parameters", "offload": "parameters", "precision": "bf16-master"}),
]  # fmt: skip


@pytest.mark.parametrize(("added", "changes"), AXOLOTL_CASES)
def test_axolotl_settings(tmp_path: Path, added: dict[str, Any], changes: dict[str, Any]) -> None:
    plain = {"trainer": "axolotl", "sequence_length": 512}
    found = adopt(file(tmp_path, {"base_model": "m"} | added))
    assert found.recipe == Recipe(**plain | changes)
    assert found.unknown == ()


TRAINER_CASES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {"precision": "fp32", "trainer": "transformers", "sequence_length": 2048}),
    ({"bf16": True}, {"precision": "bf16", "trainer": "transformers", "sequence_length": 2048}),
    ({"max_length": 1024}, {"precision": "bf16-mixed", "checkpointing": "full", "loss": "fused"}),
    ({"max_length": 1024, "fp16": True}, {"precision": "fp16-mixed", "checkpointing": "full", "loss": "fused"}),
    ({"max_length": 1024, "bf16": False}, {"precision": "fp32", "checkpointing": "full", "loss": "fused"}),
    ({"packing": False, "activation_checkpointing": False}, {"precision": "bf16-mixed", "loss": "fused"}),
    ({"packing": False, "gradient_checkpointing_kwargs": {"selective": True}},
     {"precision": "bf16-mixed", "checkpointing": "selective", "loss": "fused"}),
    ({"use_peft": True, "load_in_4bit": True, "dtype": "bfloat16", "gradient_checkpointing": False},
     {"method": "qlora", "quantization": "nf4", "lora_dropout": 0.05, "lora_targets": ("q_proj", "v_proj"),
      "loss": "fused"}),
    ({"optim": "sgd", "optim_args": "momentum=0.9", "packing": False},
     {"optimizer": "sgd-momentum", "precision": "bf16-mixed", "checkpointing": "full", "loss": "fused"}),
]  # fmt: skip


@pytest.mark.parametrize(("added", "changes"), TRAINER_CASES)
def test_training_arguments(tmp_path: Path, added: dict[str, Any], changes: dict[str, Any]) -> None:
    found = adopt(file(tmp_path, {"output_dir": "o"} | added))
    plain = {"trainer": "trl", "micro_batch": 8, "sequence_length": 1024}
    assert found.recipe == Recipe(**plain | changes)
    assert found.unknown == ()


@pytest.mark.filterwarnings("ignore::FutureWarning")  # TRL's own default has a deprecated name
def test_defaults_of_the_libraries_leave_nothing_unknown(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("trl")
    from transformers import TrainingArguments
    from trl import SFTConfig

    for config, trainer in (
        (TrainingArguments("out", use_cpu=True), "transformers"),
        (SFTConfig("out", use_cpu=True), "trl"),
    ):
        path = file(tmp_path, config.to_json_string())
        found = adopt(path)
        assert found.unknown == ()
        assert found.recipe.trainer == trainer


# (the format it is written in, what is said of torch.compile there, is it compiled, the keys that are not understood)
COMPILED: list[tuple[dict[str, Any], dict[str, Any], bool, tuple[str, ...]]] = [
    (TRAINER, {"torch_compile": True}, True, ()),
    (TRAINER, {"torch_compile": False}, False, ()),
    (TRAINER, {"torch_compile": None}, False, ()),
    (TRAINER, {"torch_compile_backend": "inductor", "torch_compile_mode": "default"}, True, ()),
    (TRAINER, {"torch_compile_mode": "reduce-overhead"}, True, ("torch_compile_mode",)),
    (TRAINER, {"torch_compile": True, "torch_compile_backend": "aot_eager"}, False, ("torch_compile_backend",)),
    ({"base_model": "m"}, {"torch_compile": "auto"}, True, ()),
    ({"base_model": "m"}, {"torch_compile": False}, False, ()),
    ({"model_name_or_path": "m", "finetuning_type": "lora"}, {"torch_compile": "true"}, True, ()),
    ({"distributed_type": "NO"}, {"dynamo_backend": "INDUCTOR"}, True, ()),
    ({"distributed_type": "NO"}, {"dynamo_backend": False}, False, ()),
    ({"distributed_type": "NO"}, {"dynamo_config": {"dynamo_backend": "NO"}}, False, ()),
    ({"distributed_type": "NO"},
     {"dynamo_config": {"dynamo_backend": "INDUCTOR", "dynamo_mode": "default", "dynamo_use_dynamic": False}},
     True, ()),
    ({"distributed_type": "NO"}, {"dynamo_config": {"dynamo_backend": "TENSORRT"}}, False, ("dynamo_config",)),
    ({"distributed_type": "NO"}, {"dynamo_config": {"dynamo_backend": "INDUCTOR", "dynamo_mode": "max-autotune"}},
     True, ("dynamo_config",)),
]  # fmt: skip


@pytest.mark.parametrize(("written", "added", "compiled", "unknown"), COMPILED)
def test_torch_compile_is_read_from_every_format(
    tmp_path: Path, written: dict[str, Any], added: dict[str, Any], compiled: bool, unknown: tuple[str, ...]
) -> None:
    before, found = adopt(file(tmp_path, written)), adopt(file(tmp_path, written | added))
    assert found.recipe == before.recipe.but(compile=compiled)
    assert set(found.unknown) - set(before.unknown) == set(unknown)


def expected(recipe: Recipe, name: str) -> Recipe:
    """What can come back of a recipe written as axolotl or LLaMA-Factory YAML."""
    plain = Recipe()
    alone = name == "axolotl" and recipe.loss == "fused"  # a fused loss without Liger's layers, as TRL's is
    back = recipe.but(trainer="axolotl-loss" if alone else name, alloc_conf="", num_gpus=1)
    if name != "axolotl" or recipe.loading != "sharded":  # without cpu_ram_efficient_loading it is the usual way
        back = back.but(loading="auto")
    if recipe.method == "full":
        back = back.but(**{f: getattr(plain, f) for f in ("lora_rank", "lora_alpha", "lora_dropout", "lora_targets")})
    elif recipe.precision == "bf16-master":
        back = back.but(precision="bf16")  # nothing of the base is trained
    if back.lora_targets == ("attention",):
        back = back.but(lora_targets=("k_proj", "o_proj", "q_proj", "v_proj"))
    if recipe.quantization != "none":
        back = back.but(method="qlora")
    # on one GPU, or where combinations.py has not been asked, the ZeRO stage that offloads
    stage = {"none": recipe.shard, "parameters": "parameters", "optimizer": "gradients"}[recipe.offload]
    return back.but(shard=stage) if recipe.shard == "none" or recipe.offload == "parameters" else back


@pytest.mark.parametrize("name", ["axolotl", "llamafactory"])
def test_what_was_exported_comes_back(tmp_path: Path, name: str) -> None:
    count = 0
    for recipe in dict.fromkeys((*SINGLES, *GRID[::3])):
        try:
            files = export(make_plan(recipe), name)
        except Unsupported:
            continue
        write(files, tmp_path, force=True)
        found = adopt(tmp_path / f"{name}.yaml")
        assert found.recipe == expected(recipe, name)
        assert not found.unknown
        assert found.model == "org/tiny-llama"
        count += 1
        assert adopt(tmp_path / "recipe.toml").recipe == recipe
    assert count > 25


def test_gradients_that_stay_whole_are_not_understood(tmp_path: Path) -> None:
    each = {"accelerator_config": {"gradient_accumulation_kwargs": {"sync_each_batch": True}}}
    written: list[dict[str, Any]] = [
        {"base_model": "m", "fsdp_version": 2, "fsdp_config": {"offload_params": False}},
        TRAINER | {"fsdp": "full_shard auto_wrap", "fsdp_config": {}, "label_smoothing_factor": 0},
    ]
    for says in written:
        for more, unknown in (({"gradient_accumulation_steps": 1}, ()), ({"gradient_accumulation_steps": 4}, True)):
            found = adopt(file(tmp_path, says | more)).unknown
            assert found == (("accelerator_config",) if unknown else ())
        assert adopt(file(tmp_path, says | {"gradient_accumulation_steps": 4} | each)).unknown == ()


SPREAD = [
    recipe
    for p, s, o in product(CHOICES["precision"], CHOICES["shard"], CHOICES["offload"])
    if refusal(recipe := Recipe(precision=p, shard=s, offload=o, num_gpus=4)) is None
]
WRITTEN = {"axolotl": "axolotl", "llamafactory": "llamafactory", "accelerate": "accelerate", "deepspeed": "accelerate"}


@pytest.mark.parametrize("target", WRITTEN)
def test_every_way_to_spread_a_run_comes_back(tmp_path: Path, target: str) -> None:
    read: set[tuple[str, str, str]] = set()
    for recipe in SPREAD:
        try:
            write(export(make_plan(recipe), target), tmp_path, force=True)
        except Unsupported:
            continue
        found = adopt(tmp_path / f"{WRITTEN[target]}.yaml")
        assert (found.recipe.shard, found.recipe.offload) == (recipe.shard, recipe.offload)
        if "precision" in found.stated and not found.assumed:  # a launcher need not know what the weights are loaded in
            assert found.recipe.precision == recipe.precision
            read.add((recipe.precision, recipe.shard, recipe.offload))
    assert {s for p, s, o in read if p == "bf16-master"} == set(CHOICES["shard"])
    assert {o for p, s, o in read if p == "bf16-master"} == set(CHOICES["offload"])


def test_an_optimizer_memfit_does_not_know_is_said(tmp_path: Path) -> None:
    found = adopt(file(tmp_path, TRAINER | {"optim": "ademamix_8bit", "label_smoothing_factor": 0}))
    assert found.unknown == ("optim",)


def test_what_was_assumed_is_said(tmp_path: Path) -> None:
    found = adopt(file(tmp_path, TRAINER))
    assert any("sequence length" in line for line in found.assumed)
    assert any("dtype" in line for line in found.assumed)
    found = adopt(file(tmp_path, {"base_model": "m", "deepspeed": "zero2.json"}))
    assert any("ZeRO-2 from its name" in line for line in found.assumed)


@pytest.mark.parametrize(
    ("says", "fused"),
    [({}, False), ({"adapter": "lora"}, True), ({"adapter": "qlora", "lora_mlp_kernel": False}, False),
     ({"adapter": "lora", "load_in_8bit": True}, False), ({"adapter": "lora", "lora_o_kernel": True}, True)],
)  # fmt: skip
def test_layers_that_axolotl_fuses_are_said_to_be_counted_as_pefts(
    tmp_path: Path, says: dict[str, Any], fused: bool
) -> None:
    found = adopt(file(tmp_path, {"base_model": "m", **says}))
    assert any("lora_*_kernel" in line for line in found.assumed) == fused


HOSTILE = [
    ("!!python/object/apply:os.system ['touch owned']", "not valid"),
    ("base_model: !!python/name:os.system ''", "not valid"),
    ("[" * 20000, "not valid"),
    ('{"a":' * 20000, "not valid"),
    ("a: [1", "not valid"),
    ("just words", "no training configuration"),
    ("- base_model: m", "no training configuration"),
    ("", "no training configuration"),
    ('{"a": 1}', "no training configuration"),
    ("model_name_or_path: m", "no training configuration"),
    ("base_modle: m", "has the key base_modle, which no format has"),
    ("base_model: m\nmicro_batch_size: four", "whole number"),
    ("base_model: m\nmicro_batch_size: 0", "--micro-batch"),
    ("base_model: m\nmicro_batch_size: -3\nbatch_size: 4", "--micro-batch"),
    ("base_model: [m]", "must be text"),
    ("base_model: m\nadapter: lora\nlora_dropout: .nan", "--lora-dropout"),
    ("base_model: m\nadapter: lora\nlora_target_modules: {a: b}", "must be names"),
    ("base_model: m\nadapter: lora\nbnb_config_kwargs: 3", "must be a mapping"),
    ("base_model: m\nadapter: qlora\nload_in_4bit: true\nbnb_config_kwargs: {bnb_4bit_quant_type: nf5}", "nf5"),
    ("zero_optimization: {stage: 9}", "0 to 3"),
    ("schema = 1\n[recipe]\nmicro_batc = 1\n[job]\nmodel = 'm'", "micro_batc"),
]


@pytest.mark.parametrize(("text", "said"), HOSTILE, ids=[text[:24] for text, _ in HOSTILE])
def test_hostile_and_broken_files_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BadInput, match=said) as caught:
        adopt(file(tmp_path, text))
    assert caught.value.hint and "given.yaml" in caught.value.message
    assert not (tmp_path / "owned").exists()


def test_a_file_that_repeats_itself_is_not_unfolded(tmp_path: Path) -> None:
    bomb = "a0: &a0 [x, x, x, x, x, x, x, x]\n"
    bomb += "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 8)}]\n" for i in range(1, 30))
    for key in (
        "attn_implementation",
        "optim_args",
        "fsdp_config",
        "lora_target_modules",
        "micro_batch_size",
        "optimizer",
    ):
        try:
            adopt(file(tmp_path, f"{bomb}base_model: m\nadapter: lora\n{key}: *a29\n"))
        except BadInput as error:
            assert len(error.message) < 400


def test_files_that_are_no_small_text_are_refused(tmp_path: Path) -> None:
    large = tmp_path / "large.yaml"
    large.write_bytes(b"base_model: m\n#" + b"x" * SIZE_LIMIT)
    for path, said in ((large, "larger"), (tmp_path, "not a file"), (tmp_path / "none.yaml", "no file")):
        with pytest.raises(BadInput, match=said):
            adopt(path)


KEYS = ["base_model", "adapter", "lora_r", "deepspeed", "fsdp_config", "optimizer", "bf16", "plugins", "datasets",
        "stage", "fp16", "model_name_or_path", "finetuning_type", "lora_target", "output_dir", "optim",
        "model_init_kwargs", "zero_optimization", "distributed_type", "deepspeed_config", "num_processes",
        "mixed_precision", "gradient_checkpointing", "schema", "recipe", "activation_checkpointing_kwargs",
        "micro_batch_size", "per_device_train_batch_size", "load_in_4bit", "quantization_bit"]  # fmt: skip
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 99) | st.floats() | st.text(max_size=9)
    | st.sampled_from(["auto", "zero2", "lora", "FSDP"]),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.sampled_from([*KEYS, "device", "enabled", "stage"]), inner, max_size=3),
    max_leaves=6,
)  # fmt: skip


@settings(deadline=None)
@given(data=st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=8))
def test_any_settings_are_read_or_refused(data: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> None:
    for number, text in enumerate((json.dumps(data), yaml.safe_dump(data))):
        path = file(tmp_path_factory.getbasetemp(), text, f"any{number}.yaml")
        try:
            found = adopt(path)
        except BadInput as error:
            assert error.message and error.hint
        else:
            assert found.format in {row.name for row in FORMATS}


@pytest.mark.parametrize(
    ("text", "older"), [(ACCELERATE, False), (ACCELERATE.replace("  fsdp_version: 2\n", ""), True)]
)
def test_fsdp1_is_said_to_be_read_as_fsdp2(tmp_path: Path, text: str, older: bool) -> None:
    """accelerate runs FSDP1 unless the file names version 2."""
    found = adopt(file(tmp_path, text))
    assert any("FSDP1" in line for line in found.assumed) == older
    assert found.recipe.shard == "parameters"
