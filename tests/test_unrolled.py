"""Tapes of deep models unrolled from shallow ones: equal to the tape traced whole, or not made at all."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("trl")

from memfit import Recipe, cli, find_gpu
from memfit.capacity import capacity
from memfit.alloc_conf import parse_alloc_conf
from memfit.replay import replay
from memfit.tape import Alloc, EmptyCache, Event, Free, Mark, RecordStream, Tape
from memfit.traced import footprint_of, judged
from memfit.unrolled import NotPeriodic, in_order_of_birth, unroll
from memfit.virtual import depths
from memfit.virtual.jobs.recipe import setup_of
from memfit.virtual.tracing import trace_recipe

pytestmark = pytest.mark.filterwarnings("ignore")
A100 = find_gpu("a100-80gb")

COMMON: dict[str, Any] = {
    "vocab_size": 1000, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "num_hidden_layers": 12, "max_position_embeddings": 512, "tie_word_embeddings": False,
}  # fmt: skip
LLAMA = {**COMMON, "model_type": "llama"}
SLIDING = 2 * ["sliding_attention"] + ["full_attention"]
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
MODELS: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "qwen2, tied": {**COMMON, "model_type": "qwen2", "tie_word_embeddings": True},
    "qwen3": {**COMMON, "model_type": "qwen3"},
    "gpt2": {"model_type": "gpt2", "vocab_size": 1000, "n_embd": 64, "n_head": 4, "n_layer": 12, "n_positions": 512},
    "gpt-neox": {**COMMON, "model_type": "gpt_neox"},
    "gemma 2, every second attention full": {**COMMON, "model_type": "gemma2", "sliding_window": 64},
    "gemma 3, every third, and a rest": {
        **COMMON, "model_type": "gemma3_text", "num_hidden_layers": 11, "layer_types": (4 * SLIDING)[:11], "sliding_window": 64,
    },
    "gemma 3 with eyes": {
        "model_type": "gemma3",
        "text_config": {**COMMON, "model_type": "gemma3_text", "layer_types": 4 * SLIDING, "sliding_window": 64},
        "vision_config": {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2},
    },
    "mixtral": {**COMMON, **EXPERTS, "model_type": "mixtral", "num_local_experts": 4},
    "qwen3 moe": {**COMMON, **EXPERTS, "model_type": "qwen3_moe", "num_experts": 4},
    "deepseek, whose first blocks are dense": {
        **COMMON, **EXPERTS, "model_type": "deepseek_v2", "first_k_dense_replace": 2, "n_routed_experts": 4,
        "n_shared_experts": 1, "kv_lora_rank": 16, "q_lora_rank": None, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16,
        "v_head_dim": 16, "num_key_value_heads": 4, "topk_method": "greedy", "n_group": 1, "topk_group": 1,
    },
    "gemma 4, whose embeddings grow with the depth": {
        **COMMON, "model_type": "gemma4_text", "layer_types": 4 * SLIDING, "hidden_size_per_layer_input": 16,
        "vocab_size_per_layer_input": 1000, "num_kv_shared_layers": 0, "sliding_window": 64,
    },
}  # fmt: skip
TRL: dict[str, Any] = {"trainer": "trl", "loss": "fused"}
QLORA = {"method": "qlora", "quantization": "nf4-double"}
FSDP = {"shard": "parameters", "num_gpus": 8}
RECIPES: tuple[dict[str, Any], ...] = (
    TRL,
    {**TRL, "method": "lora", "checkpointing": "full", "accumulation": 2},
    {**TRL, "method": "lora", "micro_batch": 2, "padding": "packing"},
    {**TRL, **QLORA, "checkpointing": "full"},
    {"trainer": "transformers", "precision": "bf16-mixed", "checkpointing": "full"},
    {"trainer": "transformers", "method": "lora", "precision": "fp16-mixed", "micro_batch": 2, "lora_dropout": 0.05},
    {"trainer": "transformers", **QLORA, "optimizer": "paged-adamw-8bit"},
    {"trainer": "transformers", "optimizer": "adamw-foreach", "alloc_conf": "expandable_segments:True"},
    {"trainer": "transformers", "optimizer": "adafactor", "accumulation": 3},
    {"trainer": "transformers", "attention": "flash", "micro_batch": 2},
    {"trainer": "transformers", **FSDP, "precision": "bf16-mixed", "checkpointing": "full"},
    {**TRL, **FSDP, "method": "lora"},
    {"trainer": "torch", "optimizer": "adamw-8bit"},
    {"trainer": "torch", "optimizer": "adamw-forloop", "accumulation": 2},
    {"trainer": "torch", "optimizer": "muon", "checkpointing": "full"},
    {"trainer": "torch", "optimizer": "sgd-momentum", "precision": "fp32", "attention": "eager"},
    {"trainer": "torch", **FSDP, "shard": "gradients", "precision": "bf16-mixed", "accumulation": 2},
)


@pytest.fixture(autouse=True)
def small_models_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Deep enough for a test is not deep enough to save time."""
    monkeypatch.setattr(depths, "WORTH", 100.0)


def equal(config: dict[str, Any], **words: Any) -> None:
    """The unrolled tape is the whole one, and so is all that is read from it."""
    recipe = Recipe(**{"sequence_length": 64, **words})
    made, asked = trace_recipe(recipe, config, A100)
    whole, answered = trace_recipe(recipe, config, A100, full=True)
    assert "layers traced, the rest unrolled" in made.about["depth"] and "depth" not in whole.about
    assert made.events == in_order_of_birth(whole.events)
    assert asked == answered
    conf = parse_alloc_conf(recipe.alloc_conf)
    ours, theirs = (replay(t.events, settings=conf) for t in (made, whole))
    assert ours.peak == theirs.peak and ours.by_phase() == theirs.by_phase()
    assert footprint_of(made, ours, (), (), 0) == footprint_of(whole, theirs, (), (), 0)


@pytest.mark.parametrize("words", RECIPES, ids=lambda w: "-".join(map(str, w.values())))
def test_every_kind_of_recipe_unrolls_to_what_it_is_traced_whole(words: dict[str, Any]) -> None:
    equal(LLAMA, **words)


@pytest.mark.parametrize("name", list(MODELS)[1:])
def test_every_kind_of_model_unrolls_to_what_it_is_traced_whole(name: str) -> None:
    equal(MODELS[name], trainer="transformers", method="lora")
    equal(MODELS[name], trainer="torch", optimizer="adamw-foreach", checkpointing="full")


def test_the_smallest_card_is_the_same() -> None:
    recipe = Recipe(**TRL, method="lora", sequence_length=64, checkpointing="full")
    one, two = (judged(trace_recipe(recipe, LLAMA, A100, full=full)[0]) for full in (False, True))
    assert one.events != two.events or one == two
    assert replace(capacity(one, parse_alloc_conf("")), timeline=None, free=None) == replace(
        capacity(two, parse_alloc_conf("")), timeline=None, free=None
    )
