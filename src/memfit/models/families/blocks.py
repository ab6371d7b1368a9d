"""The common attention and feed-forward parts of decoder blocks; each function returns (trait, weights)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from memfit.models.families.dialect import (
    Dialect,
    Flag,
    MlpMaker,
    Weights,
    experts,
    flag,
    head_dim,
    linear,
    norm,
    other,
    prefixed,
)
from memfit.models.families.fields import Fields
from memfit.nouns.architecture import Attention, Mlp, Weight


def softmax_attention(f: Fields, d: Dialect, index: int) -> tuple[Attention, Weights]:
    """Build query, key, value and output projections, separate or fused, with their norms."""
    width, heads, head = f.size("hidden_size"), f.size("num_attention_heads"), head_dim(f)
    kv_heads = d.kv_heads(f)
    bias, out_bias, t = flag(f, d.qkv_bias), flag(f, d.out_bias), d.transposed
    qk_norm = d.qk_norm if not d.qk_norm_if or f.flag(d.qk_norm_if) else "none"
    if heads % kv_heads:
        raise f.unsupported(f"{heads} query heads cannot share {kv_heads} key/value heads")
    trait = Attention(
        "softmax", heads, kv_heads, head, head,
        rotary_dim=d.rotary(f, index), rotary=d.rotary_how, upcast=d.upcast, code=d.code,
        qk_norm=qk_norm, fused_qkv=bool(d.qkv), bias=bias, out_bias=out_bias,
        window=d.window(f, index), softcap=bool(f.raw("attn_logit_softcapping")), sdpa=d.sdpa,
        sinks=d.sinks, alibi=flag(f, d.alibi), dropout=f.number(d.attention_dropout), returns_weights=d.returns_weights,
    )  # fmt: skip
    made = {
        "q": linear(d.q, heads * head, width, bias, t),
        "k": linear(d.k, kv_heads * head, width, bias, t),
        "v": linear(d.v, kv_heads * head, width, bias, t),
        "qkv": linear(d.qkv, (heads + 2 * kv_heads) * head, width, bias, t),
        "o": linear(d.o, width, heads * head, out_bias, t),
        "norms": (),
    }
    if qk_norm != "none" and d.qk_norm_weights:
        made["norms"] = _norm_of_heads(d, d.q_norm, heads, head) + _norm_of_heads(d, d.k_norm, kv_heads, head)
    weights = tuple(w for part in (*d.attention_order, "norms") for w in made[part])
    return trait, prefixed(d.attention_module, (other("sinks", heads) if d.sinks else ()) + weights)


def _norm_of_heads(d: Dialect, name: str, heads: int, head: int) -> Weights:
    if d.qk_norm_by_head:
        return (Weight(f"{name}.weight", (heads, head), "norm"),)
    return norm(name, head if d.qk_norm == "head" else heads * head)


def gated_weights(d: Dialect, width: int, inner: int, bias: bool = False) -> Weights:
    """Return the weights of down(act(gate(x)) * up(x)), gate and up separate or fused."""
    if d.gate_up:
        entry = linear(d.gate_up, 2 * inner, width, bias)
    else:
        entry = linear(d.gate, inner, width, bias) + linear(d.up, inner, width, bias)
    return entry + linear(d.down, width, inner, bias)


def gated_mlp(f: Fields, d: Dialect, index: int, key: str = "intermediate_size") -> tuple[Mlp, Weights]:
    """Build the dense gated feed-forward part, whose width is the config's `key`."""
    width, inner, bias = f.size("hidden_size"), f.size(key), flag(f, d.mlp_bias)
    trait = Mlp("gated", inner, d.activation_of(f), fused_gate_up=bool(d.gate_up), bias=bias)
    return trait, prefixed(d.mlp_module, gated_weights(d, width, inner, bias))


