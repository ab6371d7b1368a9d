"""Families with latent or linear attention.

Latent attention (MLA): DeepSeek, Kimi, GLM 4.7 Flash and 5. The gated delta rule: Kimi Linear, Qwen3-Next, Qwen3.5.
"""

from __future__ import annotations

from dataclasses import replace

from memfit.models.families.blocks import (
    Moe,
    by_sparse_step,
    from_first_dense,
    shared_expert,
    shared_experts,
    softmax_attention,
)
from memfit.models.families.dialect import AttentionMaker, Dialect, Weights, conv, flag, linear, norm, other, prefixed
from memfit.models.families.fields import Fields
from memfit.models.families.llama_like import LLAMA, UNTIED
from memfit.nouns.architecture import Attention


def latent_attention(f: Fields, d: Dialect, index: int) -> tuple[Attention, Weights]:
    """Build MLA: low-rank queries, keys and values, and a rotary part of `qk_rope_head_dim` in each head."""
    width, heads, bias = f.size("hidden_size"), f.size("num_attention_heads"), flag(f, d.qkv_bias)
    rope, head_v, rank = f.size("qk_rope_head_dim"), f.size("v_head_dim"), f.size("kv_lora_rank")
    head = f.size("qk_nope_head_dim") + rope
    # null means a full-rank query; an absent key is an error, since the class default is not the checkpoint's
    q_rank = f.size("q_lora_rank", 0, least=0) if f.has("q_lora_rank") else f.size("q_lora_rank")
    weights = linear("q_proj", heads * head, width)
    if q_rank:
        weights = linear("q_a_proj", q_rank, width, bias) + norm("q_a_layernorm", q_rank)
        weights += linear("q_b_proj", heads * head, q_rank)
    weights += linear("kv_a_proj_with_mqa", rank + rope, width, bias) + norm("kv_a_layernorm", rank)
    weights += linear("kv_b_proj", heads * (head - rope + head_v), rank)
    weights += linear("o_proj", width, heads * head_v, bias)
    trait = Attention(
        "mla", heads, heads, head, head_v, rotary_dim=d.rotary(f, index), rotary=d.rotary_how, bias=bias, out_bias=bias,
        dropout=f.number(d.attention_dropout), q_lora_rank=q_rank, kv_lora_rank=rank, sdpa=d.sdpa,
    )  # fmt: skip
    return trait, prefixed(d.attention_module, weights)


def _rope_part(f: Fields, index: int) -> int:
    return f.size("qk_rope_head_dim")


def _indexed_attention(f: Fields, d: Dialect, index: int) -> tuple[Attention, Weights]:
    """Build latent attention with an indexer that selects keys; some layers reuse an earlier selection."""
    trait, weights = latent_attention(f, d, index)
    modes = f.per_layer("indexer_types", f.layers())
    if modes and modes[index] != "full":
        return trait, weights
    if not modes and (f.raw("index_topk_pattern") is not None or f.size("index_topk_freq", 1) != 1):
        raise f.unsupported("a schedule of shared indexers is read only from 'indexer_types'")
    width, heads, head = f.size("hidden_size"), f.size("index_n_heads"), f.size("index_head_dim")
    indexer = linear("wq_b", heads * head, f.size("q_lora_rank")) + linear("wk", head, width)
    indexer += norm("k_norm", head, bias=True) + linear("weights_proj", heads, width)
    return trait, weights + prefixed(f"{d.attention_module}.indexer", indexer)


def _kimi_linear_config(f: Fields) -> Fields:
    """Return the config with the linear layers' dimensions, which published files keep in `linear_attn_config`."""
    nested = f.section("linear_attn_config") if f.raw("linear_attn_config") is not None else {}
    keys = {
        "linear_head_dim": "head_dim", "linear_num_heads": "num_heads",
        "linear_conv_kernel_dim": "short_conv_kernel_size",
    }  # fmt: skip
    own = {key: nested[inner] for key, inner in keys.items() if inner in nested}
    return Fields({**f.values, **own}, f.name, f.aliases, f.defaults)


def _kimi_full(f: Fields, index: int) -> bool:
    """Return whether layer `index` (from 0) has full attention; `full_attn_layers` counts from 1."""
    if f.raw("linear_attn_config") is not None:
        nested = Fields(f.section("linear_attn_config"), f.name)
        return index + 1 in (nested.items("full_attn_layers", int) or ())
    types = f.per_layer("layer_types", f.layers())
    return types[index] == "full_attention" if types else bool(index and index % 4 == 0)


def _kimi_attention(f: Fields, d: Dialect, index: int) -> tuple[Attention, Weights]:
    """Build latent attention in every fourth layer, Kimi's gated delta rule in the others."""
    if _kimi_full(f, index):
        return latent_attention(f, d, index)
    g = _kimi_linear_config(f)
    width, heads, head = g.size("hidden_size"), g.size("linear_num_heads"), g.size("linear_head_dim")
    kernel, inner = g.size("linear_conv_kernel_dim"), heads * head
    weights = tuple(w for part in ("q_proj", "k_proj", "v_proj") for w in linear(part, inner, width))
    weights += conv("conv1d", 3 * inner, 1, kernel)
    weights += other("forget_gate.dt_bias", inner) + other("forget_gate.A_log", 1, 1, heads, 1)
    weights += linear("forget_gate.f_a_proj", head, width) + linear("forget_gate.f_b_proj", inner, head)
    weights += linear("b_proj", heads, width)
    weights += linear("g_a_proj", head, width) + linear("g_b_proj", inner, head)
    weights += norm("o_norm", head) + linear("o_proj", width, inner)
    return Attention("linear", heads, heads, head, head, conv=kernel), prefixed(d.attention_module, weights)


