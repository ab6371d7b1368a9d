"""Attention of model classes that predate the common interface: BLOOM, Falcon, MPT, GPT-J and CodeGen, written out."""

from __future__ import annotations

from memfit.closed_form import ops
from memfit.closed_form.engine import Recorder, Tensor
from memfit.closed_form.layers.attention import cached
from memfit.closed_form.layers.attention_kernels import scaled_dot_product_attention
from memfit.closed_form.layers.modules import Block
from memfit.closed_form.layers.rotary import rotate
from memfit.nouns.architecture import Attention


def bloom(block: Block, x: Tensor, a: Attention) -> Tensor:
    """BloomAttention: ALiBi enters the product; raw and masked scores live until the end."""
    rec, scores = block.rec, {"TS": a.heads}
    fused = block.linear("qkv", x, 3 * block.width)
    q, k, v = (ops.split_heads(rec, ops.slice(rec, fused, {"T": block.width})) for _ in range(3))
    k, v = cached(block, k, v)
    q, k, v = (ops.heads_first(rec, t) for t in (q, k, v))
    raw = ops.bmm(rec, q, k, scores, "scores")
    masked = ops.add(rec, raw, ops.constant({"SS": 1}, block.style.norm_weight), "masked scores")
    weights = ops.cast(rec, ops.softmax(rec, masked, 4), q.itemsize, "probabilities")
    weights = ops.dropout(rec, weights, a.dropout if block.style.dropout else 0.0)
    context = ops.tokens_first(rec, ops.bmm(rec, weights, v, {"T": block.width}, "attention output"))
    out = block.linear("o", context, block.width)
    del fused, raw, masked
    return out


def mpt(block: Block, x: Tensor, a: Attention) -> Tensor:
    """MptAttention: an fp32 position bias makes the scores fp32; the mask is filled in, not added."""
    rec = block.rec
    fused = ops.split(rec, block.linear("qkv", x, 3 * block.width), (block.width,) * 3)
    q, k, v = (ops.split_heads(rec, t) for t in fused)
    k, v = cached(block, k, v)
    scores = ops.scale(rec, ops.bmm(rec, q, k, {"TS": a.heads}, "scores"), "scaled scores")
    scores = ops.add(rec, scores, ops.constant({"SS": 1}, 4), "biased scores")
    scores = ops.unary(rec, scores, "masked scores", keeps="nothing")
    weights = ops.cast(rec, ops.softmax(rec, scores, 4), v.itemsize, "probabilities")
    weights = ops.dropout(rec, weights, a.dropout if block.style.dropout else 0.0)
    context = ops.tokens_first(rec, ops.bmm(rec, weights, v, {"T": block.width}, "attention output"))
    out = block.linear("o", context, block.width)
    del scores
    return out


def gptj(block: Block, x: Tensor, a: Attention) -> Tensor:
    """GPTJAttention, CodeGenAttention: queries, keys and scores in fp32."""
    rec, style, n = block.rec, block.style, block.width
    if a.fused_qkv:
        q, v, k = ops.split(rec, block.linear("qkv", x, 3 * n), (n, n, n))
    else:
        q, k, v = (block.linear(role, x, n) for role in "qkv")
    if a.rotary_dim:
        k, q = rotate(rec, k, q, a, style.residual)
    q, k, v = (ops.split_heads(rec, t) for t in (q, k, v))
    k, v = cached(block, k, v)
    out = _attend(block, q, k, v, a)
    return block.linear("o", ops.tokens_first(rec, out), n)


def _attend(block: Block, q: Tensor, k: Tensor, v: Tensor, a: Attention) -> Tensor:
    rec = block.rec
    q, k = ops.cast(rec, q, 4, "fp32 queries"), ops.cast(rec, k, 4, "fp32 keys")
    weights = ops.bmm(rec, q, k, {"TS": a.heads}, "scores")
    weights = ops.scale(rec, weights, "scaled scores")
    weights = ops.add(rec, weights, ops.constant({"SS": 1}, 4), "masked scores")
    weights = ops.softmax(rec, weights, weights.itemsize)
    weights = ops.cast(rec, weights, v.itemsize, "probabilities")
    weights = ops.dropout(rec, weights, a.dropout if block.style.dropout else 0.0)
    return ops.bmm(rec, weights, v, {"T": block.width}, "attention output")


def falcon(block: Block, x: Tensor, a: Attention) -> Tensor:
    """FalconAttention: the mask always exists, and one key head is broadcast, which only the math kernel takes."""
    rec, style = block.rec, block.style
    fused = block.linear("qkv", x, (a.heads + 2 * a.kv_heads) * a.head_dim)
    q, k, v = _falcon_heads(rec, fused, a)
    if a.rotary_dim:
        q, k = rotate(rec, q, k, a, style.residual)
    k, v = cached(block, k, v)
    if style.kernel == "eager":
        out = _falcon_eager(block, q, k, v, a)
    else:
        mask = ops.constant({"TS" if style.mask == "rows" else "SS": 1}, 1)
        if a.alibi:  # added to the mask, for every head
            mask = ops.constant({"TS": a.heads}, style.residual)
        out = scaled_dot_product_attention(rec, style, q, k, v, a, 0.0, mask)
    return block.linear("o", ops.tokens_first(rec, out), block.width)


def _falcon_heads(rec: Recorder, fused: Tensor, a: Attention) -> tuple[Tensor, Tensor, Tensor]:
    """Slices of the fused projection; keys and values are copied out where they are picked by index."""
    n, kv = {"T": a.heads * a.head_dim}, {"T": a.kv_heads * a.head_dim}
    q = ops.slice(rec, fused, n)
    if a.kv_heads == a.heads:
        k, v = ops.slice(rec, fused, n), ops.slice(rec, fused, n)
    else:
        k, v = (ops.clone(rec, ops.slice(rec, fused, kv), "picked heads") for _ in range(2))
        if a.kv_heads > 1:  # the new decoder: one copy of keys and values for every query head
            k, v = ops.repeat(rec, k, n), ops.repeat(rec, v, n)
    return ops.split_heads(rec, q), ops.split_heads(rec, k), ops.split_heads(rec, v)


def _falcon_eager(block: Block, q: Tensor, k: Tensor, v: Tensor, a: Attention) -> Tensor:
    rec, dtype = block.rec, q.itemsize
    k, v = (ops.expand(rec, t, q.elements) if t.elements != q.elements else t for t in (k, v))
    weights = ops.bmm(rec, q, k, {"TS": a.heads}, "scores")
    masked = ops.add(rec, weights, ops.constant({"SS": 1}, block.style.residual), "masked scores")
    weights = ops.softmax(rec, masked, dtype)
    del masked
    return ops.bmm(rec, weights, v, {"T": a.heads * a.value_dim}, "attention output")


CODES = {"bloom": bloom, "mpt": mpt, "gptj": gptj, "falcon": falcon}
