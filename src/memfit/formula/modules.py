"""nn.Module-level pieces of a block: a linear layer with its adapter or quantised base, norms, activations."""

from __future__ import annotations

from memfit.architecture import Layer, Norm, Weight
from memfit.formula import ops
from memfit.formula.engine import Elements, Recorder, Tensor
from memfit.formula.style import Style

# where a family keeps each projection: the first module name found in the layer counts
NAMES: dict[str, tuple[str, ...]] = {
    "q": ("q_proj", "query", "q", "q_b_proj"),
    "k": ("k_proj", "key", "k"),
    "v": ("v_proj", "value", "v"),
    "qkv": ("qkv_proj", "query_key_value", "c_attn", "Wqkv", "qkv", "attn"),
    "o": ("o_proj", "out_proj", "dense", "c_proj", "Wo", "wo", "o"),
    "gate": ("gate_proj", "w2", "gate"),
    "up": ("up_proj", "w1", "up"),
    "gate_up": ("gate_up_proj", "Wi"),
    "down": ("down_proj", "c_proj", "w3", "Wo"),
    "fc1": ("fc1", "c_fc", "dense_h_to_4h", "fc_in", "up_proj", "intermediate", "Wi"),
    "fc2": ("fc2", "c_proj", "dense_4h_to_h", "fc_out", "down_proj", "output", "Wo"),
}
MLP_WORDS = ("mlp", "ffn", "fc", "intermediate", "dense_h", "dense_4h", "feed_forward", "block_sparse_moe")


