"""The loss of model classes up to transformers 4.45 and of remote code: shifted logits, then nn.CrossEntropyLoss.

Source: modeling_llama.py of 4.36, modeling_qwen.py, modeling_baichuan.py; accelerate's ConvertOutputsToFp32 around them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from memfit.formula import ops
from memfit.formula.engine import Recorder, Tensor

if TYPE_CHECKING:
    from memfit.formula.ends import HeadStyle

SIXTEEN_BIT = frozenset({"qwen", "baichuan"})  # families whose code scores the logits as they come


def head(rec: Recorder, h: HeadStyle, logits: Tensor) -> Tensor:
    """From logits to the loss. What the model returns is in fp32 until the trainer has looked at it."""
    if h.upcast:
        logits = ops.cast(rec, logits, 4, "fp32 logits")
    shifted = _shift(rec, logits, batched=h.batched)
    loss = _cross_entropy(rec, shifted)
    del shifted
    returned = ops.cast(rec, logits, 4, "fp32 copy of the model's output")
    del logits, returned
    return loss


def _shift(rec: Recorder, logits: Tensor, *, batched: bool) -> Tensor:
    """logits[..., :-1, :].contiguous(): a view of one sequence, a copy of several; backward writes into zeros."""
    elements, width = logits.elements, logits.itemsize
    out = rec.new(elements, width, "shifted logits") if batched else logits.view()

    def backward(g: Tensor, saved: list[Tensor]) -> list[Tensor | None]:
        return [rec.new(elements, width, "gradient of the slice")]

    return rec.record(out, [logits], [], backward)


def _cross_entropy(rec: Recorder, logits: Tensor) -> Tensor:
    """log_softmax in the dtype of the logits; nll_loss is an fp32 operation under autocast."""
    elements, width = logits.elements, logits.itemsize
    scores = rec.new(elements, width, "log_softmax", "activations")
    scores = rec.record(scores, [logits], [scores], lambda g, _: [rec.new(elements, width, "logits gradient")])
    wide = ops.cast(rec, scores, 4, "fp32 log_softmax") if rec.autocast else scores
    del scores
    itemsize = wide.itemsize
    loss = rec.new({"1": 1}, itemsize, "loss")
    return rec.record(loss, [wide], [wide], lambda g, _: [rec.new(elements, itemsize, "nll gradient")])
