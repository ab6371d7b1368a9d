"""Encoders (BERT, RoBERTa, DistilBERT, DeBERTa-v2/v3, ModernBERT) and encoder-decoders (T5, Whisper).

Encoders have masked-language and classification heads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from memfit.models.families.blocks import gated_mlp, plain_mlp, softmax_attention
from memfit.models.families.dialect import (
    Dialect,
    Head,
    Weights,
    blocks,
    conv,
    embedding,
    linear,
    no_rotary,
    norm,
    other,
    prefixed,
)
from memfit.models.families.fields import Fields
from memfit.nouns.architecture import Architecture, Attention, Layer, Mlp, Norm, Recording


@dataclass(frozen=True, kw_only=True)
class Heads:
    """The weights above the blocks of an encoder family for each task; calling it reads `architectures`."""

    masked: Callable[[Fields], Weights]  # the masked-language head without its tied output matrix
    pooler: str = ""  # pooler of the bare model
    dense: str = ""  # the D x D layer before the classifier; {stem} stands for the model's attribute
    classifier: str = "classifier"

    def __call__(self, f: Fields, d: Dialect) -> Head:
        width, kind = f.size("hidden_size"), f.head_class()
        pooler = linear(self.pooler, width, width, bias=True) if self.pooler else ()
        if kind == "model":  # nothing is trained on what the pooler returns
            return tuple(replace(w, fixed=True) for w in pooler), "encoder", False
        if kind == "token-classification":
            return linear("classifier", f.labels(), width, bias=True), "classification", False
        if kind == "classification":
            dense = linear(self.dense.format(stem=d.stem), width, width, bias=True)
            return dense + linear(self.classifier, f.labels(), width, bias=True), "classification", False
        if kind == "pretraining" and self.pooler:
            below = prefixed(d.stem, pooler)
            return below + self.masked(f) + linear("cls.seq_relationship", 2, width, bias=True), "masked-lm", True
        if not f.flag("tie_word_embeddings"):
            raise f.unsupported("a masked-language head that is not tied to the embedding is not modelled")
        return self.masked(f), "masked-lm", True


def _bert_masked(f: Fields) -> Weights:
    width = f.size("hidden_size")
    transform = linear("dense", width, width, bias=True) + norm("LayerNorm", width, bias=True)
    return other("cls.predictions.bias", f.size("vocab_size")) + prefixed("cls.predictions.transform", transform)


def _roberta_masked(f: Fields) -> Weights:
    width = f.size("hidden_size")
    dense = linear("dense", width, width, bias=True) + norm("layer_norm", width, bias=True)
    return prefixed("lm_head", other("bias", f.size("vocab_size")) + dense)


def _distilbert_masked(f: Fields) -> Weights:
    width = f.size("hidden_size")
    dense = linear("vocab_transform", width, width, bias=True) + norm("vocab_layer_norm", width, bias=True)
    return dense + other("vocab_projector.bias", f.size("vocab_size"))


def _deberta_masked(f: Fields) -> Weights:
    if not f.flag("legacy"):
        raise f.unsupported("the masked-language head with 'legacy': false is not modelled")
    return _bert_masked(f)


def _modernbert_head(f: Fields, d: Dialect) -> Head:
    width, kind = f.size("hidden_size"), f.head_class()
    if kind == "model":
        return (), "encoder", False
    head = linear("head.dense", width, width, f.flag("classifier_bias")) + norm("head.norm", width, d.norm_bias)
    if kind in ("classification", "token-classification"):
        return head + linear("classifier", f.labels(), width, bias=True), "classification", False
    if not f.flag("tie_word_embeddings"):
        raise f.unsupported("a masked-language head that is not tied to the embedding is not modelled")
    return head + (other("decoder.bias", f.size("vocab_size")) if f.flag("decoder_bias") else ()), "masked-lm", True


def both_ways(f: Fields, d: Dialect, index: int) -> tuple[Attention, Weights]:
    """Build softmax attention without a causal mask."""
    trait, weights = softmax_attention(f, d, index)
    return replace(trait, causal=False), weights


def _disentangled(f: Fields, d: Dialect, index: int) -> tuple[Attention, Weights]:
    """Build DeBERTa's attention between content and position; positions have projections unless these are shared."""
    trait, weights = both_ways(f, d, index)
    kinds = str(f.raw("pos_att_type") or "")
    if f.flag("relative_attention") and not f.flag("share_att_key"):
        width = f.size("hidden_size")
        for kind, name in (("c2p", "pos_key_proj"), ("p2c", "pos_query_proj")):
            own = linear(f"attention.self.{name}", trait.heads * trait.head_dim, width, bias=True)
            weights += own if kind in kinds else ()
    return trait, weights


