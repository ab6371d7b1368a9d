"""Attention sub-blocks, one function per kind: projections, rotary embedding and kernel, as in the model code."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from memfit.closed_form import ops
from memfit.closed_form.engine import GraphRecorder, Tensor
from memfit.closed_form.layers import liger
from memfit.closed_form.layers.attention_kernels import scaled_dot_product_attention
from memfit.closed_form.layers.elementwise import rms_without_weight, rotate
from memfit.closed_form.layers.image_attention import within_images
from memfit.closed_form.layers.linear_attention import gated_delta_net
from memfit.closed_form.layers.linears import LayerRun
from memfit.closed_form.layers.split_sequences import EXCHANGES
from memfit.errors import TRACE_HINT, Unsupported
from memfit.nouns.architecture import Attention


def softmax_attention(block: LayerRun, x: Tensor, a: Attention) -> Tensor:
    """LlamaAttention and the classes modelled on it."""
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
    out = block.linear("o", out, block.width)  # its input is freed here, before queries, keys and values
    return out  # noqa: RET504


def _gated_queries(block: LayerRun, x: Tensor, a: Attention) -> tuple[Tensor, Tensor | None]:
    """Return the queries, and the gate where one q_proj of double width makes both."""
    width = a.heads * a.head_dim
    if not a.gated:
        return block.linear("q", x, width), None
    q, gate = ops.split(block.rec, block.linear("q", x, 2 * width), (width, width))
    return q, ops.clone(block.rec, gate, "gate")


def _project(block: LayerRun, x: Tensor, a: Attention) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return queries, keys and values as [B, N, S, H] views, normed if the model does, and the gate of the output."""
    widths = (a.heads * a.head_dim, a.kv_heads * a.head_dim, a.kv_heads * a.value_dim)
    if a.fused_qkv:
        q, k, v = ops.split(block.rec, block.linear("qkv", x, sum(widths)), widths)
        return _as_heads(block, q, "q", a), _as_heads(block, k, "k", a), _as_heads(block, v, "v", a), None
    q, gate = _gated_queries(block, x, a)
    q = _as_heads(block, q, "q", a)
    k, v = (_as_heads(block, block.linear(role, x, n), role, a) for role, n in zip("kv", widths[1:], strict=True))
    return q, k, v, gate


def _as_heads(block: LayerRun, x: Tensor, role: str, a: Attention) -> Tensor:
    if role != "v" and a.qk_norm != "none":
        if block.style.liger and block.style.liger.head_norm == "by_head":
            x = ops.heads_first(block.rec, ops.split_heads(block.rec, x))
            return block.norm(x, f"{role}_norm", a.head_dim)
        x = block.head_norm(x, f"{role}_norm", a.head_dim if a.qk_norm == "head" else next(iter(x.elements.values())))
    return ops.split_heads(block.rec, x)


def llama4(block: LayerRun, x: Tensor, a: Attention) -> Tensor:
    """Llama4TextAttention: norms without a weight follow the rotation; layers without rotation scale their queries."""
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


