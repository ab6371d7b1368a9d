"""The builder of decoder-only models: a config read through a Dialect becomes an Architecture."""

from __future__ import annotations

from collections.abc import Mapping

from memfit.models.families.dialect import Dialect, Head, flag
from memfit.models.families.fields import Fields
from memfit.models.families.parts import Weights, embedding, linear, norm, prefixed
from memfit.nouns.architecture import Architecture, Layer, Norm


def decoder(config: Mapping[str, object], name: str, d: Dialect) -> Architecture:
    """A decoder-only language model, with the head its `architectures` entry names."""
    f = Fields(config, name, d.aliases, d.defaults)
    d = d.variant(f, d) if d.variant else d
    width, vocabulary, layers = f.size("hidden_size"), f.size("vocab_size"), blocks(f, d)
    head, task, tied = (d.heads or head_of)(f, d)
    # a bare model class has no attribute of its own around it: "layers.0", not "model.layers.0"
    stem = d.stem if task != "encoder" else d.stem.partition(".")[2]
    below, above = (d.frame or frame)(f, d)
    return Architecture(
        name=name,
        model_type=f.text("model_type", ""),
        family=f.text("model_type", ""),
        task=task,
        width=width,
        vocabulary=vocabulary,
        layers=layers,
        embedding=prefixed(stem, below),
        final=prefixed(stem, above),
        head=head,
        tied=tied,
        embedding_scale=d.embedding_scale,
        logits_softcap=bool(f.raw("final_logit_softcapping")),
        learned_positions=bool(d.positions),
        max_positions=f.size("max_position_embeddings", 0, least=0),
        final_norm=Norm(d.norm) if d.final else None,
        trainable_memory=d.untrainable,
        layer_names=tuple(f"{stem}.{d.layers}.{i}".removeprefix(".") for i in range(len(layers))),
        embedding_dropout=f.number(d.embedding_dropout) if d.embedding_dropout else 0.0,
        logits_upcast=d.logits_upcast,
        rotary_tables=d.rotary_tables,
        buffers=d.buffers(f),
    )


def blocks(f: Fields, d: Dialect) -> tuple[Layer, ...]:
    """Every block of the model; equal ones are one object."""
    seen: dict[Layer, Layer] = {}
    made = (block(f, d, i) for i in range(f.layers()))
    return tuple(seen.setdefault(layer, layer) for layer in made)


def block(f: Fields, d: Dialect, index: int) -> Layer:
    """One block, its weights in the order in which the module defines them."""
    width = f.size("hidden_size")
    attention, attention_weights = d.attention(f, d, index)
    mlp, mlp_weights = d.mlp(f, d, index)
    extras = d.extras(f, d, index) if d.extras else ()
    parts = {"@attention": attention_weights, "@mlp": mlp_weights, "@extras": extras}
    body = d.bodies(f, d, index) if d.bodies else d.body
    made = (parts[part] if part in parts else norm_of(d, part, width) for part in body)
    weights = tuple(w for part in made for w in part)
    own_norms = sum(w.kind == "norm" and w.name.count(".") == 1 for w in extras)
    norms = sum(part not in parts for part in body) + own_norms
    return Layer(attention, mlp, Norm(d.norm), d.placement, weights, dropout=d.residual_dropout_of(f), norms=norms)


def norm_of(d: Dialect, name: str, width: int) -> Weights:
    return norm(name, width, d.norm_bias) if name and d.norm_weights else ()


def head_of(f: Fields, d: Dialect) -> Head:
    """The weights above the final norm, the task, and whether the head is the embedding."""
    width, vocabulary = f.size("hidden_size"), f.size("vocab_size")
    kind = f.head_class()
    if kind == "model":
        return (), "encoder", False
    if kind == "classification":
        return linear("score", f.labels(), width), "classification", False
    if kind != "lm":
        raise f.unsupported(f"a {kind} head on a decoder is not modelled")
    weights = linear(d.head, vocabulary, width, flag(f, d.head_bias))
    if f.flag("tie_word_embeddings"):
        return weights[1:], "causal-lm", True
    return weights, "causal-lm", False


def frame(f: Fields, d: Dialect) -> tuple[Weights, Weights]:
    """What stands below and above the blocks: embeddings, and the final norm."""
    width = f.size("hidden_size")
    below = embedding(d.embed, f.size("vocab_size"), width)
    if d.positions:
        below += embedding(d.positions, f.size("max_position_embeddings") + d.position_offset, width)
    if d.embed_norm:
        below += norm(d.embed_norm, width, d.norm_bias)
    return below, norm_of(d, d.final, width)
