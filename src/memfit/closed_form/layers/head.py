"""The upper end of a model: the last norm, the output projection and the loss."""

from __future__ import annotations

from functools import lru_cache

from memfit.closed_form import ops
from memfit.closed_form.engine import Recorder, Tensor
from memfit.closed_form.layers.activations import activation
from memfit.closed_form.layers.logits import HeadStyle
from memfit.closed_form.layers.losses import LOSSES
from memfit.closed_form.layers.norms import norm
from memfit.closed_form.layers.program import Program, finished, recorder, sharded
from memfit.closed_form.style import Style
from memfit.nouns.architecture import Norm


@lru_cache(maxsize=1024)
def head_program(h: HeadStyle, style: Style) -> Program:
    """Final norm, head and loss, forward and backward."""
    rec = recorder(style)
    rec.awaited = "embedding" if h.tied and rec.accumulating else ""
    x = rec.new({"T": h.width}, style.residual, "hidden states")
    rec.new({}, 1, "no gradient")
    rec.taken()
    x.requires_grad = style.grad and style.input_grad
    if h.norm is not None:
        x = norm(rec, x, h.norm, h.width, style, "final_norm")
    if h.transform:
        x = _transform(rec, h, style, x)
    loss, held = LOSSES[h.loss](rec, h, style, x)
    del x
    forward = rec.taken()
    returned = rec.returned or len(forward)
    forward, after = forward[:returned], forward[returned:]
    rec.exit_autocast()
    if not style.grad:
        del loss
        held.clear()
    exits = rec.taken()
    received = None
    if style.grad:
        first = [rec.new({"1": 1}, 4, "gradient of the loss")]
        root = Tensor(None, loss.elements, loss.itemsize, True, loss.grad_fn)
        received = rec.backward(root, first) if loss.grad_fn else None
        first.clear()
        held.clear()
        del loss
        if not h.tied:  # else the embedding's gradient comes first
            sharded(rec, style, beside=style.unit)  # the last block is prefetched
    if not style.grad:
        return finished(rec, [forward, [], [*after, *exits], []], 0, None)
    return finished(rec, [forward, [], exits, [*after, *rec.taken()]], 0, received)


def _transform(rec: Recorder, h: HeadStyle, style: Style, x: Tensor) -> Tensor:
    """The prediction head of encoders: dense, activation, norm."""
    w = ops.weight(h.width * h.width, h.itemsize, "transform.weight", h.trained)
    x = ops.linear(
        rec, x, w, {"T": h.width}, ops.weight(h.width, h.itemsize, "transform.bias", h.trained), "transformed"
    )
    x = activation(rec, x, h.transform)
    return norm(rec, x, Norm("layer"), h.width, style, "transform.norm")
