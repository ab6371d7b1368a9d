"""The loss of model classes up to transformers 4.45 and of remote code: shifted logits, then nn.CrossEntropyLoss.

Source: modeling_llama.py of 4.36, modeling_qwen.py, modeling_baichuan.py; accelerate's ConvertOutputsToFp32 around them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from memfit.formula import ops
from memfit.formula.engine import Recorder, Tensor

if TYPE_CHECKING:
    from memfit.formula.head import HeadStyle

SIXTEEN_BIT = frozenset({"qwen", "baichuan"})  # families whose code scores the logits as they come


def head(rec: Recorder, h: HeadStyle, logits: Tensor) -> Tensor:
    """From logits to the loss. What the model returns is in fp32 until the trainer has looked at it."""
    if h.upcast:
        logits = ops.cast(rec, logits, 4, "fp32 logits")
    loss = ops.cross_entropy(rec, _shift(rec, logits, batched=h.batched))
    returned = ops.cast(rec, logits, 4, "fp32 copy of the model's output")
    del logits, returned
    return loss


def _shift(rec: Recorder, logits: Tensor, *, batched: bool) -> Tensor:
    """logits[..., :-1, :].contiguous(): a view of one sequence, a copy of several; backward writes into zeros."""
    out = rec.like(logits, "shifted logits") if batched else logits.view()
    like = logits.blueprint()
    return rec.record(out, [logits], [], lambda g: [rec.like(like, "gradient of the slice")])
