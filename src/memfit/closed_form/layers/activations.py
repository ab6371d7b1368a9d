"""The activation functions of transformers.activations by their config name."""

from __future__ import annotations

from memfit.closed_form import ops
from memfit.closed_form.engine import Recorder, Tensor

KEEP_OUTPUT = ("relu", "sigmoid", "tanh")


def activation(rec: Recorder, x: Tensor, name: str, trained: bool = False) -> Tensor:
    """act(x); a name that is not written out here is one kernel that keeps its input. trained: so are its parameters."""
    if name == "xielu":
        return _xielu(rec, x, trained)
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


def _xielu(rec: Recorder, x: Tensor, trained: bool) -> Tensor:
    """where(x > 0, a * x * x + b * x, (expm1(min(x, eps)) - x) * c + b * x); autocast makes a and c fp32, and what follows."""
    wide = 4 if rec.autocast else x.itemsize
    positive_scale, negative_scale = (ops.weight(1, wide, name, trained) for name in ("alpha_p", "alpha_n"))
    positive = rec.like(x, "x > 0", 1)
    square = ops.mul(rec, ops.mul(rec, positive_scale, x, "scaled x"), x, "scaled square")
    above = ops.add(rec, square, ops.scale(rec, x, "linear part"), "positive branch")
    del square
    exponential = ops.unary(rec, ops.cast(rec, _minimum(rec, x), wide, "fp32 copy"), "expm1", keeps="output", buffers=1)
    difference = ops.sub(rec, exponential, x, "expm1 - x")
    del exponential
    scaled = ops.mul(rec, difference, negative_scale, "scaled difference")
    del difference
    below = ops.add(rec, scaled, ops.scale(rec, x, "linear part"), "negative branch")
    del scaled
    return rec.record(
        rec.like(above, "xielu"),
        [above, below],
        [positive],
        lambda g: [rec.like(g, "gradient of a branch") for _ in "ab"],
    )


def _minimum(rec: Recorder, x: Tensor) -> Tensor:
    """torch.min(x, a number): ties share the gradient, which takes two masks and half of it."""

    def backward(g: Tensor) -> list[Tensor | None]:
        held = [rec.like(g, "half of the gradient"), rec.like(g, "equal", 1)]
        result = rec.like(g, "minimum gradient")
        held.append(rec.like(g, "larger", 1))
        del held
        return [result]

    return rec.record(rec.like(x, "minimum"), [x], [x], backward)


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
