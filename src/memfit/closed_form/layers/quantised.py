"""Linear layers whose weight is stored quantised: what each product restores, keeps for backward and needs there."""

from __future__ import annotations

from memfit.closed_form import ops
from memfit.closed_form.engine import Elements, Recorder, Tensor
from memfit.closed_form.style import Style


def quantised(rec: Recorder, x: Tensor, numel: int, shape: Elements, style: Style) -> Tensor:
    """The product of x with a quantised weight of `numel` elements, of `shape`."""
    if style.quantization.startswith("gptq"):
        return _gptq(rec, x, numel, shape, style)
    return (_int8 if style.quantization == "int8" else _four_bits)(rec, x, numel, shape, style)


def _int8(rec: Recorder, x: Tensor, numel: int, shape: Elements, style: Style) -> Tensor:
    """bitsandbytes Linear8bitLt: rows of x in int8, a product in int32, and the result in the dtype of x.

    MatMul8bitLt keeps its input as a plain attribute, which no checkpoint takes away; backward dequantises the weight.
    """
    width, elements, need = x.itemsize, x.elements, x.requires_grad
    half, rows = rec.new(elements, 2, "fp16 input"), rec.new({"T": 1}, 4, "row scales")
    small, absolute = rec.new(elements, 1, "int8 input"), rec.new(elements, 2, "absolute values")
    outliers = rec.new(elements, 1, "outliers")
    del absolute, outliers, half
    product, narrow = rec.new(shape, 4, "int32 product"), rec.new(shape, 2, "fp16 output")
    y = rec.new(shape, width, "output")
    del narrow, product, small, rows
    if need and rec.grad:
        rec.hold(x)

    def backward(g: Tensor) -> ops.Grads:
        weight = rec.new({"1": numel}, width, "dequantised weight")
        g = ops.cast(rec, g, width, "gradient in the dtype of the input")
        result = rec.product(elements, width, "input gradient")
        del weight
        return [ops.viewed(result)]

    return rec.record(y, [x], [], backward)


def _four_bits(rec: Recorder, x: Tensor, numel: int, shape: Elements, style: Style) -> Tensor:
    """bitsandbytes Linear4bit: x to the compute dtype, the weight dequantised for the product, the result cast back.

    MatMul4Bit keeps no activation. Its backward restores the weight in the dtype that was quantised and casts it to the
    compute dtype, its forward restores it in the compute dtype at once (gemm_4bit, since bitsandbytes 0.50). Double
    quantisation first restores the fp32 scales.
    """
    before, compute = x.itemsize, style.autocast or style.weight
    x = ops.cast(rec, x, compute, "quantised input")
    need, elements, double = x.requires_grad, x.elements, style.quantization == "nf4-double"

    def dequantised(width: int) -> Tensor:
        scales = rec.new({"1": numel // 64}, 4, "restored scales") if double else None
        weight = rec.new({"1": numel}, width, "dequantised weight")
        del scales
        wanted = style.dequantised_cast or width != compute
        return rec.new({"1": numel}, compute, "cast weight") if wanted else weight

    weight = dequantised(compute)
    y = rec.product(shape, compute, "output")
    del weight

    def backward(g: Tensor) -> list[Tensor | None]:
        held = dequantised(style.weight)
        result = rec.product(elements, compute, "input gradient") if need else None
        del held
        return [result]

    if style.quantised_keeps_input and need:
        y = rec.record(y, [x], [x], backward)
        rec.lingering |= {x.storage.id} if x.storage else set()
    else:
        y = rec.record(y, [x], [], backward)
    del x
    return ops.cast(rec, y, before, "quantised output")


def _gptq(rec: Recorder, x: Tensor, numel: int, shape: Elements, style: Style) -> Tensor:
    """auto-gptq's trainable QuantLinear: the weight is unpacked in plain operations and saved for the backward."""
    whole: Elements = {"1": numel}
    wide = rec.new(whole, 4, "unpacked weight")  # bitwise_right_shift gives int32
    narrow = rec.new(whole, 2 if style.quantization == "gptq-int8" else 1, "narrowed weight")
    del wide
    weight = rec.new(whole, 2, "dequantised weight")
    del narrow
    return ops.linear(rec, x, weight, shape)
