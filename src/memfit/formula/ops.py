"""PyTorch's operations on sized tensors: what each allocates forward, keeps for backward and allocates backward.

One function per operation, named as in torch. Source: derivatives.yaml and the ATen kernels, checked against recorded
allocation tapes of the CUDA build; every rule that adds bytes beyond the result says so.
"""

from __future__ import annotations

from memfit.formula.engine import Elements, Recorder, Tensor
from memfit.formula.size import Size

SAVED = list[Tensor]
GRADS = list[Tensor | None]


def weight(elements: int, itemsize: int, name: str, trained: bool) -> Tensor:
    """A parameter: its own bytes are counted with the parameters, here only its gradient and its casts."""
    return Tensor(None, {"1": elements}, itemsize, trained, None, name)


def constant(elements: Elements, itemsize: int) -> Tensor:
    """A tensor counted elsewhere that needs no gradient (rotary tables, masks)."""
    return Tensor(None, elements, itemsize)


def cast(rec: Recorder, x: Tensor, itemsize: int, label: str = "cast") -> Tensor:
    """x.to(dtype): a copy when the width differs; its backward casts the gradient back."""
    if x.itemsize == itemsize:
        return x
    out = rec.new(x.elements, itemsize, label)
    elements, wide = x.elements, x.itemsize
    return rec.record(out, [x], [], lambda g, _: [rec.new(elements, wide, "cast gradient")])


def autocast(rec: Recorder, x: Tensor) -> Tensor:
    """An operand in the compute dtype of the autocast region; only trained fp32 weights are cached."""
    if not rec.autocast or x.itemsize == rec.autocast:
        return x
    if x.parameter is None or not x.requires_grad or not rec.grad:
        return cast(rec, x, rec.autocast, "autocast copy")
    if x.parameter not in rec.cache:
        rec.cache[x.parameter] = cast(rec, x, rec.autocast, "autocast copy")
    return rec.cache[x.parameter]


def linear(rec: Recorder, x: Tensor, w: Tensor, shape: Elements, bias: Tensor | None = None,
           label: str = "output") -> Tensor:  # fmt: skip
    """F.linear: keeps x when the weight is trained and the weight (or its cast) when x needs a gradient."""
    w, x = autocast(rec, w), autocast(rec, x)
    if bias is not None:
        bias = autocast(rec, bias)
    need_x, need_w, need_b = x.requires_grad, w.requires_grad, bias is not None and bias.requires_grad
    rec.before_saving(x if need_w else None, w if need_x else None)
    out = rec.new(shape, w.itemsize, label)
    x_elements, w_elements, width, columns = x.elements, w.elements, w.itemsize, bias.elements["1"] if bias else 0

    def backward(g: Tensor, saved: SAVED) -> GRADS:
        bias_grad = column_sum(rec, columns, width) if need_b else None
        weight_grad = rec.new(w_elements, width, "weight gradient") if need_w else None
        input_grad = rec.new(x_elements, width, "input gradient") if need_x else None
        if input_grad is not None:
            input_grad.viewed = True
        return [input_grad, weight_grad, bias_grad]

    return rec.record(out, [x, w, bias], [x if need_w else None, w if need_x else None], backward)


def column_sum(rec: Recorder, columns: int, itemsize: int) -> Tensor:
    """g.sum(0) of a [T, columns] gradient: fp32 staging buffer across thread blocks, freed at once."""
    out = rec.new({"1": columns}, itemsize, "summed gradient")
    rec.buffer({("reduce", columns, 4): 1}, "reduction staging")
    return out


def bmm(rec: Recorder, a: Tensor, b: Tensor, shape: Elements, label: str = "product") -> Tensor:
    """torch.matmul of two activations (eager attention)."""
    a, b = autocast(rec, a), autocast(rec, b)
    out = rec.new(shape, a.itemsize, label)
    need_a, need_b, a_elements, b_elements, width = a.requires_grad, b.requires_grad, a.elements, b.elements, a.itemsize

    def backward(g: Tensor, saved: SAVED) -> GRADS:
        first = rec.new(a_elements, width, "gradient of a") if need_a else None
        return [first, rec.new(b_elements, width, "gradient of b") if need_b else None]

    return rec.record(out, [a, b], [a if need_b else None, b if need_a else None], backward)


def add(rec: Recorder, a: Tensor, b: Tensor, label: str = "sum") -> Tensor:
    """a + b in the wider dtype; backward hands the same gradient to both (cast where the widths differ)."""
    width = max(a.itemsize, b.itemsize)
    out = rec.new(a.elements, width, label)
    widths, elements = (a.itemsize, b.itemsize), a.elements

    def backward(g: Tensor, saved: SAVED) -> GRADS:
        return [g if w == width else rec.new(elements, w, "cast gradient") for w in widths]

    return rec.record(out, [a, b], [], backward)


