"""Liger's Triton kernels on sized tensors: autograd functions that save little and work in place where they can.

Source: liger-kernel 0.8.5, ops/rms_norm.py, swiglu.py, geglu.py, rope.py and fused_moe.py. Every function makes its
inputs contiguous first. Under autocast they compute in the dtype they are given.
"""

from __future__ import annotations

from memfit.closed_form import ops
from memfit.closed_form.engine import Elements, GraphRecorder, Tensor


def rms_norm(rec: GraphRecorder, x: Tensor, w: Tensor, rows: Elements, *, in_place: bool) -> Tensor:
    """LigerRMSNormFunction: saves x, weight and an fp32 rstd per row; sums the weight's gradient by multiprocessor."""
    out, rstd = rec.like(x, "normalised"), rec.new(rows, 4, "rstd")
    columns, width, trained, heads_first = w.elements["1"], w.itemsize, w.requires_grad, x.heads_first

    def backward(g: Tensor) -> list[Tensor | None]:
        if g.heads_first != heads_first:
            g = rec.new(g.elements, g.itemsize, "contiguous gradient", heads_first=heads_first)
        partial = rec.new({"processors": columns}, 4, "partial weight gradients") if trained else None
        input_grad = g.view() if in_place else rec.like(g, "norm gradient")
        if partial is None:
            return [ops.viewed(input_grad), None]
        summed = rec.new({"1": columns}, 4, "summed gradient")
        return [ops.viewed(input_grad), ops.cast(rec, summed, width, "weight gradient")]

    return rec.record(out, [x, w], [x, w, rstd], backward)


def gated_product(rec: GraphRecorder, gate: Tensor, up: Tensor) -> Tensor:
    """LigerSiLUMulFunction, LigerGELUMulFunction: act(gate) * up; the gradients overwrite the two saved tensors."""

    def backward(g: Tensor) -> list[Tensor | None]:
        assert rec.running is not None
        up, gate = rec.running.saved  # in the order in which a node releases them
        return [ops.viewed(gate.detach()), ops.viewed(up.detach())]

    return rec.record(rec.like(gate, "gated product"), [gate, up], [gate, up], backward)


def halves(rec: GraphRecorder, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the two halves of a joint projection, each copied."""
    count = next(iter(x.elements.values()))
    gate, up = ops.split(rec, x, (count // 2, count // 2))
    return contiguous(rec, gate), contiguous(rec, up)


def contiguous(rec: GraphRecorder, part: Tensor) -> Tensor:
    """Copy a part of a tensor, as a Liger function does before it begins."""
    copied = rec.new(part.elements, part.itemsize, "contiguous part")
    return rec.record(copied, [part], [], lambda g: [ops.viewed(g.detach())])


def rotate(rec: GraphRecorder, q: Tensor, k: Tensor, *, parts: bool) -> tuple[Tensor, Tensor]:
    """LigerRopeFunction: in place on [B, S, N, H], forward and backward; another layout is copied first.

    parts: queries and keys are parts of one tensor.
    """
    q, k = (_by_token(rec, x, "heads by token", parts) for x in (q, k))
    turned = [q.view(), k.view()]

    def backward(grads: list[Tensor | None]) -> list[Tensor | None]:
        return [None if g is None else ops.viewed(_by_token(rec, g, "gradient by token")) for g in grads]

    rec.record_all(turned, [q, k], [], backward)
    return turned[0], turned[1]


def _by_token(rec: GraphRecorder, x: Tensor, label: str, part: bool = False) -> Tensor:
    """x.transpose(1, 2).contiguous() inside an autograd function, so it adds no node to the graph."""
    if not (x.heads_first or part):
        return x.view()
    copied = rec.new(x.elements, x.itemsize, label)
    copied.requires_grad, copied.grad_fn, copied.slot = x.requires_grad, x.grad_fn, x.slot
    return copied


def experts(rec: GraphRecorder, x: Tensor, scores: Tensor, gate_up: Tensor, down: Tensor, width: int, k: int) -> Tensor:
    """LigerFusedMoEFunction: saves its inputs and the joint projection; makes all gradients, needed or not."""
    joint: Elements = {"T": 2 * width * k}
    hidden: Elements = {basis: n * k for basis, n in x.elements.items()}
    before = rec.new(joint, x.itemsize, "joint projection")
    working = [rec.new({"T": width * k}, x.itemsize, "gated product")]
    working.append(rec.new(hidden, x.itemsize, "output of the experts"))
    out = rec.like(x, "experts' output")
    working.clear()
    x_like, up_like, down_like = x.blueprint(), gate_up.blueprint(), down.blueprint()

    def backward(g: Tensor) -> list[Tensor | None]:
        held = [rec.new(joint, g.itemsize, "gradient of the joint projection")]
        held.append(rec.new({"T": width * k}, g.itemsize, "weighted product"))
        score_grad = rec.new({"T": k}, g.itemsize, "gradient of the scores")
        down_grad = rec.like(down_like, "weight gradient")
        held.append(rec.new(hidden, g.itemsize, "gradient by expert"))
        x_grad = rec.like(x_like, "input gradient", g.itemsize)
        up_grad = rec.like(up_like, "weight gradient")
        held.clear()
        return [x_grad, score_grad, up_grad, down_grad]

    return rec.record(out, [x, scores, gate_up, down], [x, gate_up, down, before, scores], backward)
