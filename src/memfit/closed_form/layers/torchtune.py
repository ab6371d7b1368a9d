"""torchtune's TransformerSelfAttentionLayer: rotation in fp32, and keys and values copied for every query head.

Source: torchtune/modules/transformer.py, attention.py, position_embeddings.py and feed_forward.py of 0.4 and 0.5.
"""

from __future__ import annotations

from dataclasses import replace

from memfit.closed_form import ops
from memfit.closed_form.engine import Elements, Recorder, Tensor
from memfit.closed_form.layers.activations import activation
from memfit.closed_form.layers.attention import interface
from memfit.closed_form.layers.logits import HeadStyle
from memfit.closed_form.layers.modules import Block
from memfit.closed_form.layers.rotary import rotate_one
from memfit.closed_form.style import Style
from memfit.nouns.architecture import Attention

OUTPUT_CHUNKS = 8  # CEWithChunkedOutputLoss(num_output_chunks=8)


def block(block: Block, x: Tensor) -> Tensor:
    """TransformerSelfAttentionLayer.forward; `h` is bound to the normed input until the residual replaces it."""
    h = block.norm(x, "sa_norm")
    attended = _attention(block, h)
    h = ops.add(block.rec, attended, x, "residual")
    out = _feed_forward(block, block.norm(h, "mlp_norm"))
    return ops.add(block.rec, h, out, "residual")


def _attention(block: Block, x: Tensor) -> Tensor:
    """MultiHeadAttention.forward."""
    rec, a = block.rec, block.layer.attention
    n, kv = a.heads * a.head_dim, a.kv_heads * a.head_dim
    q = _rope(rec, block.linear("q", x, n), a)
    k, v = block.linear("k", x, kv), block.linear("v", x, kv)
    k = _rope(rec, k, a)
    if n != kv:
        k, v = ops.repeat(rec, k, {"T": n}, "expanded keys"), ops.repeat(rec, v, {"T": n}, "expanded values")
    return block.linear("o", interface(block, q, k, v, replace(a, kv_heads=a.heads)), block.width)


def _rope(rec: Recorder, x: Tensor, a: Attention) -> Tensor:
    """RotaryPositionalEmbeddings.forward: pairs of an fp32 copy, stacked and cast back."""
    return rotate_one(rec, x, "pairs_fp32") if a.rotary_dim else x


def _feed_forward(block: Block, x: Tensor) -> Tensor:
    m, rec = block.layer.mlp, block.rec
    h = activation(rec, block.linear("gate", x, m.width, "mlp"), m.activation)
    h = ops.mul(rec, h, block.linear("up", x, m.width, "mlp"), "gated product")
    return block.linear("down", h, block.width, "mlp")


def compiled_head(rec: Recorder, h: HeadStyle, style: Style, x: Tensor) -> tuple[Tensor, list[Tensor]]:
    """CEWithChunkedOutputLoss with a compiled cross entropy: the 16-bit logits are kept, nothing is widened in memory."""
    w = ops.weight(h.vocabulary * h.width, h.itemsize, "embedding" if h.tied else "head", h.trained)
    part: Elements = {("part", OUTPUT_CHUNKS, 0): h.vocabulary}
    piece: Elements = {("part", OUTPUT_CHUNKS, 0): h.width}
    logits = [ops.linear(rec, ops.slice(rec, x, piece), w, part, None, "logits") for _ in range(OUTPUT_CHUNKS)]
    total: Tensor | None = None
    while logits:
        loss = _fused_cross_entropy(rec, logits.pop(0))
        total = loss if total is None else ops.add(rec, total, loss)
    assert total is not None
    return total, []


def _fused_cross_entropy(rec: Recorder, logits: Tensor) -> Tensor:
    like = logits.blueprint()
    loss = rec.new({"1": 1}, 4, "loss")
    return rec.record(loss, [logits], [logits], lambda g: [rec.like(like, "logits gradient")])


LOSSES = {"torchtune-compiled": compiled_head}
