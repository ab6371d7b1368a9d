"""Blocks of encoder-decoder models, T5 and Whisper: attention to a stack's own tokens and to what was read.

The blocks of a stack share tensors: those of a decoder what its encoder hands over, those of T5 the bias of positions
that the first of them makes. Their gradients are sums, which the last block of a stack begins.
"""

from __future__ import annotations

from collections.abc import Callable

from memfit.closed_form import ops
from memfit.closed_form.engine import Elements, GraphRecorder, Tensor
from memfit.closed_form.layers.attention import cached
from memfit.closed_form.layers.attention_kernels import scaled_dot_product_attention
from memfit.closed_form.layers.elementwise import activation
from memfit.closed_form.layers.linears import LayerRun
from memfit.closed_form.style import Style
from memfit.nouns.architecture import Attention, Layer

# tensors that several programs use: what an encoder hands over, and T5's biases
SOURCE, BIAS, CROSS_BIAS = "source", "position bias", "position bias of the source"


def given(rec: GraphRecorder, layer: Layer, style: Style, width: int) -> None:
    """Put the tensors that a block shares with others into `rec.shared`, and the sums of their gradients."""
    a, cross, biased = layer.attention, layer.cross, layer.attention.position_bias
    shared: dict[str, tuple[Elements, int, bool]] = {}
    if cross:
        shared[SOURCE] = {"X": width}, style.source, style.source_grad
    if biased:
        shared[BIAS] = {"SS": a.heads}, style.norm_weight, style.grad and style.trained
    if cross and biased:
        asked = style.grad and style.checkpointing != "none"
        queries = style.residual if style.quantization != "none" else style.autocast or style.weight
        shared[CROSS_BIAS] = {"SX": cross.heads}, queries, asked
    for name, (elements, itemsize, learned) in shared.items():
        made = name != SOURCE and style.first  # by this block
        if not made:
            rec.shared[name] = rec.new(elements, itemsize, name, "activations")
            rec.shared[name].parameter, rec.shared[name].requires_grad = name, learned
        if learned and not (made and name == BIAS):  # whose gradient ends in a node of this block
            rec.inputs[name] = [None]
        if learned and not style.last:
            rec.sums[name] = rec.new(elements, itemsize, f"gradient of the {name}")


def t5(block: LayerRun, x: Tensor) -> Tensor:
    """T5Block: self-attention, in decoders attention to the source, and the feed-forward part, each after a norm."""
    parts: list[tuple[str, Sublayer]] = [("input_norm", _to_itself), ("mlp_norm", _feed_forward)]
    if block.layer.cross:
        parts.insert(1, ("cross_norm", _to_source))
    for label, run in parts:
        x = _part(block, x, label, run, holds_norm=run is not _feed_forward)
        x = _clamped(block.rec, x, if_infinite=True) if block.style.fp16 else x
    return x


def whisper(block: LayerRun, x: Tensor) -> Tensor:
    """WhisperEncoderLayer, which clamps what it returns in fp16, and WhisperDecoderLayer."""
    x = _part(block, x, "input_norm", _copied_to_itself, holds_norm=False)
    if block.layer.cross:
        x = _part(block, x, "cross_norm", _copied_to_source, holds_norm=False)
    x = _part(block, x, "mlp_norm", _inline_feed_forward, holds_norm=False)
    clamps = block.style.fp16 and not block.layer.cross
    return _clamped(block.rec, x, if_infinite=False) if clamps else x


Sublayer = Callable[[LayerRun, list[Tensor]], Tensor]  # a block, and what its norm made, which it may drop


def _part(block: LayerRun, x: Tensor, label: str, run: Sublayer, *, holds_norm: bool = True) -> Tensor:
    """x + dropout(run(norm(x))): the sub-layer's output is a local variable during the sum."""
    normed = [block.norm(x, label)]
    block.rec.enter(label.removesuffix("_norm"))
    made = run(block, normed)
    block.rec.leave()
    del normed[holds_norm:]
    out = ops.add(block.rec, x, _dropped(block, made, block.layer.dropout), "residual")
    del made, normed
    return out


def _clamped(rec: GraphRecorder, x: Tensor, *, if_infinite: bool) -> Tensor:
    """torch.clamp of fp16 hidden states, of T5 to limits that depend on whether one is infinite."""
    seen = [rec.like(x, "absolute values"), rec.like(x, "infinite", 1)] if if_infinite else []
    del seen

    def backward(g: Tensor) -> list[Tensor | None]:
        within = [rec.like(g, "within a limit", 1) for _ in range(2)]
        result = rec.like(g, "gradient within the limits")
        del within
        return [result]

    return rec.record(rec.like(x, "clamped"), [x], [x], backward)


def _dropped(block: LayerRun, x: Tensor, p: float) -> Tensor:
    return ops.dropout(block.rec, x, p if block.style.dropout else 0.0)


def _heads(block: LayerRun, role: str, x: Tensor, a: Attention, part: str = "attention") -> Tensor:
    return ops.split_heads(block.rec, block.linear(role, x, a.heads * a.head_dim, part))


