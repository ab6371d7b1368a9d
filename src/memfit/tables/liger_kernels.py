"""Layers that `use_liger_kernel` replaces in each model type, beside the loss.

Source: transformers/monkey_patch.py of liger-kernel 0.8.5.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Liger:
    """The layers of one model type that run as one Triton kernel each; equal ones give equal styles."""

    norm: Literal["", "in_place", "copies"] = "in_place"  # whether the gradient is written over the incoming one
    # norms of queries and keys: by_head norms run on [B, N, S, H], which is copied first; own: Liger does not replace
    # them in an existing model
    head_norm: Literal["by_token", "by_head", "own"] = "by_token"
    activation: bool = True  # act(gate) * up, whose gradients are written over gate and up, or a squared ReLU
    rope: bool = True  # queries and keys are turned in place
    experts: bool = True  # stacked experts, where there are any, as one grouped kernel


_LLAMA = Liger()
_COPIES = Liger(norm="copies")
_GEMMA3 = Liger(norm="copies", head_norm="by_head")
_OWN_HEADS = Liger(norm="copies", head_norm="own")
_LATENT = Liger(rope=False)
_QWEN_NEXT = Liger(norm="copies", rope=False)

# `use_liger_kernel` leaves other models unchanged, with a line in the log; granite's kernel for the loss still needs
# all logits. llama4's norm after the rotation and its complex rotation are modelled as in transformers
LIGER: dict[str, Liger] = {
    "deepseek_v2": _LATENT, "deepseek_v3": _LATENT,
    "exaone4": _GEMMA3,
    "falcon_h1": _LLAMA,
    "gemma": _LLAMA, "gemma2": _COPIES,
    "gemma3": _GEMMA3, "gemma3_text": _GEMMA3,
    "gemma4": _QWEN_NEXT, "gemma4_text": _QWEN_NEXT,
    "glm4": _QWEN_NEXT,
    "gpt_oss": Liger(activation=False, experts=False),
    "hunyuan_v1_dense": Liger(head_norm="own"), "hunyuan_v1_moe": Liger(head_norm="own"),
    "llama": _LLAMA,
    "llama4": Liger(rope=False, experts=False), "llama4_text": Liger(rope=False, experts=False),
    "ministral": _LLAMA, "mistral": _LLAMA, "mixtral": _LLAMA,
    "nemotron": Liger(norm="", rope=False, experts=False),
    "olmo2": _OWN_HEADS, "olmo3": _OWN_HEADS,
    "phi3": _LLAMA,
    "qwen2": _LLAMA, "qwen3": _LLAMA, "qwen3_moe": _LLAMA,
    "qwen3_5": _QWEN_NEXT, "qwen3_5_text": _QWEN_NEXT, "qwen3_5_moe": _QWEN_NEXT, "qwen3_5_moe_text": _QWEN_NEXT,
    "qwen3_next": _QWEN_NEXT,
    "smollm3": _LLAMA,
}  # fmt: skip
