"""Norms as transformers writes them out, tensor by tensor."""

from __future__ import annotations

from memfit.closed_form import ops
from memfit.closed_form.engine import Elements, Recorder, Tensor
from memfit.closed_form.layers import liger
from memfit.closed_form.style import Style
from memfit.nouns.architecture import Norm


def norm(rec: Recorder, x: Tensor, kind: Norm, width: int, style: Style, label: str, bias: bool = True) -> Tensor:
    """A norm over vectors of `width` elements, with its weight (and the shift of a LayerNorm)."""
    rec.enter(label)
    try:
        w = ops.weight(width, style.norm_weight, f"{label}.weight", style.trained)
        rows: Elements = {k: v // width for k, v in x.elements.items()}
        if kind.kind == "layer":
            b = ops.weight(width, style.norm_weight, f"{label}.bias", style.trained) if bias else None
            return ops.layer_norm(rec, x, w, b, rows)
        if style.liger and style.liger.norm and kind.kind in ("rms", "rms_gemma"):
            return liger.rms_norm(rec, x, w, rows, in_place=style.liger.norm == "in_place")
        return {"rms": _rms, "rms_gemma": _rms_gemma, "layer_fp32": _layer_fp32, "layer_bare": _layer_bare}[kind.kind](
            rec, x, w, rows
        )
    finally:
        rec.leave()


def mean(rec: Recorder, x: Tensor, rows: Elements, label: str) -> Tensor:
    """x.mean(-1, keepdim=True)."""
    out = rec.new(rows, x.itemsize, label, heads_first=x.heads_first)
    like = x.blueprint()
    return rec.record(out, [x], [], lambda g: [rec.like(like, "mean gradient")])


def total(rec: Recorder, x: Tensor, rows: Elements, label: str) -> Tensor:
    """x.sum(-1, keepdim=True): the gradient is expanded without a copy."""
    out = rec.new(rows, x.itemsize, label, heads_first=x.heads_first)
    like = x.blueprint()

    def backward(g: Tensor) -> list[Tensor | None]:
        return [Tensor(g.storage, like.elements, g.itemsize, heads_first=like.heads_first)]

    return rec.record(out, [x], [], backward)


def rsqrt(rec: Recorder, x: Tensor) -> Tensor:
    """1 / sqrt(x + eps)."""
    return ops.unary(rec, ops.shift(rec, x), "rsqrt", keeps="output", buffers=2)


def _rms(rec: Recorder, x: Tensor, w: Tensor, rows: Elements) -> Tensor:
    """LlamaRMSNorm: the weight comes after the cast back."""
    return ops.mul(rec, w, rms_without_weight(rec, x, rows), "scaled")


def rms_without_weight(rec: Recorder, x: Tensor, rows: Elements) -> Tensor:
    """x * rsqrt(mean(x^2)) in fp32, cast back."""
    before = x.itemsize
    x = ops.cast(rec, x, 4, "fp32 copy")
    variance = mean(rec, ops.power(rec, x, "square"), rows, "mean square")
    x = ops.mul(rec, x, rsqrt(rec, variance), "normalised fp32")
    return ops.cast(rec, x, before, "normalised")


def _rms_gemma(rec: Recorder, x: Tensor, w: Tensor, rows: Elements) -> Tensor:
    """Gemma3RMSNorm: the fp32 weight comes before the cast back."""
    wide = ops.cast(rec, x, 4, "fp32 copy")
    out = ops.mul(
        rec, wide, rsqrt(rec, mean(rec, ops.power(rec, wide, "square"), rows, "mean square")), "normalised fp32"
    )
    del wide
    out = ops.mul(rec, out, ops.shift(rec, ops.cast(rec, w, 4, "fp32 weight"), "1 + weight"), "scaled fp32")
    return ops.cast(rec, out, x.itemsize, "scaled")


def _layer_fp32(rec: Recorder, x: Tensor, w: Tensor, rows: Elements) -> Tensor:
    """CohereLayerNorm: a LayerNorm without shift, written out in fp32."""
    before = x.itemsize
    x = ops.cast(rec, x, 4, "fp32 copy")
    center = mean(rec, x, rows, "mean")
    variance = mean(rec, ops.power(rec, ops.sub(rec, x, center, "centred"), "square"), rows, "variance")
    x = ops.mul(rec, ops.sub(rec, x, center, "centred"), rsqrt(rec, variance), "normalised fp32")
    x = ops.mul(rec, ops.cast(rec, w, 4, "fp32 weight"), x, "scaled fp32")
    return ops.cast(rec, x, before, "scaled")


def _layer_bare(rec: Recorder, x: Tensor, w: Tensor, rows: Elements) -> Tensor:
    """OlmoLayerNorm: F.layer_norm of an fp32 copy, without weight and shift."""
    out = ops.layer_norm(rec, ops.cast(rec, x, 4, "fp32 copy"), None, None, rows)
    return ops.cast(rec, out, x.itemsize, "normalised")


def l2_norm(rec: Recorder, x: Tensor, rows: Elements) -> Tensor:
    """x * rsqrt((x * x).sum(-1) + eps), as the gated delta rule normalises queries and keys."""
    length = total(rec, ops.mul(rec, x, x, "squares"), rows, "sum of squares")
    return ops.mul(rec, x, rsqrt(rec, length), "unit vectors")