def mul(rec: Recorder, a: Tensor, b: Tensor, label: str = "product") -> Tensor:
    """a * b of equal shapes, or b broadcast: keeps each operand the other's gradient needs."""
    out = rec.new(a.elements, max(a.itemsize, b.itemsize), label)
    need_a, need_b, elements, width = a.requires_grad, b.requires_grad, a.elements, out.itemsize
    a_width, b_width = a.itemsize, b.itemsize

    def backward(g: Tensor, saved: SAVED) -> GRADS:
        first = rec.new(elements, width, "gradient of a") if need_a else None
        second = rec.new(elements, width, "gradient of b") if need_b else None
        return [_as(rec, first, a_width), _as(rec, second, b_width)]

    return rec.record(out, [a, b], [a if need_b else None, b if need_a else None], backward)


def _as(rec: Recorder, g: Tensor | None, itemsize: int) -> Tensor | None:
    return None if g is None else cast(rec, g, itemsize, "cast gradient")


def scale_by_weight(rec: Recorder, w: Tensor, x: Tensor, label: str = "scaled") -> Tensor:
    """weight * x with a [D] weight: the weight's gradient is a full product summed over the tokens."""
    out = rec.new(x.elements, max(w.itemsize, x.itemsize), label)
    need_w, need_x, elements, width = w.requires_grad, x.requires_grad, x.elements, out.itemsize
    columns, w_width, x_width = w.elements["1"], w.itemsize, x.itemsize

    def backward(g: Tensor, saved: SAVED) -> GRADS:
        full = rec.new(elements, width, "unsummed weight gradient") if need_w else None
        input_grad = rec.new(elements, width, "input gradient") if need_x else None
        weight_grad = column_sum(rec, columns, w_width) if need_w else None
        del full
        return [weight_grad, _as(rec, input_grad, x_width)]

    return rec.record(out, [w, x], [x if need_w else None, w if need_x else None], backward)


def unary(rec: Recorder, x: Tensor, label: str, *, keeps: str = "input", buffers: int = 0) -> Tensor:
    """An elementwise function: keeps its input, its output or nothing, and needs `buffers` extra copies backward."""
    out = rec.new(x.elements, x.itemsize, label)
    kept = {"input": x, "output": out, "nothing": None}[keeps]
    elements, width = x.elements, x.itemsize

    def backward(g: Tensor, saved: SAVED) -> GRADS:
        held = [rec.new(elements, width, f"{label} buffer") for _ in range(buffers)]
        result = rec.new(elements, width, f"{label} gradient")
        del held
        return [result]

    return rec.record(out, [x], [kept], backward)


def scale(rec: Recorder, x: Tensor, label: str = "scaled") -> Tensor:
    """x times a number."""
    return unary(rec, x, label, keeps="nothing")


def copy(rec: Recorder, x: Tensor, elements: Elements | None = None, label: str = "copy") -> Tensor:
    """contiguous(), repeat_kv, cat: a new tensor; the gradient comes back as a new tensor of the old shape when it shrinks."""
    shape = x.elements if elements is None else elements
    out = rec.new(shape, x.itemsize, label)
    before, width = x.elements, x.itemsize

    def backward(g: Tensor, saved: SAVED) -> GRADS:
        return [g if before == shape else rec.new(before, width, f"{label} gradient")]

    return rec.record(out, [x], [], backward)


def dropout(rec: Recorder, x: Tensor, p: float) -> Tensor:
    """native_dropout: a bool mask is kept. Nothing at all when p is 0."""
    if not p:
        return x
    out = rec.new(x.elements, x.itemsize, "dropout output")
    mask = rec.new(x.elements, 1, "dropout mask")
    elements, width = x.elements, x.itemsize
    return rec.record(out, [x], [mask], lambda g, _: [rec.new(elements, width, "dropout gradient")])


def softmax(rec: Recorder, x: Tensor, itemsize: int, label: str = "softmax") -> Tensor:
    """F.softmax(x, dtype=...): one kernel; keeps its output; a wider dtype than x is computed without a copy of x."""
    out = rec.new(x.elements, itemsize, label)
    elements, width = x.elements, x.itemsize

    def backward(g: Tensor, saved: SAVED) -> GRADS:
        return [rec.new(elements, width, "softmax gradient")]

    return rec.record(out, [x], [out], backward)


def layer_norm(rec: Recorder, x: Tensor, w: Tensor | None, b: Tensor | None, rows: Size) -> Tensor:
    """F.layer_norm: keeps x, mean and rstd (fp32 per row); an fp32 op under autocast."""
    width = 4 if rec.autocast else x.itemsize
    x = cast(rec, x, width, "autocast copy") if rec.autocast else x
    out = rec.new(x.elements, x.itemsize, "layer_norm output")
    mean, rstd = rec.new(rows, 4, "layer_norm mean"), rec.new(rows, 4, "layer_norm rstd")
    elements, width = x.elements, x.itemsize
    need_x, trained = x.requires_grad, w is not None and w.requires_grad
    columns, w_width = (w.elements["1"], w.itemsize) if w is not None else (0, 0)

    def backward(g: Tensor, saved: SAVED) -> GRADS:
        input_grad = rec.new(elements, width, "layer_norm gradient") if need_x else None
        if not trained:
            return [input_grad, None, None]
        grads = [rec.new({"1": columns}, w_width, "summed gradient") for _ in range(2 if b is not None else 1)]
        return [input_grad, *grads, *([None] if b is None else [])]

    return rec.record(out, [x, w, b], [x, mean, rstd], backward)
