"""Gemma 3n and 4: keys and values shared between layers, embeddings for every layer, two head widths, AltUp."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import memfit.models.families.windows as windows
from memfit.models.families.blocks import gated_weights
from memfit.models.families.dialect import (
    Dialect,
    Weights,
    embedding,
    experts,
    flag,
    frame,
    linear,
    norm,
    other,
    prefixed,
)
from memfit.models.families.fields import Fields
from memfit.models.families.llama_like import GEMMA3, SANDWICH, TIED
from memfit.nouns.architecture import Attention, Mlp


def _slides(f: Fields, d: Dialect, index: int) -> bool:
    return d.window(f, index) is not None


def _reuses(f: Fields, index: int) -> bool:
    """Return whether a layer takes keys and values from an earlier one, as the last `num_kv_shared_layers` do."""
    shared = f.size("num_kv_shared_layers", 0, least=0)
    return shared > 0 and index >= f.layers() - shared


def _of_layer(f: Fields, index: int) -> Fields:
    """Return the config with a layer's own sizes of full attention, saved under the layer's number ("05")."""
    layers = f.raw("per_layer_config")
    named = {str(key).lstrip("0") or "0": value for key, value in layers.items()} if isinstance(layers, Mapping) else {}
    sizes = named.get(str(index))
    if not isinstance(sizes, Mapping):
        return f
    keys = {"head_dim": "global_head_dim", "num_key_value_heads": "num_global_key_value_heads"}
    own = {keys[key]: value for key, value in sizes.items() if key in keys}
    return Fields({**f.values, **own}, f.name, f.aliases, f.defaults)


def _attention(f: Fields, d: Dialect, index: int) -> tuple[Attention, Weights]:
    """Build attention; Gemma 4's full layers may have wider heads, fewer key heads, and use their keys as values."""
    width, heads, bias = f.size("hidden_size"), f.size("num_attention_heads"), flag(f, d.qkv_bias)
    head, kv = f.size("head_dim"), f.size("num_key_value_heads")
    keys_are_values, order = False, ("q", "qn", "k", "v", "kn", "o")
    if f.text("model_type", "").startswith("gemma4"):
        order = ("q", "qn", "kn", "k", "v", "o")
        if not _slides(f, d, index):
            own = _of_layer(f, index)
            head, keys_are_values = own.size("global_head_dim"), f.flag("attention_k_eq_v")
            kv = own.size("num_global_key_value_heads", kv) if keys_are_values else kv
    reuses = _reuses(f, index)
    made = {
        "q": linear("q_proj", heads * head, width, bias), "qn": norm("q_norm", head),
        "k": () if reuses else linear("k_proj", kv * head, width, bias),
        "v": () if reuses or keys_are_values else linear("v_proj", kv * head, width, bias),
        "kn": () if reuses else norm("k_norm", head),
        "o": linear("o_proj", width, heads * head, bias),
    }  # fmt: skip
    trait = Attention(
        "softmax", heads, kv, head, head, rotary_dim=head, qk_norm="head", bias=bias, out_bias=bias,
        window=d.window(f, index), dropout=f.number(d.attention_dropout), shared_kv=reuses,
    )  # fmt: skip
    return trait, prefixed(d.attention_module, tuple(w for part in order for w in made[part]))


def _inner(f: Fields, index: int) -> int:
    """Return F, which the config holds as one number or as one for each layer."""
    if isinstance(f.raw("intermediate_size"), list | tuple):
        listed = f.per_layer("intermediate_size", f.layers(), int) or ()
        return Fields({"intermediate_size": listed[index]}, f.name).size("intermediate_size")
    double = f.flag("use_double_wide_mlp") and _reuses(f, index)
    return f.size("intermediate_size") * (2 if double else 1)


