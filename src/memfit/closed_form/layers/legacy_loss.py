"""The loss of model classes up to transformers 4.45 and of remote code: shifted logits, then nn.CrossEntropyLoss.

Source: modeling_llama.py of 4.36, modeling_qwen.py, modeling_baichuan.py; accelerate's ConvertOutputsToFp32 around them.
"""

from __future__ import annotations

from memfit.closed_form import ops
from memfit.closed_form.engine import Recorder, Tensor
from memfit.closed_form.layers.logits import HeadStyle

SIXTEEN_BIT = frozenset({"qwen", "baichuan"})  # families whose code scores the logits as they come


def head(rec: Recorder, h: HeadStyle, logits: Tensor) -> Tensor:
    """From logits to the loss. What the model returns is in fp32 until the trainer has looked at it."""
    if h.upcast:
        logits = ops.cast(rec, logits, 4, "fp32 logits")
    loss = ops.cross_entropy(rec, _shift(rec, h, logits))
    returned = [ops.cast(rec, logits, 4, "fp32 copy of the model's output")]
    returned += [rec.new({"T": width}, 4, "fp32 copy of the cache") for width in h.cached]
    del logits, returned
    return loss


def _shift(rec: Recorder, h: HeadStyle, logits: Tensor) -> Tensor:
    """logits[..., :-1, :].contiguous(): a view of one sequence, a copy of several; backward writes into zeros."""
    shifted = ops.slice(rec, logits, {"L": h.vocabulary})
    return ops.clone(rec, shifted, "shifted logits") if h.batched else shifted
