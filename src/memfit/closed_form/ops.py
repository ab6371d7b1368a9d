"""PyTorch's operations on sized tensors: what each allocates forward, saves for backward and allocates backward.

One function per operation, named as in torch. Source: derivatives.yaml and the ATen kernels, checked against recorded
allocation tapes of the CUDA build. Gradients are computed in the alphabetical order of the formulas' names, as the
generated code does, and then summed and cast to their inputs' shape. A tensor that no variable holds is freed at once.
"""

from __future__ import annotations

from collections.abc import Sequence

from memfit.closed_form.engine import Elements, GraphRecorder, Tensor
from memfit.closed_form.size import Size

Grads = list[Tensor | None]


def weight(elements: int, itemsize: int, name: str, trained: bool) -> Tensor:
    """Return a parameter without storage: `static` counts its bytes, the trace only its gradient and casts."""
    return Tensor(None, {"1": elements}, itemsize, trained, None, name)


def constant(elements: Elements, itemsize: int) -> Tensor:
    """Return a tensor that is counted elsewhere and needs no gradient (rotary tables, masks)."""
    return Tensor(None, elements, itemsize)


def cast(rec: GraphRecorder, x: Tensor, itemsize: int, label: str = "cast") -> Tensor:
    """x.to(dtype): a copy when the width differs; its backward casts the gradient back."""
    if x.itemsize == itemsize:
        return x
    out, width = rec.like(x, label, itemsize), x.itemsize
    return rec.record(out, [x], [], lambda g: [rec.like(g, "cast gradient", width)])


def autocast(rec: GraphRecorder, x: Tensor) -> Tensor:
    """Cast an operand to the compute dtype of the autocast region; only trained fp32 weights are cached."""
    if not rec.autocast or x.itemsize == rec.autocast:
        return x
    if x.parameter is None or x.parameter in rec.inputs or not x.requires_grad:
        return cast(rec, x, rec.autocast, "autocast copy")
    if x.parameter not in rec.cache:
        rec.cache[x.parameter] = cast(rec, x, rec.autocast, "autocast copy")
    return rec.cache[x.parameter]


def linear(rec: GraphRecorder, x: Tensor, w: Tensor, shape: Elements, bias: Tensor | None = None,
           label: str = "output") -> Tensor:  # fmt: skip
    """F.linear: saves x when the weight is trained and the weight (or its cast) when x needs a gradient."""
    w, x = autocast(rec, w), autocast(rec, x)
    if bias is not None:
        bias = autocast(rec, bias)
    need_x, need_w, need_b = x.requires_grad, w.requires_grad, bias is not None and bias.requires_grad
    rec.before_saving(x if need_w else None, w if need_x else None)
    out = rec.product(shape, w.itemsize, label)
    x_elements, w_elements, width, columns = x.elements, w.elements, w.itemsize, bias.elements["1"] if bias else 0
    bias_first = bias is not None  # addmm computes mat1 before mat2, mm the other way round

    def backward(g: Tensor) -> Grads:
        input_grad = rec.product(x_elements, width, "input gradient") if need_x and bias_first else None
        weight_grad = rec.product(w_elements, width, "weight gradient") if need_w else None
        if need_x and not bias_first:
            input_grad = rec.product(x_elements, width, "input gradient")
        if need_b:  # validate_outputs sums it
            rec.returned_from_function()
        bias_grad = column_sum(rec, columns, width, g.elements) if need_b else None
        return [viewed(input_grad), viewed(weight_grad), viewed(bias_grad)]

    return rec.record(out, [x, w, bias], [x if need_w else None, w if need_x else None], backward)


