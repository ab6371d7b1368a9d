"""Attention of towers that take the patches of all images as one sequence, and attend within each image or window.

Source: Qwen2_5_VLVisionAttention of transformers 5.23 under sdpa, which splits queries, keys and values and joins the
results. Windows of one length are counted as one call, as a trace runs them (virtual.jobs.windows).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from memfit.closed_form import ops
from memfit.closed_form.engine import GraphRecorder, Tensor
from memfit.closed_form.layers.attention_kernels import scaled_dot_product_attention
from memfit.closed_form.layers.elementwise import rotate
from memfit.closed_form.layers.linears import LayerRun
from memfit.closed_form.size import rows_of
from memfit.errors import TRACE_HINT, Unsupported
from memfit.nouns.architecture import Attention, Rows


def within_images(block: LayerRun, x: Tensor, a: Attention) -> Tensor:
    """Attend within windows, or within each image by a call of its own, whose scratch memory is that of one image.

    Raises Unsupported for eager attention.
    """
    if block.style.kernel == "eager":
        raise Unsupported("no formula counts eager attention within images", hint=TRACE_HINT)
    rec, width = block.rec, a.heads * a.head_dim
    q, k, v = _unbound(rec, block.linear("qkv", x, 3 * width), width)
    q, k = rotate(rec, q, k, a, 4)
    assert block.style.images is not None
    groups = block.style.windows if a.window else (block.style.images,)
    parts = [_split(rec, t, groups) for t in (q, k, v)]
    outputs = []
    for group, q, k, v in zip(groups, *parts, strict=True):
        rec.units, rec.scratch = rows_of(group), rows_of(group, one=not a.window)
        outputs.append(scaled_dot_product_attention(rec, block.style, q, k, v, replace(a, code=""), 0.0, None))
    rec.units = rec.scratch = rows_of(block.style.images)
    del parts, q, k, v
    return block.linear("o", _joined(rec, outputs), width)


def _unbound(rec: GraphRecorder, x: Tensor, width: int) -> list[Tensor]:
    """x.reshape(S, 3, N, H).permute(1, 0, 2, 3).unbind(0): gradients are stacked, then copied to the order of x."""
    parts, whole, itemsize = [x.view({"T": width}) for _ in range(3)], x.elements, x.itemsize

    def backward(grads: list[Tensor | None]) -> list[Tensor | None]:
        stacked = rec.new(whole, itemsize, "stacked gradient")
        grads.clear()
        out = rec.new(whole, itemsize, "gradient in the order of the projection")
        del stacked
        return [out]

    rec.record_all(parts, [x], [], backward)
    return parts


def _split(rec: GraphRecorder, x: Tensor, groups: Sequence[Rows]) -> list[Tensor]:
    """torch.split of tokens: views, whose gradients are joined."""
    parts, whole, width = [x.view() for _ in groups], x.elements, x.itemsize
    rec.record_all(parts, [x], [], lambda grads: [rec.new(whole, width, "joined gradient")])
    return parts


def _joined(rec: GraphRecorder, parts: list[Tensor]) -> Tensor:
    """torch.cat of tokens: gradients are views."""
    out = rec.new(parts[0].elements, parts[0].itemsize, "joined output")
    count = len(parts)
    return rec.record(out, list(parts), [], lambda g: [ops.viewed(g.detach()) for _ in range(count)])
