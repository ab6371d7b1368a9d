"""litgpt's own model: fused qkv with one merged adapter, expanded key heads, and a chunked head under Fabric.

`PROFILE` is the training loop of litgpt up to 0.5.3, whose quantised weights come from bitsandbytes 0.42.

Source: litgpt/model.py, lora.py and utils.py of lit-gpt 2023-11 and litgpt 0.3 to 0.4, Lightning 2.1 to 2.4.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache, partial

from memfit.closed_form import ops
from memfit.closed_form.engine import Elements, GraphRecorder, Tensor
from memfit.closed_form.layers.attention import interface
from memfit.closed_form.layers.elementwise import activation, rotate
from memfit.closed_form.layers.head import LOSSES, HeadStyle
from memfit.closed_form.layers.linears import LayerRun, base_linear, four_bits
from memfit.closed_form.style import CODES, Code, Style
from memfit.nouns.architecture import Architecture, Layer, Norm, Weight
from memfit.tables.trainers import Trainer

CHUNK = 128  # tokens of a sequence whose logits are made, or scored, together


@lru_cache(maxsize=64)
def stored(a: Architecture) -> Architecture:
    """The weights litgpt keeps: an output head of its own, plain RMSNorm, and its names for every projection."""
    made: dict[Layer, Layer] = {}
    layers = tuple(made.setdefault(layer, _layer(layer, a.width)) for layer in a.layers)
    head = a.head or ()
    if a.tied:
        head = (Weight("lm_head.weight", (a.vocabulary, a.width), "linear"), *head)
    return replace(a, layers=layers, head=head, tied=False, final_norm=a.final_norm and _norm(a.final_norm))


def _norm(norm: Norm) -> Norm:
    return Norm("rms") if norm.kind == "rms_gemma" else norm


def _layer(layer: Layer, width: int) -> Layer:
    a, m = layer.attention, layer.mlp
    n, kv = a.heads * a.head_dim, a.kv_heads * a.head_dim
    rows = [("attn.query", n, width, a.bias), ("attn.key", kv, width, a.bias), ("attn.value", kv, width, a.bias)]
    rows.append(("attn.projection", width, n, a.out_bias))
    inner = ("fc_1", "fc_2") if m.kind == "gated" else ("fc",)
    rows += [(f"mlp.{name}", m.width, width, m.bias) for name in inner]
    rows.append(("mlp.mlp_projection", width, m.width, m.bias))
    weights = [w for w in layer.weights if w.kind == "norm" or "norm" in w.name or "ln_" in w.name]
    for name, out, ins, bias in rows:
        weights.append(Weight(f"{name}.weight", (out, ins), "linear"))
        if bias:
            weights.append(Weight(f"{name}.bias", (out,), "bias"))
    # its attention is torch's SDPA for every family, written out only where scores are capped
    attention = replace(a, code="", sdpa=not a.softcap)
    return replace(layer, attention=attention, weights=tuple(weights), norm=_norm(layer.norm))


def block(block: LayerRun, x: Tensor) -> Tensor:
    """litgpt.model.Block.forward; local variables live as long as they do there."""
    rec, layer = block.rec, block.layer
    normed = block.norm(x, "norm_1")
    attended = _attention(block, normed)
    sandwich = layer.placement == "sandwich"
    if sandwich:
        attended = block.norm(attended, "post_attention_norm")
    if layer.placement == "parallel":
        normed = normed if layer.norms == 1 else block.norm(x, "norm_2")
        return ops.add(rec, ops.add(rec, _mlp(block, normed), attended, "mlp + attention"), x, "residual")
    x = ops.add(rec, attended, x, "residual")
    h = _mlp(block, block.norm(x, "norm_2"))
    if sandwich:
        h = block.norm(h, "post_mlp_norm")
    return ops.add(rec, h, x, "residual")


def _attention(block: LayerRun, x: Tensor) -> Tensor:
    """CausalSelfAttention: grouped heads are expanded before the rotation, whose tables are fp32."""
    rec, a = block.rec, block.layer.attention
    n, kv = a.heads * a.head_dim, a.kv_heads * a.head_dim
    q, k, v = (ops.split_heads(rec, t) for t in ops.split(rec, _qkv(block, x), (n, kv, kv)))
    if n != kv:  # the interleaved queries are copied out, keys and values copied for every head
        q, k, v = (ops.repeat(rec, t, {"T": n}, "expanded heads") for t in (q, k, v))
    every = replace(a, kv_heads=a.heads, rotary="half_fp32_table")
    if a.rotary_dim:
        q, k = rotate(rec, q, k, every, 4)
        if a.rotary_dim == a.head_dim:  # the empty rest is concatenated all the same
            q, k = (
                ops.copy(rec, q, q.itemsize, "concatenated queries"),
                ops.copy(rec, k, k.itemsize, "concatenated keys"),
            )
    return _linear(block, interface(block, q, k, v, every), "attn.projection", block.width)


def _qkv(block: LayerRun, x: Tensor) -> Tensor:
    """LoRAQKVLinear: one adapter for the enabled of q, k and v, its result padded with zeros to the full width."""
    rec, style, a = block.rec, block.style, block.layer.attention
    widths = {"query": a.heads * a.head_dim, "key": a.kv_heads * a.head_dim, "value": a.kv_heads * a.head_dim}
    total, ins = sum(widths.values()), block.width
    y = base_linear(rec, style, x, total * ins, {"T": total}, total if a.bias else 0, "qkv")
    on = [w for name, w in widths.items() if name in style.lora_targets]
    if not style.lora_rank or not on:
        return y
    rank, width = style.lora_rank, sum(on)
    dropped = ops.dropout(rec, x, 0.05 if style.lora_dropout and style.dropout else 0.0)
    down = ops.weight(rank * len(on) * ins, style.adapter, "qkv.lora_A", True)
    up = ops.weight(rank * width, style.adapter, "qkv.lora_B", True)
    hidden = ops.linear(rec, dropped, down, {"T": rank * len(on)}, label="lora_A")
    delta = ops.linear(rec, hidden, up, {"T": width}, label="lora_B")
    if len(on) < 3:
        delta = _zero_pad(rec, delta, total)
    delta = ops.scale(rec, delta, "lora scaled")
    return ops.add(rec, y, delta, "with adapter")


def _zero_pad(rec: GraphRecorder, x: Tensor, total: int) -> Tensor:
    """zeros.index_copy(lora_ind, x): keeps its source, whose shape the backward formula asks for."""
    out = rec.new({"T": total}, x.itemsize, "zero-padded")
    like = x.blueprint()
    return rec.record(out, [x], [x], lambda g: [rec.like(like, "selected gradient")])


def _mlp(block: LayerRun, x: Tensor) -> Tensor:
    m, rec = block.layer.mlp, block.rec
    if m.kind == "gated":
        first, second = _linear(block, x, "mlp.fc_1", m.width), _linear(block, x, "mlp.fc_2", m.width)
        x = ops.mul(rec, activation(rec, first, m.activation), second, "gated product")
    else:
        x = activation(rec, _linear(block, x, "mlp.fc", m.width), "gelu")
    return _linear(block, x, "mlp.mlp_projection", block.width)


def _linear(block: LayerRun, x: Tensor, name: str, out: int) -> Tensor:
    bias = any(w.name == f"{name}.bias" for w in block.layer.weights)
    return lora_linear(block.rec, block.style, x, name.rsplit(".", 1)[-1], out, bias)


def lora_linear(rec: GraphRecorder, style: Style, x: Tensor, name: str, out: int, bias: bool = False) -> Tensor:
    """LoRALinear: pretrained(x) + (dropout(x) @ A^T @ B^T) * scaling, all in the dtype of x."""
    ((basis, ins),) = x.elements.items()
    y = base_linear(rec, style, x, ins * out, {basis: out}, out if bias else 0, name)
    if not style.lora_rank or name not in style.lora_targets:
        return y
    rank = style.lora_rank
    dropped = ops.dropout(rec, x, 0.05 if style.lora_dropout and style.dropout else 0.0)
    hidden = ops.linear(rec, dropped, ops.weight(rank * ins, style.adapter, f"{name}.lora_A", True), {basis: rank})
    delta = ops.linear(rec, hidden, ops.weight(rank * out, style.adapter, f"{name}.lora_B", True), {basis: out})
    delta = ops.scale(rec, delta, "lora scaled")
    return ops.add(rec, y, delta, "with adapter")


def head(rec: GraphRecorder, h: HeadStyle, style: Style, x: Tensor) -> tuple[Tensor, list[Tensor]]:
    """lm_head and chunked_cross_entropy; Fabric casts what the model returns to fp32, and the loop holds it."""
    logits = _whole_logits(rec, h, style, x) if style.trained else _chunked_logits(rec, h, style, x)
    wide = ops.cast(rec, logits, 4, "fp32 logits")
    del logits
    rec.returned = len(rec.events)
    if wide.storage:
        rec.lingering.add(wide.storage.id)  # `logits` stays bound until the model returns the next ones
    flat = ops.clone(rec, wide, "shifted logits") if style.trained else wide  # a view in chunks of whole rows
    loss = _scored(rec, flat, h.vocabulary, whole=style.trained)
    del flat
    return loss, [wide]


def _whole_logits(rec: GraphRecorder, h: HeadStyle, style: Style, x: Tensor) -> Tensor:
    w = ops.weight(h.vocabulary * h.width, h.itemsize, "head", True)
    return ops.linear(rec, x, w, {"T": h.vocabulary}, label="logits")


def _chunked_logits(rec: GraphRecorder, h: HeadStyle, style: Style, x: Tensor) -> Tensor:
    """[lm_head(x_i) for x_i in x.split(128)]: the working tensors of one chunk, the results of all."""
    chunk: Elements = {("chunk", CHUNK, 0): h.vocabulary}
    weight: Elements = {"1": h.vocabulary * h.width}
    adapted, rank = style.lora_rank and "lm_head" in style.lora_targets, style.lora_rank
    kept: list[Tensor | None] = [x] if style.quantization != "none" else []
    if rec.autocast and h.itemsize != rec.autocast:  # a frozen weight is cast, and its copy kept, for every chunk
        casts = rec.new({("chunks", CHUNK, 0): h.vocabulary * h.width}, rec.autocast, "autocast copies of the head")
        kept.append(casts)
    parts: list[Tensor | None] = [x]
    if adapted:
        dropped = ops.dropout(rec, x, 0.05 if style.lora_dropout and style.dropout else 0.0)
        down = ops.weight(rank * h.width, style.adapter, "lm_head.lora_A", True)
        hidden = ops.linear(rec, dropped, down, {"T": rank}, label="lora_A")
        kept.append(hidden)
        parts += [hidden, ops.weight(rank * h.vocabulary, style.adapter, "lm_head.lora_B", True)]
        del dropped
    if x in kept and x.storage:
        rec.lingering.add(x.storage.id)
    logits = rec.new({"T": h.vocabulary}, 2, "logits")
    working = _head_weight(rec, style, weight)
    del working
    working = [rec.new(chunk, 2, "logits of a chunk") for _ in range(2 if adapted else 0)]
    del working
    elements = x.elements

    def backward(g: Tensor) -> list[Tensor | None]:
        held = _head_weight(rec, style, weight)
        grads: list[Tensor | None] = [rec.new(elements, 2, "gradient of hidden states")]
        del held
        if adapted:
            working = rec.new(chunk, 2, "scaled gradient of a chunk")
            del working
            grads += [
                rec.new({"T": rank}, 2, "lora gradient"),
                rec.new({"1": rank * h.vocabulary}, 2, "lora_B gradient"),
            ]
        return grads

    return rec.record(logits, parts, kept, backward)


def _head_weight(rec: GraphRecorder, style: Style, weight: Elements) -> list[Tensor]:
    """The head's weight for one product: nothing to make, or dequantised and cast."""
    if style.quantization == "none":
        return []
    first = rec.new(weight, 2, "dequantised weight")
    cast = rec.new(weight, 2, "cast weight")
    del first
    return [cast]