def _to_itself(block: LayerRun, normed: list[Tensor]) -> Tensor:
    """T5Attention of a stack to itself, causal in decoders, whose batches have no mask."""
    rec, a, style = block.rec, block.layer.attention, block.style
    q, k, v = (_heads(block, role, normed[0], a) for role in "qkv")
    k, v = cached(block, k, v)
    bias = _relative_bias(block, a) if style.first else rec.shared[BIAS]
    if style.kernel == "eager":
        return block.linear("o", _eager(block, q, k, v, a, bias, "TS"), block.width)
    if a.causal:
        mask = _where(rec, bias, {"SS": a.heads}, rec.new({"SS": 1}, 1, "causal mask"))
    else:
        mask = _where(rec, bias, {"TS": a.heads}, ops.constant({"TS": 1}, 1)) if style.mask == "rows" else bias
    # the bias is laid out with its heads last
    mask = ops.clone(rec, mask, "contiguous mask") if rec.autocast not in (0, mask.itemsize) else mask
    variable = mask  # which autocast copies, of T5Attention.forward
    ragged, mask = _aligned(rec, mask, a)
    del bias
    out = scaled_dot_product_attention(rec, style, q, k, v, a, a.dropout if style.attention_dropout else 0.0, mask)
    del mask, ragged, variable
    return block.linear("o", out, block.width)


def _to_source(block: LayerRun, normed: list[Tensor]) -> Tensor:
    """T5Attention to the encoder's output, with zeros for a bias."""
    rec, a, style = block.rec, block.layer.cross, block.style
    assert a is not None
    source = rec.shared[SOURCE]
    q, k, v = (_heads(block, role, source if role in "kv" else normed[0], a, "cross") for role in "qkv")
    k, v = cached(block, k, v)
    mask = _zeros(block, a, q.itemsize) if style.first else rec.shared[CROSS_BIAS]
    if style.kernel == "eager":
        return block.linear("o", _eager(block, q, k, v, a, mask, "TX"), block.width, "cross")
    if style.source_mask:
        mask = _where(rec, mask, {"TX": a.heads}, ops.constant({"TX": 1}, 1))
    out = scaled_dot_product_attention(rec, style, q, k, v, a, a.dropout if style.attention_dropout else 0.0, mask)
    del mask
    return block.linear("o", out, block.width, "cross")


def _aligned(rec: GraphRecorder, mask: Tensor, a: Attention) -> tuple[Tensor, Tensor]:
    """Return a copy of a mask in the compute dtype as the kernel takes it, in rows of 16 bytes each.

    A copy whose rows are no such multiple is the first of the two, and the second is the kernel's own.
    """
    width, before = rec.autocast or mask.itemsize, mask.blueprint()
    basis, step = next(iter(mask.elements)), 16 // width
    ragged = rec.new({("ragged", basis, step): a.heads}, width, "contiguous mask")
    out = rec.new({("aligned", basis, step): a.heads}, width, "mask of the kernel").view(mask.elements)
    out = rec.record(out, [mask], [], lambda g: [ops.cast(rec, g, before.itemsize, "cast gradient")])
    return ragged, out


def _eager(block: LayerRun, q: Tensor, k: Tensor, v: Tensor, a: Attention, bias: Tensor | None, pairs: str) -> Tensor:
    """eager_attention_forward: the softmax has the dtype of the scores, or autocast's fp32."""
    rec, style = block.rec, block.style
    weights = ops.scale(rec, ops.bmm(rec, q, k, {pairs: a.heads}, "scores"), "scaled scores")
    weights = weights if bias is None else ops.add(rec, weights, bias, "biased scores")
    if a.causal or style.mask == "rows" or (pairs == "TX" and bias is not None):
        weights = ops.shift(rec, weights, "masked scores")
    weights = ops.softmax(rec, weights, 4 if rec.autocast else weights.itemsize)
    weights = ops.dropout(rec, weights, a.dropout if style.attention_dropout else 0.0)
    return ops.tokens_first(rec, ops.bmm(rec, weights, v, {"T": a.heads * a.head_dim}, "attention output"))


def _zeros(block: LayerRun, a: Attention, itemsize: int) -> Tensor:
    """Zeros of the source's bias. With checkpointing T5 asks for their gradient, which nothing uses."""
    style, made = block.style, block.rec.new({"SX": a.heads}, itemsize, "zero bias")
    made.requires_grad = style.grad and style.checkpointing != "none"
    made.parameter = CROSS_BIAS
    _share(block, CROSS_BIAS, made)
    return made


def _share(block: LayerRun, name: str, made: Tensor) -> None:
    """Hand a tensor to the other blocks, unless it is made again in a recomputation."""
    block.held.append(made)
    if block.rec.stop_at is None:
        block.rec.shared[name] = made


