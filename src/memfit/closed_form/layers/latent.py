"""Latent attention (MLA): queries, and keys with values, squeezed through a low rank; the cache holds the latents."""

from __future__ import annotations

from dataclasses import replace

from memfit.closed_form import ops
from memfit.closed_form.engine import Tensor
from memfit.closed_form.layers import liger
from memfit.closed_form.layers.attention import cached, interface
from memfit.closed_form.layers.modules import Block
from memfit.closed_form.layers.rotary import rotate
from memfit.nouns.architecture import Attention


def latent(block: Block, x: Tensor, a: Attention) -> Tensor:
    """DeepseekV3Attention and all that follow it."""
    rec, rope = block.rec, _rope_width(block, a)
    nope = a.head_dim - rope
    q = ops.split_heads(rec, _queries(block, x, a))
    q_nope, q_rot = ops.split(rec, q, (a.heads * nope, a.heads * rope), by_head=True)
    compressed = block.linear("kv_a_proj_with_mqa", x, a.kv_lora_rank + rope)
    kv, k_rot = ops.split(rec, compressed, (a.kv_lora_rank, rope))
    if block.style.liger:
        kv = liger.contiguous(block.rec, kv)
    kv = block.norm(kv, "kv_a_layernorm", a.kv_lora_rank)
    if a.rotary_dim:
        q_rot, k_rot = rotate(rec, q_rot, k_rot, replace(a, head_dim=rope, rotary_dim=rope), block.style.residual)
    kv, k_rot = cached(block, kv, k_rot)
    q = ops.cat(rec, (q_nope, q_rot), "queries")
    k, v = _expanded(block, kv, k_rot, a, nope, rope)
    return block.linear("o", interface(block, q, k, v, a), block.width)


def _rope_width(block: Block, a: Attention) -> int:
    """The part of each key that all heads share; Kimi Linear has one without rotating it."""
    w = block.find("kv_a_proj_with_mqa", "attention")
    return w.shape[0] - a.kv_lora_rank if w else a.rotary_dim


def _queries(block: Block, x: Tensor, a: Attention) -> Tensor:
    if not a.q_lora_rank:
        return block.linear("q", x, a.heads * a.head_dim)
    x = block.norm(block.linear("q_a_proj", x, a.q_lora_rank), "q_a_layernorm", a.q_lora_rank)
    return block.linear("q_b_proj", x, a.heads * a.head_dim)


def _expanded(block: Block, kv: Tensor, k_rot: Tensor, a: Attention, nope: int, rope: int) -> tuple[Tensor, Tensor]:
    """expand_kv: keys put together in place from their own part of each head and the shared one."""
    rec = block.rec
    both = ops.split_heads(rec, block.linear("kv_b_proj", kv, a.heads * (nope + a.value_dim)))
    k_nope, v = ops.split(rec, both, (a.heads * nope, a.heads * a.value_dim), by_head=True)
    shared = ops.expand(rec, k_rot, {"T": a.heads * rope})
    keys = rec.new({"T": a.heads * a.head_dim}, kv.itemsize, "keys", heads_first=True)
    keys = ops.copy_into(rec, keys, k_nope)
    return ops.copy_into(rec, keys, shared), v
