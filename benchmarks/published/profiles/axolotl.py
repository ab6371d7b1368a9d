"""axolotl with Apple's cut cross entropy, whose kernels never hold logits."""

from __future__ import annotations

from dataclasses import replace

from memfit.closed_form import ops
from memfit.closed_form.engine import GraphRecorder, Tensor
from memfit.closed_form.layers.head import LOSSES, HeadStyle
from memfit.closed_form.style import Style
from memfit.tables.trainers import trainer


def cut(rec: GraphRecorder, h: HeadStyle, style: Style, x: Tensor) -> tuple[Tensor, list[Tensor]]:
    """cut_cross_entropy's linear_cross_entropy: it saves the log-sum-exp, and its backward makes gradients alone."""
    w = ops.weight(h.vocabulary * h.width, h.itemsize, "embedding" if h.tied else "head", h.trained)
    kept = rec.new({"T": 1}, 4, "log-sum-exp")
    loss = rec.new({"1": 1}, 4, "loss")

    def backward(g: Tensor) -> list[Tensor | None]:
        hidden = rec.like(x, "gradient of hidden states") if x.requires_grad else None
        return [hidden, rec.like(w, "head gradient") if w.requires_grad else None]

    return rec.record(loss, [x, w], [x, kept], backward), []


LOSSES["cut"] = cut
AXOLOTL = replace(trainer("axolotl-loss"), heads=tuple((loss, "cut") for loss in ("full", "chunked", "fused")))