def _relative_bias(block: LayerRun, a: Attention) -> Tensor:
    """T5Attention.compute_bias: looks up a number for each pair of positions and each head."""
    rec, style, weight = block.rec, block.style, block.layer_weight("relative_attention_bias")
    held = _buckets(rec, both_ways=not a.causal)  # the distance is a variable until the lookup is done
    made = rec.new({"SS": a.heads}, style.norm_weight, "position bias")
    table = ops.weight(weight.numel, style.norm_weight, weight.name, style.trained)

    def backward(g: Tensor) -> list[Tensor | None]:
        contiguous = rec.like(g, "contiguous gradient")
        result = rec.new({"1": weight.numel}, g.itemsize, "gradient")
        rec.buffer({("embed pairs", a.heads, weight.shape[0]): 1}, "embedding sort buffers")
        del contiguous
        return [result]

    rec.record(made, [table], [held[1]], backward)
    if made.grad_fn:
        rec.seeds[made.grad_fn] = BIAS
    _share(block, BIAS, made)
    return made


def _buckets(rec: GraphRecorder, *, both_ways: bool) -> tuple[Tensor, Tensor]:
    """T5Attention._relative_position_bucket of every pair of positions: their distance, and the bucket it is in."""

    def made(itemsize: int = 8) -> Tensor:
        return rec.new({"SS": 1}, itemsize, "buckets of positions")

    distance = made()
    found = made(1) if both_ways else made()  # is it ahead?; or zeros
    if both_ways:
        for _ in range(3):  # as a number, times the buckets of a direction, added to 0
            found = made()
        away = made()
    else:
        away = made()
        del found
        away = made()  # negated
    near = made(1)
    for _ in range(5):  # the logarithm that far positions are sorted by
        far = made(4)
    for _ in range(2):  # as a number, after the near buckets
        far = made()
    last = made()
    capped = made()
    del last, far
    chosen = made()
    if not both_ways:
        found = made()
    del chosen, away, near, capped
    return distance, found


def _where(rec: GraphRecorder, bias: Tensor, elements: Elements, mask: Tensor) -> Tensor:
    """torch.where(mask, bias, a number): the gradient is chosen in the same way, then summed over the batch."""
    out, before = rec.new(elements, bias.itemsize, "mask with position bias"), bias.blueprint()

    def backward(g: Tensor) -> list[Tensor | None]:
        chosen = rec.like(g, "chosen gradient")
        return [chosen if g.elements == before.elements else rec.like(before, "sum over the batch")]

    return rec.record(out, [bias], [mask], backward)


def _feed_forward(block: LayerRun, normed: list[Tensor]) -> Tensor:
    """T5DenseActDense and T5DenseGatedActDense: what the last projection gets is cast to the dtype of its weight."""
    m, rec, x, held = block.layer.mlp, block.rec, normed[0], []
    if m.kind == "gated":
        held = [activation(rec, block.linear("gate", x, m.width, "mlp"), m.activation)]
        held.append(block.linear("up", x, m.width, "mlp"))
        x = ops.mul(rec, held[0], held[1], "gated product")
    else:
        x = activation(rec, block.linear("fc1", x, m.width, "mlp"), m.activation)
    x = _dropped(block, x, m.dropout)
    x = ops.cast(rec, x, block.style.norm_weight, "as wide as the weight")
    x = block.linear("down", x, block.width, "mlp")
    del held
    return x


def _inline_feed_forward(block: LayerRun, normed: list[Tensor]) -> Tensor:
    """fc2(act(fc1(x))) in the block itself, where each result takes the place of the one before."""
    m = block.layer.mlp
    x = activation(block.rec, block.linear("fc1", normed[0], m.width, "mlp"), m.activation)
    normed.clear()
    return block.linear("fc2", _dropped(block, x, m.dropout), block.width, "mlp")


def _copied_to_itself(block: LayerRun, normed: list[Tensor]) -> Tensor:
    return _copied(block, normed[0], normed[0], block.layer.attention, "attention")


def _copied_to_source(block: LayerRun, normed: list[Tensor]) -> Tensor:
    assert block.layer.cross is not None
    return _copied(block, normed[0], block.rec.shared[SOURCE], block.layer.cross, "cross")


def _copied(block: LayerRun, x: Tensor, source: Tensor, a: Attention, part: str) -> Tensor:
    """WhisperAttention: scales the queries itself, and copies queries, keys and values head by head."""
    rec, style, width = block.rec, block.style, a.heads * a.head_dim
    q = ops.scale(rec, block.linear("q", x, width, part), "scaled queries")
    q = ops.heads_first(rec, ops.split_heads(rec, q), "queries by head")
    k, v = (ops.heads_first(rec, _heads(block, role, source, a, part), f"{role} by head") for role in "kv")
    if style.kernel == "eager":
        out = _eager(block, q, k, v, a, None, "TX" if part == "cross" else "TS")
    else:
        dropout = a.dropout if style.attention_dropout else 0.0
        out = ops.tokens_first(rec, scaled_dot_product_attention(rec, style, q, k, v, a, dropout, None))
    out = block.linear("o", out, block.width, part)  # its input is freed here, before queries, keys and values
    return out  # noqa: RET504
