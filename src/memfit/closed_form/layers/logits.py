"""What stands above the blocks of a model, and the logits its output projection gives; every loss is built on them."""

from __future__ import annotations

from dataclasses import dataclass

from memfit.closed_form import ops
from memfit.closed_form.engine import Recorder, Tensor
from memfit.nouns.architecture import Norm


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadStyle:
    """What stands above the blocks."""

    vocabulary: int
    width: int
    norm: Norm | None
    loss: str = "full"  # a row of LOSSES
    tied: bool = False
    trained: bool = True
    itemsize: int = 2  # of the head's weight
    holds_logits: bool = False
    softcap: bool = False
    scaled: bool = False  # Cohere multiplies the logits
    transform: str = ""  # BERT, ModernBERT: dense, this activation, norm before the decoder
    bias: bool = False
    upcast: bool = True  # logits are cast to fp32 for the loss
    returns_fp32: bool = False  # accelerate makes an fp32 copy of the logits that the loss has left in 16 bits
    causal: bool = True  # labels are shifted
    cached: tuple[int, ...] = ()  # elements per token of every key and value that the model returns in 16 bits
    batched: bool = False  # several sequences: dropping the last token of each leaves no view
    pooled: bool = False  # a classifier of sequences sees their first token, through a dense layer and tanh


def logits_of(rec: Recorder, h: HeadStyle, x: Tensor) -> Tensor:
    """lm_head(x), scaled and capped where the model does."""
    w = ops.weight(h.vocabulary * h.width, h.itemsize, "embedding" if h.tied else "head", h.trained)
    b = ops.weight(h.vocabulary, h.itemsize, "head.bias", h.trained) if h.bias else None
    logits = ops.linear(rec, x, w, {"T": h.vocabulary}, b, "logits")
    if h.scaled:
        logits = ops.scale(rec, logits, "scaled logits")
    if h.softcap:
        logits = ops.scale(rec, logits, "logits / cap")
        logits = ops.unary(rec, logits, "tanh", keeps="output")
        logits = ops.scale(rec, logits, "capped logits")
    return logits
