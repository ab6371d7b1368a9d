"""torch.nn.functional.scaled_dot_product_attention: what each of its kernels allocates and saves.

Source: sdp_utils, attention.cu and attention_backward.cu of PyTorch 2.13, checked against recorded tapes of every
kernel.
"""

from __future__ import annotations

from memfit.closed_form import ops
from memfit.closed_form.engine import GraphRecorder, Tensor
from memfit.closed_form.size import Basis
from memfit.closed_form.style import Style
from memfit.nouns.architecture import Attention
from memfit.tables.cuda_kernels import CUDNN_FORWARD

Grads = list[Tensor | None]
MASK_ROWS = 8  # elements: mem_eff_alignment of attention.cpp


def scaled_dot_product_attention(
    rec: GraphRecorder, style: Style, q: Tensor, k: Tensor, v: Tensor, a: Attention, dropout: float, mask: Tensor | None
) -> Tensor:
    """Return attention of [B, N, S, H] queries to keys and values of N or (without a mask) K heads.

    mask: a bool mask (itemsize 1) or a float mask; None where is_causal is passed instead.
    """
    floats = mask is not None and mask.itemsize != 1
    mask = ops.autocast(rec, mask) if mask and floats else mask  # the last argument is cast first
    q, k, v = (ops.autocast(rec, t) for t in (q, k, v))
    mask = _for_every_row(rec, mask, style, a) if mask and floats else mask
    if style.kernel == "math":
        # autocast applies to the call as a whole, not to the operations inside it
        compute, rec.autocast = rec.autocast, 0
        out = _math(rec, q, k, v, a, dropout, None if mask is None else _bias(rec, mask, q.itemsize))
        rec.autocast = compute
        return out
    bias = None if mask is None else _kernels_mask(rec, mask, style, a, q.itemsize)
    kernels = {"flash": _flash, "flash2": _flash, "efficient": _efficient, "cudnn": _cudnn}
    return kernels[style.kernel](rec, q, k, v, a, bias)


def _for_every_row(rec: GraphRecorder, mask: Tensor, style: Style, a: Attention) -> Tensor:
    """Expand a mask of all heads to the batch; its gradient is summed again."""
    wide = {"SS": {"TS": a.heads}, "SX": {"TX": a.heads}}.get(next(iter(mask.elements)))
    if wide is None or not mask.requires_grad:
        return mask
    return ops.expand(rec, mask, wide) if style.batched else rec.record(mask.view(wide), [mask], [], lambda g: [g])


def _bias(rec: GraphRecorder, mask: Tensor, itemsize: int) -> Tensor:
    """convert_boolean_attn_mask: each call makes a float mask in the queries' dtype for every row of the batch."""
    if mask.itemsize != 1:
        return mask
    return rec.new({"TS": 1} if set(mask.elements) == {"SS"} else mask.elements, itemsize, "mask in compute dtype")


def _kernels_mask(rec: GraphRecorder, mask: Tensor, style: Style, a: Attention, itemsize: int) -> Tensor:
    if style.kernel != "efficient":
        return _bias(rec, mask, itemsize)
    if style.code.mask:
        return style.code.mask(rec, _bias(rec, mask, itemsize), a.heads)
    return _in_even_rows(rec, mask, itemsize)


def _in_even_rows(rec: GraphRecorder, mask: Tensor, itemsize: int) -> Tensor:
    """preprocess_mask: rows whose length is no multiple of 8 elements are copied into some that are.

    A float mask with a gradient, or with rows of a cross-attention, comes in such rows from its model's code.
    """
    (basis, heads), *others = mask.elements.items()
    if mask.itemsize == 1:
        basis, heads = ("TS", 1) if basis == "SS" else (basis, heads)
        ragged = rec.new({("ragged", basis, MASK_ROWS): heads}, itemsize, "mask in compute dtype")
        out = rec.new({("aligned", basis, MASK_ROWS): heads}, itemsize, "mask of the kernel")
        del ragged
        return out
    if others or basis != "TS" or mask.storage:
        return mask
    return rec.new({("evened", basis, MASK_ROWS): heads}, mask.itemsize, "mask of the kernel")