def cached(block: LayerRun, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """DynamicCache.update: concatenates even the first time. The cache lives as long as the model's output."""
    if not block.style.use_cache:
        return k, v
    rec, width = block.rec, max(k.itemsize, v.itemsize)  # both caches have the dtype of the keys
    k, v = ops.copy(rec, k, width, "cached keys"), ops.copy(rec, v, width, "cached values")
    rec.until_exit += [k.detach(), v.detach()]
    if block.style.holds_output:
        rec.lingering |= {t.storage.id for t in (k, v) if t.storage}
    return k, v


def interface(block: LayerRun, q: Tensor, k: Tensor, v: Tensor, a: Attention) -> Tensor:
    """ALL_ATTENTION_FUNCTIONS: sdpa_attention_forward or eager_attention_forward; returns [B, S, N * H]."""
    rec, style = block.rec, block.style
    if style.exchange:
        out = EXCHANGES[style.exchange](rec, style, q, k, v, a)
        return ops.tokens_first(rec, out, "contiguous output")
    if style.kernel == "eager":
        return eager(block, q, k, v, a)
    unpadded = style.kernel == "flash2" and style.mask == "rows" and style.code.block is None
    # see use_gqa_in_sdpa: otherwise the kernel takes grouped heads
    if style.repeats_keys or (not unpadded and (style.mask != "none" or a.head_dim > 256)):
        k, v = repeat_kv(rec, k, a), repeat_kv(rec, v, a)
    if unpadded:
        return _unpadded(block, q, k, v, a)
    mask = None if style.mask == "none" else ops.constant({"SS" if style.mask == "shared" else "TS": 1}, 1)
    out = scaled_dot_product_attention(rec, style, q, k, v, a, a.dropout if style.attention_dropout else 0.0, mask)
    return ops.tokens_first(rec, out, "contiguous output")


def _unpadded(block: LayerRun, q: Tensor, k: Tensor, v: Tensor, a: Attention) -> Tensor:
    """_flash_attention_forward with a padding mask: copies the rows of real tokens, and pads the result again."""
    rec, style = block.rec, block.style
    tokens = rec.new({"T": 1}, 8, "indices of tokens")
    k, v, q = (ops.rows(rec, t, tokens) for t in (k, v, q))
    out = scaled_dot_product_attention(rec, style, q, k, v, a, a.dropout if style.attention_dropout else 0.0, None)
    return ops.rows(rec, out, tokens)


def repeat_kv(rec: GraphRecorder, x: Tensor, a: Attention) -> Tensor:
    """Return keys or values for every query head: a view where there is one key head, else a copy."""
    if a.kv_heads == a.heads:
        return x
    every = {k: n // a.kv_heads * a.heads for k, n in x.elements.items()}
    return ops.expand(rec, x, every) if a.kv_heads == 1 else ops.repeat(rec, x, every)


def eager(block: LayerRun, q: Tensor, k: Tensor, v: Tensor, a: Attention) -> Tensor:
    """eager_attention_forward: the scores of all heads exist at once, in several tensors."""
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
        weights = ops.add(rec, weights, ops.constant({"SS": 1}, style.additive), "masked scores")
    wide = 4 if a.upcast or rec.autocast else weights.itemsize
    weights = (style.code.softmax or ops.softmax)(rec, weights, wide)
    weights = ops.cast(rec, weights, q.itemsize, "probabilities")
    weights = ops.dropout(rec, weights, a.dropout if style.attention_dropout else 0.0)
    if style.code.block is None:
        block.held.append(weights.detach())  # returned beside the output, into a variable of transformers' block
    out = ops.bmm(rec, weights, values, {"T": a.heads * a.value_dim}, "attention output")
    return ops.tokens_first(rec, out, "contiguous output")


def _eager_with_sinks(block: LayerRun, q: Tensor, keys: Tensor, values: Tensor, a: Attention) -> Tensor:
    """gpt-oss: one more score per row and head, from which the row's maximum is subtracted; fp32 if the sinks are."""
    rec, one_more = block.rec, {"TS": a.heads, "T": a.heads}
    weights = ops.scale(rec, ops.bmm(rec, q, keys, {"TS": a.heads}, "scores"), "scaled scores")
    weights = ops.add(rec, weights, ops.constant({"SS": 1}, block.style.additive), "masked scores")
    wide = max(weights.itemsize, block.style.weight)  # torch.cat promotes the narrower dtype
    combined = ops.extended(
        rec, ops.cast(rec, weights, wide, "scores as wide as the sinks"), one_more, "scores and sinks"
    )
    combined = ops.minus_maximum(rec, combined, {"T": a.heads})
    probabilities = ops.softmax(rec, combined, combined.itemsize)
    scores = ops.slice(rec, probabilities, {"TS": a.heads})
    weights = ops.dropout(rec, scores, a.dropout if block.style.attention_dropout else 0.0)
    weights = ops.cast(rec, weights, values.itemsize, "probabilities")
    del probabilities, scores
    out = ops.bmm(rec, weights, values, {"T": a.heads * a.value_dim}, "attention output")
    out = ops.tokens_first(rec, out, "contiguous output")
    del combined
    return out


# Latent attention (MLA) projects queries, and keys with values, through a low rank; the cache holds the latents


def latent(block: LayerRun, x: Tensor, a: Attention) -> Tensor:
    """DeepseekV3Attention and the classes modelled on it."""
    rec, shared = block.rec, block.find("kv_a_proj_with_mqa", "attention")
    # the part of each key that all heads share; Kimi Linear has one without rotating it
    rope = shared.shape[0] - a.kv_lora_rank if shared else a.rotary_dim
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


def _queries(block: LayerRun, x: Tensor, a: Attention) -> Tensor:
    if not a.q_lora_rank:
        return block.linear("q", x, a.heads * a.head_dim)
    x = block.norm(block.linear("q_a_proj", x, a.q_lora_rank), "q_a_layernorm", a.q_lora_rank)
    return block.linear("q_b_proj", x, a.heads * a.head_dim)


def _expanded(block: LayerRun, kv: Tensor, k_rot: Tensor, a: Attention, nope: int, rope: int) -> tuple[Tensor, Tensor]:
    """expand_kv: allocates the keys, and copies each head's own part and the shared part into them."""
    rec = block.rec
    both = ops.split_heads(rec, block.linear("kv_b_proj", kv, a.heads * (nope + a.value_dim)))
    k_nope, v = ops.split(rec, both, (a.heads * nope, a.heads * a.value_dim), by_head=True)
    shared = ops.expand(rec, k_rot, {"T": a.heads * rope})
    keys = rec.new({"T": a.heads * a.head_dim}, kv.itemsize, "keys", heads_first=True)
    keys = ops.copy_into(rec, keys, k_nope)
    return ops.copy_into(rec, keys, shared), v


# Model classes older than ALL_ATTENTION_FUNCTIONS, with attention code of their own


def bloom(block: LayerRun, x: Tensor, a: Attention) -> Tensor:
    """BloomAttention: baddbmm adds ALiBi in the product; raw and masked scores are local variables until the end."""
    rec, scores = block.rec, {"TS": a.heads}
    fused = block.linear("qkv", x, 3 * block.width)
    q, k, v = (ops.split_heads(rec, ops.slice(rec, fused, {"T": block.width})) for _ in range(3))
    k, v = cached(block, k, v)
    q, k, v = (ops.heads_first(rec, t) for t in (q, k, v))
    raw = ops.bmm(rec, q, k, scores, "scores")
    masked = ops.add(rec, raw, ops.constant({"SS": 1}, block.style.norm_weight), "masked scores")
    weights = ops.cast(rec, ops.softmax(rec, masked, 4), q.itemsize, "probabilities")
    weights = ops.dropout(rec, weights, a.dropout if block.style.attention_dropout else 0.0)
    block.held.append(weights.detach())
    context = ops.tokens_first(rec, ops.bmm(rec, weights, v, {"T": block.width}, "attention output"))
    out = block.linear("o", context, block.width)
    del fused, raw, masked
    return out


def mpt(block: LayerRun, x: Tensor, a: Attention) -> Tensor:
    """MptAttention: an fp32 position bias makes the scores fp32; masked_fill applies the mask."""
    rec = block.rec
    fused = ops.split(rec, block.linear("qkv", x, 3 * block.width), (block.width,) * 3)
    q, k, v = (ops.split_heads(rec, t) for t in fused)
    k, v = cached(block, k, v)
    scores = ops.scale(rec, ops.bmm(rec, q, k, {"TS": a.heads}, "scores"), "scaled scores")
    scores = ops.add(rec, scores, ops.constant({"SS": 1}, 4), "biased scores")
    scores = ops.unary(rec, scores, "masked scores", keeps="nothing")
    weights = ops.cast(rec, ops.softmax(rec, scores, 4), v.itemsize, "probabilities")
    weights = ops.dropout(rec, weights, a.dropout if block.style.attention_dropout else 0.0)
    block.held.append(weights.detach())
    context = ops.tokens_first(rec, ops.bmm(rec, weights, v, {"T": block.width}, "attention output"))
    out = block.linear("o", context, block.width)
    del scores
    return out


def gptj(block: LayerRun, x: Tensor, a: Attention) -> Tensor:
    """GPTJAttention, CodeGenAttention: queries, keys and scores in fp32.

    GPTNeoSelfAttention has a causal mask of its own, narrowed by a window, in place of a scale.
    """
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


def _attend(block: LayerRun, q: Tensor, k: Tensor, v: Tensor, a: Attention) -> Tensor:
    rec = block.rec
    q, k = ops.cast(rec, q, 4, "fp32 queries"), ops.cast(rec, k, 4, "fp32 keys")
    weights = ops.bmm(rec, q, k, {"TS": a.heads}, "scores")
    weights = ops.scale(rec, weights, "scaled scores")
    weights = ops.add(rec, weights, ops.constant({"SS": 1}, block.style.additive), "masked scores")
    weights = ops.softmax(rec, weights, 4)
    weights = ops.cast(rec, weights, v.itemsize, "probabilities")
    weights = ops.dropout(rec, weights, a.dropout if block.style.attention_dropout else 0.0)
    block.held.append(weights.detach())
    return ops.bmm(rec, weights, v, {"T": block.width}, "attention output")


def falcon(block: LayerRun, x: Tensor, a: Attention) -> Tensor:
    """FalconAttention: always makes a mask; a single key head is broadcast, which only the math kernel accepts."""
    rec, style = block.rec, block.style
    fused = block.linear("qkv", x, (a.heads + 2 * a.kv_heads) * a.head_dim)
    q, k, v = _falcon_heads(rec, fused, a)
    if a.rotary_dim:
        q, k = rotate(rec, q, k, a, style.residual)
    k, v = cached(block, k, v)
    if style.kernel == "eager":
        out = _falcon_eager(block, q, k, v, a, x.itemsize)
    else:
        mask = ops.constant({"TS" if style.mask == "rows" else "SS": 1}, 1)
        if a.alibi:  # added to the mask, for every head
            mask = ops.constant({"TS": a.heads}, style.residual)
        out = scaled_dot_product_attention(rec, style, q, k, v, a, 0.0, mask)
    return block.linear("o", ops.tokens_first(rec, out), block.width)


def _falcon_heads(rec: GraphRecorder, fused: Tensor, a: Attention) -> tuple[Tensor, Tensor, Tensor]:
    """Return slices of the fused projection; indexing copies keys and values unless every query has its own."""
    n, kv = {"T": a.heads * a.head_dim}, {"T": a.kv_heads * a.head_dim}
    q = ops.slice(rec, fused, n)
    if a.kv_heads == a.heads:
        k, v = ops.slice(rec, fused, n), ops.slice(rec, fused, n)
    else:
        k, v = (ops.clone(rec, ops.slice(rec, fused, kv), "picked heads") for _ in range(2))
        if a.kv_heads > 1:  # the new decoder: one copy of keys and values for every query head
            k, v = ops.repeat(rec, k, n), ops.repeat(rec, v, n)
    return ops.split_heads(rec, q), ops.split_heads(rec, k), ops.split_heads(rec, v)


def _falcon_eager(block: LayerRun, q: Tensor, k: Tensor, v: Tensor, a: Attention, dtype: int) -> Tensor:
    """With ALiBi the scores are fp32 before softmax narrows them again."""
    rec = block.rec
    k, v = (ops.expand(rec, t, q.elements) if t.elements != q.elements else t for t in (k, v))
    raw = scores = ops.bmm(rec, q, k, {"TS": a.heads}, "scores")
    mask = ops.constant({"SS": 1}, block.style.additive)
    if a.alibi:
        wide = ops.cast(rec, raw, 4, "fp32 scores")
        scores = ops.add(rec, wide, ops.constant({"T": a.heads}, block.style.residual), "biased scores")
        mask = ops.constant({"TS": a.heads}, block.style.residual)
    masked = ops.add(rec, scores, mask, "masked scores")
    weights = ops.softmax(rec, masked, dtype)
    del masked
    weights = ops.dropout(rec, weights, a.dropout if a.alibi and block.style.attention_dropout else 0.0)
    block.held.append(weights.detach())  # returned beside the output
    return ops.bmm(rec, weights, v, {"T": a.heads * a.value_dim}, "attention output")


MIXERS: dict[str, Callable[[LayerRun, Tensor, Attention], Tensor]] = {
    "softmax": softmax_attention, "mla": latent, "linear": gated_delta_net, "llama4": llama4, "bloom": bloom,
    "mpt": mpt, "gptj": gptj, "falcon": falcon, "images": within_images,
}  # fmt: skip


def attention(block: LayerRun, x: Tensor) -> Tensor:
    """Run the attention sub-block, from normed hidden states to the output projection."""
    a = block.layer.attention
    mixer = MIXERS.get(a.code or a.kind)
    if mixer is None:
        raise Unsupported(f"activations of {a.kind} attention are not modelled", hint=TRACE_HINT)
    block.rec.enter("attention")
    try:
        return mixer(block, x, a)
    finally:
        block.rec.leave()
