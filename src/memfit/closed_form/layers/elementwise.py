"""Activations, norms and rotary embeddings, operation by operation as in transformers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from memfit.closed_form import ops
from memfit.closed_form.engine import Elements, GraphRecorder, Tensor
from memfit.closed_form.layers import liger
from memfit.closed_form.style import Style
from memfit.nouns.architecture import Attention, Norm

KEEP_OUTPUT = ("relu", "sigmoid", "tanh")


def activation(rec: GraphRecorder, x: Tensor, name: str, trained: bool = False) -> Tensor:
    """Return act(x): one kernel that saves its input, unless a row below differs. trained: xIELU's parameters train."""
    if name == "xielu":
        return _xielu(rec, x, trained)
    written = {
        "gelu_new": _new_gelu, "gelu_fast": _fast_gelu, "quick_gelu": _quick_gelu, "relu2": _relu2,
        "bloom_gelu": _bloom_gelu
    }.get(name)  # fmt: skip
    if written is not None:
        return written(rec, x)
    return ops.unary(rec, x, name, keeps="output" if name in KEEP_OUTPUT else "input")


def _new_gelu(rec: GraphRecorder, x: Tensor) -> Tensor:
    """0.5 * x * (1 + tanh(c * (x + 0.044715 * x^3)))."""
    half = ops.scale(rec, x, "half")
    inner = ops.add(rec, x, ops.scale(rec, _power(rec, x, "cube"), "scaled cube"), "inner")
    inner = ops.scale(rec, inner, "tanh input")
    gate = ops.unary(rec, inner, "tanh", keeps="output")
    del inner
    gate = ops.shift(rec, gate, "one plus tanh")
    return ops.mul(rec, half, gate, "gelu")


def _fast_gelu(rec: GraphRecorder, x: Tensor) -> Tensor:
    """0.5 * x * (1 + tanh(x * c * (1 + 0.044715 * x * x)))."""
    half = ops.scale(rec, x, "half")
    inner = ops.scale(rec, x, "scaled")
    square = ops.mul(rec, ops.scale(rec, x, "scaled"), x, "square")
    inner = ops.mul(rec, inner, ops.shift(rec, square), "tanh input")
    del square
    gate = ops.unary(rec, inner, "tanh", keeps="output")
    del inner
    return ops.mul(rec, half, ops.shift(rec, gate, "one plus tanh"), "gelu")


def _quick_gelu(rec: GraphRecorder, x: Tensor) -> Tensor:
    """x * sigmoid(1.702 * x)."""
    return ops.mul(rec, x, ops.unary(rec, ops.scale(rec, x, "scaled"), "sigmoid", keeps="output"), "gelu")


def _relu2(rec: GraphRecorder, x: Tensor) -> Tensor:
    """relu(x)^2."""
    return _power(rec, ops.unary(rec, x, "relu", keeps="output"), "squared relu")


def _power(rec: GraphRecorder, x: Tensor, label: str) -> Tensor:
    """torch.pow: autocast runs it in fp32, so everything computed from the result is fp32 too."""
    return ops.power(rec, ops.cast(rec, x, 4, "fp32 copy") if rec.autocast else x, label)


def _xielu(rec: GraphRecorder, x: Tensor, trained: bool) -> Tensor:
    """where(x > 0, a * x * x + b * x, (expm1(min(x, eps)) - x) * c + b * x); a, c and result are fp32 in autocast."""
    wide = 4 if rec.autocast else x.itemsize
    positive_scale, negative_scale = (ops.weight(1, wide, name, trained) for name in ("alpha_p", "alpha_n"))
    positive = rec.like(x, "x > 0", 1)
    square = ops.mul(rec, ops.mul(rec, positive_scale, x, "scaled x"), x, "scaled square")
    above = ops.add(rec, square, ops.scale(rec, x, "linear part"), "positive branch")
    del square
    exponential = ops.unary(rec, ops.cast(rec, _minimum(rec, x), wide, "fp32 copy"), "expm1", keeps="output", buffers=1)
    difference = ops.sub(rec, exponential, x, "expm1 - x")
    del exponential
    scaled = ops.mul(rec, difference, negative_scale, "scaled difference")
    del difference
    below = ops.add(rec, scaled, ops.scale(rec, x, "linear part"), "negative branch")
    del scaled
    out = rec.like(above, "xielu")
    return rec.record(out, [above, below], [positive], lambda g: [rec.like(g, "gradient of a branch") for _ in "ab"])


