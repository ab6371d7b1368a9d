"""The table of decoder families older than Llama or with another layout: GPT, Falcon, OPT, Phi, MPT, Qwen 1."""

from __future__ import annotations

from dataclasses import replace

from memfit.models.families.blocks import gated_mlp, gated_weights, plain_mlp, softmax_attention
from memfit.models.families.dialect import (
    Dialect,
    Weights,
    embedding,
    flag,
    frame,
    head_dim,
    linear,
    no_rotary,
    prefixed,
)
from memfit.models.families.fields import Fields
from memfit.nouns.architecture import Mlp

_GPT_KEYS = {
    "hidden_size": "n_embd", "max_position_embeddings": "n_positions", "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer", "intermediate_size": "n_inner",
}  # fmt: skip
_GPT2_DEFAULTS: dict[str, object] = {
    "tie_word_embeddings": True, "activation_function": "gelu_new", "multi_query": True,
    "attn_pdrop": 0.1, "resid_pdrop": 0.1, "embd_pdrop": 0.1,
}  # fmt: skip
_GPTJ_DEFAULTS: dict[str, object] = {
    "tie_word_embeddings": False, "activation_function": "gelu_new",
    "attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0,
}  # fmt: skip
_NORM_FIRST = ("input_layernorm", "@attention", "post_attention_layernorm", "@mlp")


def _rotary_dim(f: Fields, index: int) -> int:
    """Return the rotated width in GPT-J's config; null rotates the whole head."""
    return f.size("rotary_dim", head_dim(f))


def _neo_window(f: Fields, index: int) -> int | None:
    """Return GPT-Neo's window: every other layer, or those in `attention_layers`, have `window_size` tokens."""
    kinds = f.per_layer("attention_layers", f.layers())
    local = kinds[index] == "local" if kinds else index % 2 == 1
    return f.size("window_size") if local else None


def _one_kv_head(f: Fields) -> int:
    return 1 if f.flag("multi_query") else f.size("num_attention_heads")


def _no_cross_attention(f: Fields, d: Dialect) -> Dialect:
    if f.flag("add_cross_attention"):
        raise f.unsupported("cross-attention layers in a decoder are not modelled")
    return d


def _by_residual(f: Fields, d: Dialect) -> Dialect:
    return replace(d, placement="parallel" if f.flag("use_parallel_residual") else "pre")


def _phi(f: Fields, d: Dialect) -> Dialect:
    if f.flag("qk_layernorm"):
        raise f.unsupported("'qk_layernorm' is not modelled for this family")
    return d


def _stablelm(f: Fields, d: Dialect) -> Dialect:
    """Adapt to StableLM 2, whose attention and feed-forward share one norm if the residual is parallel."""
    d = _phi(f, _by_residual(f, d))
    return replace(d, body=d.body[:3]) if d.placement == "parallel" else d


def _falcon(f: Fields, d: Dialect) -> Dialect:
    """Adapt to Falcon's layouts: one shared norm (7B), one for each part (40B), or both parts in sequence (RW)."""
    parallel, new = f.flag("parallel_attn"), f.flag("new_decoder_architecture")
    norms: tuple[str, ...] = ("input_layernorm",)
    if not parallel:
        norms = ("post_attention_layernorm", "input_layernorm")
    elif f.size("num_ln_in_parallel_attn", 2 if new else 1) == 2:
        norms = ("ln_attn", "ln_mlp")
    return replace(
        d, body=("@attention", "@mlp", *norms), placement="parallel" if parallel else "pre",
        rotary=no_rotary if f.flag("alibi") else d.rotary,
    )  # fmt: skip


def _falcon_kv_heads(f: Fields) -> int:
    heads = f.size("num_attention_heads")
    one = f.flag("multi_query") and not f.flag("new_decoder_architecture")
    return 1 if one else f.size("num_kv_heads", heads)


def _opt(f: Fields, d: Dialect) -> Dialect:
    """Adapt to OPT-350m, which has norms after each part and no final norm."""
    if not f.flag("layer_norm_elementwise_affine"):
        raise f.unsupported("norms without weights are not modelled for OPT")
    before = f.flag("do_layer_norm_before")
    keeps_final = before and not f.flag("_remove_final_layer_norm")
    return replace(d, placement="pre" if before else "post", final=d.final if keeps_final else "")


