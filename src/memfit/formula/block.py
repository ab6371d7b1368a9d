"""One transformer block from hidden states to hidden states, in each arrangement of norms and residuals."""

from __future__ import annotations

from memfit.errors import Unsupported
from memfit.formula import ops
from memfit.formula.attention import attention, split
from memfit.formula.engine import Tensor
from memfit.formula.modules import Block, activation


def forward(block: Block, x: Tensor) -> Tensor:
    """Run the block's own code; local variables live as long as they do in the model's Python."""
    return {
        "pre": _pre, "sandwich": _sandwich, "post": _post, "post_inner": _post_inner, "parallel": _parallel
    }[block.layer.placement](block, x)  # fmt: skip


def _pre(block: Block, x: Tensor) -> Tensor:
    residual = x
    h = block.norm(x, "input_norm")
    h = _dropout(block, attention(block, h))
    x = ops.add(block.rec, residual, h, "residual")
    del residual
    residual = x
    h = block.norm(x, "mlp_norm")
    h = _dropout(block, mlp(block, h))
    return ops.add(block.rec, residual, h, "residual")


def _sandwich(block: Block, x: Tensor) -> Tensor:
    residual = x
    h = block.norm(x, "input_norm")
    h = attention(block, h)
    h = block.norm(h, "post_attention_norm")
    x = ops.add(block.rec, residual, h, "residual")
    del residual
    residual = x
    h = block.norm(x, "mlp_norm")
    h = mlp(block, h)
    h = block.norm(h, "post_mlp_norm")
    return ops.add(block.rec, residual, h, "residual")


def _post_inner(block: Block, x: Tensor) -> Tensor:
    residual = x
    h = attention(block, x)
    h = block.norm(h, "post_attention_norm")
    x = ops.add(block.rec, residual, h, "residual")
    del residual
    residual = x
    h = mlp(block, x)
    h = block.norm(h, "post_mlp_norm")
    return ops.add(block.rec, residual, h, "residual")


def _post(block: Block, x: Tensor) -> Tensor:
    h = _dropout(block, attention(block, x))
    h = ops.add(block.rec, h, x, "residual")
    x = block.norm(h, "attention_norm")
    del h
    h = _dropout(block, mlp(block, x))
    h = ops.add(block.rec, h, x, "residual")
    return block.norm(h, "output_norm")


def _parallel(block: Block, x: Tensor) -> Tensor:
    residual = x
    first = block.norm(x, "input_norm")
    a = _dropout(block, attention(block, first))
    second = block.norm(x, "mlp_norm") if block.layer.norms > 1 else first
    m = _dropout(block, mlp(block, second))
    del first, second
    total = ops.add(block.rec, m, a, "attention + mlp")
    del a, m
    return ops.add(block.rec, total, residual, "residual")


def _dropout(block: Block, x: Tensor) -> Tensor:
    return ops.dropout(block.rec, x, block.layer.dropout if block.style.dropout else 0.0)


def mlp(block: Block, x: Tensor) -> Tensor:
    """The feed-forward sub-block."""
    block.rec.scope.append("mlp")
    try:
        kind = block.layer.mlp.kind
        if kind == "gated":
            return _gated(block, x)
        if kind == "plain":
            return _plain(block, x)
        raise Unsupported(
            f"activations of a {kind} feed-forward are not modelled", hint="use memfit trace for this model"
        )
    finally:
        block.rec.scope.pop()


def _gated(block: Block, x: Tensor) -> Tensor:
    m, rec = block.layer.mlp, block.rec
    if m.fused_gate_up:
        both = block.linear("gate_up", x, 2 * m.width, "mlp")
        gate, up = split(rec, both, (m.width, m.width))
        del both
        product = ops.mul(rec, up, activation(rec, gate, m.activation), "gated product")
        return block.linear("down", product, block.width, "mlp")
    gate = block.linear("gate", x, m.width, "mlp")
    active = activation(rec, gate, m.activation)
    del gate
    up = block.linear("up", x, m.width, "mlp")
    product = ops.mul(rec, active, up, "gated product")
    del active, up
    return block.linear("down", product, block.width, "mlp")


def _plain(block: Block, x: Tensor) -> Tensor:
    m, rec = block.layer.mlp, block.rec
    h = block.linear("fc1", x, m.width, "mlp")
    h = activation(rec, h, m.activation)
    return block.linear("fc2", h, block.width, "mlp")
