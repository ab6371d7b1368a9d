"""One transformer block from hidden states to hidden states, in each arrangement of norms and residuals."""

from __future__ import annotations

from memfit.closed_form import ops
from memfit.closed_form.engine import Tensor
from memfit.closed_form.layers import liger
from memfit.closed_form.layers.activations import activation
from memfit.closed_form.layers.mixers import attention
from memfit.closed_form.layers.modules import Block
from memfit.closed_form.layers.moe import gated, mixture
from memfit.closed_form.layers.per_layer import gated_in, scaled_in_place
from memfit.errors import Unsupported


def forward(block: Block, x: Tensor) -> Tensor:
    """Run the block's own code; local variables live as long as they do in the model's Python."""
    if block.layer.attention.code == "falcon":
        return _falcon(block, x)
    return {
        "pre": _pre, "sandwich": _sandwich, "post": _post, "post_inner": _post_inner, "parallel": _parallel
    }[block.layer.placement](block, x)  # fmt: skip


def _pre(block: Block, x: Tensor) -> Tensor:
    residual = x
    x = block.norm(x, "input_norm") if block.layer.norms > 1 else x  # ModernBERT's first block has none there
    x = _dropout(block, attention(block, x))
    x = ops.add(block.rec, residual, x, "residual")
    residual = x
    x = block.norm(x, "mlp_norm")
    x = _dropout(block, mlp(block, x))
    return ops.add(block.rec, residual, x, "residual")


def _sandwich(block: Block, x: Tensor) -> Tensor:
    residual = x
    x = block.norm(x, "input_norm")
    x = attention(block, x)
    x = block.norm(x, "post_attention_norm")
    x = ops.add(block.rec, residual, x, "residual")
    residual = x
    x = block.norm(x, "mlp_norm")
    x = mlp(block, x)
    x = block.norm(x, "post_mlp_norm")
    x = ops.add(block.rec, residual, x, "residual")
    del residual
    own = block.find("per_layer_input_gate", "attention")
    return x if own is None else scaled_in_place(block.rec, gated_in(block, x, own.shape[0]))


def _post_inner(block: Block, x: Tensor) -> Tensor:
    residual = x
    x = attention(block, x)
    x = block.norm(x, "post_attention_norm")
    x = ops.add(block.rec, residual, x, "residual")
    residual = x
    x = mlp(block, x)
    x = block.norm(x, "post_mlp_norm")
    return ops.add(block.rec, residual, x, "residual")


def _post(block: Block, x: Tensor) -> Tensor:
    x = block.norm(ops.add(block.rec, _dropout(block, attention(block, x)), x, "residual"), "attention_norm")
    return block.norm(ops.add(block.rec, _dropout(block, mlp(block, x)), x, "residual"), "output_norm")


def _parallel(block: Block, x: Tensor) -> Tensor:
    residual = x
    x = block.norm(x, "input_norm")
    attended = _dropout(block, attention(block, x))
    if block.layer.norms > 1:
        x = block.norm(residual, "mlp_norm")
    fed = _dropout(block, mlp(block, x))
    return ops.add(block.rec, ops.add(block.rec, fed, attended, "attention + mlp"), residual, "residual")


def _falcon(block: Block, x: Tensor) -> Tensor:
    """FalconDecoderLayer: what is normed and attended stays a local variable; one sum of a parallel block is in place."""
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


def _dropout(block: Block, x: Tensor) -> Tensor:
    return ops.dropout(block.rec, x, block.layer.dropout if block.style.dropout else 0.0)


def mlp(block: Block, x: Tensor) -> Tensor:
    """The feed-forward sub-block."""
    block.rec.enter("mlp")
    try:
        kind = block.layer.mlp.kind
        if kind == "gated":
            return _gated(block, x)
        if kind == "plain":
            return _plain(block, x)
        if kind == "moe":
            return mixture(block, x)
        raise Unsupported(
            f"activations of a {kind} feed-forward are not modelled", hint="'memfit models' lists what is covered"
        )
    finally:
        block.rec.leave()


def _gated(block: Block, x: Tensor) -> Tensor:
    """down(act(gate(x)) * up(x))."""
    m, rec = block.layer.mlp, block.rec
    if m.fused_gate_up and block.style.liger and block.style.liger.activation:
        joint = block.linear("gate_up", x, 2 * m.width, "mlp")  # the model's local variables are views of it
        out = block.linear("down", liger.gated_product(rec, *liger.halves(rec, joint)), block.width, "mlp")
        del joint
        return out
    if m.fused_gate_up:
        gate, up = ops.split(rec, block.linear("gate_up", x, 2 * m.width, "mlp"), (m.width, m.width))
        up = ops.mul(rec, up, activation(rec, gate, m.activation), "gated product")
        up = ops.dropout(rec, up, m.dropout if block.style.dropout else 0.0)
        return block.linear("down", up, block.width, "mlp")
    return gated(block, x, m.width)


def _plain(block: Block, x: Tensor) -> Tensor:
    """fc2(act(fc1(x)))."""
    m, rec = block.layer.mlp, block.rec
    x = block.linear("fc1", x, m.width, "mlp")
    if m.activation == "relu2" and block.style.liger and block.style.liger.activation:
        x = ops.unary(rec, x, "squared relu")
    else:
        x = activation(rec, x, m.activation, block.style.trained)
    return block.linear("fc2", x, block.width, "mlp")