def _opt_frame(f: Fields, d: Dialect) -> tuple[Weights, Weights]:
    width = f.size("hidden_size")
    inner = f.size("word_embed_proj_dim", width)
    below, above = frame(f, d)
    if inner == width:
        return below, above
    project_out, project_in = linear("project_out", inner, width), linear("project_in", width, inner)
    return embedding(d.embed, f.size("vocab_size"), inner) + below[1:] + project_out + project_in, above


def _mpt(f: Fields, d: Dialect) -> Dialect:
    """Adapt to MPT as transformers builds it, with ALiBi and without biases; refuse what it cannot build."""
    inner = Fields(f.section("attn_config") if f.raw("attn_config") is not None else {}, f.name, {}, _MPT_ATTENTION)
    if not inner.flag("alibi") or not f.flag("no_bias") or inner.text("attn_type") != "multihead_attention":
        raise f.unsupported("only MPT with ALiBi, without biases and with multi-head attention is modelled")
    if f.size("expansion_ratio") != 4 or inner.flag("qk_ln"):
        raise f.unsupported("only MPT with expansion_ratio 4 and without qk_ln is modelled")
    rate = inner.number("attn_pdrop")
    return replace(d, attention_dropout="attn_pdrop", defaults={**d.defaults, "attn_pdrop": rate})


def _qwen(f: Fields, d: Dialect) -> Dialect:
    return replace(d, out_bias=not f.flag("no_bias"), mlp_bias=not f.flag("no_bias"))


def _qwen_mlp(f: Fields, d: Dialect, index: int) -> tuple[Mlp, Weights]:
    """Build Qwen 1's feed-forward part; its config holds the joint width of w1 and w2."""
    width, inner, bias = f.size("hidden_size"), f.size("intermediate_size") // 2, flag(f, d.mlp_bias)
    return Mlp("gated", inner, "silu", bias=bias), prefixed(d.mlp_module, gated_weights(d, width, inner, bias))


def _baichuan(f: Fields, d: Dialect) -> Dialect:
    """Adapt to Baichuan 13B, which has ALiBi and no `max_position_embeddings`, or 7B with rotary embeddings."""
    alibi = not f.has("max_position_embeddings")
    return replace(d, alibi=alibi, rotary=no_rotary if alibi else d.rotary)


def _causal_mask(f: Fields) -> tuple[int, ...]:
    """Return the bytes of a bool mask over all pairs of positions."""
    return (f.size("max_position_embeddings") ** 2,)


def _sinusoids(f: Fields) -> tuple[int, ...]:
    """Return the bytes of every layer's fp32 sines and cosines of all positions."""
    rotated = f.size("rotary_dim", f.size("hidden_size"), least=0)
    return (4 * f.size("max_position_embeddings") * rotated,) * f.layers()


_MPT_ATTENTION: dict[str, object] = {"alibi": True, "attn_type": "multihead_attention", "qk_ln": False}

GPT = Dialect(
    attention=softmax_attention, mlp=plain_mlp, aliases=_GPT_KEYS, stem="transformer", layers="h", embed="wte",
    final="ln_f", body=("ln_1", "@attention", "ln_2", "@mlp"), norm="layer", norm_bias=True,
    attention_module="attn", rotary=no_rotary, mlp_ratio=4, mlp_bias=True, activation="activation_function",
    attention_dropout="attn_pdrop", residual_dropout="resid_pdrop", embedding_dropout="embd_pdrop",
)  # fmt: skip
GPT2 = replace(
    GPT, defaults=_GPT2_DEFAULTS, variant=_no_cross_attention, positions="wpe", qkv="c_attn", o="c_proj",
    attention_order=("qkv", "o"), qkv_bias=True, out_bias=True, transposed=True, up="c_fc", down="c_proj", upcast=False,
)  # fmt: skip
GPTJ = replace(
    GPT, defaults=_GPTJ_DEFAULTS, body=("ln_1", "@attention", "@mlp"), placement="parallel", rotary=_rotary_dim,
    o="out_proj", attention_order=("k", "v", "q", "o"), up="fc_in", down="fc_out", head_bias=True, sdpa=False,
    code="gptj", returns_weights=True, buffers=_sinusoids,
)  # fmt: skip
FUSED = Dialect(  # the layout of Megatron: BLOOM, Falcon, GPT-NeoX, ChatGLM
    attention=softmax_attention, mlp=plain_mlp, stem="transformer", layers="h", embed="word_embeddings", final="ln_f",
    norm="layer", norm_bias=True, body=_NORM_FIRST, attention_module="self_attention", qkv="query_key_value",
    o="dense", attention_order=("qkv", "o"), up="dense_h_to_4h", down="dense_4h_to_h",
    residual_dropout="hidden_dropout",
)  # fmt: skip

