"""Model classes and libraries of 2023: shifted logits before nn.CrossEntropyLoss, PyTorch 2.1, auto-gptq, PyTorch 1.10.

`SWIFT` is the loop of ms-swift 1.x on transformers 4.3x; the code "torch<1.11" is transformers on PyTorch before 1.11.
Source: modeling_llama.py of transformers 4.36, modeling_qwen.py, modeling_baichuan.py; accelerate's
ConvertOutputsToFp32 around them; auto-gptq 0.5.1; PyTorch's attention.cpp of 2.0 and 2.1.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

from memfit.closed_form import ops
from memfit.closed_form.engine import Elements, GraphRecorder, Tensor
from memfit.closed_form.layers.head import LOSSES, HeadStyle, logits_of
from memfit.closed_form.layers.head import shifted_loss as own_loss
from memfit.closed_form.layers.linears import four_bits
from memfit.closed_form.style import CODES, Code, Style
from memfit.nouns.architecture import Architecture
from memfit.nouns.job import Recipe
from memfit.tables.optimizers import OPTIMIZERS
from memfit.tables.trainers import Trainer

SIXTEEN_BIT = frozenset({"qwen", "baichuan"})  # families whose code scores the logits as they come
MASK_ALIGNMENT = 16  # keys, of the efficient kernel's mask in PyTorch 2.0 and 2.1 (preprocess_mask)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShiftedHead(HeadStyle):
    """The upper end of an older model class."""

    cached: tuple[int, ...] = ()  # elements per token of every key and value that the model returns in 16 bits


def shifted_head(h: HeadStyle, a: Architecture, r: Recipe, train: bool, *, returns_cache: bool = True) -> HeadStyle:
    """The head of an older class. use_cache is on without checkpointing; accelerate casts keys and values to fp32."""
    attentions = (
        [layer.attention for layer in a.layers] if returns_cache and train and r.checkpointing == "none" else []
    )
    cached = tuple(n for x in attentions for n in (x.kv_heads * x.head_dim, x.kv_heads * x.value_dim))
    fields = {f: getattr(h, f) for f in HeadStyle.__dataclass_fields__} | {
        "upcast": h.upcast and a.family not in SIXTEEN_BIT, "batched": r.micro_batch > 1,
    }  # fmt: skip
    return ShiftedHead(**fields, cached=cached)


def shifted_loss(rec: GraphRecorder, h: HeadStyle, style: Style, x: Tensor) -> tuple[Tensor, list[Tensor]]:
    """From hidden states to the loss. What the model returns is in fp32 until the trainer has looked at it."""
    assert isinstance(h, ShiftedHead)
    logits = logits_of(rec, h, x)
    if h.upcast:
        logits = ops.cast(rec, logits, 4, "fp32 logits")
    loss = own_loss(rec, h, logits)
    returned = [ops.cast(rec, logits, 4, "fp32 copy of the model's output")]
    returned += [rec.new({"T": width}, 4, "fp32 copy of the cache") for width in h.cached]
    del logits, returned
    return loss, []


def mask_per_head(rec: GraphRecorder, mask: Tensor, heads: int) -> Tensor:
    """PyTorch 2.1 expands the efficient kernel's mask to all heads before it pads its rows."""
    return rec.new({("mask", heads, MASK_ALIGNMENT): 1}, mask.itemsize, "mask of every head")


def quantised(rec: GraphRecorder, x: Tensor, numel: int, shape: Elements, style: Style) -> Tensor:
    """The product with a quantised weight: auto-gptq's, or that of bitsandbytes before 0.43.2."""
    if style.quantization.startswith("gptq"):
        return _gptq(rec, x, numel, shape, style)
    return four_bits(rec, x, numel, shape, style, keeps_input=True)


def _gptq(rec: GraphRecorder, x: Tensor, numel: int, shape: Elements, style: Style) -> Tensor:
    """auto-gptq's trainable QuantLinear: the weight is unpacked in plain operations and saved for the backward."""
    whole: Elements = {"1": numel}
    wide = rec.new(whole, 4, "unpacked weight")  # bitwise_right_shift gives int32
    narrow = rec.new(whole, 2 if style.quantization == "gptq-int8" else 1, "narrowed weight")
    del wide
    weight = rec.new(whole, 2, "dequantised weight")
    del narrow
    return ops.linear(rec, x, weight, shape)


CODES["ms-swift"] = Code(head=shifted_head, quantised=quantised, mask=mask_per_head)
CODES["torch<1.11"] = Code(
    softmax=partial(ops.softmax, keeps_input=True)
)  # softmax saves its input too (pull request 65242)
LOSSES["shifted"] = shifted_loss
# transformers.Trainer 4.3x, model classes of that time, its own fp32 LoRA layers, no k-bit preparation
SWIFT = Trainer(
    name="ms-swift", code="ms-swift", autocast=True, logits_to_fp32=True, decayed_first=True, kbit_prepare=False,
    heads=(("full", "shifted"), ("chunked", "shifted"), ("fused", "shifted")), warms_cache=False,
)  # fmt: skip
# PyTorch 2.0's _multi_tensor_adamw adds eps out of place: a second copy of all trained weights in every step
FOREACH_20 = "adamw-foreach-torch2.0"
OPTIMIZERS[FOREACH_20] = replace(
    OPTIMIZERS["adamw-foreach"], key=FOREACH_20, step_copies=2, hf_name="", aliases=(), loop=""
)
# the same under DeepSpeed, whose engine runs in 16 bits without autocast
DEEPSPEED = replace(SWIFT, autocast=False, logits_to_fp32=False)
