"""The token mixers: projections, rotary embedding and the attention kernel each as the model's code calls them."""

from __future__ import annotations

from memfit.architecture import Attention
from memfit.errors import Unsupported
from memfit.formula import ops
from memfit.formula.engine import Recorder, Tensor
from memfit.formula.modules import Block


def attention(block: Block, x: Tensor) -> Tensor:
    """One attention sub-block from normed hidden states to the output projection."""
    a = block.layer.attention
    block.rec.scope.append("attention")
    try:
        if a.kind == "softmax":
            return _softmax_attention(block, x, a)
        raise Unsupported(f"activations of {a.kind} attention are not modelled", hint="use memfit trace for this model")
    finally:
        block.rec.scope.pop()


def _softmax_attention(block: Block, x: Tensor, a: Attention) -> Tensor:
    rec = block.rec
    q, k, v = _project(block, x, a)
    if a.qk_norm == "head":
        q, k = block.norm(q, "q_norm", a.head_dim), block.norm(k, "k_norm", a.head_dim)
    elif a.qk_norm == "full":
        q, k = block.norm(q, "q_norm", a.heads * a.head_dim), block.norm(k, "k_norm", a.kv_heads * a.head_dim)
    if a.rotary_dim:
        q, k = rotate(rec, q, a.heads, a), rotate(rec, k, a.kv_heads, a)
    if block.style.use_cache:  # DynamicCache concatenates even the first time and lives until the model returns
        k = ops.copy(rec, k, label="cached keys")
        v = ops.copy(rec, v, label="cached values")
        rec.until_exit += [Tensor(k.storage, k.elements, k.itemsize), Tensor(v.storage, v.elements, v.itemsize)]
    out = kernel(block, q, k, v, a)
    head_major = (
        0 < a.rotary_dim < a.head_dim
    )  # cat() of the rotated part leaves [B, N, S, H], which the output inherits
    if head_major and block.style.kernel in ("flash", "cudnn"):
        out = ops.copy(rec, out, label="contiguous output")
    return block.linear("o", out, block.width)


def _project(block: Block, x: Tensor, a: Attention) -> tuple[Tensor, Tensor, Tensor]:
    n, kv = a.heads * a.head_dim, a.kv_heads * a.head_dim
    if not a.fused_qkv:
        q = block.linear("q", x, n)
        return q, block.linear("k", x, kv), block.linear("v", x, kv)
    qkv = block.linear("qkv", x, n + 2 * kv)
    return split(block.rec, qkv, (n, kv, kv))  # type: ignore[return-value]


def split(rec: Recorder, x: Tensor, widths: tuple[int, ...]) -> tuple[Tensor, ...]:
    """x.split(widths, dim=-1): views; the gradients come back through one concatenation of the full width."""
    elements, width = x.elements, x.itemsize
    basis = next(iter(elements))
    parts = [Tensor(x.storage, {basis: w}, width) for w in widths]
    if not (rec.grad and x.requires_grad):
        return tuple(parts)
    arrived: list[Tensor | None] = []

    def join(g: Tensor, saved: list[Tensor]) -> list[Tensor | None]:
        return [rec.new(elements, width, "joined gradient")]

    del arrived
    joined = rec.record(Tensor(x.storage, elements, width), [x], [], join)
    for part in parts:
        part.requires_grad, part.grad_fn = True, joined.grad_fn
    return tuple(parts)


def rotate(rec: Recorder, x: Tensor, heads: int, a: Attention) -> Tensor:
    """apply_rotary_pos_emb: (x * cos) + (rotate_half(x) * sin), on the rotated part of each head."""
    whole, turned = x.elements, {"T": heads * a.rotary_dim}
    partial = a.rotary_dim != a.head_dim
    part = x.view(turned) if partial else x
    table = ops.constant(turned, x.itemsize)
    straight = ops.mul(rec, part, table, "x * cos")
    half = negated_half(rec, part)
    turned_half = ops.mul(rec, half, table, "rotated * sin")
    del half
    out = ops.add(rec, straight, turned_half, "rotated")
    del straight, turned_half
    return ops.copy(rec, out, whole, "rotary concatenated") if partial else out


