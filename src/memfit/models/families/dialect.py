"""Describe and build a decoder family.

The makers of weights come first, with the names and shapes of PyTorch's modules; then `Dialect`, one row per family
with its config keys and its differences from Llama; then `decoder`, which builds an Architecture from config and row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from memfit.models.families.fields import Fields
from memfit.nouns.architecture import Architecture, Attention, Layer, Mlp, Norm, Weight

Weights = tuple[Weight, ...]


def linear(name: str, width_out: int, width_in: int, bias: bool = False, transposed: bool = False) -> Weights:
    """Make an nn.Linear (out, in); `transposed` makes the Conv1D of GPT-2, which stores (in, out)."""
    shape = (width_in, width_out) if transposed else (width_out, width_in)
    weight = Weight(f"{name}.weight", shape, "linear")
    return (weight, Weight(f"{name}.bias", (width_out,), "bias")) if bias else (weight,)


def norm(name: str, width: int, bias: bool = False) -> Weights:
    """Make a norm's scale and, with `bias`, its shift."""
    weight = Weight(f"{name}.weight", (width,), "norm")
    return (weight, Weight(f"{name}.bias", (width,), "norm")) if bias else (weight,)


def embedding(name: str, rows: int, width: int) -> Weights:
    return (Weight(f"{name}.weight", (rows, width), "embedding"),)


def conv(name: str, *shape: int, bias: bool = False) -> Weights:
    """Make a convolution (out, in / groups, *kernel)."""
    weight = Weight(f"{name}.weight", shape, "conv")
    return (weight, Weight(f"{name}.bias", shape[:1], "bias")) if bias else (weight,)


def other(name: str, *shape: int) -> Weights:
    return (Weight(name, shape, "other"),)


def experts(name: str, count: int, width: int, inner: int, bias: bool = False, transposed: bool = False) -> Weights:
    """Make fused experts: gate_up (E, 2F, D) and down (E, D, F); `transposed` swaps the last two axes."""
    up, down = (count, 2 * inner, width), (count, width, inner)
    weights = []
    for part, (e, width_out, width_in) in (("gate_up_proj", up), ("down_proj", down)):
        shape = (e, width_in, width_out) if transposed else (e, width_out, width_in)
        weights.append(Weight(f"{name}.{part}", shape, "experts"))
        if bias:
            weights.append(Weight(f"{name}.{part}_bias", (e, width_out), "experts"))
    return tuple(weights)


def prefixed(prefix: str, weights: Weights) -> Weights:
    """Put weights below a module name; '' leaves them as they are."""
    if not prefix:
        return weights
    return tuple(replace(w, name=f"{prefix}.{w.name}") for w in weights)


Placement = Literal["pre", "post", "sandwich", "parallel", "post_inner"]
Task = Literal["causal-lm", "masked-lm", "classification", "encoder", "multimodal"]
NormKind = Literal["rms", "rms_gemma", "layer", "layer_fp32", "layer_bare"]
QkNorm = Literal["none", "head", "full"]
Flag = bool | str  # a value fixed by the modeling code, or the config key that holds it
Head = tuple[Weights, Task, bool]  # weights above the blocks, the task, whether the output matrix is the embedding
AttentionMaker = Callable[[Fields, "Dialect", int], tuple[Attention, Weights]]
MlpMaker = Callable[[Fields, "Dialect", int], tuple[Mlp, Weights]]


