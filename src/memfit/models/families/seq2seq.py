"""Encoder-decoder models: T5 and Whisper. Their weights are known; their training memory is not modelled."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from memfit.models.families.blocks import plain_mlp, softmax_attention
from memfit.models.families.decoder import blocks
from memfit.models.families.dialect import Dialect, no_rotary
from memfit.models.families.fields import Fields
from memfit.models.families.parts import Weights, conv, embedding, linear, norm, prefixed
from memfit.nouns.architecture import Architecture, Attention, Layer, Mlp, Norm

UNMODELLED = "training memory of encoder-decoder models is not modelled"

_T5_KEYS = {
    "hidden_size": "d_model", "num_attention_heads": "num_heads", "num_hidden_layers": "num_layers",
    "head_dim": "d_kv", "intermediate_size": "d_ff",
}  # fmt: skip


def _t5_layer(f: Fields, first: bool, decodes: bool) -> Layer:
    """Self-attention, in decoders attention over the encoder, and the feed-forward part, each behind a norm."""
    width, heads, head, inner = (
        f.size(k) for k in ("hidden_size", "num_attention_heads", "head_dim", "intermediate_size")
    )
    shapes = {
        "q": (heads * head, width),
        "k": (heads * head, width),
        "v": (heads * head, width),
        "o": (width, heads * head),
    }
    projections = tuple(w for part, shape in shapes.items() for w in linear(part, *shape))
    bias = embedding("relative_attention_bias", f.size("relative_attention_num_buckets"), heads) if first else ()
    parts = [prefixed("SelfAttention", projections + bias)]
    parts += [prefixed("EncDecAttention", projections)] if decodes else []
    gated, activation = _t5_activation(f)
    names = ("wi_0", "wi_1") if gated else ("wi",)
    mlp = tuple(w for part in names for w in linear(part, inner, width)) + linear("wo", width, inner)
    parts.append(prefixed("DenseReluDense", mlp))
    weights = tuple(w for i, part in enumerate(parts) for w in prefixed(f"layer.{i}", part + norm("layer_norm", width)))
    return Layer(
        Attention("softmax", heads, heads, head, head, causal=decodes, dropout=f.number("dropout_rate")),
        Mlp("gated" if gated else "plain", inner, activation, dropout=f.number("dropout_rate")),
        Norm("rms"), "pre", weights, dropout=f.number("dropout_rate"), norms=len(parts),
    )  # fmt: skip


def _t5_activation(f: Fields) -> tuple[bool, str]:
    """'relu' or 'gated-gelu' -> (gated, activation)."""
    words = f.text("feed_forward_proj").split("-")
    return words[0] == "gated", "gelu_new" if f.text("feed_forward_proj") == "gated-gelu" else words[-1]


def t5(config: Mapping[str, object], name: str, feed_forward: str = "relu") -> Architecture:
    """T5 and mT5; transformers 5 ties the head to the embedding whatever the file says."""
    defaults = {"relative_attention_num_buckets": 32, "feed_forward_proj": feed_forward, "dropout_rate": 0.1}
    f = Fields(config, name, _T5_KEYS, defaults)
    if f.head_class() != "lm":
        raise f.unsupported("only the ForConditionalGeneration class is modelled")
    width, depth = f.size("hidden_size"), f.layers()
    counts = {"encoder": depth, "decoder": f.size("num_decoder_layers", depth, most=4096)}
    layers, names = [], []
    for part, count in counts.items():
        first, rest = (_t5_layer(f, first, part == "decoder") for first in (True, False))
        layers += [first, *[rest] * (count - 1)]
        names += [f"{part}.block.{i}" for i in range(count)]
    return Architecture(
        name=name, model_type=f.text("model_type", "t5"), family="t5", task="seq2seq-lm", width=width,
        vocabulary=f.size("vocab_size"), layers=tuple(layers), layer_names=tuple(names),
        embedding=embedding("shared", f.size("vocab_size"), width),
        final=norm("encoder.final_layer_norm", width) + norm("decoder.final_layer_norm", width), head=(), tied=True,
        final_norm=Norm("rms"), trainable_memory=UNMODELLED,
    )  # fmt: skip


def _key_without_bias(f: Fields, d: Dialect, index: int) -> tuple[Attention, Weights]:
    trait, weights = softmax_attention(f, d, index)
    return replace(trait, causal=d.layers == "decoder"), tuple(w for w in weights if not w.name.endswith("k_proj.bias"))


def _cross_attention(f: Fields, d: Dialect, index: int) -> Weights:
    """The decoder's second attention has the shapes of its first."""
    _, weights = _key_without_bias(f, replace(d, attention_module="encoder_attn"), index)
    return weights + norm("encoder_attn_layer_norm", f.size("hidden_size"), bias=True)


_WHISPER = Dialect(
    attention=_key_without_bias, mlp=plain_mlp, norm="layer", norm_bias=True, rotary=no_rotary,
    attention_order=("k", "v", "q", "o"), o="out_proj", qkv_bias=True, out_bias=True, mlp_module="", up="fc1",
    down="fc2", mlp_bias=True, activation="activation_function", residual_dropout="dropout",
    body=("@attention", "self_attn_layer_norm", "@extras", "@mlp", "final_layer_norm"),
)  # fmt: skip


def whisper(config: Mapping[str, object], name: str) -> Architecture:
    """Whisper: two convolutions and an encoder over sound, a decoder over text with a tied head."""
    layers: tuple[Layer, ...] = ()
    names: tuple[str, ...] = ()
    f = Fields(config, name, {"hidden_size": "d_model"}, {"tie_word_embeddings": True})
    for part in ("encoder", "decoder"):
        keys = {"hidden_size": "d_model", "num_hidden_layers": f"{part}_layers", "intermediate_size": f"{part}_ffn_dim",
                "num_attention_heads": f"{part}_attention_heads"}  # fmt: skip
        g = Fields({k: v for k, v in config.items() if k not in keys}, name, keys, {"activation_function": "gelu"})
        extras = _cross_attention if part == "decoder" else None
        made = blocks(g, replace(_WHISPER, layers=part, extras=extras))
        layers, names = layers + made, names + tuple(f"model.{part}.layers.{i}" for i in range(len(made)))
    width, mels = f.size("hidden_size"), f.size("num_mel_bins")
    sound = conv("conv1", width, mels, 3, bias=True) + conv("conv2", width, width, 3, bias=True)
    sound += embedding("embed_positions", f.size("max_source_positions"), width)
    text = embedding("embed_tokens", f.size("vocab_size"), width)
    text += embedding("embed_positions", f.size("max_target_positions"), width)
    final = norm("model.encoder.layer_norm", width, True) + norm("model.decoder.layer_norm", width, True)
    if f.head_class() != "lm" or not f.flag("tie_word_embeddings"):
        raise f.unsupported("only WhisperForConditionalGeneration with a tied head is modelled")
    return Architecture(
        name=name, model_type="whisper", family="whisper", task="seq2seq-lm", width=width, layers=layers,
        vocabulary=f.size("vocab_size"), embedding=prefixed("model.encoder", sound) + prefixed("model.decoder", text),
        final=final, head=(), tied=True, layer_names=names, learned_positions=True, final_norm=Norm("layer"),
        max_positions=f.size("max_target_positions"), trainable_memory=UNMODELLED,
    )  # fmt: skip
