"""Families that mix full attention with the gated delta rule: Qwen3-Next and Qwen3.5."""

from __future__ import annotations

from dataclasses import replace

from memfit.models.families.blocks import Moe, by_sparse_step, shared_expert, softmax_attention
from memfit.models.families.dialect import AttentionMaker, Dialect
from memfit.models.families.fields import Fields
from memfit.models.families.llama_like import LLAMA, UNTIED
from memfit.models.families.parts import Weights, conv, linear, norm, other, prefixed
from memfit.nouns.architecture import Attention


def _is_full(f: Fields, index: int) -> bool:
    types = f.per_layer("layer_types", f.layers())
    return types[index] == "full_attention" if types else (index + 1) % f.size("full_attention_interval") == 0


def _gated_attention(f: Fields, d: Dialect, index: int) -> tuple[Attention, Weights]:
    """Softmax attention whose output passes a gate; the query projection is twice as wide and holds it."""
    trait, weights = softmax_attention(f, d, index)
    doubled = f"{d.attention_module}.{d.q}."
    wide = (replace(w, shape=(2 * w.shape[0], *w.shape[1:])) if w.name.startswith(doubled) else w for w in weights)
    return replace(trait, gated=True), tuple(wide)


def _mixer(fused: bool) -> AttentionMaker:
    """Full or linear attention by layer; Qwen3-Next fuses the linear layers' input projections, Qwen3.5 does not."""

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
_EXPERTS = Moe(order=("router", "experts", "shared", "shared_gate"), shared="shared_expert", shared_width=shared_expert)

HYBRIDS: dict[str, Dialect] = {
    "qwen3_next": replace(QWEN3_5, attention=_mixer(fused=True), mlp=replace(_EXPERTS, sparse=by_sparse_step)),
    "qwen3_5_text": QWEN3_5,
    "qwen3_5_moe_text": replace(QWEN3_5, mlp=_EXPERTS),
}