def _scored(rec: GraphRecorder, logits: Tensor, vocabulary: int, *, whole: bool) -> Tensor:
    """Cross entropy by chunks: the log-probabilities of all are kept; each chunk's gradient takes its place."""
    elements, chunk = logits.elements, {("chunk", CHUNK, 0): vocabulary}
    kept = rec.new(elements, 4, "log_softmax", "activations")
    saved = [kept.detach()]

    def backward(g: Tensor) -> list[Tensor | None]:
        working = [rec.new(chunk, 4, "gradient of a chunk") for _ in range(2)]
        del working
        saved.clear()
        result = rec.new(elements, 4, "gradient of all chunks")
        return [rec.new(elements, 4, "concatenated gradient")] if whole else [result]

    kept = rec.record(kept, [logits], [], backward)
    loss = rec.new({"1": 1}, 4, "loss")
    return rec.record(loss, [kept], [], lambda g: [rec.new({"1": 1}, 4, "gradient of the mean")])


CODES["litgpt"] = Code(stored=stored, block=block, quantised=partial(four_bits, keeps_input=True, casts=True))
LOSSES["litgpt"] = head
# no autocast under bf16-true, 16-bit adapters, lm_head and loss by chunks of 128, fp32 logits from Fabric; Fabric
# quantises every nn.Linear, lm_head too, from fp16
PROFILE = Trainer(
    name="litgpt", code="litgpt", heads=(("full", "full"), ("chunked", "litgpt"), ("fused", "litgpt")),
    default_loss="chunked", adapter_fp32=False, qlora_adapter_fp32=False, kbit_prepare=False, quantised_head=True,
    keeps_loss=True, warms_cache=False,
)  # fmt: skip