CLASSICS: dict[str, Dialect] = {
    "gpt2": GPT2,
    "gpt_bigcode": replace(
        GPT2, defaults={**_GPT2_DEFAULTS, "activation_function": "gelu_pytorch_tanh"}, transposed=False,
        kv_heads=_one_kv_head, buffers=_causal_mask,
    ),
    "gptj": GPTJ,
    "codegen": replace(GPTJ, qkv="qkv_proj", attention_order=("qkv", "o")),
    "gpt_neo": replace(
        GPT, aliases={"num_attention_heads": "num_heads", "num_hidden_layers": "num_layers"},
        defaults={"tie_word_embeddings": True, "activation_function": "gelu_new", "window_size": 256},
        buffers=lambda f: _causal_mask(f) * f.layers(), positions="wpe", attention_module="attn.attention",
        attention_order=("k", "v", "q", "o"), o="out_proj", out_bias=True, window=_neo_window, sdpa=False,
        code="gptj", returns_weights=True, up="c_fc", down="c_proj", attention_dropout="attention_dropout",
        residual_dropout="resid_dropout", embedding_dropout="embed_dropout",
    ),
    "gpt_neox": replace(
        FUSED, aliases={"partial_rotary_factor": "rotary_pct"}, variant=_by_residual,
        defaults={"tie_word_embeddings": False, "hidden_act": "gelu", "attention_bias": True,
                  "partial_rotary_factor": 0.25, "use_parallel_residual": True},
        stem="gpt_neox", layers="layers", embed="embed_in", final="final_layer_norm",
        body=("input_layernorm", "post_attention_layernorm", "@attention", "@mlp"), attention_module="attention",
        qkv_bias="attention_bias", out_bias="attention_bias", mlp_bias=True,
    ),
    "bloom": replace(
        FUSED, aliases={"num_hidden_layers": "n_layer", "num_attention_heads": "n_head", "hidden_size": "n_embed"},
        defaults={"tie_word_embeddings": True}, embed_norm="word_embeddings_layernorm", rotary=no_rotary, alibi=True,
        sdpa=False, qkv_bias=True, out_bias=True, mlp_bias=True, mlp_ratio=4, activation="=bloom_gelu", code="bloom",
        returns_weights=True, packed_masks=False,
    ),
    "falcon": replace(
        FUSED, aliases={"intermediate_size": "ffn_hidden_size", "hidden_size": "n_embed"}, variant=_falcon,
        defaults={"tie_word_embeddings": True, "bias": False, "alibi": False, "multi_query": True,
                  "parallel_attn": True, "new_decoder_architecture": False, "activation": "gelu"},
        kv_heads=_falcon_kv_heads, alibi="alibi", qkv_bias="bias", out_bias="bias", mlp_bias="bias", mlp_ratio=4,
        activation="activation", code="falcon", returns_weights=True,
        packed_masks=False,
    ),
    "chatglm": replace(
        FUSED, aliases={"vocab_size": "padded_vocab_size", "num_hidden_layers": "num_layers", "head_dim": "kv_channels",
                        "intermediate_size": "ffn_hidden_size", "num_key_value_heads": "multi_query_group_num",
                        "max_position_embeddings": "seq_length"},
        defaults={"tie_word_embeddings": False, "partial_rotary_factor": 0.5},
        layers="encoder.layers", embed="embedding.word_embeddings", final="encoder.final_layernorm",
        head="transformer.output_layer", norm="rms", norm_bias=False, mlp=gated_mlp, gate_up="dense_h_to_4h",
        qkv_bias="add_qkv_bias", out_bias="add_bias_linear", mlp_bias="add_bias_linear", activation="=silu",
    ),
    "opt": replace(
        GPT, aliases={"intermediate_size": "ffn_dim"}, variant=_opt, frame=_opt_frame, mlp_ratio=0,
        defaults={"tie_word_embeddings": True, "activation_function": "relu", "dropout": 0.1, "enable_bias": True,
                  "do_layer_norm_before": True, "_remove_final_layer_norm": False,
                  "layer_norm_elementwise_affine": True},
        stem="model.decoder", layers="layers", embed="embed_tokens", positions="embed_positions", position_offset=2,
        final="final_layer_norm", body=("@attention", "self_attn_layer_norm", "@mlp", "final_layer_norm"),
        attention_module="self_attn", attention_order=("k", "v", "q", "o"), o="out_proj", mlp_module="",
        qkv_bias="enable_bias", out_bias="enable_bias", mlp_bias="enable_bias", up="fc1", down="fc2",
        attention_dropout="attention_dropout", residual_dropout="dropout", embedding_dropout="",
        packed_masks=False,
    ),
    "phi": Dialect(
        attention=softmax_attention, mlp=plain_mlp, variant=_phi, final="final_layernorm", head_bias=True,
        defaults={"tie_word_embeddings": False, "hidden_act": "gelu_new", "partial_rotary_factor": 0.5,
                  "qk_layernorm": False},
        body=("@attention", "@mlp", "input_layernorm"), placement="parallel", norm="layer", norm_bias=True,
        o="dense", qkv_bias=True, out_bias=True, up="fc1", down="fc2", mlp_bias=True,
        residual_dropout="resid_pdrop", embedding_dropout="embd_pdrop",
    ),
    "stablelm": Dialect(
        attention=softmax_attention, mlp=gated_mlp, variant=_stablelm, norm="layer", norm_bias=True,
        defaults={"tie_word_embeddings": False, "hidden_act": "silu", "partial_rotary_factor": 0.25,
                  "qk_layernorm": False, "use_qkv_bias": False, "use_parallel_residual": False},
        qkv_bias="use_qkv_bias", residual_dropout="hidden_dropout",
    ),
    "mpt": replace(
        GPT, aliases={"hidden_size": "d_model", "num_attention_heads": "n_heads", "num_hidden_layers": "n_layers",
                      "max_position_embeddings": "max_seq_len"},
        defaults={"tie_word_embeddings": True, "no_bias": True, "expansion_ratio": 4}, variant=_mpt,
        layers="blocks", final="norm_f", norm_bias=False, body=("norm_1", "@attention", "norm_2", "@mlp"),
        qkv="Wqkv", o="out_proj", attention_order=("qkv", "o"), alibi=True, sdpa=False, code="mpt",
        mlp_module="ffn", mlp_bias=False, activation="=gelu", residual_dropout="attn_pdrop", embedding_dropout="",
        returns_weights=True, packed_masks=False,
    ),
    "qwen": replace(
        GPT, aliases={"head_dim": "kv_channels", "max_position_embeddings": "seq_length"}, variant=_qwen,
        defaults={"tie_word_embeddings": False, "no_bias": True}, norm="rms", norm_bias=False,
        mlp=_qwen_mlp, mlp_ratio=0, qkv="c_attn", o="c_proj", attention_order=("qkv", "o"), qkv_bias=True,
        rotary=Dialect.rotary, gate="w1", up="w2", down="c_proj",
        attention_dropout="attn_dropout_prob", residual_dropout="", embedding_dropout="emb_dropout_prob",
    ),
    "baichuan": Dialect(
        attention=softmax_attention, mlp=gated_mlp, defaults={"tie_word_embeddings": False}, variant=_baichuan,
        qkv="W_pack", attention_order=("qkv", "o"),
    ),
    "internlm2": Dialect(
        attention=softmax_attention, mlp=gated_mlp, defaults={"tie_word_embeddings": False, "bias": False},
        embed="tok_embeddings", head="output", body=("@attention", "@mlp", "attention_norm", "ffn_norm"),
        attention_module="attention", qkv="wqkv", o="wo", attention_order=("qkv", "o"), qkv_bias="bias",
        out_bias="bias", mlp_module="feed_forward", gate="w1", up="w3", down="w2",
    ),
}  # fmt: skip
