"""Gated delta rule of Qwen3-Next and Qwen3.5 as transformers runs it without the fla package: chunks of 64 tokens.

Source: torch_chunk_gated_delta_rule. The scan over the chunks is traced in two steps, the last chunk and all before it:
the saved tensors of the earlier chunks are counted together, their temporaries once.
"""

from __future__ import annotations

from dataclasses import dataclass

from memfit.closed_form import ops
from memfit.closed_form.engine import Elements, GraphRecorder, Tensor
from memfit.closed_form.layers.elementwise import l2_norm, mean, rsqrt
from memfit.closed_form.layers.linears import LayerRun
from memfit.errors import TRACE_HINT, Unsupported
from memfit.nouns.architecture import Attention

CHUNK = 64


def gated_delta_net(block: LayerRun, x: Tensor, a: Attention) -> Tensor:
    """Qwen3_5GatedDeltaNet, with kv_heads heads of queries and keys, and heads of values."""
    rec, keys, values = block.rec, a.kv_heads * a.head_dim, a.heads * a.value_dim
    if block.find("in_proj_qkv", "attention") is None and block.find("in_proj_qkvz", "attention") is None:
        reason = "Kimi's delta attention without the fla package is not modelled"
        raise Unsupported(reason, hint=TRACE_HINT)
    if block.style.mask == "rows":
        x = ops.mul(rec, x, ops.constant({"T": 1}, 1), "padding zeroed")
    mixed, z, b, decay_input = _project(block, x, a)
    state = None
    if block.style.use_cache:
        state = rec.new({"B": (2 * keys + values) * a.conv}, mixed.itemsize, "conv state")
    mixed = _causal_conv(block, mixed, a.conv)
    mixed = ops.unary(rec, mixed, "silu")
    if state is not None:
        rec.until_exit.append(state)
        mixed = ops.slice(rec, mixed, mixed.elements)  # x[..., -S:] is everything, but its gradient is copied
    q, k, v = (ops.split_heads(rec, t) for t in ops.split(rec, mixed, (keys, keys, values)))
    beta = ops.unary(rec, b, "sigmoid", keeps="output")
    decay = _decay(block, decay_input, a)
    out = _chunk_rule(block, q, k, v, decay, beta, a)
    out = _gated_norm(block, out, z, a)
    return block.linear("o", out, block.width)


def _gated_norm(block: LayerRun, x: Tensor, z: Tensor, a: Attention) -> Tensor:
    """Qwen3_5RMSNormGated: norms in fp32, scales in the dtype of the hidden states, gates in fp32."""
    rec, style, before = block.rec, block.style, x.itemsize
    wide = ops.cast(rec, x, 4, "fp32 copy")
    variance = mean(rec, ops.power(rec, wide, "square"), {"T": a.heads}, "mean square")
    wide = ops.mul(rec, wide, rsqrt(rec, variance), "normalised fp32")
    w = ops.weight(a.value_dim, style.norm_weight, "norm.weight", style.trained)
    scaled = ops.mul(rec, w, ops.cast(rec, wide, before, "normalised"), "scaled")
    del wide
    gated = ops.mul(rec, scaled, ops.unary(rec, ops.cast(rec, z, 4, "fp32 gate"), "silu"), "gated")
    del scaled
    return ops.cast(rec, gated, before, "gated output")


