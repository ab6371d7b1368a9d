"""Softmax attention: projections, rotary embedding and the kernel each as the model's code calls them."""

from __future__ import annotations

from memfit.closed_form import ops
from memfit.closed_form.engine import Recorder, Tensor
from memfit.closed_form.layers import liger
from memfit.closed_form.layers.attention_kernels import scaled_dot_product_attention
from memfit.closed_form.layers.modules import Block
from memfit.closed_form.layers.norms import rms_without_weight
from memfit.closed_form.layers.rotary import rotate
from memfit.nouns.architecture import Attention


def softmax_attention(block: Block, x: Tensor, a: Attention) -> Tensor:
    """LlamaAttention and all that follow it."""
    q, k, v, gate = _project(block, x, a)
    if a.rotary_dim:
        if block.style.liger and block.style.liger.rope:
            q, k = liger.rotate(block.rec, q, k, parts=a.fused_qkv)
        else:
            q, k = rotate(block.rec, q, k, a, block.style.residual)
    k, v = cached(block, k, v)
    out = interface(block, q, k, v, a)
    if gate is not None:
        out = ops.mul(block.rec, out, ops.unary(block.rec, gate, "sigmoid", keeps="output"), "gated output")
    return block.linear("o", out, block.width)


def _gated_queries(block: Block, x: Tensor, a: Attention) -> tuple[Tensor, Tensor | None]:
    """Queries, and where q_proj is twice as wide the gate that lies beside them."""
    width = a.heads * a.head_dim
    if not a.gated:
        return block.linear("q", x, width), None
    q, gate = ops.split(block.rec, block.linear("q", x, 2 * width), (width, width))
    return q, ops.clone(block.rec, gate, "gate")


def _project(block: Block, x: Tensor, a: Attention) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Queries, keys and values as [B, N, S, H] views, normed where the model does; and the gate of the output."""
    widths = (a.heads * a.head_dim, a.kv_heads * a.head_dim, a.kv_heads * a.value_dim)
    if a.fused_qkv:
        q, k, v = ops.split(block.rec, block.linear("qkv", x, sum(widths)), widths)
        return _as_heads(block, q, "q", a), _as_heads(block, k, "k", a), _as_heads(block, v, "v", a), None
    q, gate = _gated_queries(block, x, a)
    q = _as_heads(block, q, "q", a)
    k, v = (_as_heads(block, block.linear(role, x, n), role, a) for role, n in zip("kv", widths[1:], strict=True))
    return q, k, v, gate


def _as_heads(block: Block, x: Tensor, role: str, a: Attention) -> Tensor:
    if role != "v" and a.qk_norm != "none":
        if block.style.liger and block.style.liger.head_norm == "by_head":
            x = ops.heads_first(block.rec, ops.split_heads(block.rec, x))
            return block.norm(x, f"{role}_norm", a.head_dim)
        x = block.head_norm(x, f"{role}_norm", a.head_dim if a.qk_norm == "head" else next(iter(x.elements.values())))
    return ops.split_heads(block.rec, x)


def llama4(block: Block, x: Tensor, a: Attention) -> Tensor:
    """Llama4TextAttention: normed without weight after the rotation; layers without one scale their queries."""
    rec, style = block.rec, block.style
    q, k, v = (
        block.linear(role, x, n * a.head_dim) for role, n in zip("qkv", (a.heads, a.kv_heads, a.kv_heads), strict=True)
    )
    if not a.rotary_dim:
        q = ops.cast(rec, ops.mul(rec, q, ops.constant({"S": 1}, 4), "scaled queries"), q.itemsize)
    else:
        q, k = rotate(rec, q, k, a, style.residual)
        if a.qk_norm != "none":
            q, k = rms_without_weight(rec, q, {"T": a.heads}), rms_without_weight(rec, k, {"T": a.kv_heads})
    q, k, v = (ops.split_heads(rec, t) for t in (q, k, v))
    k, v = cached(block, k, v)
    return block.linear("o", interface(block, q, k, v, a), block.width)


def cached(block: Block, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """DynamicCache.update concatenates even the first time; the cache lives until the model's output goes."""
    if not block.style.use_cache:
        return k, v
    rec, width = block.rec, max(k.itemsize, v.itemsize)  # both caches have the dtype of the keys
    k, v = ops.copy(rec, k, width, "cached keys"), ops.copy(rec, v, width, "cached values")
    rec.until_exit += [k.detach(), v.detach()]
    if block.style.holds_output:
        rec.lingering |= {t.storage.id for t in (k, v) if t.storage}
    return k, v