def _mlp(f: Fields, d: Dialect, index: int) -> tuple[Mlp, Weights]:
    """Build a dense gated part, beside which the 26B has experts that read the same residual."""
    width, inner = f.size("hidden_size"), _inner(f, index)
    weights = prefixed(d.mlp_module, gated_weights(d, width, inner))
    if not f.flag("enable_moe_block"):
        return Mlp("gated", inner, d.activation_of(f)), weights
    count = f.size("num_experts")
    trait = Mlp(
        "moe", f.size("moe_intermediate_size"), d.activation_of(f), experts=count,
        experts_per_token=f.size("top_k_experts", most=count), shared_width=inner,
    )  # fmt: skip
    return trait, weights


def _layer_extras(f: Fields, d: Dialect, index: int) -> Weights:
    """Return a block's other weights: AltUp and LAuReL (3n), the own embedding's gate, router and experts (4)."""
    width, own = f.size("hidden_size"), f.size("hidden_size_per_layer_input", least=0)
    weights: Weights = ()
    if f.text("model_type", "").startswith("gemma3n"):
        streams, rank = f.size("altup_num_inputs", most=64), f.size("laurel_rank")
        altup = other("correct_output_scale", width) if f.flag("altup_correct_scale", True) else ()
        altup += linear("correction_coefs", streams, streams) + linear("prediction_coefs", streams**2, streams)
        altup += linear("modality_router", streams, width) + norm("router_norm", width)
        laurel = linear("linear_left", rank, width) + linear("linear_right", width, rank)
        weights = prefixed("altup", altup) + prefixed("laurel", laurel + norm("post_laurel_norm", width))
    if own:
        weights += linear("per_layer_input_gate", own, width) + linear("per_layer_projection", width, own)
        weights += norm("post_per_layer_input_norm", width)
    if f.flag("enable_moe_block"):
        count = f.size("num_experts")
        weights += other("router.scale", width) + other("router.per_expert_scale", count)
        weights += linear("router.proj", count, width)
        weights += experts("experts", count, width, f.size("moe_intermediate_size"))
        weights += norm("post_feedforward_layernorm_1", width) + norm("post_feedforward_layernorm_2", width)
        weights += norm("pre_feedforward_layernorm_2", width)
    return weights


def _frame(f: Fields, d: Dialect) -> tuple[Weights, Weights]:
    """Return the token embedding, the one for all layers, and AltUp's projections into and out of its streams."""
    below, above = frame(f, d)
    width, own = f.size("hidden_size"), f.size("hidden_size_per_layer_input", least=0)
    if own:
        joint = f.layers() * own
        below += embedding("embed_tokens_per_layer", f.size("vocab_size_per_layer_input"), joint)
        below += linear("per_layer_model_projection", joint, width) + norm("per_layer_projection_norm", own)
    if f.text("model_type", "").startswith("gemma3n"):
        streams = range(f.size("altup_num_inputs", most=64) - 1)
        below += tuple(w for i in streams for w in linear(f"altup_projections.{i}", width, width))
        above += tuple(w for i in streams for w in linear(f"altup_unembed_projections.{i}", width, width))
    return below, above


_DEFAULTS = {
    **TIED, "hidden_activation": "gelu_pytorch_tanh", "sliding_window": 512, "head_dim": 256,
    "vocab_size_per_layer_input": 262144, "hidden_size_per_layer_input": 256,
}  # fmt: skip
GEMMA4 = replace(
    GEMMA3, attention=_attention, mlp=_mlp, extras=_layer_extras, body=(*SANDWICH, "@extras"), frame=_frame,
    defaults={**_DEFAULTS, "global_head_dim": 512},
)  # fmt: skip

GEMMAS: dict[str, Dialect] = {
    "gemma3n_text": replace(
        GEMMA4, defaults={**_DEFAULTS, "altup_num_inputs": 4, "laurel_rank": 64, "final_logit_softcapping": 30.0},
        window=windows.every(5), untrainable="AltUp's parallel residual streams are not modelled",
    ),
    "gemma4_text": GEMMA4,
}  # fmt: skip