def _flash(rec: GraphRecorder, q: Tensor, k: Tensor, v: Tensor, a: Attention, bias: Tensor | None) -> Tensor:
    """FlashAttention-2: first makes the gradients of grouped keys and values for every query head."""
    ragged, tile = a.head_dim % 8, 32 if a.head_dim <= 128 else 64
    if ragged:
        q, k, v = (_padded(rec, t, a.head_dim) for t in (q, k, v))
    width, grouped = q.itemsize, a.kv_heads != a.heads and k.elements != q.elements
    out = rec.like(q, "attention output")
    logsumexp = rec.new({"T": a.heads}, 4, "log-sum-exp")
    state = [rec.new({"1": size}, 1, "random state") for size in (16, 8)]
    shapes, out_first = (q.blueprint(), k.blueprint(), v.blueprint()), out.heads_first

    def backward(g: Tensor) -> Grads:
        copies = [rec.new(g.elements, width, "contiguous copy") for first in (g.heads_first, out_first) if first]
        grads: Grads = [rec.like(t, "attention gradient") for t in shapes]
        held = [
            rec.within_a_call({"T128": a.heads}, 4, "row sums"),
            rec.within_a_call({"T128": a.heads * (-(-a.head_dim // tile) * tile)}, 4, "dq accumulator"),
        ]
        if grouped:
            held += [rec.new(shapes[0].elements, width, "expanded key gradient") for _ in range(2)]
        held.clear()
        del copies
        return grads

    out = rec.record(out, [q, k, v], [k, q, v, logsumexp, out, *state], backward)
    return ops.slice(rec, out, {"T": a.heads * a.value_dim}) if ragged else out


def _padded(rec: GraphRecorder, x: Tensor, head: int) -> Tensor:
    """Pad heads to a width that is a multiple of 8."""
    shape = {k: n // head * -(-head // 8) * 8 for k, n in x.elements.items()}
    before = x.blueprint()
    out = rec.new(shape, x.itemsize, "padded heads", heads_first=x.heads_first)
    return rec.record(out, [x], [], lambda g: [rec.like(before, "unpadded gradient")])


def _efficient(rec: GraphRecorder, q: Tensor, k: Tensor, v: Tensor, a: Attention, bias: Tensor | None) -> Tensor:
    """The memory-efficient kernel: accumulates gradients, and the output of heads above 128, in fp32."""
    width = q.itemsize
    out = rec.new({"T": a.heads * a.value_dim}, width, "attention output")
    logsumexp = rec.new({"T32": a.heads}, 4, "log-sum-exp")
    wide = max(a.head_dim, a.value_dim) > 128
    if wide and width != 4:
        rec.within_a_call({"T": a.heads * a.value_dim}, 4, "output accumulator")
    shapes = [t.elements for t in (q, k, v)]
    if bias is not None and bias.requires_grad:
        basis = next(iter(bias.elements))
        shapes.append({("aligned", basis, 16): a.heads})

    def backward(g: Tensor) -> Grads:
        grads: Grads = [rec.new(elements, width, "attention gradient") for elements in shapes]
        if width == 4:
            product = rec.within_a_call({"T": a.heads * a.value_dim}, 4, "output * gradient")
            delta = rec.within_a_call({"T": a.heads}, 4, "row sums")
            del product
        else:
            delta = rec.within_a_call({"T": a.heads}, 4, "row sums")
        workspace = rec.within_a_call(_gradient_workspace(a, width), 4, "gradient accumulators")
        del delta, workspace
        return grads

    return rec.record(out, [q, k, v, *([bias] if len(shapes) > 3 else [])], [bias, k, q, v, logsumexp, out], backward)


def _gradient_workspace(a: Attention, width: int) -> dict[Basis, int]:
    """Return fp32 elements: tiles of queries (64 x 64, wide heads 128 x 64), and above width 128 also per key split."""
    if a.head_dim <= 64:
        return {"T64": a.heads * 64, ("tiles", 64, a.heads): 4}
    columns = 128 if a.head_dim <= 128 else -(-a.head_dim // 64) * 64
    size: dict[Basis, int] = {"T128": a.heads * columns, ("tiles", 128, a.heads): 4 * columns // 64}
    if a.head_dim > 128 and width != 4:
        size["keysplit", a.heads, 64 * sum(-(-h // 128) * 128 for h in (a.head_dim, a.value_dim))] = 1
    return size


def _cudnn(rec: GraphRecorder, q: Tensor, k: Tensor, v: Tensor, a: Attention, bias: Tensor | None) -> Tensor:
    """cuDNN: results have the layout of their operands; the backward takes one workspace.

    In which grouped heads have dk and dv for every query head (cudnn_backward of tables/cuda_kernels.py).
    """
    width = q.itemsize
    out = rec.new({"T": a.heads * a.value_dim}, width, "attention output", heads_first=q.heads_first)
    logsumexp = rec.new({"T": a.heads}, 4, "log-sum-exp")
    workspace = rec.new({"1": CUDNN_FORWARD}, 1, "cuDNN workspace")
    del workspace
    shapes = q.blueprint(), k.blueprint(), v.blueprint()
    grouped = a.kv_heads != a.heads and k.elements != q.elements
    expanded = a.heads * (a.head_dim + a.value_dim) * width if grouped else 0

    def backward(g: Tensor) -> Grads:
        grads: Grads = [rec.like(t, "attention gradient") for t in shapes]
        size = {"T": 4 * a.heads * (a.head_dim + 1) + expanded, "1": CUDNN_FORWARD}
        workspace = rec.within_a_call(size, 1, "dq accumulator, row sums, dk and dv of every query head")
        del workspace
        return grads

    return rec.record(out, [q, k, v], [bias, k, q, v, logsumexp, out], backward)


def _math(
    rec: GraphRecorder, q: Tensor, k: Tensor, v: Tensor, a: Attention, dropout: float, bias: Tensor | None
) -> Tensor:
    """The math kernel: makes fp32 copies of 16-bit operands, and all scores."""
    origin, heads = q.itemsize, {"T": a.heads * a.head_dim}
    crosses = "X" in k.elements  # tokens of what a decoder's cross-attention reads
    copies = q, k, v = tuple(ops.cast(rec, t, 4, "fp32 copy") for t in (q, k, v))
    q = ops.scale(rec, q, "scaled queries")
    if bias is None and a.causal:
        bias = _causal_bias(rec)
    grouped = k.elements != heads and not crosses
    broadcast = grouped and a.code == "falcon"  # torch.matmul expands the one head
    if grouped and not broadcast:  # enable_gqa calls repeat_interleave
        k, v = ops.repeat(rec, k, heads), ops.repeat(rec, v, {"T": a.heads * a.value_dim})
    expanded = k, v
    k = ops.scale(rec, k, "scaled keys")
    if broadcast:
        k, v = ops.expand(rec, k, heads), ops.expand(rec, v, heads)
    scores = ops.bmm(rec, q, k, {"TX" if crosses else "TS": a.heads}, "scores")
    if bias is not None and bias.requires_grad:  # added in place; its gradient is that of the scores
        scores = rec.record(scores.view(), [scores, bias], [], lambda g: [g, ops.viewed(g.detach())])
    weights = _safe_softmax(rec, scores, a.heads)
    del scores
    weights = ops.dropout(rec, weights, dropout)
    returned = rec.like(weights, "weights in the dtype of the queries", origin) if origin != 4 else None
    out = ops.cast(rec, ops.bmm(rec, weights, v, {"T": a.heads * a.value_dim}, "attention output"), origin)
    del bias, copies, expanded  # of the function, before its caller drops the weights
    del returned
    return out


def _causal_bias(rec: GraphRecorder) -> Tensor:
    ones = rec.new({"SS": 1}, 1, "ones")
    lower = rec.new({"SS": 1}, 1, "lower triangle")
    del ones
    bias = rec.new({"SS": 1}, 4, "causal mask")
    del lower
    return bias


def _safe_softmax(rec: GraphRecorder, scores: Tensor, heads: int) -> Tensor:
    """_safe_softmax: a softmax, and a test for rows in which every key is masked."""
    out = ops.softmax(rec, scores, 4)
    equal = rec.like(scores, "masked scores", 1)
    rec.new({"T": heads}, 1, "masked rows")
    del equal
    return out