def interface(block: Block, q: Tensor, k: Tensor, v: Tensor, a: Attention) -> Tensor:
    """ALL_ATTENTION_FUNCTIONS: sdpa_attention_forward or the model's written-out attention, as [B, S, N * H]."""
    rec, style = block.rec, block.style
    if style.kernel == "eager":
        return eager(block, q, k, v, a)
    if style.kernel == "flash2" and style.mask == "rows" and style.code == "transformers":
        return _unpadded(block, q, k, v, a)
    if style.mask != "none" or a.head_dim > 256:  # use_gqa_in_sdpa: else the kernel takes grouped heads as they are
        k, v = repeat_kv(rec, k, a), repeat_kv(rec, v, a)
    mask = None if style.mask == "none" else ops.constant({"SS" if style.mask == "shared" else "TS": 1}, 1)
    out = scaled_dot_product_attention(rec, style, q, k, v, a, a.dropout if style.dropout else 0.0, mask)
    return ops.tokens_first(rec, out, "contiguous output")


def _unpadded(block: Block, q: Tensor, k: Tensor, v: Tensor, a: Attention) -> Tensor:
    """_flash_attention_forward with a padding mask: the rows of real tokens are picked, end to end, and put back."""
    rec, style = block.rec, block.style
    tokens = rec.new({"T": 1}, 8, "indices of tokens")
    k, v, q = (ops.rows(rec, t, tokens) for t in (k, v, q))
    out = scaled_dot_product_attention(rec, style, q, k, v, a, a.dropout if style.dropout else 0.0, None)
    return ops.rows(rec, out, tokens)


def repeat_kv(rec: Recorder, x: Tensor, a: Attention) -> Tensor:
    """Keys or values for every query head: a view when there is one head for all, else a copy."""
    if a.kv_heads == a.heads:
        return x
    every = {k: n // a.kv_heads * a.heads for k, n in x.elements.items()}
    return ops.expand(rec, x, every) if a.kv_heads == 1 else ops.repeat(rec, x, every)


def eager(block: Block, q: Tensor, k: Tensor, v: Tensor, a: Attention) -> Tensor:
    """eager_attention_forward: every score of every head exists, several times."""
    rec, style = block.rec, block.style
    keys, values = repeat_kv(rec, k, a), repeat_kv(rec, v, a)
    if a.sinks:
        return _eager_with_sinks(block, q, keys, values, a)
    weights = ops.scale(rec, ops.bmm(rec, q, keys, {"TS": a.heads}, "scores"), "scaled scores")
    if a.softcap:
        weights = ops.scale(rec, weights, "scores / cap")
        weights = ops.unary(rec, weights, "tanh", keeps="output")
        weights = ops.scale(rec, weights, "capped scores")
    if style.mask != "none":
        weights = ops.add(rec, weights, ops.constant({"SS": 1}, weights.itemsize), "masked scores")
    if rec.autocast and not a.upcast:
        weights = ops.cast(rec, weights, 4, "autocast copy")
    wide = 4 if a.upcast else weights.itemsize
    weights = ops.softmax(rec, weights, wide, keeps_input=style.softmax_keeps_input)
    weights = ops.cast(rec, weights, q.itemsize, "probabilities")
    weights = ops.dropout(rec, weights, a.dropout if style.dropout else 0.0)
    out = ops.bmm(rec, weights, values, {"T": a.heads * a.value_dim}, "attention output")
    return ops.tokens_first(rec, out, "contiguous output")


def _eager_with_sinks(block: Block, q: Tensor, keys: Tensor, values: Tensor, a: Attention) -> Tensor:
    """gpt-oss: one more score per row and head, shifted by its maximum; in fp32 where the sinks are."""
    rec, one_more = block.rec, {"TS": a.heads, "T": a.heads}
    weights = ops.scale(rec, ops.bmm(rec, q, keys, {"TS": a.heads}, "scores"), "scaled scores")
    weights = ops.add(rec, weights, ops.constant({"SS": 1}, weights.itemsize), "masked scores")
    wide = max(weights.itemsize, block.style.weight)  # cat promotes
    combined = ops.extended(
        rec, ops.cast(rec, weights, wide, "scores as wide as the sinks"), one_more, "scores and sinks"
    )
    combined = ops.minus_maximum(rec, combined, {"T": a.heads})
    probabilities = ops.softmax(rec, combined, combined.itemsize)
    scores = ops.slice(rec, probabilities, {"TS": a.heads})
    weights = ops.dropout(rec, scores, a.dropout if block.style.dropout else 0.0)
    weights = ops.cast(rec, weights, values.itemsize, "probabilities")
    del probabilities, scores
    out = ops.bmm(rec, weights, values, {"T": a.heads * a.value_dim}, "attention output")
    out = ops.tokens_first(rec, out, "contiguous output")
    del combined
    return out
