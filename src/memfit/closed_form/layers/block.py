"""One transformer block, in each arrangement of norms and residuals."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from memfit.closed_form import ops
from memfit.closed_form.engine import GraphRecorder, Tensor
from memfit.closed_form.layers import liger
from memfit.closed_form.layers.attention import attention
from memfit.closed_form.layers.elementwise import activation, norm
from memfit.closed_form.layers.encoder_decoder import t5, whisper
from memfit.closed_form.layers.linears import LayerRun
from memfit.closed_form.layers.moe import gated, mixture
from memfit.closed_form.style import Style
from memfit.nouns.architecture import Architecture, Norm

# Gemma 4 has embeddings for each layer, which are looked up and projected once, then gated into each block. Source:
# Gemma4TextModel.get_per_layer_inputs, project_per_layer_inputs and the end of Gemma4TextDecoderLayer.forward


@dataclass(frozen=True, slots=True)
class PerLayer:
    """The embedding table of which each layer reads its own slice."""

    rows: int
    joint: int  # width of all layers' embeddings together
    own: int  # width of one layer's embedding
    norm: Norm


def per_layer_of(a: Architecture) -> PerLayer | None:
    """Return the model's table; None for all but the small Gemma 4 models."""
    table = next((w for w in a.embedding if w.module == "embed_tokens_per_layer"), None)
    if table is None:
        return None
    rows, joint = table.shape
    return PerLayer(rows, joint, joint // len(a.layers), a.final_norm or Norm("rms"))


def inputs(rec: GraphRecorder, p: PerLayer, x: Tensor, width: int, itemsize: int, style: Style) -> Tensor:
    """Return (scaled embedding + normed projection of the token embeddings), scaled: [B, S, L, own]."""
    table = ops.weight(p.rows * p.joint, itemsize, "embed_tokens_per_layer", style.trained)
    own = rec.new({"T": p.joint}, itemsize, "embedding of every layer")

    def backward(g: Tensor) -> list[Tensor | None]:
        dense = rec.new({"1": p.rows * p.joint}, itemsize, "embedding gradient")
        rec.buffer({("embed", p.joint, itemsize): 1}, "embedding sort buffers")
        return [dense]

    own = ops.scale(rec, rec.record(own, [table], [], backward), "scaled embedding of every layer")
    w = ops.weight(p.joint * width, style.weight, "per_layer_model_projection.weight", style.trained)
    projected = ops.scale(rec, ops.linear(rec, x, w, {"T": p.joint}), "scaled projection")
    projected = norm(rec, projected, p.norm, p.own, style, "per_layer_projection_norm")
    return ops.scale(rec, ops.add(rec, projected, own, "projection + embedding"), "inputs of every layer")


def gated_in(block: LayerRun, x: Tensor, own: int) -> Tensor:
    """Return x + norm(up(act(down(x)) * own input)); the own input's gradient is written into zeros for all layers."""
    rec, style = block.rec, block.style
    given = Tensor(None, {"T": own}, x.itemsize, style.own_input_grad)
    if given.requires_grad:

        def backward(g: Tensor) -> list[Tensor | None]:
            """SelectBackward: makes a gradient as large as all layers' inputs, which is added to the sum and freed."""
            rec.new({"T": style.per_layer}, g.itemsize, "gradient of every layer's input")
            return [None]

        given = rec.record(given.view(), [given], [], backward)
    gate = activation(rec, block.linear("per_layer_input_gate", x, own), block.layer.mlp.activation)
    product = ops.mul(rec, gate, given, "gated input of the layer")
    del gate
    projected = block.linear("per_layer_projection", product, block.width)
    del product
    projected = block.norm(projected, "post_per_layer_input_norm")
    return ops.add(rec, x, projected, "residual")


def scaled_in_place(rec: GraphRecorder, x: Tensor) -> Tensor:
    """hidden_states *= layer_scalar: allocates nothing forward and a product backward."""
    return rec.record(x.view(), [x], [], lambda g: [rec.like(g, "scaled gradient")])


def forward(block: LayerRun, x: Tensor) -> Tensor:
    """Run a block; local variables have the lifetimes of the model's Python code. `held` may be returned beside it."""
    run = BLOCKS.get(block.layer.attention.code) or PLACEMENTS[block.layer.placement]
    x = run(block, x)
    if not block.style.hands_weights:
        block.held.clear()
    return x


def _pre(block: LayerRun, x: Tensor) -> Tensor:
    residual = x
    x = block.norm(x, "input_norm") if block.layer.norms > 1 else x  # ModernBERT's first block has no input norm
    x = _dropout(block, attention(block, x))
    x = ops.add(block.rec, residual, x, "residual")
    residual = x
    x = block.norm(x, "mlp_norm")
    x = _dropout(block, mlp(block, x))
    return ops.add(block.rec, residual, x, "residual")


def _sandwich(block: LayerRun, x: Tensor) -> Tensor:
    """Norm the output of attention and feed-forward, and with placement "sandwich" also their input."""
    both = block.layer.placement == "sandwich"
    residual = x
    x = block.norm(x, "input_norm") if both else x
    x = attention(block, x)
    x = block.norm(x, "post_attention_norm")
    x = ops.add(block.rec, residual, x, "residual")
    residual = x
    x = block.norm(x, "mlp_norm") if both else x
    x = mlp(block, x)
    x = block.norm(x, "post_mlp_norm")
    x = ops.add(block.rec, residual, x, "residual")
    del residual
    own = block.find("per_layer_input_gate", "attention")
    return x if own is None else scaled_in_place(block.rec, gated_in(block, x, own.shape[0]))


def _post(block: LayerRun, x: Tensor) -> Tensor:
    x = _added_and_normed(block, attention(block, x), x, "attention_norm")
    return _added_and_normed(block, mlp(block, x), x, "output_norm")


def _added_and_normed(block: LayerRun, made: Tensor, x: Tensor, label: str) -> Tensor:
    """LayerNorm(dropout(made) + x): what is added stays a local variable during the norm."""
    made = _dropout(block, made)
    return block.norm(ops.add(block.rec, made, x, "residual"), label)


def _parallel(block: LayerRun, x: Tensor) -> Tensor:
    residual = x
    x = block.norm(x, "input_norm")
    attended = _dropout(block, attention(block, x))
    if block.layer.norms > 1:
        x = block.norm(residual, "mlp_norm")
    fed = _dropout(block, mlp(block, x))
    return ops.add(block.rec, ops.add(block.rec, fed, attended, "attention + mlp"), residual, "residual")


def _falcon(block: LayerRun, x: Tensor) -> Tensor:
    """FalconDecoderLayer: normed and attended states stay local variables; a parallel block adds once in place."""
    rec, parallel = block.rec, block.layer.placement == "parallel"
    residual, normed = x, block.norm(x, "input_norm")
    fed = block.norm(x, "mlp_norm") if parallel and block.layer.norms > 1 else normed
    attended = attention(block, normed)
    if not parallel:
        residual = ops.add(rec, residual, _dropout(block, attended), "residual")
        fed = block.norm(residual, "mlp_norm")
    out = mlp(block, fed)
    if parallel:
        out = rec.record(out.view(), [out, attended], [], lambda g: [g, g])
    return ops.add(rec, residual, _dropout(block, out), "residual")


# by Attention.code
BLOCKS: dict[str, Callable[[LayerRun, Tensor], Tensor]] = {"falcon": _falcon, "t5": t5, "whisper": whisper}
PLACEMENTS: dict[str, Callable[[LayerRun, Tensor], Tensor]] = {
    "pre": _pre, "sandwich": _sandwich, "post": _post, "post_inner": _sandwich, "parallel": _parallel,
}  # fmt: skip


def _dropout(block: LayerRun, x: Tensor) -> Tensor:
    return ops.dropout(block.rec, x, block.layer.dropout if block.style.dropout else 0.0)


def mlp(block: LayerRun, x: Tensor) -> Tensor:
    """Run the feed-forward sub-block."""
    block.rec.enter("mlp")
    try:
        return {"gated": _gated, "plain": _plain, "moe": mixture}[block.layer.mlp.kind](block, x)
    finally:
        block.rec.leave()


def _gated(block: LayerRun, x: Tensor) -> Tensor:
    """down(act(gate(x)) * up(x))."""
    m, rec = block.layer.mlp, block.rec
    if m.fused_gate_up and block.style.liger and block.style.liger.activation:
        joint = block.linear("gate_up", x, 2 * m.width, "mlp")  # gate and up are views of it
        out = block.linear("down", liger.gated_product(rec, *liger.halves(rec, joint)), block.width, "mlp")
        del joint
        return out
    if m.fused_gate_up:
        gate, up = ops.split(rec, block.linear("gate_up", x, 2 * m.width, "mlp"), (m.width, m.width))
        up = ops.mul(rec, up, activation(rec, gate, m.activation), "gated product")
        up = ops.dropout(rec, up, m.dropout if block.style.dropout else 0.0)
        return block.linear("down", up, block.width, "mlp")
    return gated(block, x, m.width)


def _plain(block: LayerRun, x: Tensor) -> Tensor:
    """fc2(act(fc1(x)))."""
    m, rec = block.layer.mlp, block.rec
    x = block.linear("fc1", x, m.width, "mlp")
    if m.activation == "relu2" and block.style.liger and block.style.liger.activation:
        x = ops.unary(rec, x, "squared relu")
    else:
        x = activation(rec, x, m.activation, block.style.trained)
    return block.linear("fc2", x, block.width, "mlp")