def head_dim(f: Fields) -> int:
    """Return H from the config, or the width divided by the query heads."""
    return f.size("head_dim", f.size("hidden_size") // f.size("num_attention_heads"))


def flag(f: Fields, value: Flag) -> bool:
    return f.flag(value) if isinstance(value, str) else value


def no_window(f: Fields, index: int) -> int | None:
    return None


def rotary(f: Fields, index: int) -> int:
    """Return the rotated width of each head: H times `partial_rotary_factor`, in rope_parameters or beside it."""
    parameters = f.raw("rope_parameters")
    inner = parameters.get("partial_rotary_factor") if isinstance(parameters, Mapping) else None
    share = inner if isinstance(inner, int | float) else f.number("partial_rotary_factor", 1.0)
    return int(head_dim(f) * share)


def kv_heads(f: Fields) -> int:
    """Return K from the config, or one key head for each query head."""
    return f.size("num_key_value_heads", f.size("num_attention_heads"))


def no_rotary(f: Fields, index: int) -> int:
    return 0


@dataclass(frozen=True, kw_only=True)
class Dialect:
    """One row of the decoder table. Defaults are Llama's; module names are those of transformers."""

    attention: AttentionMaker
    mlp: MlpMaker
    aliases: Mapping[str, str] = field(default_factory=dict)  # canonical key -> key in the published config
    defaults: Mapping[str, object] = field(default_factory=dict)  # of the config class, for keys that files may omit
    variant: Callable[[Fields, Dialect], Dialect] | None = None  # adapts the row to one config
    frame: Callable[[Fields, Dialect], tuple[Weights, Weights]] | None = None  # embedding and final weights
    heads: Callable[[Fields, Dialect], Head] | None = None
    extras: Callable[[Fields, Dialect, int], Weights] | None = None  # weights of a block beside the two parts
    untrainable: str = ""  # why training memory is not modelled

    stem: str = "model"
    layers: str = "layers"
    embed: str = "embed_tokens"
    embed_norm: str = ""
    positions: str = ""  # learned position embedding
    position_offset: int = 0
    final: str = "norm"
    head: str = "lm_head"
    head_bias: Flag = False

    # order of the block's modules: @attention, @mlp, @extras, and the names of its norms
    body: tuple[str, ...] = ("@attention", "@mlp", "input_layernorm", "post_attention_layernorm")
    bodies: Callable[[Fields, Dialect, int], tuple[str, ...]] | None = None  # where blocks differ in their norms
    placement: Placement = "pre"
    norm: NormKind = "rms"
    norm_bias: bool = False
    norm_weights: bool = True  # False: the norms of blocks and the final norm have no weights

    attention_module: str = "self_attn"
    q: str = "q_proj"
    k: str = "k_proj"
    v: str = "v_proj"
    o: str = "o_proj"
    qkv: str = ""  # name of the fused projection, if there is one
    kv_heads: Callable[[Fields], int] = kv_heads
    attention_order: tuple[str, ...] = ("q", "k", "v", "o")
    qkv_bias: Flag = False
    out_bias: Flag = False
    qk_norm: QkNorm = "none"
    q_norm: str = "q_norm"
    k_norm: str = "k_norm"
    qk_norm_if: str = ""  # config key that turns the norms on
    qk_norm_weights: bool = True  # False: the norms have no scale
    qk_norm_by_head: bool = False  # True: each head has its own scale
    sinks: bool = False
    alibi: Flag = False
    upcast: bool = True  # see Attention
    returns_weights: bool = False  # see Attention
    code: str = ""  # see Attention
    rotary_how: str = "half"  # Attention.rotary
    rotary_tables: int = 1  # see Architecture
    logits_upcast: bool = True
    buffers: Callable[[Fields], tuple[int, ...]] = lambda f: ()  # Architecture.buffers
    sdpa: bool = True
    packed_masks: bool = True  # see Architecture
    stored_stacked: bool = False  # see Architecture
    transposed: bool = False  # Conv1D of GPT-2
    rotary: Callable[[Fields, int], int] = rotary
    window: Callable[[Fields, int], int | None] = no_window

    mlp_module: str = "mlp"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    gate_up: str = ""  # name of the fused projection, if there is one
    mlp_bias: Flag = False
    mlp_ratio: int = 0  # F / D if the config may leave F out
    activation: str = "hidden_act"  # config key, or "=name" if the code fixes it

    attention_dropout: str = "attention_dropout"  # config keys; absent and without a default: 0
    residual_dropout: str = ""
    embedding_dropout: str = ""
    embedding_scale: Literal["none", "module", "model"] = "none"

    def activation_of(self, f: Fields) -> str:
        return self.activation[1:] if self.activation.startswith("=") else f.text(self.activation)

    def residual_dropout_of(self, f: Fields) -> float:
        return f.number(self.residual_dropout) if self.residual_dropout else 0.0


def decoder(config: Mapping[str, object], name: str, d: Dialect) -> Architecture:
    """Build a decoder-only language model, with the head its `architectures` entry names."""
    f = Fields(config, name, d.aliases, d.defaults)
    d = d.variant(f, d) if d.variant else d
    width, vocabulary, layers = f.size("hidden_size"), f.size("vocab_size"), blocks(f, d)
    head, task, tied = (d.heads or head_of)(f, d)
    # in a bare model class nothing wraps the layers: "layers.0", not "model.layers.0"
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
        packed_masks=d.packed_masks,
        stored_stacked=d.stored_stacked,
    )


def blocks(f: Fields, d: Dialect) -> tuple[Layer, ...]:
    """Build every block of the model; equal ones are one object."""
    first: dict[Layer, Layer] = {}
    return tuple(first.setdefault(layer, layer) for layer in (block(f, d, i) for i in range(f.layers())))


def block(f: Fields, d: Dialect, index: int) -> Layer:
    """Build one block, its weights in the order in which the module defines them."""
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
    """Return the weights above the final norm, the task, and whether the head is tied to the embedding."""
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
    """Return the weights below and above the blocks: embeddings, and the final norm."""
    width = f.size("hidden_size")
    below = embedding(d.embed, f.size("vocab_size"), width)
    if d.positions:
        below += embedding(d.positions, f.size("max_position_embeddings") + d.position_offset, width)
    if d.embed_norm:
        below += norm(d.embed_norm, width, d.norm_bias)
    return below, norm_of(d, d.final, width)
