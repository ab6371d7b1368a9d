"""What the tests of unrolling share: small models of every kind, and a recipe traced both ways."""

from __future__ import annotations

from typing import Any

from memfit import Recipe, find_gpu
from memfit.allocator.replay import replay
from memfit.footprints.footprint_of_trace import footprint_of
from memfit.nouns.alloc_settings import parse_alloc_conf
from memfit.nouns.gpu import Gpu
from memfit.virtual.repeated_blocks.unrolled import Order, in_order_of_birth
from memfit.virtual.tracing import trace_recipe

A100 = find_gpu("a100-80gb")

COMMON: dict[str, Any] = {
    "vocab_size": 1000, "hidden_size": 96, "intermediate_size": 160, "num_attention_heads": 4, "num_key_value_heads": 1,
    "head_dim": 16, "num_hidden_layers": 7, "max_position_embeddings": 512, "tie_word_embeddings": False,
}  # fmt: skip
LLAMA = {**COMMON, "model_type": "llama"}
SLIDING = 2 * ["sliding_attention"] + ["full_attention"]
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
MODELS: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "qwen2, tied": {**COMMON, "model_type": "qwen2", "tie_word_embeddings": True},
    "qwen3": {**COMMON, "model_type": "qwen3"},
    "gpt2": {"model_type": "gpt2", "vocab_size": 1000, "n_embd": 64, "n_head": 4, "n_layer": 7, "n_positions": 512},
    "gpt-neox": {**COMMON, "model_type": "gpt_neox"},
    "gemma 2, every second attention full": {**COMMON, "model_type": "gemma2", "num_hidden_layers": 8, "sliding_window": 64},
    "gemma 3, every third, and a rest": {
        **COMMON, "model_type": "gemma3_text", "num_hidden_layers": 14, "layer_types": (5 * SLIDING)[:14], "sliding_window": 64,
    },
    "gemma 3 with eyes": {
        "model_type": "gemma3",
        "text_config": {**COMMON, "model_type": "gemma3_text", "num_hidden_layers": 12, "layer_types": 4 * SLIDING, "sliding_window": 64},
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
        **COMMON, "model_type": "gemma4_text", "layer_types": 7 * ["full_attention"], "hidden_size_per_layer_input": 28, "num_attention_heads": 5,
        "vocab_size_per_layer_input": 1000, "num_kv_shared_layers": 0, "sliding_window": 64,
    },
}  # fmt: skip
Answers = list[tuple[str, Any]]  # what is read from a tape, the tape itself first


def both(
    config: dict[str, Any], arranged: Order = in_order_of_birth, gpu: Gpu = A100, **words: Any
) -> tuple[Answers, Answers]:
    """Of the unrolled tape and of the whole one: all that is read from them."""
    recipe = Recipe(**{"sequence_length": 80, **words})
    conf, found = parse_alloc_conf(recipe.alloc_conf), []
    for full in (False, True):
        tape, asked = trace_recipe(recipe, config, gpu, full=full)
        assert ("layers traced, the rest unrolled" in tape.about.get("depth", "")) is not full
        played = replay(tape.events, settings=conf)
        found.append(
            [
                ("tape", arranged(tape.events) if full else tape.events), ("answers", asked), ("peak", played.peak),
                ("phases", played.by_phase()), ("footprint", footprint_of(tape, played, (), (), 0)),
            ]
        )  # fmt: skip
    return found[0], found[1]


def first_difference(unrolled: Answers, whole: Answers) -> str | None:
    """What differs first: pytest would take minutes to compare two tapes in words."""
    return next((name for (name, one), (_, other) in zip(unrolled, whole, strict=True) if one != other), None)
