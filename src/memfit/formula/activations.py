"""The activation functions of transformers.activations by their config name."""

from __future__ import annotations

from memfit.formula import ops
from memfit.formula.engine import Recorder, Tensor

KEEP_OUTPUT = ("relu", "sigmoid", "tanh")


def activation(rec: Recorder, x: Tensor, name: str) -> Tensor:
    """act(x); a name that is not written out here is one kernel that keeps its input."""
    written = {
        "gelu_new": _new_gelu, "gelu_fast": _fast_gelu, "quick_gelu": _quick_gelu, "relu2": _relu2, "bloom_gelu": _bloom_gelu
    }.get(name)  # fmt: skip
    if written is not None:
        return written(rec, x)
    return ops.unary(rec, x, name, keeps="output" if name in KEEP_OUTPUT else "input")


def _new_gelu(rec: Recorder, x: Tensor) -> Tensor:
    """0.5 * x * (1 + tanh(c * (x + 0.044715 * x^3)))."""
    half = ops.scale(rec, x, "half")
    inner = ops.add(rec, x, ops.scale(rec, _power(rec, x, "cube"), "scaled cube"), "inner")
    inner = ops.scale(rec, inner, "tanh input")
    gate = ops.unary(rec, inner, "tanh", keeps="output")
    del inner
    return ops.mul(rec, half, ops.shift(rec, gate, "one plus tanh"), "gelu")


def _fast_gelu(rec: Recorder, x: Tensor) -> Tensor:
    """0.5 * x * (1 + tanh(x * c * (1 + 0.044715 * x * x)))."""
    half = ops.scale(rec, x, "half")
    inner = ops.scale(rec, x, "scaled")
    square = ops.mul(rec, ops.scale(rec, x, "scaled"), x, "square")
    inner = ops.mul(rec, inner, ops.shift(rec, square), "tanh input")
    del square
    gate = ops.unary(rec, inner, "tanh", keeps="output")
    del inner
    return ops.mul(rec, half, ops.shift(rec, gate, "one plus tanh"), "gelu")


def _quick_gelu(rec: Recorder, x: Tensor) -> Tensor:
    """x * sigmoid(1.702 * x)."""
    return ops.mul(rec, x, ops.unary(rec, ops.scale(rec, x, "scaled"), "sigmoid", keeps="output"), "gelu")


def _relu2(rec: Recorder, x: Tensor) -> Tensor:
    """relu(x)^2."""
    return _power(rec, ops.unary(rec, x, "relu", keeps="output"), "squared relu")


def _power(rec: Recorder, x: Tensor, label: str) -> Tensor:
    """torch.pow, which autocast runs in fp32: so is all that is computed from it."""
    return ops.power(rec, ops.cast(rec, x, 4, "fp32 copy") if rec.autocast else x, label)


def _bloom_gelu(rec: Recorder, x: Tensor) -> Tensor:
    """BLOOM's own autograd function: keeps the input, and writes both directions out in up to six tensors."""
    _held(rec, x, 3)
    out = rec.like(x, "gelu")

    def backward(g: Tensor) -> list[Tensor | None]:
        _held(rec, g, 5)
        return [rec.like(g, "gelu gradient")]

    return rec.record(out, [x], [x], backward)


def _held(rec: Recorder, x: Tensor, count: int) -> None:
    """`count` intermediate results alive at once."""
    held = [rec.like(x, "gelu intermediate") for _ in range(count)]
    while held:
        held.pop()