def plain_mlp(f: Fields, d: Dialect, index: int) -> tuple[Mlp, Weights]:
    """Build down(act(up(x))), `mlp_ratio` times as wide as the model if the config leaves the width out."""
    width, bias = f.size("hidden_size"), flag(f, d.mlp_bias)
    inner = f.size("intermediate_size", d.mlp_ratio * width) if d.mlp_ratio else f.size("intermediate_size")
    weights = linear(d.up, inner, width, bias, d.transposed) + linear(d.down, width, inner, bias, d.transposed)
    return Mlp("plain", inner, d.activation_of(f), bias=bias), prefixed(d.mlp_module, weights)


def xielu_mlp(f: Fields, d: Dialect, index: int) -> tuple[Mlp, Weights]:
    """Build Apertus' feed-forward part, whose activation has two parameters."""
    trait, weights = plain_mlp(f, d, index)
    learned = f.text(d.activation) == "xielu"
    numbers = other("act_fn.alpha_p", 1) + other("act_fn.alpha_n", 1) if learned else ()
    return trait, weights + prefixed(d.mlp_module, numbers)


def from_first_dense(f: Fields, index: int) -> bool:
    """Return whether a layer of DeepSeek is sparse, by `mlp_layer_types` or from `first_k_dense_replace` on."""
    types = f.per_layer("mlp_layer_types", f.layers())
    return types[index] == "sparse" if types else index >= f.size("first_k_dense_replace", least=0)


def every_layer(f: Fields, index: int) -> bool:
    return True


def by_sparse_step(f: Fields, index: int) -> bool:
    """Return whether a layer of Qwen is sparse: every `decoder_sparse_step`-th is, except `mlp_only_layers`."""
    dense = f.items("mlp_only_layers", int) or ()
    return index not in dense and (index + 1) % f.size("decoder_sparse_step") == 0


def no_shared(f: Fields) -> int:
    return 0


def shared_experts(f: Fields) -> int:
    """Return the joint width of the experts of DeepSeek that process every token."""
    return f.size("moe_intermediate_size") * f.size("n_shared_experts", 0, least=0)


def shared_expert(f: Fields) -> int:
    """Return the width of the one expert of Qwen that processes every token."""
    return f.size("shared_expert_intermediate_size", least=0)


@dataclass(frozen=True, kw_only=True)
class Moe:
    """A family's layout of experts; calling it builds the feed-forward part of one layer."""

    count: str = "num_experts"  # config keys
    per_token: str = "num_experts_per_tok"
    inner: str = "moe_intermediate_size"
    sparse: Callable[[Fields, int], bool] = every_layer
    dense: MlpMaker = gated_mlp  # for layers that are not sparse
    order: tuple[str, ...] = ("experts", "router", "shared")
    router: str = "gate"
    routing: str = "softmax"  # Mlp.router
    router_bias: bool = False
    shared: str = "shared_experts"
    shared_width: Callable[[Fields], int] = no_shared
    bias: Flag = False
    transposed: bool = False
    every_token: bool = False

    def __call__(self, f: Fields, d: Dialect, index: int) -> tuple[Mlp, Weights]:
        if not self.sparse(f, index):
            return self.dense(f, d, index)
        width, count, inner = f.size("hidden_size"), f.size(self.count), f.size(self.inner)
        shared, bias = self.shared_width(f), flag(f, self.bias)
        trait = Mlp(
            "moe", inner, d.activation_of(f), bias=bias, experts=count, shared_width=shared,
            experts_per_token=f.size(self.per_token, most=count), every_token=self.every_token,
            router=self.routing,
        )  # fmt: skip
        made = {
            "experts": experts("experts", count, width, inner, bias, self.transposed),
            "router": other(f"{self.router}.weight", count, width)
            + (other(f"{self.router}.bias", count) if self.router_bias else ()),
            "shared": prefixed(self.shared, gated_weights(d, width, shared)) if shared else (),
            "shared_gate": linear("shared_expert_gate", 1, width) if shared else (),
        }
        return trait, prefixed(d.mlp_module, tuple(w for part in self.order for w in made[part]))
