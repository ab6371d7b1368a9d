"""The Dialect noun: where a decoder family's config keeps each dimension and how its blocks differ from Llama's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from memfit.models.families.fields import Fields
from memfit.models.families.parts import Weights
from memfit.nouns.architecture import Attention, Mlp

Placement = Literal["pre", "post", "sandwich", "parallel", "post_inner"]
Task = Literal["causal-lm", "masked-lm", "classification", "encoder", "multimodal"]
NormKind = Literal["rms", "rms_gemma", "layer", "layer_fp32", "layer_bare"]
QkNorm = Literal["none", "head", "full"]
Flag = bool | str  # a fact of the modeling code, or the config key that decides it
Head = tuple[Weights, Task, bool]  # weights above the blocks, the task, whether the output matrix is the embedding
AttentionMaker = Callable[[Fields, "Dialect", int], tuple[Attention, Weights]]
MlpMaker = Callable[[Fields, "Dialect", int], tuple[Mlp, Weights]]


def head_dim(f: Fields) -> int:
    """H: written in the config, or the width shared out over the query heads."""
    return f.size("head_dim", f.size("hidden_size") // f.size("num_attention_heads"))


def flag(f: Fields, value: Flag) -> bool:
    return f.flag(value) if isinstance(value, str) else value


def no_window(f: Fields, index: int) -> int | None:
    return None


def rotary(f: Fields, index: int) -> int:
    """The rotated part of each head: `partial_rotary_factor`, in rope_parameters or beside it, of H."""
    parameters = f.raw("rope_parameters")
    inner = parameters.get("partial_rotary_factor") if isinstance(parameters, Mapping) else None
    share = inner if isinstance(inner, int | float) else f.number("partial_rotary_factor", 1.0)
    return int(head_dim(f) * share)


def kv_heads(f: Fields) -> int:
    """K: written in the config, or one for each query head."""
    return f.size("num_key_value_heads", f.size("num_attention_heads"))


def no_rotary(f: Fields, index: int) -> int:
    return 0


@dataclass(frozen=True, kw_only=True)
class Dialect:
    """One row of the decoder table. Defaults are Llama's; module names are those of transformers' modeling code."""

    attention: AttentionMaker
    mlp: MlpMaker
    aliases: Mapping[str, str] = field(default_factory=dict)  # canonical key -> key in the published config
    defaults: Mapping[str, object] = field(default_factory=dict)  # of the config class, for keys files may omit
    variant: Callable[[Fields, Dialect], Dialect] | None = None  # the row that this very config needs
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
    norm_weights: bool = True  # False: the norms of blocks and of the end hold nothing

    attention_module: str = "self_attn"
    q: str = "q_proj"
    k: str = "k_proj"
    v: str = "v_proj"
    o: str = "o_proj"
    qkv: str = ""  # name of the fused projection, when there is one
    kv_heads: Callable[[Fields], int] = kv_heads
    attention_order: tuple[str, ...] = ("q", "k", "v", "o")
    qkv_bias: Flag = False
    out_bias: Flag = False
    qk_norm: QkNorm = "none"
    q_norm: str = "q_norm"
    k_norm: str = "k_norm"
    qk_norm_if: str = ""  # config key that turns the norms on
    qk_norm_weights: bool = True  # False: the norms have no scale
    qk_norm_by_head: bool = False  # True: each head has a scale of its own
    sinks: bool = False
    alibi: Flag = False
    upcast: bool = True  # see Attention
    code: str = ""  # see Attention
    rotary_how: str = "half"  # Attention.rotary
    rotary_tables: int = 1  # see Architecture
    logits_upcast: bool = True
    buffers: Callable[[Fields], tuple[int, ...]] = lambda f: ()  # Architecture.buffers
    sdpa: bool = True
    transposed: bool = False  # Conv1D of GPT-2
    rotary: Callable[[Fields, int], int] = rotary
    window: Callable[[Fields, int], int | None] = no_window

    mlp_module: str = "mlp"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    gate_up: str = ""  # name of the fused projection, when there is one
    mlp_bias: Flag = False
    mlp_ratio: int = 0  # F / D where the config may leave the width out
    activation: str = "hidden_act"  # config key, or "=name" when the code fixes it

    attention_dropout: str = "attention_dropout"  # config keys; absent and without a default: 0
    residual_dropout: str = ""
    embedding_dropout: str = ""
    embedding_scale: Literal["none", "module", "model"] = "none"

    def activation_of(self, f: Fields) -> str:
        return self.activation[1:] if self.activation.startswith("=") else f.text(self.activation)

    def residual_dropout_of(self, f: Fields) -> float:
        return f.number(self.residual_dropout) if self.residual_dropout else 0.0