def _frame(f: Fields, d: Dialect) -> tuple[Weights, Weights]:
    """Return word, position and segment embeddings with one norm, and no weights above the blocks."""
    width, segments = f.size("hidden_size"), f.size("type_vocab_size", 0, least=0)
    below = embedding("word_embeddings", f.size("vocab_size"), width)
    if f.flag("position_biased_input", True):
        below += embedding("position_embeddings", f.size("max_position_embeddings"), width)
    below += embedding("token_type_embeddings", segments, width) if segments else ()
    return prefixed("embeddings", below + norm("LayerNorm", width, bias=True)), ()


def _deberta_frame(f: Fields, d: Dialect) -> tuple[Weights, Weights]:
    """Return BERT's embeddings, and the table of relative positions, its norm and a convolution as final weights."""
    below, above = _frame(f, d)
    width, kernel = f.size("hidden_size"), f.size("conv_kernel_size", 0, least=0)
    if f.flag("relative_attention"):
        buckets, reach = f.size("position_buckets", -1, least=-1), f.size("max_relative_positions", -1, least=-1)
        reach = reach if reach > 0 else f.size("max_position_embeddings")
        above += embedding("rel_embeddings", 2 * (buckets if buckets > 0 else reach), width)
    if "layer_norm" in f.text("norm_rel_ebd", "none"):
        above += norm("LayerNorm", width, bias=True)
    if kernel:
        mixed = conv("conv", width, width // f.size("conv_groups", 1), kernel, bias=True)
        above += prefixed("conv", mixed + norm("LayerNorm", width, bias=True))
    return below, prefixed("encoder", above)


def _bert(f: Fields, d: Dialect) -> Dialect:
    if f.flag("add_cross_attention") or f.flag("is_decoder"):
        raise f.unsupported("an encoder used as a decoder is not modelled")
    return d


def _deberta(f: Fields, d: Dialect) -> Dialect:
    if f.size("embedding_size", f.size("hidden_size")) != f.size("hidden_size"):
        raise f.unsupported("embeddings narrower than the model are not modelled for DeBERTa")
    return replace(d, positions="position_embeddings" if f.flag("position_biased_input") else "")


def _local_window(f: Fields, index: int) -> int | None:
    """Return ModernBERT's window: two of three layers attend to `local_attention` tokens around them."""
    types = f.per_layer("layer_types", f.layers())
    local = types[index] == "sliding_attention" if types else index % f.size("global_attn_every_n_layers") != 0
    return f.size("local_attention") if local else None


def _modernbert(f: Fields, d: Dialect) -> Dialect:
    return replace(d, norm_bias=f.flag("norm_bias"))


def _modernbert_mlp(f: Fields, d: Dialect, index: int) -> tuple[Mlp, Weights]:
    trait, weights = gated_mlp(f, d, index)
    return replace(trait, dropout=f.number("mlp_dropout")), weights


def _modernbert_body(f: Fields, d: Dialect, index: int) -> tuple[str, ...]:
    """Return a block's order; the first has no norm before its attention, because the embedding ends in one."""
    return ("@attention", "mlp_norm", "@mlp") if index == 0 else ("attn_norm", "@attention", "mlp_norm", "@mlp")


_DEFAULTS: dict[str, object] = {
    "tie_word_embeddings": True, "hidden_act": "gelu", "hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1,
}  # fmt: skip
BERT = Dialect(
    attention=both_ways, mlp=plain_mlp, defaults=_DEFAULTS, variant=_bert, frame=_frame,
    heads=Heads(masked=_bert_masked, pooler="pooler.dense", dense="{stem}.pooler.dense"),
    stem="bert", layers="encoder.layer", positions="position_embeddings", final="",
    body=("@attention", "attention.output.LayerNorm", "@mlp", "output.LayerNorm"), placement="post",
    norm="layer", norm_bias=True, attention_module="attention", q="self.query", k="self.key", v="self.value",
    o="output.dense", qkv_bias=True, out_bias=True, rotary=no_rotary, mlp_module="", up="intermediate.dense",
    down="output.dense", mlp_bias=True, attention_dropout="attention_probs_dropout_prob",
    residual_dropout="hidden_dropout_prob", embedding_dropout="hidden_dropout_prob", upcast=False, logits_upcast=False,
)  # fmt: skip
ROBERTA = replace(
    BERT, stem="roberta", heads=Heads(
        masked=_roberta_masked, pooler="pooler.dense", dense="classifier.dense", classifier="classifier.out_proj",
    ),
)  # fmt: skip

ENCODERS: dict[str, Dialect] = {
    "bert": BERT,
    "roberta": ROBERTA,
    "xlm-roberta": ROBERTA,
    "camembert": ROBERTA,
    "distilbert": replace(
        BERT, aliases={"hidden_size": "dim", "num_attention_heads": "n_heads", "num_hidden_layers": "n_layers",
                       "intermediate_size": "hidden_dim"},
        defaults={"tie_word_embeddings": True, "activation": "gelu", "dropout": 0.1, "attention_dropout": 0.1},
        stem="distilbert", layers="transformer.layer", activation="activation",
        heads=Heads(masked=_distilbert_masked, dense="pre_classifier"),
        body=("@attention", "sa_layer_norm", "@mlp", "output_layer_norm"), q="q_lin", k="k_lin", v="v_lin", o="out_lin",
        mlp_module="ffn", up="lin1", down="lin2", attention_dropout="attention_dropout", residual_dropout="dropout",
        embedding_dropout="dropout",
    ),
    "deberta-v2": replace(
        BERT, attention=_disentangled, variant=_deberta, frame=_deberta_frame, stem="deberta", sdpa=False,
        aliases={"head_dim": "attention_head_size"},
        defaults={**_DEFAULTS, "type_vocab_size": 0, "relative_attention": False, "position_biased_input": True,
                  "legacy": True, "share_att_key": False},
        heads=Heads(masked=_deberta_masked, dense="pooler.dense"),
        q="self.query_proj", k="self.key_proj", v="self.value_proj",
        untrainable="DeBERTa's content-to-position and position-to-content scores are not modelled",
    ),
    "modernbert": Dialect(
        attention=both_ways, mlp=_modernbert_mlp, bodies=_modernbert_body, heads=_modernbert_head, variant=_modernbert,
        defaults={"tie_word_embeddings": True, "hidden_activation": "gelu", "attention_bias": False, "mlp_bias": False,
                  "decoder_bias": True, "classifier_bias": False, "global_attn_every_n_layers": 3,
                  "local_attention": 128},
        embed="embeddings.tok_embeddings", embed_norm="embeddings.norm", final="final_norm", norm="layer",
        attention_module="attn", qkv="Wqkv", o="Wo", attention_order=("qkv", "o"), qkv_bias="attention_bias",
        out_bias="attention_bias", window=_local_window, gate_up="Wi", down="Wo", mlp_bias="mlp_bias",
        activation="hidden_activation", embedding_dropout="embedding_dropout", rotary_how="half_fp32", rotary_tables=2,
    ),
}  # fmt: skip


_T5_KEYS = {
    "hidden_size": "d_model", "num_attention_heads": "num_heads", "num_hidden_layers": "num_layers",
    "head_dim": "d_kv", "intermediate_size": "d_ff",
}  # fmt: skip


def _t5_layer(f: Fields, first: bool, decodes: bool) -> Layer:
    """Build self-attention, in decoders attention over the encoder, and the feed-forward part, each after a norm."""
    width, heads, head, inner = (
        f.size(k) for k in ("hidden_size", "num_attention_heads", "head_dim", "intermediate_size")
    )
    projections = tuple(w for part in "qkv" for w in linear(part, heads * head, width))
    projections += linear("o", width, heads * head)
    bias = embedding("relative_attention_bias", f.size("relative_attention_num_buckets"), heads) if first else ()
    parts = [prefixed("SelfAttention", projections + bias)]
    parts += [prefixed("EncDecAttention", projections)] if decodes else []
    feed_forward = f.text("feed_forward_proj")  # 'relu' or 'gated-gelu'
    gated = feed_forward.partition("-")[0] == "gated"
    activation = "gelu_new" if feed_forward == "gated-gelu" else feed_forward.rpartition("-")[2]
    names = ("wi_0", "wi_1") if gated else ("wi",)
    mlp = tuple(w for part in names for w in linear(part, inner, width))
    mlp += tuple(replace(w, whole=True) for w in linear("wo", width, inner))
    parts.append(prefixed("DenseReluDense", mlp))
    trait = Attention(
        "softmax", heads, heads, head, head, causal=decodes, dropout=f.number("dropout_rate"), code="t5",
        position_bias=True,
    )  # fmt: skip
    weights = tuple(w for i, part in enumerate(parts) for w in prefixed(f"layer.{i}", part + norm("layer_norm", width)))
    return Layer(
        trait,
        Mlp("gated" if gated else "plain", inner, activation, dropout=f.number("dropout_rate")),
        Norm("rms_t5"), "pre", weights, dropout=f.number("dropout_rate"), norms=len(parts),
        cross=replace(trait, causal=False) if decodes else None,
    )  # fmt: skip


def t5(config: Mapping[str, object], name: str, feed_forward: str = "relu") -> Architecture:
    """Build T5 and mT5; transformers 5 ties the head to the embedding, whatever the config holds."""
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
        final_norm=Norm("rms_t5"), encoder_layers=depth, embedding_dropout=f.number("dropout_rate"),
        head_dropout=f.number("dropout_rate"), logits_upcast=False,
        states_scaled=config.get("model_type") != "mt5"
        and f.flag("scale_decoder_outputs", f.flag("tie_word_embeddings", True)),  # the former in what was saved again
    )  # fmt: skip