_EXPERTS = Moe(count="n_routed_experts", sparse=from_first_dense, shared_width=shared_experts, routing="fp32")
MLA = replace(
    LLAMA, attention=latent_attention, mlp=_EXPERTS, defaults=UNTIED, qkv_bias="attention_bias", mlp_bias=False,
    rotary=_rope_part, rotary_how="pairs",
)  # fmt: skip

LATENTS: dict[str, Dialect] = {
    "deepseek_v2": replace(
        MLA, rotary_how="complex", mlp=replace(_EXPERTS, routing="fp32_softmax"), mlp_bias="mlp_bias",
        defaults={**UNTIED, "mlp_bias": False},
    ),
    "deepseek_v3": MLA,
    "kimi_k2": MLA,  # DeepSeek-V3's code under another name
    "glm4_moe_lite": replace(MLA, defaults={**UNTIED, "first_k_dense_replace": 1}),
    "glm_moe_dsa": replace(
        MLA, attention=_indexed_attention, defaults={**UNTIED, "first_k_dense_replace": 3},
        untrainable="sparse attention chosen by an indexer is not modelled",
    ),
    "kimi_linear": replace(
        MLA, attention=_kimi_attention, rotary=lambda f, index: 0,  # the shared part of its keys is not rotated
        aliases={"max_position_embeddings": "model_max_length", "num_experts_per_tok": "num_experts_per_token",
                 "n_shared_experts": "num_shared_experts", "n_routed_experts": "num_experts"},
        defaults={**UNTIED, "first_k_dense_replace": 1},
    ),
}  # fmt: skip


def _is_full(f: Fields, index: int) -> bool:
    types = f.per_layer("layer_types", f.layers())
    return types[index] == "full_attention" if types else (index + 1) % f.size("full_attention_interval") == 0


def _gated_attention(f: Fields, d: Dialect, index: int) -> tuple[Attention, Weights]:
    """Build softmax attention with a gate on its output; the query projection is twice as wide and holds the gate."""
    trait, weights = softmax_attention(f, d, index)
    doubled = f"{d.attention_module}.{d.q}."
    wide = (replace(w, shape=(2 * w.shape[0], *w.shape[1:])) if w.name.startswith(doubled) else w for w in weights)
    return replace(trait, gated=True), tuple(wide)


def _mixer(fused: bool) -> AttentionMaker:
    """Make the builder of full or linear attention; Qwen3-Next fuses the linear layers' inputs, Qwen3.5 does not."""

    def attention(f: Fields, d: Dialect, index: int) -> tuple[Attention, Weights]:
        if _is_full(f, index):
            return _gated_attention(f, d, index)
        width, keys, values = f.size("hidden_size"), f.size("linear_num_key_heads"), f.size("linear_num_value_heads")
        head_k, head_v = f.size("linear_key_head_dim"), f.size("linear_value_head_dim")
        key, value, kernel = keys * head_k, values * head_v, f.size("linear_conv_kernel_dim")
        weights = other("dt_bias", values) + other("A_log", values) + conv("conv1d", 2 * key + value, 1, kernel)
        if fused:
            weights += linear("in_proj_qkvz", 2 * (key + value), width) + linear("in_proj_ba", 2 * values, width)
        weights += norm("norm", head_v) + linear("out_proj", width, value)
        if not fused:
            weights += linear("in_proj_qkv", 2 * key + value, width) + linear("in_proj_z", value, width)
            weights += linear("in_proj_b", values, width) + linear("in_proj_a", values, width)
        trait = Attention("linear", values, keys, head_k, head_v, fused_qkv=True, conv=kernel)
        return trait, prefixed("linear_attn", weights)

    return attention


_DEFAULTS = {
    **UNTIED, "head_dim": 256, "partial_rotary_factor": 0.25, "full_attention_interval": 4, "decoder_sparse_step": 1,
    "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}  # fmt: skip
QWEN3_5 = replace(
    LLAMA, attention=_mixer(fused=False), defaults=_DEFAULTS, mlp_bias=False, qk_norm="head", norm="rms_gemma"
)
_SHARED_EXPERTS = Moe(
    order=("router", "experts", "shared", "shared_gate"), shared="shared_expert", shared_width=shared_expert
)

HYBRIDS: dict[str, Dialect] = {
    "qwen3_next": replace(QWEN3_5, attention=_mixer(fused=True), mlp=replace(_SHARED_EXPERTS, sparse=by_sparse_step)),
    "qwen3_5_text": QWEN3_5,
    "qwen3_5_moe_text": replace(QWEN3_5, mlp=_SHARED_EXPERTS),
}