class Block:
    """One layer being run under a style: gives its modules to the code of attention and MLP."""

    def __init__(self, rec: Recorder, layer: Layer, style: Style, width: int) -> None:
        self.rec, self.layer, self.style, self.width = rec, layer, style, width
        self.hidden: Elements = {"T": width}

    def find(self, role: str, part: str) -> Weight | None:
        """The weight of a projection; `part` is "attention" or "mlp"."""
        for name in NAMES[role]:
            for w in self.layer.weights:
                if w.module == name or (name in ("intermediate", "output") and f"{name}.dense" in w.name):
                    inside_mlp = any(word in w.name for word in MLP_WORDS) or _bert_mlp(w.name)
                    if w.kind == "linear" and inside_mlp == (part == "mlp"):
                        return w
        return None

    def bias_of(self, weight: Weight) -> Weight | None:
        """The bias beside a weight, when stored."""
        name = weight.name.removesuffix("weight") + "bias"
        return next((w for w in self.layer.weights if w.name == name), None)

    def linear(self, role: str, x: Tensor, out: int, part: str = "attention") -> Tensor:
        """The projection `role`, with quantised base and adapter as the style says."""
        rec, style = self.rec, self.style
        w = self.find(role, part)
        name = w.module if w else role
        rec.scope.append(name)
        try:
            shape = {k: v // self._in(x) * out for k, v in x.elements.items()}
            bias = self.bias_of(w) if w else None
            numel = w.numel if w else self._in(x) * out
            y = base_linear(rec, style, x, numel, shape, bias.numel if bias else 0, name)
            if style.lora_rank and (name in style.lora_targets):
                y = self._adapter(x, y, shape, name)
            return y
        finally:
            rec.scope.pop()

    def _in(self, x: Tensor) -> int:
        return next(iter(x.elements.values()))

    def _adapter(self, x: Tensor, y: Tensor, shape: Elements, name: str) -> Tensor:
        """peft.tuners.lora.Linear.forward: result + lora_B(lora_A(dropout(x))) * scaling, in the adapter's dtype."""
        rec, style, rank = self.rec, self.style, self.style.lora_rank
        before, ins, outs = y.itemsize, self._in(x), next(iter(shape.values()))
        x = ops.cast(rec, x, style.adapter, "lora input")
        a = ops.weight(ins * rank, style.adapter, f"{name}.lora_A", True)
        b = ops.weight(outs * rank, style.adapter, f"{name}.lora_B", True)
        low = {k: v // ins * rank for k, v in x.elements.items()}
        dropped = ops.dropout(rec, x, 0.05) if style.lora_dropout and style.dropout else x
        hidden = ops.linear(rec, dropped, a, low, label="lora_A")
        del dropped
        delta = ops.linear(rec, hidden, b, shape, label="lora_B")
        del hidden
        delta = ops.scale(rec, delta, "lora scaled")
        y = ops.add(rec, y, delta, "with adapter")
        del delta
        return ops.cast(rec, y, before, "adapter result")

    def norm(self, x: Tensor, label: str = "norm", width: int | None = None, kind: Norm | None = None) -> Tensor:
        """A norm over the hidden width (or over `width` of each of several heads)."""
        self.rec.scope.append(label)
        try:
            return norm(self.rec, x, kind or self.layer.norm, width or self.width, self.style, label)
        finally:
            self.rec.scope.pop()


def _bert_mlp(name: str) -> bool:
    return name.startswith("output.dense")


def base_linear(rec: Recorder, style: Style, x: Tensor, numel: int, shape: Elements, bias: int, name: str) -> Tensor:
    """A linear layer without adapter: plain, or with a quantised weight. `bias`: its elements, 0 for none."""
    if style.quantization != "none":
        return quantized_linear(rec, x, numel, shape, style)
    w = ops.weight(numel, style.weight, f"{name}.weight", style.trained)
    b = ops.weight(bias, style.weight, f"{name}.bias", style.trained) if bias else None
    return ops.linear(rec, x, w, shape, b)


def quantized_linear(rec: Recorder, x: Tensor, numel: int, shape: Elements, style: Style) -> Tensor:
    """bitsandbytes Linear4bit: x to the compute dtype, the weight dequantised for the product, the result cast back.

    MatMul4Bit keeps no activation; backward dequantises again. Double quantisation first restores the fp32 scales.
    """
    before, compute = x.itemsize, 2
    x = ops.cast(rec, x, compute, "quantised input")
    need, elements, double = x.requires_grad, x.elements, style.quantization == "nf4-double"

    def dequantised() -> Tensor:
        scales = rec.new({"1": numel // 64}, 4, "restored scales") if double else None
        weight = rec.new({"1": numel}, compute, "dequantised weight")
        del scales
        return rec.new({"1": numel}, compute, "cast weight") if style.dequantised_cast else weight

    weight = dequantised()
    y = rec.new(shape, compute, "output")
    del weight

    def backward(g: Tensor, saved: list[Tensor]) -> list[Tensor | None]:
        held = dequantised()
        result = rec.new(elements, compute, "input gradient") if need else None
        del held
        return [result]

    if style.quantised_keeps_input and need:
        y = rec.record(y, [x], [x], backward)
        rec.lingering |= {x.storage.id} if x.storage else set()
    else:
        y = rec.record(y, [x], [], backward)
    del x
    return ops.cast(rec, y, before, "quantised output")


def norm(rec: Recorder, x: Tensor, kind: Norm, width: int, style: Style, label: str) -> Tensor:
    """The norm as transformers computes it; `width` is the length of the normalised vectors."""
    rows = {k: v // width for k, v in x.elements.items()}
    w = ops.weight(width, style.norm_weight, f"{label}.weight", style.trained)
    if kind.kind == "layer":
        b = ops.weight(width, style.norm_weight, f"{label}.bias", style.trained)
        return ops.layer_norm(rec, x, w, b, rows)
    before = x.itemsize
    wide = ops.cast(rec, x, 4, "fp32 copy")
    del x
    normal = _normalise(rec, wide, rows)
    del wide
    if kind.kind == "rms_gemma":
        scaled = ops.scale_by_weight(rec, ops.weight(width, 4, f"{label}.weight", style.trained), normal)
        del normal
        return ops.cast(rec, scaled, before, "cast back")
    back = ops.cast(rec, normal, before, "normalised")
    return ops.scale_by_weight(rec, w, back)


def _normalise(rec: Recorder, x: Tensor, rows: Elements) -> Tensor:
    """x * rsqrt(mean(x^2) + eps) in fp32: keeps x for both uses and the rsqrt of every row."""
    square = ops.unary(rec, x, "square", buffers=2)
    mean = rec.new(rows, 4, "mean square")
    elements = x.elements
    mean = rec.record(mean, [square], [], lambda g, _: [rec.new(elements, 4, "mean gradient")])
    del square
    shifted = ops.unary(rec, mean, "shifted", keeps="nothing")
    root = ops.unary(rec, shifted, "rsqrt", keeps="output", buffers=2)
    del shifted
    out = rec.new(elements, 4, "normalised fp32")

    def backward(g: Tensor, saved: list[Tensor]) -> list[Tensor | None]:
        first = rec.new(elements, 4, "input gradient")
        full = rec.new(elements, 4, "unsummed gradient")
        row = rec.new(rows, 4, "row gradient")
        del full
        return [first, row]

    return rec.record(out, [x, root], [root, x], backward)


def activation(rec: Recorder, x: Tensor, name: str) -> Tensor:
    """The activation functions of transformers.activations by config name."""
    if name in ("gelu_new", "gelu_fast", "gelu_python_tanh"):
        return _python_gelu(rec, x)
    if name in ("quick_gelu",):
        inner = ops.scale(rec, x)
        gate = ops.unary(rec, inner, "sigmoid", keeps="output")
        del inner
        return ops.mul(rec, x, gate)
    keeps = "output" if name in ("relu", "sigmoid", "tanh") else "input"
    if name in ("relu2", "relu_squared"):
        return ops.unary(rec, ops.unary(rec, x, "relu", keeps="output"), "square")
    return ops.unary(rec, x, name, keeps=keeps)


def _python_gelu(rec: Recorder, x: Tensor) -> Tensor:
    """NewGELUActivation: 0.5 * x * (1 + tanh(c * (x + 0.044715 * x^3))), one tensor per operation."""
    half = ops.scale(rec, x, "half")
    cube = ops.unary(rec, x, "cube", buffers=1)
    cube = ops.scale(rec, cube, "scaled cube")
    inner = ops.add(rec, x, cube)
    del cube
    inner = ops.scale(rec, inner, "tanh input")
    tanh = ops.unary(rec, inner, "tanh", keeps="output")
    del inner
    shifted = ops.scale(rec, tanh, "one plus tanh")
    del tanh
    return ops.mul(rec, half, shifted)
