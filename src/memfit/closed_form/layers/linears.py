"""Linear layers: projections by role, their adapters, and quantised weights."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from memfit.closed_form import ops
from memfit.closed_form.engine import Elements, GraphRecorder, Tensor
from memfit.closed_form.layers.elementwise import norm
from memfit.closed_form.style import Style
from memfit.nouns.architecture import Layer, Norm, Weight


def _int8(rec: GraphRecorder, x: Tensor, numel: int, shape: Elements, style: Style) -> Tensor:
    """bitsandbytes Linear8bitLt: rows of x in int8, a product in int32, and the result in the dtype of x.

    MatMul8bitLt holds its input as a plain attribute, which checkpointing does not free. Its backward dequantises the
    weight.
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


def four_bits(
    rec: GraphRecorder, x: Tensor, numel: int, shape: Elements, style: Style, *, keeps_input: bool = False,
    casts: bool = False,
) -> Tensor:  # fmt: skip
    """bitsandbytes Linear4bit: x to the compute dtype, the weight dequantised for the product, the result cast back.

    MatMul4Bit saves no activation. Its forward dequantises the weight in the compute dtype (gemm_4bit, since
    bitsandbytes 0.50), its backward in the dtype that was quantised, and then casts it. Double quantisation first
    restores the fp32 scales.

    keeps_input: bitsandbytes before 0.43.2, whose MatMul4Bit saves its input without need. casts: the weight was
    quantised from another 16-bit dtype than the compute dtype, so the forward casts it too.
    """
    before, compute = x.itemsize, style.computed
    x = ops.cast(rec, x, compute, "quantised input")
    need, elements, double = x.requires_grad, x.elements, style.quantization == "nf4-double"

    def dequantised(width: int) -> Tensor:
        scales = rec.new({"1": numel // 64}, 4, "restored scales") if double else None
        weight = rec.new({"1": numel}, width, "dequantised weight")
        del scales
        return rec.new({"1": numel}, compute, "cast weight") if casts or width != compute else weight

    weight = dequantised(compute)
    y = rec.product(shape, compute, "output")
    del weight

    def backward(g: Tensor) -> list[Tensor | None]:
        held = dequantised(style.weight)
        result = rec.product(elements, compute, "input gradient") if need else None
        del held
        return [result]

    if keeps_input and need:
        y = rec.record(y, [x], [x], backward)
        rec.lingering |= {x.storage.id} if x.storage else set()
    else:
        y = rec.record(y, [x], [], backward)
    out = ops.cast(rec, y, before, "quantised output")
    del y  # before the input, a variable of Linear4bit.forward
    return out


# module names of each projection in all families; the first one that a layer has is taken
NAMES: dict[str, tuple[str, ...]] = {
    "q": ("q_proj", "query", "q_lin", "q", "q_b_proj"),
    "k": ("k_proj", "key", "k_lin", "k"),
    "v": ("v_proj", "value", "v_lin", "v"),
    "qkv": ("qkv_proj", "query_key_value", "c_attn", "Wqkv", "qkv", "attn", "W_pack", "wqkv"),
    "o": ("o_proj", "out_proj", "dense", "c_proj", "Wo", "wo", "out_lin", "o", "proj"),
    "gate": ("gate_proj", "w2", "gate", "wi_0"),
    "up": ("up_proj", "w1", "up", "wi_1"),
    "gate_up": ("gate_up_proj", "Wi", "dense_h_to_4h"),
    "down": ("down_proj", "c_proj", "w3", "Wo", "dense_4h_to_h", "wo"),
    "fc1": ("fc1", "c_fc", "dense_h_to_4h", "fc_in", "up_proj", "lin1", "intermediate", "Wi", "wi", "linear_fc1"),
    "fc2": ("fc2", "c_proj", "dense_4h_to_h", "fc_out", "down_proj", "lin2", "output", "Wo", "linear_fc2"),
}
MLP_WORDS = (
    "mlp", "ffn", "fc", "intermediate", "dense_h", "dense_4h", "feed_forward", "block_sparse_moe", "DenseReluDense",
)  # fmt: skip
CROSS_WORDS = ("EncDecAttention", "encoder_attn")


@lru_cache(maxsize=4096)
def part_of(name: str) -> str:
    """Return the part of a block that a weight belongs to: "mlp", "cross" (attention to the source) or "attention"."""
    if any(word in name for word in MLP_WORDS) or name.startswith("output.dense"):
        return "mlp"
    return "cross" if any(word in name for word in CROSS_WORDS) else "attention"


class LayerRun:
    """One layer as it is traced under a style; the code of attention and MLP calls its projections and norms."""

    def __init__(self, rec: GraphRecorder, layer: Layer, style: Style, width: int) -> None:
        self.rec, self.layer, self.style, self.width = rec, layer, style, width
        self.held: list[Tensor] = []  # local variables of the model's block

    def find(self, role: str, part: str) -> Weight | None:
        """Return the weight of a projection; `part` as in `part_of`."""
        for name in NAMES.get(role, (role,)):
            for w in self.layer.weights:
                named = w.module == name or (name in ("intermediate", "output") and f"{name}.dense" in w.name)
                if named and w.kind == "linear" and part_of(w.name) == part:
                    return w
        return None

    def layer_weight(self, module: str) -> Weight:
        """Return the layer's weight of a module."""
        return next(w for w in self.layer.weights if w.module == module)

    def bias_of(self, weight: Weight) -> Weight | None:
        """Return the bias of a weight; None if it has none."""
        name = weight.name.removesuffix("weight") + "bias"
        return next((w for w in self.layer.weights if w.name == name), None)

    def linear(self, role: str, x: Tensor, out: int, part: str = "attention") -> Tensor:
        """Run the projection `role`, quantised and with an adapter where the style has them."""
        rec, style = self.rec, self.style
        w = self.find(role, part)
        if w and w.whole and style.quantization != "none":
            plain = replace(style, quantization="none", weight=style.norm_weight)
            return LayerRun(rec, self.layer, plain, self.width).linear(role, x, out, part)
        name, key = (w.module, w.name) if w else (role, role)
        rec.enter(name)
        try:
            ins = next(iter(x.elements.values()))
            shape: Elements = {k: v // ins * out for k, v in x.elements.items()}
            bias = self.bias_of(w) if w else None
            numel = w.numel if w else ins * out
            b = bias.numel if bias else 0
            if style.lora_rank and name in style.lora_targets:
                return self._adapted(x, numel, shape, b, key)
            return self._base(x, numel, shape, b, key)
        finally:
            rec.leave()

    def _base(self, x: Tensor, numel: int, shape: Elements, bias: int, name: str) -> Tensor:
        """Run the linear layer without its adapter."""
        rec, style = self.rec, self.style
        if self.layer.attention.code == "falcon" and style.quantization == "none":
            return _falcon_linear(rec, style, x, numel, shape, bias, name)
        return base_linear(rec, style, x, numel, shape, bias, name)

    def _adapted(self, x: Tensor, numel: int, shape: Elements, bias: int, name: str) -> Tensor:
        """peft.tuners.lora.Linear.forward: result + lora_B(lora_A(dropout(x))) * scaling, in the adapter's dtype.

        PEFT's class for bitsandbytes layers clones the base's output first and casts the delta back to its dtype.
        """
        rec, style, rank = self.rec, self.style, self.style.lora_rank
        y = self._base(x, numel, shape, bias, name)
        before, ins, outs = y.itemsize, next(iter(x.elements.values())), next(iter(shape.values()))
        quantized = style.quantization != "none"
        if quantized:
            y = ops.clone(rec, y, "defensive clone")
        x = ops.cast(rec, x, style.adapter, "lora input") if not (quantized and rec.autocast) else x
        a = ops.weight(ins * rank, style.adapter, f"{name}.lora_A", True)
        b = ops.weight(outs * rank, style.adapter, f"{name}.lora_B", True)
        low: Elements = {k: v // ins * rank for k, v in x.elements.items()}
        if style.magnitude:
            y = self._decomposed(x, y, a, b, numel, bias, f"{name}.magnitude")
            return y if quantized and rec.autocast else ops.cast(rec, y, before, "adapter result")
        dropped = ops.dropout(rec, x, 0.05) if style.lora_dropout and style.dropout else x
        hidden = ops.linear(rec, dropped, a, low, label="lora_A")
        del dropped
        delta = ops.linear(rec, hidden, b, shape, label="lora_B")
        del hidden
        delta = ops.scale(rec, delta, "lora scaled")
        if quantized and not rec.autocast:
            delta = ops.cast(rec, delta, before, "adapter result")
        y = ops.add(rec, y, delta, "with adapter")
        del delta
        return y if quantized else ops.cast(rec, y, before, "adapter result")

    def _decomposed(self, x: Tensor, y: Tensor, a: Tensor, b: Tensor, numel: int, bias: int, name: str) -> Tensor:
        """peft.tuners.lora.dora.DoraLinearLayer.forward: the norms of the adapted weight, then two scaled results.

        The base's result is scaled without its bias, which is taken off a copy in the wider dtype of the two.
        The product of the factors is made of a unit matrix; its graph and that of the norms end with the function.
        """
        rec, style, rank = self.rec, self.style, self.style.lora_rank
        ins, outs = next(iter(x.elements.values())), next(iter(y.elements.values()))
        kept, product = self._of_factors(a, b, ins, outs)
        product = ops.cast(rec, product, x.itemsize, "product of the factors")
        weight = self._dequantised(numel, x.itemsize)
        scaled = rec.new({"1": numel}, x.itemsize, "scaled product")
        adapted = rec.new({"1": numel}, x.itemsize, "adapted weight")
        del scaled
        norms = rec.new({"1": outs}, x.itemsize, "norms")
        del adapted
        magnitude = ops.weight(outs, style.magnitude, name, True)
        ratio = ops.mul(rec, magnitude, norms.detach(), "magnitude / norms")
        low: Elements = {k: v // ins * rank for k, v in x.elements.items()}
        result = ops.linear(rec, ops.linear(rec, x, a, low, label="lora_A"), b, y.elements, label="lora_B")
        added = ops.weight(bias, style.weight if style.quantization == "none" else style.norm_weight, name, False)
        plain = ops.add(rec, y, added, "output without bias") if bias else y
        base = ops.mul(rec, ops.shift(rec, ratio, "ratio - 1"), plain, "scaled output")
        delta = ops.scale(rec, ops.mul(rec, ratio, result, "scaled result"), "lora scaled")
        total = ops.add(rec, base, delta, "with direction")
        del base, delta, plain, result, ratio, norms, weight, product, kept
        return ops.add(rec, y, total, "with adapter")

    def _of_factors(self, a: Tensor, b: Tensor, ins: int, outs: int) -> tuple[list[Tensor], Tensor]:
        """Return what the graph of lora_B(lora_A(a unit matrix)) keeps, which no gradient reaches, and the product."""
        rec, rank = self.rec, self.style.lora_rank
        for factor in (a, b):
            ops.autocast(rec, factor)  # whose copies are cached with their own graph
        grad, rec.grad = rec.grad, False
        unit = rec.new({"1": ins * ins}, self.style.adapter, "unit matrix")
        narrow = ops.autocast(rec, unit)
        hidden = ops.linear(rec, narrow, a, {"1": ins * rank}, label="lora_A of a unit matrix")
        if not grad:
            del narrow
        product = ops.linear(rec, hidden, b, {"1": ins * outs}, label="product of the factors")
        rec.grad = grad
        return [narrow, hidden] if grad else [], product

    def _dequantised(self, numel: int, itemsize: int) -> Tensor | None:
        """Return peft's dequantize_module_weight in the dtype of the input; None for the stored weight itself."""
        rec, style = self.rec, self.style
        stored = style.quantization == "none"
        weight = None if stored else rec.new({"1": numel}, style.weight, "dequantised weight")
        if itemsize == style.weight:
            return weight
        return rec.new({"1": numel}, itemsize, "weight in the dtype of the input")

    def norm(self, x: Tensor, label: str = "norm", width: int | None = None, kind: Norm | None = None) -> Tensor:
        """Run a norm over the hidden width, or over `width` elements of each head."""
        return norm(self.rec, x, kind or self.layer.norm, width or self.width, self.style, label)

    def head_norm(self, x: Tensor, label: str, width: int) -> Tensor:
        """Run a norm of queries or keys, which Liger does not replace in every model."""
        own = self.style.liger and self.style.liger.head_norm == "own"
        return norm(self.rec, x, self.layer.norm, width, replace(self.style, liger=None) if own else self.style, label)


def base_linear(
    rec: GraphRecorder, style: Style, x: Tensor, numel: int, shape: Elements, bias: int, name: str
) -> Tensor:
    """Run a linear layer without adapter, plain or quantised. `bias`: its elements; 0 for none."""
    if style.quantization != "none":
        quantised = style.code.quantised or (_int8 if style.quantization == "int8" else four_bits)
        return quantised(rec, x, numel, shape, style)
    w = ops.weight(numel, style.weight, f"{name}.weight", style.trained)
    b = ops.weight(bias, style.weight, f"{name}.bias", style.trained) if bias else None
    return ops.linear(rec, x, w, shape, b)


def _falcon_linear(
    rec: GraphRecorder, style: Style, x: Tensor, numel: int, shape: Elements, bias: int, name: str
) -> Tensor:
    """FalconLinear: x @ weight.T + bias. Autocast does not cache the cast of the transposed view, nor cast the bias."""
    w = ops.weight(numel, style.weight, f"{name}.weight", style.trained)
    turned = rec.record(Tensor(None, w.elements, w.itemsize), [w], [], lambda g: [g])
    y = ops.linear(rec, x, turned, shape)
    if not bias:
        return y
    return ops.add(rec, y, ops.weight(bias, style.weight, f"{name}.bias", style.trained), "with bias")
