"""The table of decoder families built like Llama: one Dialect each, following transformers' modeling code."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import memfit.models.families.windows as windows
from memfit.models.families.blocks import (
    Moe,
    by_sparse_step,
    from_first_dense,
    gated_mlp,
    plain_mlp,
    shared_expert,
    shared_experts,
    softmax_attention,
    xielu_mlp,
)
from memfit.models.families.dialect import Dialect
from memfit.models.families.fields import Fields

UNTIED: dict[str, object] = {"tie_word_embeddings": False, "hidden_act": "silu", "attention_bias": False}
TIED: dict[str, object] = {**UNTIED, "tie_word_embeddings": True}
SANDWICH = (
    "@attention", "@mlp",
    "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm",
)  # fmt: skip
POST_INNER = ("@attention", "@mlp", "post_attention_layernorm", "post_feedforward_layernorm")

_QWEN = {**UNTIED, "use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28}
_QWEN_MOE = {**_QWEN, "decoder_sparse_step": 1}
_GEMMA = {**TIED, "hidden_activation": "gelu_pytorch_tanh", "head_dim": 256, "sliding_window": 4096}
_NO_ROPE = {"no_rope_layer_interval": 4}

LLAMA = Dialect(
    attention=softmax_attention, mlp=gated_mlp, defaults={**UNTIED, "mlp_bias": False},
    qkv_bias="attention_bias", out_bias="attention_bias", mlp_bias="mlp_bias",
)  # fmt: skip
MISTRAL = replace(
    LLAMA, defaults={**UNTIED, "sliding_window": 4096}, qkv_bias=False, out_bias=False, mlp_bias=False,
    window=windows.uniform,
)  # fmt: skip
QWEN2 = replace(LLAMA, defaults=_QWEN, qkv_bias=True, out_bias=False, mlp_bias=False, window=windows.optional)
QWEN3 = replace(LLAMA, defaults={**_QWEN, "head_dim": 128}, mlp_bias=False, qk_norm="head", window=windows.optional)
GEMMA = replace(
    LLAMA, defaults={**TIED, "hidden_act": "gelu_pytorch_tanh", "head_dim": 256}, mlp_bias=False,
    norm="rms_gemma", embedding_scale="module", activation="=gelu_pytorch_tanh",
)  # fmt: skip
GEMMA2 = replace(
    GEMMA, defaults={**_GEMMA, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    body=SANDWICH, placement="sandwich", window=windows.every(2), activation="hidden_activation", sdpa=False,
)  # fmt: skip
GEMMA3 = replace(GEMMA2, defaults=_GEMMA, qk_norm="head", window=windows.every(6), sdpa=True, rotary_tables=2)
OLMO2 = replace(
    LLAMA, defaults=UNTIED, mlp_bias=False, norm="rms_gemma", qk_norm="full", body=POST_INNER, placement="post_inner",
    rotary_how="half_fp32_table",
)  # fmt: skip
GLM4_MOE = replace(
    LLAMA, defaults={**UNTIED, "partial_rotary_factor": 0.5, "use_qk_norm": False}, out_bias=False, mlp_bias=False,
    qk_norm="head", qk_norm_if="use_qk_norm", mlp=Moe(
        count="n_routed_experts", sparse=from_first_dense, shared_width=shared_experts, routing="fp32",
    ),
)  # fmt: skip


def _llama4_sparse(f: Fields, index: int) -> bool:
    layers = f.items("moe_layers", int)
    return index in layers if layers is not None else (index + 1) % f.size("interleave_moe_layer_step") == 0


DECODERS: dict[str, Dialect] = {
    "llama": LLAMA,
    "mistral": MISTRAL,
    "ministral3": replace(MISTRAL, defaults={**UNTIED, "head_dim": 128, "sliding_window": None}),
    "qwen2": QWEN2,
    "qwen3": QWEN3,
    "gemma": GEMMA,
    "gemma2": GEMMA2,
    "gemma3_text": GEMMA3,
    "olmo2": OLMO2,
    "olmo3": replace(OLMO2, defaults={**UNTIED, "sliding_window": 4096}, window=windows.every(4)),
    "smollm3": replace(
        LLAMA, defaults={**TIED, **_NO_ROPE, "mlp_bias": False, "use_sliding_window": False, "sliding_window": None},
        rotary=windows.some_rotary, window=windows.without_rotary,
    ),
    "phi3": replace(
        LLAMA, defaults={**UNTIED, "resid_pdrop": 0.0}, qkv_bias=False, out_bias=False, mlp_bias=False,
        qkv="qkv_proj", attention_order=("o", "qkv"), gate_up="gate_up_proj", window=windows.uniform,
        residual_dropout="resid_pdrop", rotary_how="half_joined",
    ),
    "glm": replace(
        LLAMA, defaults={**UNTIED, "attention_bias": True, "head_dim": 128, "partial_rotary_factor": 0.5},
        out_bias=False, mlp_bias=False, gate_up="gate_up_proj",
    ),
    "cohere": replace(
        LLAMA, defaults={**TIED, "use_qk_norm": False}, mlp_bias=False, norm="layer_fp32",
        qk_norm="head", qk_norm_if="use_qk_norm", qk_norm_by_head=True,
        body=("@attention", "@mlp", "input_layernorm"), placement="parallel", rotary_how="half_fp32_once",
    ),
    "starcoder2": replace(
        LLAMA, mlp=plain_mlp, defaults={**TIED, "hidden_act": "gelu_pytorch_tanh", "use_bias": True},
        qkv_bias="use_bias", out_bias="use_bias", mlp_bias="use_bias", up="c_fc", down="c_proj",
        norm="layer", norm_bias=True, window=windows.uniform,
        residual_dropout="residual_dropout", embedding_dropout="embedding_dropout",
    ),
    "granite": replace(LLAMA, embedding_scale="model"),  # its other multipliers make no tensor of their own
    "seed_oss": replace(
        LLAMA, defaults={**UNTIED, "attention_bias": True, "attention_out_bias": False, "mlp_bias": False,
                         "head_dim": 128, "attention_dropout": 0.1, "residual_dropout": 0.1},
        out_bias="attention_out_bias", residual_dropout="residual_dropout",
    ),
    "hunyuan_v1_dense": replace(
        LLAMA, mlp_bias=False, qk_norm="head", q_norm="query_layernorm", k_norm="key_layernorm"
    ),
    "arcee": replace(LLAMA, mlp=plain_mlp, defaults={**LLAMA.defaults, "hidden_act": "relu2"}),
    "apertus": replace(
        LLAMA, mlp=xielu_mlp, defaults={**UNTIED, "hidden_act": "xielu"}, mlp_bias=False, qk_norm="head",
        body=("@attention", "@mlp", "attention_layernorm", "feedforward_layernorm"),
    ),
    "ernie4_5": replace(
        LLAMA, defaults={**TIED, "use_bias": False, "head_dim": 128}, qkv_bias="use_bias", out_bias="use_bias",
        mlp_bias="use_bias",
    ),
    "exaone4": replace(
        LLAMA, defaults={**UNTIED, "sliding_window": 4096, "sliding_window_pattern": 4}, qkv_bias=False,
        out_bias=False, mlp_bias=False, qk_norm="head", body=POST_INNER, placement="post_inner",
        window=windows.every(4), rotary=windows.rotary_where_sliding,
    ),
    "olmo": replace(LLAMA, defaults=UNTIED, mlp_bias=False, norm="layer_bare", norm_weights=False),
    "cohere2": replace(
        LLAMA, defaults={**TIED, "sliding_window": 4096}, mlp_bias=False, norm="layer_fp32",
        body=("@attention", "@mlp", "input_layernorm"), placement="parallel",
        window=windows.every(4), rotary=windows.rotary_where_sliding,
    ),
    "glm4": replace(
        LLAMA, defaults={**UNTIED, "attention_bias": True, "head_dim": 128, "partial_rotary_factor": 0.5},
        out_bias=False, mlp_bias=False, gate_up="gate_up_proj", placement="sandwich", body=(
            "@attention", "@mlp", "input_layernorm", "post_attention_layernorm", "post_self_attn_layernorm",
            "post_mlp_layernorm",
        ),
    ),
    "nemotron": replace(
        LLAMA, mlp=plain_mlp, norm="layer", norm_bias=True,
        defaults={**LLAMA.defaults, "hidden_act": "relu2", "partial_rotary_factor": 0.5},
    ),
    "qwen2_moe": replace(
        QWEN2, defaults={**_QWEN_MOE, "qkv_bias": True}, qkv_bias="qkv_bias", window=windows.alternating_until,
        mlp=Moe(
            sparse=by_sparse_step, order=("router", "experts", "shared", "shared_gate"), shared="shared_expert",
            shared_width=shared_expert,
        ),
    ),
    "granitemoe": replace(
        LLAMA, embedding_scale="model", mlp_bias=False, mlp_module="block_sparse_moe",
        body=("@attention", "input_layernorm", "post_attention_layernorm", "@mlp"), mlp=Moe(
            count="num_local_experts", inner="intermediate_size", router="router", order=("router", "experts"),
        ),
    ),
    "mixtral": replace(
        MISTRAL, defaults=UNTIED,
        mlp=Moe(
            count="num_local_experts", inner="intermediate_size", order=("router", "experts"), routing="fp32_scores",
        ),
    ),
    "phimoe": replace(
        LLAMA, defaults={**UNTIED, "lm_head_bias": False}, mlp_bias=False, head_bias="lm_head_bias",
        norm="layer", norm_bias=True, mlp=Moe(
            count="num_local_experts", inner="intermediate_size", router="router", order=("router", "experts"),
        ),
    ),
    "qwen3_moe": replace(
        QWEN3, defaults={**_QWEN_MOE, "head_dim": None}, window=windows.switched,
        mlp=Moe(sparse=by_sparse_step, order=("experts", "router")),
    ),
    "glm4_moe": GLM4_MOE,
    "gpt_oss": replace(
        MISTRAL, defaults={**UNTIED, "attention_bias": True, "head_dim": 64, "sliding_window": 128},
        qkv_bias="attention_bias", out_bias="attention_bias", norm="rms_gemma", window=windows.every(2),
        sinks=True, sdpa=False, packed_masks=False, stored_stacked=True, rotary_how="pairs", activation="=gpt_oss_glu",
        mlp=Moe(
            count="num_local_experts", inner="intermediate_size", router="router", router_bias=True, bias=True,
            order=("router", "experts"), transposed=True, routing="topk",
        ),
    ),
    "llama4_text": replace(
        LLAMA, defaults={**UNTIED, **_NO_ROPE, "head_dim": 128, "interleave_moe_layer_step": 1, "use_qk_norm": True,
                         "attention_chunk_size": 8192},
        mlp_bias=False, qk_norm="head", qk_norm_if="use_qk_norm", qk_norm_weights=False,
        rotary=windows.some_rotary, rotary_how="complex", code="llama4", upcast=False, window=windows.chunked,
        stored_stacked=True,
        mlp_module="feed_forward", mlp=Moe(
            count="num_local_experts", inner="intermediate_size", router="router", shared="shared_expert",
            shared_width=lambda f: f.size("intermediate_size"), sparse=_llama4_sparse, transposed=True,
            every_token=True, dense=partial(gated_mlp, key="intermediate_size_mlp"),
        ),
    ),
}  # fmt: skip
