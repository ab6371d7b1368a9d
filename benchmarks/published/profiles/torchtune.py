"""torchtune's TransformerSelfAttentionLayer: rotation in fp32, and keys and values copied for every query head.

`PROFILE` is the loop of its single-device recipes. Source: torchtune/modules/transformer.py, attention.py,
position_embeddings.py and feed_forward.py of 0.4 and 0.5.
"""

from __future__ import annotations

from dataclasses import replace

from memfit.closed_form import ops
from memfit.closed_form.engine import Elements, GraphRecorder, Tensor
from memfit.closed_form.layers.attention import interface
from memfit.closed_form.layers.elementwise import ROTARY, activation
from memfit.closed_form.layers.head import LOSSES, HeadStyle
from memfit.closed_form.layers.linears import LayerRun
from memfit.closed_form.style import CODES, Code, Style
from memfit.nouns.architecture import Attention
from memfit.tables.trainers import Trainer

OUTPUT_CHUNKS = 8  # CEWithChunkedOutputLoss(num_output_chunks=8)


def block(block: LayerRun, x: Tensor) -> Tensor:
    """TransformerSelfAttentionLayer.forward; `h` is bound to the normed input until the residual replaces it."""
    h = block.norm(x, "sa_norm")
    attended = _attention(block, h)
    h = ops.add(block.rec, attended, x, "residual")
    out = _feed_forward(block, block.norm(h, "mlp_norm"))
    return ops.add(block.rec, h, out, "residual")


def _attention(block: LayerRun, x: Tensor) -> Tensor:
    """MultiHeadAttention.forward."""
    rec, a = block.rec, block.layer.attention
    n, kv = a.heads * a.head_dim, a.kv_heads * a.head_dim
    q = _rope(rec, block.linear("q", x, n), a)
    k, v = block.linear("k", x, kv), block.linear("v", x, kv)
    k = _rope(rec, k, a)
    if n != kv:
        k, v = ops.repeat(rec, k, {"T": n}, "expanded keys"), ops.repeat(rec, v, {"T": n}, "expanded values")
    return block.linear("o", interface(block, q, k, v, replace(a, kv_heads=a.heads)), block.width)


def _rope(rec: GraphRecorder, x: Tensor, a: Attention) -> Tensor:
    """RotaryPositionalEmbeddings.forward: pairs of an fp32 copy, stacked and cast back."""
    if not a.rotary_dim:
        return x
    row = ROTARY["pairs"]
    return ops.cast(rec, row.turn(rec, ops.cast(rec, x, 4, "fp32 copy"), row, 4), x.itemsize, "rotated")


def _feed_forward(block: LayerRun, x: Tensor) -> Tensor:
    m, rec = block.layer.mlp, block.rec
    h = activation(rec, block.linear("gate", x, m.width, "mlp"), m.activation)
    h = ops.mul(rec, h, block.linear("up", x, m.width, "mlp"), "gated product")
    return block.linear("down", h, block.width, "mlp")


def compiled_head(rec: GraphRecorder, h: HeadStyle, style: Style, x: Tensor) -> tuple[Tensor, list[Tensor]]:
    """CEWithChunkedOutputLoss with a compiled cross entropy: keeps the 16-bit logits and widens nothing in memory."""
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


def _fused_cross_entropy(rec: GraphRecorder, logits: Tensor) -> Tensor:
    like = logits.blueprint()
    loss = rec.new({"1": 1}, 4, "loss")
    return rec.record(loss, [logits], [logits], lambda g: [rec.like(like, "logits gradient")])


def chunked_head(rec: GraphRecorder, h: HeadStyle, style: Style, x: Tensor) -> tuple[Tensor, list[Tensor]]:
    """torchtune's CEWithChunkedOutputLoss: eight pieces of logits, of which one at a time is widened to fp32."""
    w = ops.weight(h.vocabulary * h.width, h.itemsize, "embedding" if h.tied else "head", h.trained)
    part: Elements = {("part", OUTPUT_CHUNKS, 0): h.vocabulary}
    piece: Elements = {("part", OUTPUT_CHUNKS, 0): h.width}
    logits = [
        ops.linear(rec, ops.slice(rec, x, piece), w, part, None, "logits of a chunk") for _ in range(OUTPUT_CHUNKS)
    ]
    total: Tensor | None = None
    for chunk in logits:
        loss = ops.cross_entropy(rec, ops.cast(rec, chunk, 4, "fp32 logits of a chunk"), None)
        total = loss if total is None else ops.add(rec, total, loss)
    assert total is not None
    return total, []


CODES["torchtune"] = Code(block=block)
LOSSES["torchtune"], LOSSES["torchtune-compiled"] = chunked_head, compiled_head
# its own TransformerDecoder in plain bf16, 16-bit LoRA layers, torchao NF4 without the head
PROFILE = Trainer(
    name="torchtune", code="torchtune", heads=(("full", "full"), ("chunked", "torchtune"), ("fused", "torchtune")),
    default_loss="chunked", adapter_fp32=False, qlora_adapter_fp32=False, kbit_prepare=False, warms_cache=False,
)  # fmt: skip
