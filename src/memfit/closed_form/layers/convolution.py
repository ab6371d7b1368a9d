"""Convolutions as PyTorch runs them through cuDNN, whose workspaces a table knows."""

from __future__ import annotations

from memfit.closed_form import ops
from memfit.closed_form.engine import Elements, GraphRecorder, Tensor
from memfit.tables.cudnn_convolutions import Convolution, Part


def convolved(
    c: Convolution, itemsize: int, name: str, trained: bool, *, bias: bool = True
) -> tuple[Tensor, Tensor | None]:
    """Return the kernels of a convolution and, with `bias`, its shift."""
    kernels = ops.weight(c.outside * c.inside * c.taps, itemsize, f"{name}.weight", trained)
    return kernels, ops.weight(c.outside, itemsize, f"{name}.bias", trained) if bias else None


def convolution(
    rec: GraphRecorder, x: Tensor, weight: Tensor, bias: Tensor | None, c: Convolution, shape: Elements, each: int = 1
) -> Tensor:
    """F.conv1d and its kin: each pass is followed by its workspace, and the bias's gradient, a sum, comes last.

    c: the convolution of one input, of which each sample has `each`. A gradient in another layout than the result's
    (`heads_first`) is copied first, and summed in blocks of rows.
    """
    shift = None if bias is None else ops.autocast(rec, bias)
    weight, x = ops.autocast(rec, weight), ops.autocast(rec, x)
    width, before, kernels = weight.itemsize, x.elements, weight.elements
    need_x, need_w, need_b = x.requires_grad, weight.requires_grad, shift is not None and shift.requires_grad

    def workspace(part: Part) -> None:
        rec.buffer({("convolution", (c, part), each): 1}, "cuDNN workspace")

    out = rec.new(shape, width, "convolved")
    workspace("forward")

    def backward(g: Tensor) -> ops.Grads:
        laid_out = rec.new(shape, width, "contiguous gradient") if g.heads_first else g
        grads: list[Tensor | None] = [None, None, None]
        if need_x:
            grads[0] = rec.new(before, width, "input gradient")
            workspace("input")
        if need_w:
            grads[1] = rec.new(kernels, width, "gradient of the kernels")
            workspace("weight")
        if need_b and g.heads_first:
            grads[2] = ops.column_sum(rec, c.outside, width, shape)
        elif need_b:
            grads[2] = rec.new({"1": c.outside}, width, "summed gradient")
        del laid_out
        return grads

    return rec.record(out, [x, weight, shift], [x, weight] if need_x or need_w else [], backward)
