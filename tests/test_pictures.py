"""Texts with images: their tokens by the models' own processors, and their training against an H100."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from memfit import Recipe, find_gpu
from memfit.errors import BadInput
from memfit.models.families.towers import IN_TEXT as TOWERS
from memfit.models.families.towers import images_of
from memfit.models.hub import resolve_config
from memfit.nouns.task import Shape
from traced import check_as_measured

pytest.importorskip("trl")
CLIP = {"model_type": "clip_vision_model", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3,
        "num_attention_heads": 4, "image_size": 56, "patch_size": 14}  # fmt: skip
SIGLIP = {**CLIP, "model_type": "siglip_vision_model", "vision_use_head": False}
# what a family's config needs, and the tokens of an image of 640 x 480 beside those that frame it
FAMILIES: dict[str, tuple[dict[str, Any], int]] = {
    "qwen2_vl": ({}, 391), "qwen2_5_vl": ({}, 391), "qwen3_vl": ({}, 300), "qwen3_vl_moe": ({}, 300),
    "gemma3": ({"vision_config": SIGLIP, "mm_tokens_per_image": 4}, 4),
    "paligemma": ({"vision_config": SIGLIP}, 16),
    "llava": ({"vision_config": CLIP}, 16),
    "llava_next": ({"vision_config": {**CLIP, "image_size": 336, "patch_size": 14}}, 2340),
    "mllama": ({}, 1),  # whose text attends to the image across
    "internvl": ({"vision_config": {"image_size": [28, 28], "patch_size": [14, 14]}, "image_seq_length": 2}, 13 * 2),
    "mistral3": ({}, 18 * 23),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", FAMILIES)
def test_an_image_takes_the_tokens_that_the_library_counts(kind: str) -> None:
    from transformers import AutoConfig

    from memfit.virtual.jobs import pictures
    from memfit.virtual.jobs.recipe import Setup

    given, tokens = FAMILIES[kind]
    config = AutoConfig.for_model(kind, **given)
    setup = Setup(config={"model_type": kind, **given}, shape=Shape(images=2, image=(640, 480)), sequence=8000)
    if kind == "mistral3" and find_spec("PIL") and not find_spec("torchvision"):
        with pytest.raises(BadInput) as caught:  # transformers reads its images with torchvision then
            pictures.batch_of_one(setup, config)
        assert "torchvision" in caught.value.hint
        return
    batch, processor = pictures.batch_of_one(setup, config), pictures.processor_of(config)
    number = getattr(config, "image_token_id", None) or config.image_token_index
    assert int((batch["input_ids"] == number).sum()) == 2 * tokens
    assert batch["input_ids"].shape == batch["labels"].shape == (1, 8000)
    counted = pictures.counted(setup, config)
    assert 2 * tokens <= counted.tokens <= 2 * tokens + 100
    if kind in TOWERS:
        for size in ((640, 480), (0, 0), (5000, 30), (9, 9)):
            shape = replace(setup.shape, image=size)
            known = pictures.counted(replace(setup, shape=shape), config)
            assert images_of(config.to_dict(), kind, shape) == known
    if hasattr(processor, "_get_num_multimodal_tokens") and kind != "mistral3":
        assert processor._get_num_multimodal_tokens(image_sizes=[(480, 640)])["num_image_tokens"][0] in (
            tokens, tokens + 2
        )  # fmt: skip


# --- tiny models, trained ---

TEXT = {"vocab_size": 300_000, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}  # fmt: skip
WINDOWED = {"depth": 2, "hidden_size": 64, "out_hidden_size": 64, "intermediate_size": 128, "num_heads": 4,
            "fullatt_block_indexes": [1]}  # fmt: skip
TINY: dict[str, dict[str, Any]] = {
    "qwen2_5_vl": {"text_config": {**TEXT, "rope_parameters": {
        "rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e4}}, "vision_config": WINDOWED},
    "gemma3": {"text_config": TEXT, "vision_config": SIGLIP, "mm_tokens_per_image": 4},
    "llava": {"text_config": {**TEXT, "model_type": "llama"}, "vision_config": CLIP},
}  # fmt: skip


def requested(kind: str, images: int, method: Any = "full") -> int:
    """Return the most bytes that the steps of a tiny model request."""
    from memfit.allocator.replay import replay
    from memfit.virtual.tracing import trace_recipe

    recipe = Recipe(method=method, micro_batch=2, sequence_length=600, loss="fused", checkpointing="none")
    tape, _ = trace_recipe(
        recipe, {"model_type": kind, **TINY[kind]}, find_gpu("h100"), task="image-text", brief=True,
        shape=Shape(images=images, image=(320, 240)),
    )  # fmt: skip
    found = replay(tape.events).by_phase()
    return max(found[phase].requested for phase in ("first_step", "step"))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["gemma3", "llava"])
def test_images_take_memory_of_the_tower_and_adapters_go_there(kind: str) -> None:
    one, three = requested(kind, 1, "lora"), requested(kind, 3, "lora")
    assert three > one  # at the same sequence length, so the difference is the tower's


@pytest.mark.filterwarnings("ignore")
def test_windows_together_request_what_they_request_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    from memfit.virtual.jobs import windows

    together = requested("qwen2_5_vl", 2)
    monkeypatch.setattr(windows, "MODULES", {})
    assert together == pytest.approx(requested("qwen2_5_vl", 2), rel=1e-4)


# --- against a card ---


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore")
def test_an_image_takes_what_it_took_on_the_card(monkeypatch: pytest.MonkeyPatch) -> None:
    from memfit.virtual.jobs import loop
    from memfit.virtual.jobs.recipe import Setup

    config = resolve_config("qwen2.5-vl-3b")
    config["num_hidden_layers"] = 8  # as it was measured
    setup = Setup(
        config=config, task="image-text", shape=Shape(image=(728, 504)), trainer="torch", method="lora", dtype="bf16",
        autocast="bf16", targets=("q_proj", "k_proj", "v_proj", "o_proj"), optimizer="adamw_torch", micro_batch=2,
        sequence=36 * 52 // 4 + 200, load="device", steps=3,
    )  # fmt: skip
    adapted = loop.with_adapters  # the inputs of the embeddings and of the tower required gradients
    monkeypatch.setattr(
        loop, "with_adapters", lambda setup, model: adapted(setup, [model, model.enable_input_require_grads()][0])
    )
    check_as_measured(setup, "qwen2.5-vl lora")


def test_a_plan_with_images_is_written(ran: Any, tmp_path: Path) -> None:
    """What a choice saves is told beside it, where a formula counts the recipe without it."""
    code, _, err = ran(
        "plan", "Qwen/Qwen2.5-VL-3B-Instruct", "--images", 1, "--image-size", "224x224", "--gpu", "h100", "--method",
        "lora", "--no-trace", "--out", tmp_path,
    )  # fmt: skip
    assert code == 0, err
    assert {file.name for file in tmp_path.iterdir()} == {"recipe.toml", "requirements.txt", "train.py"}