def negated_half(rec: Recorder, x: Tensor) -> Tensor:
    """rotate_half: cat((-x2, x1)); backward: two slices written into zeroed full tensors and added."""
    half_elements = {k: v // 2 for k, v in x.elements.items()}
    elements, width = x.elements, x.itemsize
    negated = rec.new(half_elements, width, "negated half")
    out = rec.new(elements, width, "rotate_half")
    del negated

    def backward(g: Tensor, saved: list[Tensor]) -> list[Tensor | None]:
        negative = rec.new(half_elements, width, "negated gradient")
        first = rec.new(elements, width, "slice gradient")
        del negative
        second = rec.new(elements, width, "slice gradient")
        del second
        return [first]

    return rec.record(out, [x], [], backward)


def kernel(block: Block, q: Tensor, k: Tensor, v: Tensor, a: Attention) -> Tensor:
    """The attention itself; the result is [T, N * value width] in the layout the output projection reads."""
    rec, style = block.rec, block.style
    if rec.autocast:
        q, k, v = (ops.autocast(rec, t) for t in (q, k, v))
    if style.kernel == "eager":
        return _eager(block, q, k, v, a)
    dropout = a.dropout if style.dropout else 0.0
    if style.kernel == "math":
        return _math(block, q, k, v, a)
    if style.masked and a.kv_heads != a.heads:  # use_gqa_in_sdpa: never with a mask
        k, v = _repeat(rec, k, a), _repeat(rec, v, a)
    return _fused(block, q, k, v, a, dropout)


def _repeat(rec: Recorder, x: Tensor, a: Attention) -> Tensor:
    """repeat_kv: keys or values copied for every query head."""
    return ops.copy(rec, x, {"T": a.heads * a.head_dim}, "repeated") if a.kv_heads != a.heads else x


def _fused(block: Block, q: Tensor, k: Tensor, v: Tensor, a: Attention, dropout: float) -> Tensor:
    """flash, memory-efficient and cuDNN kernels: keep q, k, v, the output and one fp32 number per row and head."""
    rec, style = block.rec, block.style
    out = rec.new({"T": a.heads * a.value_dim}, q.itemsize, "attention output")
    rows = "T32" if style.kernel == "efficient" else "T"
    logsumexp = rec.new({rows: a.heads}, 4, "log-sum-exp")
    kept: list[Tensor | None] = [q, k, v, out, logsumexp, rec.buffer({"1": 24}, "random state")]
    if style.masked:
        kept.append(rec.new({"TS": 1}, q.itemsize, "mask in compute dtype"))
    sizes = (q.elements, k.elements, v.elements)
    width, expanded, name = q.itemsize, k.elements != q.elements, style.kernel

    def backward(g: Tensor, saved: list[Tensor]) -> list[Tensor | None]:
        if name == "cudnn":
            grads = [rec.new(s, width, "attention gradient") for s in sizes]
            held = [rec.new({"T": a.heads * a.head_dim}, 4, "dq accumulator"), rec.new({"T": a.heads}, 4, "row sums")]
        elif name == "efficient":
            grads = [rec.new(s, width, "attention gradient") for s in sizes]
            held = [rec.new({"T": a.heads}, 4, "row sums"), *_efficient_workspace(rec, a, width)]
        else:
            grads = [rec.new(s, width, "attention gradient") for s in sizes]
            held = [
                rec.new({"T128": a.heads}, 4, "row sums"),
                rec.new({"T128": a.heads * _round32(a.head_dim)}, 4, "dq accumulator"),
            ]
            if expanded:
                held += [rec.new({"T": a.heads * a.head_dim}, width, "expanded key gradient") for _ in range(2)]
        del held
        return list(grads)

    return rec.record(out, [q, k, v], kept, backward)


def _round32(n: int) -> int:
    return -(-n // 32) * 32


def _efficient_workspace(rec: Recorder, a: Attention, width: int) -> list[Tensor]:
    """attention_backward.cu: fp32 accumulators for dq, dk and dv when the head is wider than one tile (128)."""
    return [rec.new({"T128": a.heads * a.head_dim}, 4, "gradient accumulators")]


def _scores_to_output(block: Block, scores: Tensor, v: Tensor, a: Attention) -> Tensor:
    rec, style = block.rec, block.style
    wide = ops.softmax(rec, scores, 4)
    del scores
    probabilities = ops.cast(rec, wide, v.itemsize, "probabilities")
    del wide
    if style.dropout:
        probabilities = ops.dropout(rec, probabilities, a.dropout)
    out = ops.bmm(rec, probabilities, v, {"T": a.heads * a.value_dim}, "attention output")
    return ops.copy(rec, out, label="contiguous output")


def _eager(block: Block, q: Tensor, k: Tensor, v: Tensor, a: Attention) -> Tensor:
    """eager_attention_forward: every score of every head exists, several times."""
    rec, scores = block.rec, {"TS": a.heads}
    keys, values = _repeat(rec, k, a), _repeat(rec, v, a)
    weights = ops.bmm(rec, q, keys, scores, "scores")
    weights = ops.scale(rec, weights, "scaled scores")
    if a.softcap:
        weights = ops.scale(rec, weights, "capped scores")
        weights = ops.unary(rec, weights, "tanh", keeps="output")
        weights = ops.scale(rec, weights, "rescaled scores")
    weights = ops.add(rec, weights, ops.constant(scores, weights.itemsize), "masked scores")
    return _scores_to_output(block, weights, values, a)


def _math(block: Block, q: Tensor, k: Tensor, v: Tensor, a: Attention) -> Tensor:
    """SDPA's math fallback: fp32 copies of 16-bit inputs and fp32 scores."""
    rec, scores = block.rec, {"TS": a.heads}
    keys, values = _repeat(rec, k, a), _repeat(rec, v, a)
    q, keys, values = (ops.cast(rec, t, 4, "fp32 copy") for t in (q, keys, values))
    q, keys = ops.scale(rec, q, "scaled queries"), ops.scale(rec, keys, "scaled keys")
    weights = ops.bmm(rec, q, keys, scores, "scores")
    weights = ops.add(rec, weights, ops.constant(scores, 4), "masked scores")
    wide = ops.softmax(rec, weights, 4)
    del weights
    if block.style.dropout:
        wide = ops.dropout(rec, wide, a.dropout)
    out = ops.bmm(rec, wide, values, {"T": a.heads * a.value_dim}, "attention output")
    return ops.cast(rec, out, v.itemsize, "contiguous output")
