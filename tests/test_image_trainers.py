"""Files of SimpleTuner and of kohya's sd-scripts, read as text-to-image training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from conftest import Ran
from memfit import Recipe
from memfit.errors import MemfitError
from memfit.frameworks.image_trainers import FAMILIES
from memfit.frameworks.keys import Adopted
from memfit.frameworks.reading import adopt
from memfit.frameworks.schemas import reasons
from memfit.models.hub import resolve_config
from memfit.tables.optimizers import OPTIMIZERS
from memfit.tables.pipelines import pipeline

# simpletuner/examples/sd3.peft-lora/config.json, and the datasets that it names
SD3 = {
    "model_family": "sd3", "model_type": "lora", "lora_type": "standard", "lora_rank": 128, "lora_alpha": 128,
    "base_model_precision": "no_change", "mixed_precision": "bf16", "optimizer": "adamw_bf16", "train_batch_size": 3,
    "gradient_checkpointing": True, "data_backend_config": "config/examples/datasets.json", "learning_rate": 1e-4,
    "lr_scheduler": "constant", "max_train_steps": 100, "use_ema": False, "output_dir": "out", "seed": 42,
}  # fmt: skip
DATASETS = [
    {"id": "a", "type": "local", "resolution": 1024, "resolution_type": "pixel_area"},
    {"id": "b", "type": "local", "resolution": 0.25, "resolution_type": "area"},
    {"id": "texts", "dataset_type": "text_embeds", "resolution": 4096},
]
KOHYA = """
[model_arguments]
pretrained_model_name_or_path = "stabilityai/stable-diffusion-xl-base-1.0"
[network_arguments]
network_module = "networks.lora"
network_dim = 32
network_train_unet_only = true
[training_arguments]
resolution = "1024,1024"
train_batch_size = 4
mixed_precision = "bf16"
full_bf16 = true
gradient_checkpointing = true
optimizer_type = "AdamW8bit"
cache_latents = true
sdpa = true
output_dir = "out"
"""


def read(folder: Path, changes: dict[str, Any], prefix: str = "") -> Adopted:
    (folder / "datasets.json").write_text(json.dumps(DATASETS))
    path = folder / "config.json"
    path.write_text(json.dumps({prefix + key: value for key, value in (SD3 | changes).items()}))
    return adopt(path)


@pytest.mark.parametrize("prefix", ["", "--"])
def test_simpletuners_file_says_model_recipe_and_images(tmp_path: Path, prefix: str) -> None:
    found = read(tmp_path, {}, prefix)
    assert (found.task, found.model, found.unknown) == ("text-to-image", "stable-diffusion-3.5-medium", ())
    assert found.shape.cached and found.shape.image == (1024, 1024)
    recipe = found.recipe
    assert (recipe.method, recipe.lora_rank, recipe.micro_batch, recipe.precision) == ("lora", 128, 3, "bf16")
    assert recipe.checkpointing == "full" and recipe.lora_dropout == 0.1  # its own default
    assert recipe.keep_gradients and recipe.optimizer == "adamw-bf16"  # which keeps a correction of each weight
    assert not read(tmp_path, {"set_grads_to_none": True}, prefix).recipe.keep_gradients
    assert read(tmp_path, {"model_type": "full"}, prefix).recipe.precision == "bf16"  # the weights themselves
    unset = read(tmp_path, dict.fromkeys(("mixed_precision", "gradient_checkpointing")), prefix).recipe
    assert (unset.precision, unset.checkpointing) == ("bf16", "full")


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"base_model_precision": "int8-quanto"}, "base_model_precision"),
        ({"base_model_precision": "int8-sdnq", "quantize_via": "cpu"}, "base_model_precision"),  # in groups of 32
        ({"base_model_precision": "fp8-torchao", "model_type": "full", "quantize_via": "cpu"}, "base_model_precision"),
        (
            {"model_family": "z_image", "base_model_precision": "fp8-torchao", "quantize_via": "cpu"},
            "assistant_lora_path",  # whose layers are in fp8, too
        ),
        ({"base_model_precision": "fp8-torchao"}, "quantize_via"),  # on the card, where all of it lies before
        ({"lora_type": "lycoris", "lycoris_config": "l.json"}, "lycoris_config"),
        ({"optimizer": "prodigy"}, "optimizer"),
        ({"gradient_checkpointing_offload_attention": True}, "gradient_checkpointing_offload_attention"),
        ({"gradient_checkpointing_backend": "unsloth"}, "gradient_checkpointing_backend"),
        ({"validation_steps": 50}, "validation_steps"),
        ({"model_flavour": "turbo"}, "model_flavour"),
        ({"musubi_blocks_to_swap": 10}, "musubi_blocks_to_swap"),
        ({"use_ema": True}, "use_ema"),
        ({"model_type": "full", "mixed_precision": "fp16"}, "mixed_precision"),  # the weights are in fp16, too
        (
            {"model_family": "flux", "model_flavour": "schnell", "base_model_precision": "fp8-torchao"},
            "assistant_lora_path",
        ),
    ],
)
def test_what_simpletuner_does_beside_the_loop_is_not_judged(tmp_path: Path, changes: Any, key: str) -> None:
    found = read(tmp_path, changes)
    assert key in found.unknown
    assert all("not a key" not in reason.why for reason in reasons(found.unknown, found.format))


@pytest.mark.parametrize(
    ("named", "key"),
    [("fp8-torchao", "fp8-torchao"), ("fp8wo-torchao", "fp8w-torchao"), ("nf4-bnb", "nf4-double"),
     ("int8-sdnq", "int8-sdnq")],
)  # fmt: skip
def test_how_simpletuner_stores_the_base_is_read(tmp_path: Path, named: str, key: str) -> None:
    rotated = {"sdnq_use_hadamard": True, "sdnq_hadamard_group_size": 256, "sdnq_group_size": -1,
               "sdnq_use_quantized_matmul": True, "sdnq_compile_mode": "compile"}  # fmt: skip
    found = read(tmp_path, {"base_model_precision": named, "quantize_via": "cpu", **rotated})
    assert (found.recipe.method, found.recipe.quantization, found.unknown) == ("qlora", key, ())


@pytest.mark.parametrize(
    ("changes", "groups"),
    [
        ({"gradient_checkpointing_interval": 2}, (2, 0)),
        ({"gradient_checkpointing_interval": 2, "gradient_checkpointing_segment_stride": 4}, (2, 4)),
        ({"gradient_checkpointing_interval": 2, "model_family": "kolors"}, (1, 0)),  # whose blocks are in no groups
        ({"gradient_checkpointing_segment_stride": 4}, (1, 0)),
        ({"gradient_checkpointing_interval": 2, "gradient_checkpointing": False}, (1, 0)),
    ],
)
def test_blocks_are_checkpointed_in_the_groups_of_the_file(
    tmp_path: Path, changes: dict[str, Any], groups: tuple[int, int]
) -> None:
    found = read(tmp_path, changes)
    assert (found.recipe.checkpoint_interval, found.recipe.checkpoint_stride, found.unknown) == (*groups, ())
    assert any("no effect" in said for said in found.assumed) == ("model_family" in changes)


# simpletuner/examples/omnigen.lycoris-lokr/lycoris_config.json
LOKR = {
    "bypass_mode": True, "algo": "lokr", "multiplier": 1.0, "full_matrix": True, "linear_dim": 10000,
    "linear_alpha": 1, "factor": 4,
    "apply_preset": {"target_module": ["Attention", "FeedForward"], "module_algo_map": {"Attention": {"factor": 2}}},
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "found"),
    [({}, (1 << 16, "Attention:2", "FeedForward:4")), ({"full_matrix": False}, (10000, "Attention:2", "FeedForward:4")),
     ({"algo": "loha"}, None), ({"bypass_mode": False}, None), ({"decompose_both": True}, None),
     ({"apply_preset": {"target_name": ["to_q"]}}, None)],
)  # fmt: skip
def test_lycoris_lokr_is_read_and_its_other_kinds_are_not_judged(tmp_path: Path, changes: Any, found: Any) -> None:
    (tmp_path / "lycoris_config.json").write_text(json.dumps(LOKR | changes))
    read_file = read(tmp_path, {"lora_type": "lycoris", "lycoris_config": "config/elsewhere/lycoris_config.json"})
    recipe = read_file.recipe
    if found is None:
        assert read_file.unknown == ("lycoris_config",)
        assert all("not a key" not in reason.why for reason in reasons(read_file.unknown, read_file.format))
    else:
        assert (recipe.adapter, recipe.lora_rank, *recipe.lora_targets, *read_file.unknown) == ("lokr", *found)


def test_z_image_without_a_second_adapter_is_judged_in_fp8(tmp_path: Path) -> None:
    words = {"model_family": "z_image", "base_model_precision": "fp8-torchao", "quantize_via": "cpu"}
    found = read(tmp_path, words | {"disable_assistant_lora": True})
    assert (found.recipe.quantization, found.unknown) == ("fp8-torchao", ())


@pytest.mark.parametrize(("family", "text"), [("qwen_image", 1024), ("sd3", 231), ("kolors", 77), ("flux", 0)])
def test_texts_are_as_long_as_simpletuner_pads_them(tmp_path: Path, family: str, text: int) -> None:
    assert read(tmp_path, {"model_family": family}).shape.text == text


def test_texts_of_one_caption_are_no_longer_than_its_bytes(tmp_path: Path) -> None:
    rows = [{"resolution": 512, "caption_strategy": "instanceprompt", "instance_prompt": "a" * 60}, DATASETS[2]]
    (tmp_path / "one.json").write_text(json.dumps(rows))
    words = {"model_family": "omnigen", "data_backend_config": "one.json"}
    assert 60 < read(tmp_path, words).recipe.sequence_length < 120
    rows.append({"resolution": 512, "caption_strategy": "filename"})
    (tmp_path / "one.json").write_text(json.dumps(rows))
    assert read(tmp_path, words).recipe.sequence_length == Recipe().sequence_length


@pytest.mark.parametrize(
    "changes",
    [
        {"gradient_checkpointing": False, "gradient_checkpointing_backend": "unsloth"}, {"sdnq_group_size": 32},
        {"lora_type": "standard", "lycoris_config": "left.json"},
    ],
)  # fmt: skip
def test_keys_of_what_is_off_say_nothing(tmp_path: Path, changes: dict[str, Any]) -> None:
    assert read(tmp_path, changes).unknown == ()


def test_validation_that_is_off_is_understood(tmp_path: Path) -> None:
    assert read(tmp_path, {"validation_disable": True, "validation_steps": 50}).unknown == ()


@pytest.mark.parametrize(("size", "kind", "side"), [(512, "pixel", 512), (1.05, "area", 1024), (1, None, 1024)])
def test_a_size_without_datasets_is_that_of_the_file(tmp_path: Path, size: float, kind: str, side: int) -> None:
    changes = {"data_backend_config": "missing.json", "resolution": size, "resolution_type": kind}
    found = read(tmp_path, changes)
    assert found.shape.image == (side, side) and "missing.json" in found.assumed[0]


def test_every_family_is_a_pipeline_of_the_catalogue() -> None:
    from memfit.frameworks import image_trainers

    for flavours in FAMILIES.values():
        for model in flavours.values():
            assert pipeline(resolve_config(model))
    for known in (image_trainers._SIMPLETUNER_OPTIMIZERS, image_trainers._KOHYA_OPTIMIZERS):
        assert {*known.values()} <= OPTIMIZERS.keys()


@pytest.mark.parametrize("changes", [{"model_family": "sora"}, {"resolution": "big", "data_backend_config": None}])
def test_what_is_no_training_is_one_line(tmp_path: Path, changes: dict[str, Any]) -> None:
    with pytest.raises(MemfitError) as error:
        read(tmp_path, changes)
    assert error.value.hint and "\n" not in error.value.message


def test_kohyas_file_is_read_over_its_sections(tmp_path: Path) -> None:
    path = tmp_path / "sdxl.toml"
    path.write_text(KOHYA)
    found = adopt(path)
    assert (found.task, found.model, found.unknown) == (
        "text-to-image", "stabilityai/stable-diffusion-xl-base-1.0", ()
    )  # fmt: skip
    assert found.shape.image == (1024, 1024) and found.shape.cached
    assert (found.recipe.lora_rank, found.recipe.micro_batch, found.recipe.optimizer) == (32, 4, "adamw-8bit")
    for line in ("full_bf16 = true\n", "network_train_unet_only = true\n", "cache_latents = true\n", "sdpa = true\n"):
        path.write_text(KOHYA.replace(line, ""))
        assert adopt(path).unknown


@pytest.mark.nightly  # half a minute
@pytest.mark.filterwarnings("ignore")
def test_a_file_of_an_image_trainer_is_traced_to_its_verdict(ran: Ran, tmp_path: Path) -> None:
    pytest.importorskip("diffusers")
    changes = {"model_family": "sd1x", "lora_rank": 4, "train_batch_size": 1, "data_backend_config": None}
    read(tmp_path, changes | {"resolution": 128, "resolution_type": "pixel"})
    code, out, err = ran("trace", "--from", tmp_path / "config.json", "--gpu", "l4")
    assert code == 0 and "FITS" in out, err
    read(tmp_path, changes | {"resolution": 128, "resolution_type": "pixel", "my_own_key": 1})
    code, out, err = ran("trace", "--from", tmp_path / "config.json", "--gpu", "l4")
    again = f"memfit trace --from {tmp_path / 'config.json'} --gpu l4 --ignore my_own_key"
    assert code == 5 and again in out, err