def _key_without_bias(f: Fields, d: Dialect, index: int) -> tuple[Attention, Weights]:
    trait, weights = softmax_attention(f, d, index)
    return replace(trait, causal=d.layers == "decoder"), tuple(w for w in weights if not w.name.endswith("k_proj.bias"))


def _cross_attention(f: Fields, d: Dialect, index: int) -> Weights:
    """Return the decoder's second attention, which has the shapes of its first."""
    _, weights = _key_without_bias(f, replace(d, attention_module="encoder_attn"), index)
    return weights + norm("encoder_attn_layer_norm", f.size("hidden_size"), bias=True)


_WHISPER = Dialect(
    attention=_key_without_bias, mlp=plain_mlp, norm="layer", norm_bias=True, rotary=no_rotary,
    attention_order=("k", "v", "q", "o"), o="out_proj", qkv_bias=True, out_bias=True, mlp_module="", up="fc1",
    down="fc2", mlp_bias=True, activation="activation_function", residual_dropout="dropout",
    code="whisper",
    body=("@attention", "self_attn_layer_norm", "@extras", "@mlp", "final_layer_norm"),
)  # fmt: skip


def whisper(config: Mapping[str, object], name: str) -> Architecture:
    """Build Whisper: two convolutions and an encoder for audio, and a decoder for text with a tied head."""
    layers: tuple[Layer, ...] = ()
    names: tuple[str, ...] = ()
    f = Fields(config, name, {"hidden_size": "d_model"}, {"tie_word_embeddings": True})
    for part in ("encoder", "decoder"):
        keys = {"hidden_size": "d_model", "num_hidden_layers": f"{part}_layers", "intermediate_size": f"{part}_ffn_dim",
                "num_attention_heads": f"{part}_attention_heads"}  # fmt: skip
        g = Fields({k: v for k, v in config.items() if k not in keys}, name, keys, {"activation_function": "gelu"})
        made = blocks(g, replace(_WHISPER, layers=part, extras=_cross_attention if part == "decoder" else None))
        layer = made[0]
        cross = replace(layer.attention, causal=False) if part == "decoder" else None
        mlp = replace(layer.mlp, dropout=f.number("activation_dropout"))
        layers += (replace(layer, mlp=mlp, cross=cross),) * len(made)
        names += tuple(f"model.{part}.layers.{i}" for i in range(len(made)))
    width, mels, positions, longest = (
        f.size(key) for key in ("hidden_size", "num_mel_bins", "max_source_positions", "max_target_positions")
    )
    text = embedding("embed_tokens", f.size("vocab_size"), width) + embedding("embed_positions", longest, width)
    sound = conv("conv1", width, mels, 3, bias=True) + conv("conv2", width, width, 3, bias=True)
    sound += tuple(replace(w, fixed=True) for w in embedding("embed_positions", positions, width))
    final = norm("model.encoder.layer_norm", width, True) + norm("model.decoder.layer_norm", width, True)
    if f.head_class() != "lm" or not f.flag("tie_word_embeddings"):
        raise f.unsupported("only WhisperForConditionalGeneration with a tied head is modelled")
    return Architecture(
        name=name, model_type="whisper", family="whisper", task="seq2seq-lm", width=width, layers=layers,
        vocabulary=f.size("vocab_size"), embedding=prefixed("model.encoder", sound) + prefixed("model.decoder", text),
        final=final, head=(), tied=True, layer_names=names, learned_positions=True, final_norm=Norm("layer"),
        max_positions=positions, encoder_layers=f.size("encoder_layers"), logits_upcast=False,
        embedding_dropout=f.number("dropout"), recording=Recording(mels, 2 * positions, 2, longest),
    )  # fmt: skip