def _project(block: LayerRun, x: Tensor, a: Attention) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return queries, keys and values in one tensor, the gate of the output, learning rate and decay."""
    rec, keys, values = block.rec, a.kv_heads * a.head_dim, a.heads * a.value_dim
    if block.find("in_proj_qkv", "attention") is not None:
        qkv = block.linear("in_proj_qkv", x, 2 * keys + values)
        z = block.linear("in_proj_z", x, values)
        return qkv, z, block.linear("in_proj_b", x, a.heads), block.linear("in_proj_a", x, a.heads)
    qkvz = block.linear("in_proj_qkvz", x, 2 * keys + 2 * values)
    ba = block.linear("in_proj_ba", x, 2 * a.heads)
    q, k, v, z = ops.split(rec, qkvz, (keys, keys, values, values))
    b, decay = ops.split(rec, ba, (a.heads, a.heads))
    # every head's part is copied out of the joint projection
    v, z, b, decay = (ops.clone(rec, t, "reshaped") for t in (v, z, b, decay))
    q, k, v = (ops.clone(rec, t, "reshaped") for t in (q, k, v))
    qkv = ops.cat(rec, [q, k, v], "queries, keys and values")
    qkv.heads_first = False
    return qkv, z, b, decay


def _causal_conv(block: LayerRun, x: Tensor, kernel: int) -> Tensor:
    """Conv1d of each channel, padded on both sides, then without the tail: copies its transposed input."""
    rec, style, channels = block.rec, block.style, x.elements["T"]
    w = ops.autocast(rec, ops.weight(channels * kernel, style.weight, "conv1d.weight", style.trained))
    x = ops.autocast(rec, x)
    need_x, need_w, like, w_like = x.requires_grad, w.requires_grad, x.blueprint(), w.blueprint()
    longer: Elements = {"T": channels, "B": (kernel - 1) * channels}
    contiguous = rec.like(x, "contiguous")
    out = rec.new(longer, x.itemsize, "conv output")
    del contiguous

    def backward(g: Tensor) -> ops.Grads:
        contiguous = rec.like(like, "contiguous")
        weight_grad = rec.like(w_like, "weight gradient") if need_w else None
        input_grad = rec.like(like, "input gradient") if need_x else None
        del contiguous
        return [input_grad, weight_grad]

    out = rec.record(out, [x, w], [x, w], backward)  # saves both, needed or not
    return ops.slice(rec, out, x.elements)


def _decay(block: LayerRun, x: Tensor, a: Attention) -> Tensor:
    """-exp(A_log) * softplus(a + dt_bias) in fp32."""
    rec, style = block.rec, block.style
    rate = ops.cast(rec, ops.weight(a.heads, style.weight, "A_log", style.trained), 4, "fp32 A_log")
    rate = ops.scale(rec, ops.unary(rec, rate, "exp", keeps="output"), "negated")
    bias = ops.weight(a.heads, style.weight, "dt_bias", style.trained)
    step = ops.unary(rec, ops.add(rec, ops.cast(rec, x, 4, "fp32 step"), bias, "step"), "softplus")
    return ops.mul(rec, rate, step, "decay")


def _chunk_rule(block: LayerRun, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, a: Attention) -> Tensor:
    """torch_chunk_gated_delta_rule."""
    rec, before = block.rec, q.itemsize
    if a.kv_heads != a.heads:
        q, k = (_for_every_head(rec, t, a.heads * a.head_dim) for t in (q, k))
    q, k, v, beta = (_fp32_by_head(rec, t) for t in (q, k, v, beta))
    q, k = (l2_norm(rec, t, {"T": a.heads}) for t in (q, k))
    q = ops.scale(rec, q, "scaled queries")
    q, k, v = [_padded(rec, t) for t in (q, k, v)]
    beta, decay = [_padded(rec, t) for t in (beta, g)]
    v_beta = ops.mul(rec, v, beta, "v_beta")
    k_beta = ops.mul(rec, k, beta, "k_beta")
    cumulated = _cumsum(rec, decay)
    pairwise = _pairwise(rec, cumulated)
    square = pairwise.elements
    laid = _laid_by_token if before == 4 else lambda _, x: x
    system = ops.bmm(rec, laid(rec, k_beta), laid(rec, k), square, "k_beta @ keys")
    system = ops.mul(rec, system, pairwise, "ut_system")
    intra = ops.bmm(rec, laid(rec, q), laid(rec, k), square, "queries @ keys")
    intra = ops.mul(rec, intra, pairwise, "attention within chunks")
    decayed = ops.mul(rec, k_beta, ops.unary(rec, cumulated, "exp", keeps="output"), "decayed k_beta")
    new_values = _solve_triangular(rec, system, v_beta)
    seen = _solve_triangular(rec, system, decayed)
    core = rec.like(new_values, "core output")
    q = ops.mul(rec, q, ops.unary(rec, cumulated, "exp", keeps="output"), "decayed queries")
    k = ops.mul(rec, k, _rest_of_chunk(rec, cumulated), "decayed keys")
    core, last = _scan(rec, core, new_values, seen, q, k, intra, a)
    # core.reshape() copies, because the zeros it was written into have the strides of a solution
    core = ops.clone(rec, core, "reshaped")
    core = _tokens_first(rec, core, before, {"T": a.heads * a.value_dim})
    del v_beta, decayed, decay, cumulated, beta, pairwise, system, intra, new_values, seen, q, k, v, k_beta
    if block.style.use_cache:
        rec.until_exit.append(rec.like(last, "recurrent state"))
    return core


def _for_every_head(rec: GraphRecorder, x: Tensor, width: int) -> Tensor:
    out = ops.repeat(rec, x, {"T": width}, "repeated for every value head")
    out.heads_first = False
    return out


def _fp32_by_head(rec: GraphRecorder, x: Tensor) -> Tensor:
    """x.transpose(1, 2).to(fp32, contiguous): a view if x is fp32."""
    if x.itemsize == 4:
        return x
    out, width = rec.new(x.elements, 4, "fp32 by head", heads_first=True), x.itemsize
    return rec.record(out, [x], [], lambda g: [rec.like(g, "cast gradient", width)])


def _padded(rec: GraphRecorder, x: Tensor) -> Tensor:
    """F.pad to whole chunks: always a copy."""
    whole, before = {"T64": x.elements["T"]}, x.elements
    out = rec.new(whole, x.itemsize, "padded", heads_first=True)
    return rec.record(out, [x], [], lambda g: [rec.new(before, g.itemsize, "cut gradient", heads_first=True)])


def _laid_by_token(rec: GraphRecorder, x: Tensor) -> Tensor:
    """Copy an fp32 operand for a product: it was never laid out head by head if no padding was needed."""
    out = rec.new({("whole", CHUNK, 0): x.elements["T64"]}, x.itemsize, "contiguous", heads_first=True).view(x.elements)
    return rec.record(out, [x], [], lambda g: [ops.viewed(g.detach())])


def _cumsum(rec: GraphRecorder, x: Tensor) -> Tensor:
    """x.cumsum(dim): takes a scratch copy; the backward flips, sums and flips."""
    out = rec.like(x, "cumulative decay")
    rec.like(x, "cumsum scratch")

    def backward(g: Tensor) -> ops.Grads:
        flipped = rec.like(g, "flipped")
        summed = rec.like(g, "cumsum")
        result = rec.like(g, "flipped back")
        del summed, flipped
        return [result]

    return rec.record(out, [x], [], backward)


def _pairwise(rec: GraphRecorder, x: Tensor) -> Tensor:
    """exp(masked(x_i - x_j)) for all pairs of a chunk."""
    rows, square = x.elements, {"T64": x.elements["T64"] * CHUNK}
    difference = rec.new(square, 4, "differences", heads_first=True)

    def backward(g: Tensor) -> ops.Grads:
        negated = rec.like(g, "negated gradient")
        sums = [rec.new(rows, 4, "summed gradient", heads_first=True) for _ in range(2)]
        del negated
        return [*sums]

    difference = rec.record(difference, [x, x], [], backward)
    masked = ops.unary(rec, difference, "masked differences", keeps="nothing")
    del difference
    return ops.unary(rec, masked, "pairwise decay", keeps="output")


def _rest_of_chunk(rec: GraphRecorder, x: Tensor) -> Tensor:
    """exp(x at the end of the chunk - x)."""
    difference = rec.like(x, "differences")
    difference = rec.record(difference, [x], [], lambda g: [rec.like(g, "negated gradient")])
    return ops.unary(rec, difference, "exp", keeps="output")


def _solve_triangular(rec: GraphRecorder, system: Tensor, b: Tensor) -> Tensor:
    """torch.linalg.solve_triangular: saves the system and the solution."""
    out, square = rec.like(b, "solution"), system.blueprint()

    def backward(g: Tensor) -> ops.Grads:
        b_grad = rec.like(g, "gradient of b")
        product = rec.like(square, "product")
        negated = rec.like(square, "negated")
        del product
        return [rec.like(negated, "gradient of the system"), b_grad]

    return rec.record(out, [system, b], [system, out], backward)


def _tokens_first(rec: GraphRecorder, x: Tensor, itemsize: int, elements: Elements) -> Tensor:
    """Cut the padding, transpose to tokens first, and cast to the dtype of the hidden states."""
    out, before = rec.new(elements, itemsize, "attention output"), x.blueprint()
    return rec.record(out, [x], [], lambda g: [rec.like(before, "cast gradient")])


def _scan(
    rec: GraphRecorder, core: Tensor, new_values: Tensor, seen: Tensor, q: Tensor, k: Tensor, intra: Tensor,
    a: Attention,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Run the loop over the chunks, which save their new values and initial states; return the last state too."""
    state, per_token = {"B": a.heads * a.head_dim * a.value_dim}, 4 * a.value_dim * a.heads
    per_state = 4 * state["B"]
    # bytes that the first and last chunk save less: the initial zeros need no gradient, the final state is not used
    less_first = less_last = 0
    if rec.autocast:  # products save casts of both operands instead
        per_token = rec.autocast * a.heads * (3 * a.head_dim + 2 * a.value_dim + CHUNK)
        per_state += 2 * rec.autocast * state["B"]
        less_first = rec.autocast * a.heads * 2 * a.head_dim * CHUNK
        less_last = rec.autocast * a.heads * (a.head_dim + a.value_dim) * CHUNK
    one_chunk = CHUNK * per_token + per_state
    back = _ScanBackward(rec, a, *(x.blueprint() for x in (core, seen, q, k, intra)))
    slices = [] if rec.autocast else [q, seen, intra]

    entering = rec.new(state, 4, "state of the last chunk")
    earlier = rec.buffer(
        {"T64": per_token + per_state // CHUNK, "B": -one_chunk - less_first}, "kept for the chunks before"
    )
    outputs = [core.view(), entering]
    kept_before = [earlier, *slices, *([] if rec.autocast else [k])]
    rec.record_all(outputs, [new_values, seen, q, k, intra], kept_before, back.before_last)
    del earlier, kept_before
    kept = rec.buffer({"B": one_chunk - less_last - 4 * state["B"]}, "kept for the last chunk")
    part = rec.new(back.values, 4, "values read")
    out = rec.new(back.values, 4, "output of a chunk")
    inputs, written, entering = [new_values, seen, q, intra, outputs[1]], outputs[0], outputs[1]
    out = rec.record(out, inputs, [kept, *([] if rec.autocast else [entering, *slices])], back.last)
    written = ops.copy_into(rec, written, out)
    del out
    terms = [rec.new(state, 4, "decayed state"), rec.new(state, 4, "update")]
    last = rec.new(state, 4, "last state")
    del terms, part
    return written, last


@dataclass(frozen=True, slots=True)
class _ScanBackward:
    """The backward of the scan's two steps, in fp32.

    `core`, `seen`, `q`, `k` and `intra` are blueprints of the whole tensors whose gradients are made here.
    """

    rec: GraphRecorder
    a: Attention
    core: Tensor
    seen: Tensor
    q: Tensor
    k: Tensor
    intra: Tensor

    @property
    def values(self) -> Elements:
        return {"B": CHUNK * self.a.heads * self.a.value_dim}

    def _values(self, label: str) -> Tensor:
        return self.rec.new(self.values, 4, label)

    def _keys(self, label: str) -> Tensor:
        return self.rec.new({"B": CHUNK * self.a.heads * self.a.head_dim}, 4, label)

    def _pairs(self, label: str) -> Tensor:
        return self.rec.new({"B": CHUNK * self.a.heads * CHUNK}, 4, label)

    def _state(self, label: str) -> Tensor:
        return self.rec.new({"B": self.a.heads * self.a.head_dim * self.a.value_dim}, 4, label)

    def before_last(self, grads: list[Tensor | None]) -> ops.Grads:
        """Run all chunks but the last; `grads` are those of `core` and of the last chunk's initial state."""
        value_grad, part = self._values("gradient of new values"), self._keys("gradient of a chunk of keys")
        key_grad = self.rec.like(self.k, "gradient of keys")
        del part
        product, through = self._state("gradient of the decay"), self._state("gradient of the state")
        del product
        grads[1] = None
        rest, own = self.rec.like(self.core, "gradient of the rest"), self._values("gradient of a chunk")
        self._values("zeros")
        grads[0] = None
        added, part = self._values("gradient of new values"), self._pairs("gradient of a chunk of pairs")
        total = self._values("gradient sum")
        del value_grad, added
        for whole in (self.intra, self.q, self.seen):  # gradients are written into zeros, then added in place
            self.rec.like(whole, "gradient of the whole")
        del part, total, through, rest, own
        return [None, None, None, key_grad, None]

    def last(self, g: Tensor) -> ops.Grads:
        """Run the last chunk."""
        value_grad, part = self._values("gradient of new values"), self._pairs("gradient of a chunk of pairs")
        intra_grad = self.rec.like(self.intra, "gradient of pairs")
        del part
        read, part = self._state("gradient of the state"), self._keys("gradient of a chunk of queries")
        q_grad = self.rec.like(self.q, "gradient of queries")
        del part
        negated, more = self._values("negated gradient"), self._state("gradient of the state")
        part = self._keys("gradient of a chunk of keys")
        del negated
        total = self._state("gradient sum")
        del read, more
        seen_grad = self.rec.like(self.seen, "gradient of keys seen")
        del part
        values_grad = self.rec.like(self.core, "gradient of new values")
        del value_grad
        return [values_grad, seen_grad, q_grad, intra_grad, total]