def _minimum(rec: GraphRecorder, x: Tensor) -> Tensor:
    """torch.min(x, a number): equal values share the gradient, so backward makes two masks and a halved gradient."""

    def backward(g: Tensor) -> list[Tensor | None]:
        held = [rec.like(g, "half of the gradient"), rec.like(g, "equal", 1)]
        result = rec.like(g, "minimum gradient")
        held.append(rec.like(g, "larger", 1))
        del held
        return [result]

    return rec.record(rec.like(x, "minimum"), [x], [x], backward)


def _bloom_gelu(rec: GraphRecorder, x: Tensor) -> Tensor:
    """BLOOM's own autograd function: saves the input; forward and backward make up to six tensors."""
    _held(rec, x, 3)
    out = rec.like(x, "gelu")

    def backward(g: Tensor) -> list[Tensor | None]:
        _held(rec, g, 5)
        return [rec.like(g, "gelu gradient")]

    return rec.record(out, [x], [x], backward)


def _held(rec: GraphRecorder, x: Tensor, count: int) -> None:
    """Make `count` intermediate results that are alive together."""
    held = [rec.like(x, "gelu intermediate") for _ in range(count)]
    held.clear()


def norm(rec: GraphRecorder, x: Tensor, kind: Norm, width: int, style: Style, label: str, bias: bool = True) -> Tensor:
    """Run a norm over vectors of `width` elements; `bias`: whether a LayerNorm has a shift."""
    rec.enter(label)
    try:
        w = ops.weight(width, style.norm_weight, f"{label}.weight", style.trained)
        rows: Elements = {k: v // width for k, v in x.elements.items()}
        if kind.kind == "layer":
            b = ops.weight(width, style.norm_weight, f"{label}.bias", style.trained) if bias else None
            return ops.layer_norm(rec, x, w, b, rows, turned=style.turned)
        if style.liger and style.liger.norm and kind.kind in ("rms", "rms_gemma"):
            return liger.rms_norm(rec, x, w, rows, in_place=style.liger.norm == "in_place")
        kinds = {
            "rms": _rms,
            "rms_gemma": _rms_gemma,
            "rms_t5": _rms_t5,
            "layer_fp32": _layer_fp32,
            "layer_bare": _layer_bare,
        }
        return kinds[kind.kind](rec, x, w, rows)
    finally:
        rec.leave()


def mean(rec: GraphRecorder, x: Tensor, rows: Elements, label: str) -> Tensor:
    """x.mean(-1, keepdim=True)."""
    out = rec.new(rows, x.itemsize, label, heads_first=x.heads_first)
    like = x.blueprint()
    return rec.record(out, [x], [], lambda g: [rec.like(like, "mean gradient")])


def total(rec: GraphRecorder, x: Tensor, rows: Elements, label: str) -> Tensor:
    """x.sum(-1, keepdim=True): the gradient is expanded without a copy."""
    out = rec.new(rows, x.itemsize, label, heads_first=x.heads_first)
    like = x.blueprint()

    def backward(g: Tensor) -> list[Tensor | None]:
        return [Tensor(g.storage, like.elements, g.itemsize, heads_first=like.heads_first)]

    return rec.record(out, [x], [], backward)


def rsqrt(rec: GraphRecorder, x: Tensor) -> Tensor:
    """1 / sqrt(x + eps)."""
    return ops.unary(rec, ops.shift(rec, x), "rsqrt", keeps="output", buffers=2)


def _rms(rec: GraphRecorder, x: Tensor, w: Tensor, rows: Elements) -> Tensor:
    """LlamaRMSNorm: multiplies by the weight after the cast back, while the fp32 product is still a variable."""
    wide, before = _normalised(rec, x, rows), x.itemsize
    return ops.mul(rec, w, ops.cast(rec, wide, before, "normalised"), "scaled")


def _rms_t5(rec: GraphRecorder, x: Tensor, w: Tensor, rows: Elements) -> Tensor:
    """T5LayerNorm: the input is multiplied as it is, and the product narrowed where the weight is."""
    variance = mean(rec, ops.power(rec, ops.cast(rec, x, 4, "fp32 copy"), "square"), rows, "mean square")
    x = ops.mul(rec, x, rsqrt(rec, variance), "normalised fp32")
    x = ops.cast(rec, x, w.itemsize, "normalised")
    return ops.mul(rec, w, x, "scaled")


def rms_without_weight(rec: GraphRecorder, x: Tensor, rows: Elements) -> Tensor:
    """x * rsqrt(mean(x^2)) in fp32, cast back."""
    return ops.cast(rec, _normalised(rec, x, rows), x.itemsize, "normalised")


def _normalised(rec: GraphRecorder, x: Tensor, rows: Elements) -> Tensor:
    x = ops.cast(rec, x, 4, "fp32 copy")
    variance = mean(rec, ops.power(rec, x, "square"), rows, "mean square")
    return ops.mul(rec, x, rsqrt(rec, variance), "normalised fp32")


def _rms_gemma(rec: GraphRecorder, x: Tensor, w: Tensor, rows: Elements) -> Tensor:
    """Gemma3RMSNorm: multiplies by the fp32 weight before the cast back."""
    wide = ops.cast(rec, x, 4, "fp32 copy")
    out = ops.mul(
        rec, wide, rsqrt(rec, mean(rec, ops.power(rec, wide, "square"), rows, "mean square")), "normalised fp32"
    )
    del wide
    out = ops.mul(rec, out, ops.shift(rec, ops.cast(rec, w, 4, "fp32 weight"), "1 + weight"), "scaled fp32")
    return ops.cast(rec, out, x.itemsize, "scaled")


def _layer_fp32(rec: GraphRecorder, x: Tensor, w: Tensor, rows: Elements) -> Tensor:
    """CohereLayerNorm: a LayerNorm without shift, in single operations in fp32."""
    before = x.itemsize
    x = ops.cast(rec, x, 4, "fp32 copy")
    center = mean(rec, x, rows, "mean")
    variance = mean(rec, ops.power(rec, ops.sub(rec, x, center, "centred"), "square"), rows, "variance")
    x = ops.mul(rec, ops.sub(rec, x, center, "centred"), rsqrt(rec, variance), "normalised fp32")
    x = ops.mul(rec, ops.cast(rec, w, 4, "fp32 weight"), x, "scaled fp32")
    return ops.cast(rec, x, before, "scaled")


def _layer_bare(rec: GraphRecorder, x: Tensor, w: Tensor, rows: Elements) -> Tensor:
    """OlmoLayerNorm: F.layer_norm of an fp32 copy, without weight and shift."""
    out = ops.layer_norm(rec, ops.cast(rec, x, 4, "fp32 copy"), None, None, rows)
    return ops.cast(rec, out, x.itemsize, "normalised")


def l2_norm(rec: GraphRecorder, x: Tensor, rows: Elements) -> Tensor:
    """x * rsqrt((x * x).sum(-1) + eps): the gated delta rule's normalisation of queries and keys."""
    length = total(rec, ops.mul(rec, x, x, "squares"), rows, "sum of squares")
    return ops.mul(rec, x, rsqrt(rec, length), "unit vectors")


def rotate(rec: GraphRecorder, q: Tensor, k: Tensor, a: Attention, table: int) -> tuple[Tensor, Tensor]:
    """Rotate queries and keys, and concatenate the part of each head that is not rotated.

    table: itemsize of cos and sin, which have the dtype of the hidden states.
    """
    row, q_type, k_type = ROTARY[a.rotary], q.itemsize, k.itemsize
    partial = row.concatenates or a.rotary_dim != a.head_dim
    table = 4 if row.wide_table else table
    if row.wide == "once":
        q, k = ops.cast(rec, q, 4, "fp32 queries"), ops.cast(rec, k, 4, "fp32 keys")
    q_rot, k_rot = q, k
    if partial:
        q_rot, q_pass = _parts(rec, q, a)
        k_rot, k_pass = _parts(rec, k, a)
    q_embed = row.turn(rec, q_rot, row, table)
    if row.concatenates:  # before the keys are rotated
        q_embed = ops.cat(rec, [q_embed, q_pass], "rotary concatenated")
    k_embed = row.turn(rec, k_rot, row, table)
    if partial:
        q_embed = q_embed if row.concatenates else ops.cat(rec, [q_embed, q_pass], "rotary concatenated")
        k_embed = ops.cat(rec, [k_embed, k_pass], "rotary concatenated")
    if not (row.wide or row.wide_table):
        return q_embed, k_embed
    return ops.cast(rec, q_embed, q_type, "rotated"), ops.cast(rec, k_embed, k_type, "rotated")


def _parts(rec: GraphRecorder, x: Tensor, a: Attention) -> tuple[Tensor, Tensor]:
    heads = x.elements["T"] // a.head_dim
    first = ops.slice(rec, x, {"T": heads * a.rotary_dim}) if a.rotary_dim != a.head_dim else x
    return first, ops.slice(rec, x, {"T": heads * (a.head_dim - a.rotary_dim)})


def _halves(x: Tensor) -> dict[str, int]:
    return {basis: n // 2 for basis, n in x.elements.items()}


def _table(itemsize: int) -> Tensor:
    """Return a placeholder for cos or sin, of which products only read the dtype."""
    return ops.constant({"S": 1}, itemsize)


def _turn_half(rec: GraphRecorder, x: Tensor, row: Rotary, itemsize: int) -> Tensor:
    """(x * cos) + (rotate_half(x) * sin) with rotate_half(x) = cat((-x2, x1))."""
    table = _table(itemsize)
    straight = ops.mul(rec, _wide(rec, x, row), table, "x * cos")
    return ops.add(
        rec, straight, ops.mul(rec, _rotate_half(rec, _wide(rec, x, row)), table, "rotated * sin"), "rotated"
    )


def _wide(rec: GraphRecorder, x: Tensor, row: Rotary) -> Tensor:
    return ops.cast(rec, x, 4, "fp32 copy") if row.wide == "each" else x


def _rotate_half(rec: GraphRecorder, x: Tensor) -> Tensor:
    x1, x2 = ops.slice(rec, x, _halves(x)), ops.slice(rec, x, _halves(x))
    return ops.cat(rec, [ops.scale(rec, x2, "negated"), x1], "rotate_half")


def _turn_pairs(rec: GraphRecorder, x: Tensor, row: Rotary, itemsize: int) -> Tensor:
    """cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin)): x1 and x2 are the halves, or the even and odd elements."""
    table = _table(itemsize)
    x1, x2 = ops.slice(rec, x, _halves(x)), ops.slice(rec, x, _halves(x))
    first = ops.sub(rec, ops.mul(rec, x1, table, "x1 * cos"), ops.mul(rec, x2, table, "x2 * sin"))
    second = ops.add(rec, ops.mul(rec, x2, table, "x2 * cos"), ops.mul(rec, x1, table, "x1 * sin"))
    return ops.cat(rec, [first, second], "rotated")


def _turn_complex(rec: GraphRecorder, x: Tensor, row: Rotary, itemsize: int) -> Tensor:
    """view_as_complex(pairs) * table: the gradient is copied before it is viewed as complex."""
    out, need = rec.like(x, "rotated"), x.requires_grad

    def backward(g: Tensor) -> list[Tensor | None]:
        pairs = rec.like(g, "complex gradient")
        return [rec.like(pairs, "unrotated gradient") if need else None]

    return rec.record(out, [x], [], backward)


@dataclass(frozen=True, slots=True)
class Rotary:
    """How a family of models rotates queries and keys."""

    turn: Callable[[GraphRecorder, Tensor, Rotary, int], Tensor]
    wide: str = ""  # "once": one fp32 copy of queries and keys; "each": a copy for each use
    concatenates: bool = False  # the part that is not rotated is concatenated even if it is empty
    wide_table: bool = False  # cos and sin stay in fp32, which widens the products


ROTARY: dict[str, Rotary] = {
    "half": Rotary(_turn_half),  # GLM and GPT-J rotate even and odd elements, with the same sizes
    "half_joined": Rotary(_turn_half, concatenates=True),  # Phi-3
    "half_fp32_table": Rotary(_turn_half, wide_table=True),  # OLMo 2
    "half_fp32": Rotary(_turn_half, "each"),  # ModernBERT
    "half_fp32_once": Rotary(_turn_half, "once"),  # Cohere
    "pairs": Rotary(_turn_pairs),  # gpt-oss, DeepSeek-V3
    "complex": Rotary(_turn_complex, "once"),  # Llama 4, DeepSeek-V2
}