def column_sum(rec: GraphRecorder, columns: int, itemsize: int, summed: Elements) -> Tensor:
    """g.sum(0) of a [rows, columns] gradient, with an fp32 staging buffer across thread blocks."""
    out = rec.new({"1": columns}, itemsize, "summed gradient")
    name, basis = ("reduce source", "X") if "X" in summed else ("reduce", "T")
    rec.buffer({(name, columns, summed.get(basis, columns) // columns): 1}, "reduction staging")
    return out


_EXTENT = ("1", "S", "T", "SS", "TS")  # bases from the smallest to the largest


def _extent(x: Tensor) -> tuple[int, int]:
    basis, count = next(iter(x.elements.items()))
    return (_EXTENT.index(basis) if basis in _EXTENT else len(_EXTENT)), count


def _wider(a: Tensor, b: Tensor) -> Tensor:
    """Return the operand that the other is broadcast to."""
    return a if _extent(a) >= _extent(b) else b


def _reduced(rec: GraphRecorder, g: Tensor | None, elements: Elements, itemsize: int) -> Tensor | None:
    """Bring a gradient back to its input's shape and dtype, as validate_outputs does."""
    if g is None:
        return None
    if g.elements != elements or g.itemsize != itemsize:
        rec.returned_from_function()
    if g.elements != elements:
        if set(elements) == {"1"}:
            g = column_sum(rec, elements["1"], g.itemsize, g.elements)
        else:
            g = rec.new(elements, g.itemsize, "summed gradient")
    return cast(rec, g, itemsize, "cast gradient")


def bmm(rec: GraphRecorder, a: Tensor, b: Tensor, shape: Elements, label: str = "product") -> Tensor:
    """torch.matmul of two activations with heads; copies operands that are laid out token by token."""
    a, b = autocast(rec, a), autocast(rec, b)
    a, b = heads_first(rec, a), heads_first(rec, b)
    out = rec.product(shape, a.itemsize, label, heads_first=True)
    need_a, need_b, a_like, b_like = a.requires_grad, b.requires_grad, a.blueprint(), b.blueprint()

    def backward(g: Tensor) -> Grads:
        second = rec.like(b_like, "gradient of b") if need_b else None
        first = rec.like(a_like, "gradient of a") if need_a else None
        return [viewed(first), viewed(second)]

    out = rec.record(out, [a, b], [a if need_b else None, b if need_a else None], backward)
    return rec.record(out.view(), [out], [], lambda g: [_as_heads_first(rec, g)])


def _as_heads_first(rec: GraphRecorder, g: Tensor) -> Tensor:
    return g if g.heads_first else rec.new(g.elements, g.itemsize, "contiguous gradient", heads_first=True)


def viewed(g: Tensor | None) -> Tensor | None:
    """Mark a gradient that passes through a view, so that the engine adds to it out of place."""
    if g is not None:
        g.viewed = True
    return g


def add(rec: GraphRecorder, a: Tensor, b: Tensor, label: str = "sum") -> Tensor:
    """a + b in the wider dtype; backward hands the same gradient to both (summed and cast where they are smaller)."""
    out = rec.like(_wider(a, b), label, max(a.itemsize, b.itemsize))
    shapes = [(a.elements, a.itemsize, a.requires_grad), (b.elements, b.itemsize, b.requires_grad)]
    return rec.record(out, [a, b], [], lambda g: [_reduced(rec, g if need else None, e, w) for e, w, need in shapes])


def mul(rec: GraphRecorder, a: Tensor, b: Tensor, label: str = "product") -> Tensor:
    """a * b, the smaller broadcast: its gradient is a full product and then a sum. Saves what the gradients need."""
    out = rec.like(_wider(a, b), label, max(a.itemsize, b.itemsize))
    need_a, need_b = a.requires_grad, b.requires_grad
    a_shape, b_shape = (a.elements, a.itemsize), (b.elements, b.itemsize)

    def backward(g: Tensor) -> Grads:
        second = rec.like(g, "gradient of b") if need_b else None
        first = rec.like(g, "gradient of a") if need_a else None
        first = _reduced(rec, first, *a_shape)
        return [first, _reduced(rec, second, *b_shape)]

    return rec.record(out, [a, b], [a if need_b else None, b if need_a else None], backward)


def sub(rec: GraphRecorder, a: Tensor, b: Tensor, label: str = "difference") -> Tensor:
    """a - b, b broadcast: its gradient is a negated copy and then a sum."""
    out = rec.like(a, label)
    need_a, need_b, b_shape = a.requires_grad, b.requires_grad, (b.elements, b.itemsize)

    def backward(g: Tensor) -> Grads:
        second = rec.like(g, "negated gradient") if need_b else None
        return [g if need_a else None, _reduced(rec, second, *b_shape)]

    return rec.record(out, [a, b], [], backward)


def unary(rec: GraphRecorder, x: Tensor, label: str, *, keeps: str = "input", buffers: int = 0) -> Tensor:
    """An elementwise function: saves its input, its output or nothing, and needs `buffers` extra copies backward."""
    out = rec.like(x, label)
    kept = {"input": x, "output": out, "nothing": None}[keeps]

    def backward(g: Tensor) -> Grads:
        held = [rec.like(g, f"{label} buffer") for _ in range(buffers)]
        result = rec.like(g, f"{label} gradient")
        held.clear()
        return [result]

    return rec.record(out, [x], [kept], backward)


def scale(rec: GraphRecorder, x: Tensor, label: str = "scaled") -> Tensor:
    """x * number, or -x."""
    return unary(rec, x, label, keeps="nothing")


def shift(rec: GraphRecorder, x: Tensor, label: str = "shifted") -> Tensor:
    """x + number: the gradient passes through."""
    return rec.record(rec.like(x, label), [x], [], lambda g: [g])


def power(rec: GraphRecorder, x: Tensor, label: str) -> Tensor:
    """x ** n: backward takes a power, scales it and multiplies."""
    return unary(rec, x, label, buffers=2)


def clone(rec: GraphRecorder, x: Tensor, label: str = "clone") -> Tensor:
    """x.clone(): the gradient passes through."""
    return rec.record(rec.like(x, label), [x], [], lambda g: [g])


def copy(rec: GraphRecorder, x: Tensor, itemsize: int, label: str = "copy") -> Tensor:
    """torch.cat with an empty tensor of a dtype: a new tensor, laid out head by head where there are heads."""
    out, width = rec.new(x.elements, itemsize, label, heads_first=True), x.itemsize
    return rec.record(
        out, [x], [], lambda g: [viewed(g.detach()) if width == itemsize else rec.like(g, "cast gradient", width)]
    )


def copy_into(rec: GraphRecorder, target: Tensor, source: Tensor) -> Tensor:
    """target[..., a:b].copy_(source): backward copies the whole gradient, then the part that goes to the source."""
    whole, part, written = target.blueprint(), source.blueprint(), target.requires_grad

    def backward(g: Tensor) -> Grads:
        rest = rec.like(whole, "gradient of the rest")
        own = rec.new(part.elements, g.itemsize, "gradient of the part", heads_first=True)
        if written:
            rec.like(own, "zeros")
        return [rest if written else None, own]

    return rec.record(target.view(), [target, source], [], backward)


def rows(rec: GraphRecorder, x: Tensor, indices: Tensor) -> Tensor:
    """x[indices] of up to all rows of tokens, or zeros[indices] = x: each is the backward of the other."""
    before, out = x.blueprint(), rec.new(x.elements, x.itemsize, "rows of tokens")
    return rec.record(out, [x], [indices], lambda g: [rec.new(before.elements, g.itemsize, "gradient of rows")])


def repeat(rec: GraphRecorder, x: Tensor, elements: Elements, label: str = "repeated") -> Tensor:
    """repeat_kv, repeat_interleave: keys or values copied for every query head; the gradient is summed back."""
    before = x.blueprint()
    out = rec.new(elements, x.itemsize, label, heads_first=True)
    return rec.record(out, [x], [], lambda g: [_summed_over_heads(rec, before, g)])


def expand(rec: GraphRecorder, x: Tensor, elements: Elements) -> Tensor:
    """x.expand(): a view of one head as many. Products copy it first, unless the batch is one sequence."""
    before = x.blueprint()
    out = x.view(elements)
    out.heads_first, out.expanded = False, True
    return rec.record(out, [x], [], lambda g: [_summed_over_heads(rec, before, g)])


def _summed_over_heads(rec: GraphRecorder, before: Tensor, g: Tensor) -> Tensor:
    return rec.new(before.elements, g.itemsize, "sum over repeated heads", heads_first=g.heads_first)


def heads_first(rec: GraphRecorder, x: Tensor, label: str = "contiguous") -> Tensor:
    """x.contiguous() of a [B, N, S, H] tensor: a copy when it is laid out token by token."""
    if x.heads_first:
        return x
    size: Elements = {"T+": x.elements["T"]} if x.expanded else x.elements
    out = rec.new(size, x.itemsize, label, heads_first=True).view(x.elements)
    return rec.record(out, [x], [], lambda g: [viewed(g.detach())])


def tokens_first(rec: GraphRecorder, x: Tensor, label: str = "contiguous") -> Tensor:
    """x.transpose(1, 2).contiguous(), back to [B, S, N * H]: a copy when it is laid out head by head."""
    if not x.heads_first:
        return x
    out = rec.new(x.elements, x.itemsize, label)
    return rec.record(out, [x], [], lambda g: [viewed(g.detach())])


def split_heads(rec: GraphRecorder, x: Tensor) -> Tensor:
    """x.view(B, S, N, H).transpose(1, 2): a view. A gradient laid out head by head is copied."""

    def backward(g: Tensor) -> Grads:
        if g.heads_first:
            return [rec.new(g.elements, g.itemsize, "contiguous gradient")]
        return [viewed(g.detach())]

    return rec.record(x.view(), [x], [], backward)


def slice(rec: GraphRecorder, x: Tensor, elements: Elements) -> Tensor:
    """x[..., a:b]: a view; its gradient is written into zeros of the whole shape."""
    whole = x.elements
    return rec.record(
        x.view(elements), [x], [], lambda g: [rec.new(whole, g.itemsize, "slice gradient", heads_first=True)]
    )


def split(rec: GraphRecorder, x: Tensor, widths: Sequence[int], *, by_head: bool = False) -> list[Tensor]:
    """x.split(widths, dim=-1): views. Their gradients are concatenated, `by_head` in the layout [B, N, S, H]."""
    basis = next(iter(x.elements))
    parts = [x.view({basis: w}) for w in widths]
    whole = x.elements

    def backward(grads: list[Tensor | None]) -> Grads:
        width = next(g.itemsize for g in grads if g is not None)
        return [rec.new(whole, width, "joined gradient", heads_first=by_head)]

    rec.record_all(parts, [x], [], backward)
    return parts


def cat(rec: GraphRecorder, parts: Sequence[Tensor], label: str = "concatenated") -> Tensor:
    """torch.cat along the last axis: a new tensor; gradients come back as views of one."""
    basis = next(iter(parts[0].elements))
    shapes = [p.elements for p in parts]
    whole = {basis: sum(e[basis] for e in shapes)}
    out = rec.new(whole, parts[0].itemsize, label, heads_first=True)

    def backward(g: Tensor) -> Grads:
        views = [g.detach() for _ in shapes]
        for view, elements in zip(views, shapes, strict=True):
            view.elements, view.viewed = elements, True
        return list(views)

    return rec.record(out, list(parts), [], backward)


def extended(rec: GraphRecorder, x: Tensor, elements: Elements, label: str) -> Tensor:
    """cat((x, a column)): the gradient comes back as a view of a part."""
    out = rec.new(elements, x.itemsize, label, heads_first=True)
    before = x.elements

    def backward(g: Tensor) -> Grads:
        part = g.detach()
        part.elements, part.viewed = before, True
        return [part]

    return rec.record(out, [x], [], backward)


def minus_maximum(rec: GraphRecorder, x: Tensor, rows: Elements) -> Tensor:
    """x - x.max(dim=-1, keepdim=True).values: saves the index of the maximum."""
    top, where = rec.new(rows, x.itemsize, "maximum"), rec.new(rows, 8, "index of the maximum")
    like = x.blueprint()
    top = rec.record(top, [x], [where], lambda g: [rec.like(like, "gradient of the maximum")])
    return sub(rec, x, top, "shifted scores")


def dropout(rec: GraphRecorder, x: Tensor, p: float) -> Tensor:
    """native_dropout: saves a bool mask; x itself when p is 0."""
    if not p:
        return x
    mask = rec.like(x, "dropout mask", 1)
    out = rec.like(x, "dropout output")
    return rec.record(out, [x], [mask], lambda g: [rec.like(g, "dropout gradient")])


def softmax(
    rec: GraphRecorder, x: Tensor, itemsize: int, label: str = "softmax", *, keeps_input: bool = False
) -> Tensor:
    """F.softmax(x, dtype=...): casts x first, saves the output; backward multiplies it by the gradient.

    Of fp16 CUDA reads 16 bits and writes 32, and the other way round in the backward (SoftMax.cu, half_to_float).
    """
    x = x if rec.half else cast(rec, x, itemsize, "fp32 copy")
    out, width = rec.like(x, label, itemsize), x.itemsize

    def backward(g: Tensor) -> Grads:
        result = rec.like(g, "softmax gradient", width)
        rec.like(g, "output * gradient")
        return [result]

    return rec.record(out, [x], [out, x] if keeps_input else [out], backward)


def layer_norm(
    rec: GraphRecorder, x: Tensor, w: Tensor | None, b: Tensor | None, rows: Size, *, turned: bool = False
) -> Tensor:
    """F.layer_norm: saves x, mean and rstd (fp32 per row); autocast runs it in fp32.

    turned: x is no contiguous tensor, so that forward and backward copy it first.
    """
    x = cast(rec, x, 4, "autocast copy") if rec.autocast else x
    copied = rec.like(x, "contiguous input") if turned else None
    out = rec.like(x, "layer_norm output")
    mean, rstd = rec.new(rows, 4, "layer_norm mean"), rec.new(rows, 4, "layer_norm rstd")
    del copied
    need_x, trained = x.requires_grad, w is not None and w.requires_grad
    columns, w_width = (w.elements["1"], w.itemsize) if w is not None else (0, 0)

    def backward(g: Tensor) -> Grads:
        copied = rec.like(g, "contiguous input") if turned else None
        input_grad = rec.like(g, "layer_norm gradient") if need_x else None
        if not trained:
            return [input_grad, None, None]
        grads = [rec.new({"1": columns}, w_width, "summed gradient") for _ in range(2 if b is not None else 1)]
        del copied
        return [input_grad, *grads, *([None] if b is None else [])]

    return rec.record(out, [x, w, b], [x, mean, rstd], backward)


def cross_entropy(rec: GraphRecorder, logits: Tensor, labels: Tensor | None = None) -> Tensor:
    """F.cross_entropy: saves log_softmax in the dtype of the logits; autocast casts it to fp32 for nll_loss."""
    out = rec.like(logits, "log_softmax")
    out = rec.record(out, [logits], [out], lambda g: [rec.like(g, "logits gradient")])
    wide = cast(rec, out, 4, "fp32 log_softmax") if rec.autocast else out
    loss, shape = rec.new({"1": 1}, wide.itemsize, "loss"), wide.blueprint()
    return rec.record(loss, [wide], [wide, labels], lambda g: [rec.like(shape, "nll gradient")])
