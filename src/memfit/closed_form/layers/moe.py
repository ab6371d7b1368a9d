"""Mixtures of experts as transformers runs them on a card: a router, then all experts in grouped matrix products.

Source: transformers.integrations.moe.grouped_mm_experts_forward and the routers of the modeling files. The number of
tokens routed to an expert changes no size: every product runs over all tokens times the experts per token.

Stacked experts and routers are not nn.Linear, so PEFT adapts them with peft.tuners.lora.ParamWrapper: while the wrapped
module runs, its weight is a parametrization. W + s * B A is computed in full, once for the check at registration and
once for the product, and cached until the module returns. autograd saves the second one, and its gradient is as large
again. Source: PEFT 0.21, torch.nn.utils.parametrize.
"""

from __future__ import annotations

from memfit.closed_form import ops
from memfit.closed_form.engine import GraphRecorder, Tensor
from memfit.closed_form.layers import liger
from memfit.closed_form.layers.elementwise import activation
from memfit.closed_form.layers.linears import LayerRun
from memfit.nouns.architecture import Mlp

Factors = tuple[Tensor, Tensor]  # B [experts, out, rank] and A [experts, rank, in] in the dtype of the weight


def expert_factors(block: LayerRun) -> dict[str, Factors]:
    """Return the adapters' factors by parameter, outermost wrapper first; they exist until the experts return."""
    m, style = block.layer.mlp, block.style
    ranks = {"down_proj": style.lora_rank, "gate_up_proj": 2 * style.lora_rank}  # two layers became one
    shapes = {"down_proj": (block.width, m.width), "gate_up_proj": (2 * m.width, block.width)}
    found: dict[str, Factors] = {}
    for name, rank in ranks.items():
        if style.lora_rank and f"experts.{name}" in style.lora_targets:
            outs, ins = shapes[name]
            found[name] = _factors(block, f"experts.{name}", m.experts * outs * rank, m.experts * rank * ins)
            _folded(block.rec, m.experts * outs * ins, found[name])
    return found


def expert_weight(block: LayerRun, name: str, elements: int, factors: dict[str, Factors]) -> Tensor:
    """Return the weight of a product: the stored one, or a new one with the adapter added (torch.baddbmm)."""
    rec, style = block.rec, block.style
    if name not in factors:
        return ops.weight(elements, style.weight, f"experts.{name}", style.trained)
    lhs, rhs = factors[name]
    b_like, a_like = lhs.blueprint(), rhs.blueprint()

    def backward(g: Tensor) -> list[Tensor | None]:
        product = rec.like(b_like, "gradient of B")
        b_grad = rec.like(product, "scaled gradient of B")
        product = rec.like(a_like, "gradient of A")
        rec.like(b_like, "contiguous B")
        return [b_grad, rec.like(product, "scaled gradient of A")]

    return rec.record(_folded(rec, elements, factors[name]), [lhs, rhs], [lhs, rhs], backward)


def router_weight(block: LayerRun, elements: int) -> Tensor:
    """Return the router's weight, to which PEFT adds the scaled B A twice: once for a check, once for the product."""
    rec, style = block.rec, block.style
    if not style.lora_rank or "gate.weight" not in style.lora_targets:
        return ops.weight(elements, style.weight, "router.weight", style.trained)
    rank, outs = style.lora_rank, block.layer.mlp.experts
    a = ops.weight(elements // outs * rank, style.adapter, "router.lora_A", True)
    b = ops.weight(outs * rank, style.adapter, "router.lora_B", True)
    delta = ops.scale(rec, ops.linear(rec, b, a, {"1": elements}, label="B A"), "scaled B A")
    delta = ops.cast(rec, delta, style.weight, "scaled B A")
    stored = ops.constant({"1": elements}, style.weight)
    ops.add(rec, stored, delta, "weight with adapter")
    return ops.add(rec, stored, delta, "weight with adapter")


def _factors(block: LayerRun, name: str, of_b: int, of_a: int) -> Factors:
    """Return B and A as views per expert in the weight's dtype. The gradient of the permuted B is copied."""
    rec, style = block.rec, block.style
    a = ops.weight(of_a, style.adapter, f"{name}.lora_A", True)
    b = ops.weight(of_b, style.adapter, f"{name}.lora_B", True)
    by_expert = rec.record(b.view(), [b], [], lambda g: [rec.like(g, "contiguous gradient")])
    return ops.cast(rec, by_expert, style.weight, "lora_B"), ops.cast(rec, a, style.weight, "lora_A")


def _folded(rec: GraphRecorder, elements: int, factors: Factors) -> Tensor:
    """torch.baddbmm: copies the weight and adds the product to it; the permuted B is copied first."""
    out = rec.new({"1": elements}, factors[0].itemsize, "experts with adapters")
    rec.like(factors[0], "contiguous B")
    return out


def mixture(block: LayerRun, x: Tensor) -> Tensor:
    """Run routed experts, and the shared expert that every token passes through."""
    m, rec = block.layer.mlp, block.rec
    if m.every_token:
        return _every_token(block, x)
    gate_weight = block.find("shared_expert_gate", "mlp")
    shared = gated(block, x, m.shared_width) if m.shared_width and gate_weight else None
    routed = _experts(block, x, ROUTERS[m.router](block, x, m))
    if shared is not None:
        gate = ops.unary(rec, block.linear("shared_expert_gate", x, 1, "mlp"), "sigmoid", keeps="output")
        return ops.add(rec, routed, ops.mul(rec, gate, shared, "gated shared expert"), "with shared expert")
    if m.shared_width:
        return ops.add(rec, routed, gated(block, x, m.shared_width), "with shared experts")
    return routed


def gated(block: LayerRun, x: Tensor, width: int) -> Tensor:
    """down(act(gate(x)) * up(x))."""
    rec = block.rec
    if block.style.liger and block.style.liger.activation:
        gate, up = block.linear("gate", x, width, "mlp"), block.linear("up", x, width, "mlp")
        product = liger.gated_product(rec, gate, up)
        del gate, up
        return block.linear("down", product, block.width, "mlp")
    active = activation(rec, block.linear("gate", x, width, "mlp"), block.layer.mlp.activation)
    up = block.linear("up", x, width, "mlp")
    product = ops.mul(rec, active, up, "gated product")
    del active, up
    return block.linear("down", product, block.width, "mlp")


def _router_logits(block: LayerRun, x: Tensor, m: Mlp, wide: bool) -> Tensor:
    """Return the router's logits; `wide`: computed in fp32."""
    style, rec = block.style, block.rec
    w = router_weight(block, m.experts * block.width)
    if wide:
        x, w = ops.cast(rec, x, 4, "fp32 hidden states"), ops.cast(rec, w, 4, "fp32 router")
    b = ops.weight(m.experts, style.weight, "router.bias", style.trained) if m.bias else None
    return ops.linear(rec, x, w, {"T": m.experts}, b, "router logits")


def _route_softmax(block: LayerRun, x: Tensor, m: Mlp) -> Tensor:
    """Compute probabilities in fp32, scale the best to a sum of one, and cast them back."""
    rec, logits = block.rec, _router_logits(block, x, m, wide=False)
    return ops.cast(rec, _best(rec, ops.softmax(rec, logits, 4), m, normed=True), logits.itemsize, "scores")


def _route_fp32_scores(block: LayerRun, x: Tensor, m: Mlp) -> Tensor:
    """Mixtral: scores stay in fp32, so their products are fp32 too."""
    logits = _router_logits(block, x, m, wide=False)
    return _best(block.rec, ops.softmax(block.rec, logits, 4), m, normed=True)


def _route_fp32(block: LayerRun, x: Tensor, m: Mlp) -> Tensor:
    """DeepSeek, GLM: hidden states and router in fp32; groups of experts are chosen first."""
    rec = block.rec
    scores = ops.unary(rec, _router_logits(block, x, m, wide=True), "scores", keeps="output")
    choice = [rec.like(scores, "scores for choice"), rec.like(scores, "masked scores for choice")]
    weights = _best(rec, scores, m, normed=True)
    del choice
    return ops.scale(rec, weights, "scaled scores")


def _route_fp32_softmax(block: LayerRun, x: Tensor, m: Mlp) -> Tensor:
    """DeepSeek-V2: a softmax in fp32, chosen from all experts at once and not normalised."""
    scores = ops.softmax(block.rec, _router_logits(block, x, m, wide=True), 4)
    return ops.scale(block.rec, _best(block.rec, scores, m, normed=False), "scaled scores")


def _route_topk(block: LayerRun, x: Tensor, m: Mlp) -> Tensor:
    """gpt-oss: a softmax over the chosen experts only."""
    logits = _router_logits(block, x, m, wide=False)
    return ops.softmax(block.rec, _best(block.rec, logits, m, normed=False), logits.itemsize)


ROUTERS = {
    "softmax": _route_softmax, "fp32_scores": _route_fp32_scores, "fp32": _route_fp32,
    "fp32_softmax": _route_fp32_softmax, "topk": _route_topk,
}  # fmt: skip


def _best(rec: GraphRecorder, scores: Tensor, m: Mlp, *, normed: bool) -> Tensor:
    """torch.topk, and if `normed` a division by the sum, in place, which saves a copy of the undivided values."""
    chosen, whole = {"T": m.experts_per_token}, scores.blueprint()
    values = rec.new(chosen, scores.itemsize, "best scores")
    indices = rec.new(chosen, 8, "chosen experts")
    values = rec.record(values, [scores], [indices], lambda g: [rec.like(whole, "scattered gradient")])
    if not normed:
        return values
    total = rec.new({"T": 1}, scores.itemsize, "sum of scores")
    divided = rec.new(chosen, scores.itemsize, "normalised scores")
    return rec.record(divided, [values], [values, total], lambda g: [rec.like(g, "division gradient")])


def _experts(block: LayerRun, x: Tensor, scores: Tensor) -> Tensor:
    """grouped_mm_experts_forward: tokens sorted by expert, two grouped products, and back."""
    m, rec, k = block.layer.mlp, block.rec, block.layer.mlp.experts_per_token
    adapters = expert_factors(block)
    if block.style.liger and block.style.liger.experts:
        up, down = (
            expert_weight(block, name, m.experts * block.width * n * m.width, {})
            for name, n in (("gate_up_proj", 2), ("down_proj", 1))
        )
        return liger.experts(rec, x, scores, up, down, m.width, k)
    ids, order = _sorted(rec, k)
    selected = _index(rec, x, k * block.width, k, "selected hidden states")
    sample = _index(rec, scores, k, k, "sorted scores")
    counted = rec.new({"T": k}, 4, "expert of each row")
    biases = _expert_bias(block, 2 * m.width, "gate_up_proj_bias")
    gate_up = expert_weight(block, "gate_up_proj", m.experts * block.width * 2 * m.width, adapters)
    projected = _grouped(block, selected, gate_up, 2 * m.width, biases)
    projected = _gate(rec, projected, m)
    biases = _expert_bias(block, block.width, "down_proj_bias")
    down = expert_weight(block, "down_proj", m.experts * m.width * block.width, adapters)
    projected = _grouped(block, projected, down, block.width, biases)
    weighted = ops.mul(rec, projected, sample, "weighted")
    inverse = rec.new({"T": k}, 8, "inverse order")
    weighted = _index(rec, weighted, k * block.width, 0, "in order again", [inverse])
    final = _sum_over_experts(rec, weighted, block.width)
    out = ops.cast(rec, final, x.itemsize, "experts' output")
    del ids, order, selected, sample, counted, biases, projected, inverse, weighted, final, gate_up, down, adapters
    return out


def _sorted(rec: GraphRecorder, k: int) -> tuple[Tensor, Tensor]:
    """torch.sort of the expert ids: sorted values, permutation and CUB's buffers."""
    ids, order = rec.new({"T": k}, 8, "sorted experts"), rec.new({"T": k}, 8, "permutation")
    buffers = [rec.new({"T": k}, 8, "sort buffer"), rec.new({"T": k}, 17, "sort buffer")]
    buffers.clear()
    return ids, order


def _index(
    rec: GraphRecorder, x: Tensor, width: int, indices: int, label: str, kept: list[Tensor] | None = None
) -> Tensor:
    """x[indices] by row: saves the indices; the backward adds into zeros of x's shape."""
    saved: list[Tensor | None] = [*(kept or [])]
    if indices:
        saved.append(rec.new({"T": indices}, 8, "indices"))
    whole = x.blueprint()
    out = rec.new({"T": width}, x.itemsize, label)
    return rec.record(out, [x], saved, lambda g: [rec.like(whole, "scattered gradient")])


def _sum_over_experts(rec: GraphRecorder, x: Tensor, width: int) -> Tensor:
    """x.view(tokens, k, D).sum(1): the backward expands the gradient, and the view copies it."""
    out = rec.new({"T": width}, x.itemsize, "sum over experts")
    like = x.blueprint()
    return rec.record(out, [x], [], lambda g: [rec.like(like, "expanded gradient")])


def _grouped(block: LayerRun, x: Tensor, w: Tensor, out: int, biases: Tensor | None) -> Tensor:
    """torch._grouped_mm in the dtype of the weights; the gradient of the weights comes first.

    On older cards transformers' own operator runs, which saves both operands and makes both gradients, needed or not.
    """
    rec, m = block.rec, block.layer.mlp
    x = ops.cast(rec, x, w.itemsize, "in the dtype of the experts")
    need_x, need_w = (t.requires_grad or not block.style.grouped_product for t in (x, w))
    x_like, w_like = x.blueprint(), w.blueprint()
    y = rec.new({"T": m.experts_per_token * out}, w.itemsize, "output of the experts")

    def backward(g: Tensor) -> list[Tensor | None]:
        weight_grad = rec.like(w_like, "weight gradient") if need_w else None
        return [rec.like(x_like, "input gradient") if need_x else None, weight_grad]

    y = rec.record(y, [x, w], [x if need_w else None, w if need_x else None], backward)
    return y if biases is None else rec.record(y.view(), [y, biases], [], lambda g: [g, g])


def _expert_bias(block: LayerRun, out: int, name: str) -> Tensor | None:
    """bias[expert of each row]: a row for every token and expert, added in place."""
    m, rec, style = block.layer.mlp, block.rec, block.style
    if not m.bias:
        return None
    w = ops.weight(m.experts * out, style.weight, f"experts.{name}", style.trained)
    rows, like = rec.new({"T": m.experts_per_token * out}, w.itemsize, name), w.blueprint()
    return rec.record(rows, [w], [], lambda g: [rec.like(like, "bias gradient")])


def _gate(rec: GraphRecorder, x: Tensor, m: Mlp) -> Tensor:
    """Return act(gate) * up of the joint projection; gpt-oss clamps both and computes another gate."""
    half = x.elements["T"] // 2
    if m.activation != "gpt_oss_glu":
        gate, up = ops.split(rec, x, (half, half))
        return ops.mul(rec, activation(rec, gate, m.activation), up, "gated")
    gate, up = ops.slice(rec, x, {"T": half}), ops.slice(rec, x, {"T": half})
    gate = _clamp(rec, gate, 1)
    up = _clamp(rec, up, 2)
    glu = ops.mul(rec, gate, ops.unary(rec, ops.scale(rec, gate), "sigmoid", keeps="output"), "glu")
    return ops.mul(rec, ops.shift(rec, up, "up + 1"), glu, "gated")


def _clamp(rec: GraphRecorder, x: Tensor, bounds: int) -> Tensor:
    """torch.clamp: the backward compares with each bound and selects."""
    out = rec.like(x, "clamped")

    def backward(g: Tensor) -> list[Tensor | None]:
        inside = [rec.like(g, "within the bound", 1) for _ in range(bounds)]
        result = rec.like(g, "clamp gradient")
        inside.clear()
        return [result]

    return rec.record(out, [x], [x], backward)


def _every_token(block: LayerRun, x: Tensor) -> Tensor:
    """Llama 4: every expert computes every token, weighted by a score that is zero for experts not chosen."""
    m, rec, style = block.layer.mlp, block.rec, block.style
    logits = _router_logits(block, x, m, wide=False)
    indices = rec.new({"T": 1}, 8, "chosen experts")
    scattered = ops.unary(rec, logits, "scattered scores", keeps="nothing")
    del logits
    scores = ops.cast(rec, ops.unary(rec, ops.cast(rec, scattered, 4), "sigmoid", keeps="output"), style.residual)
    del scattered, indices
    routed = ops.repeat(rec, x, {"T": m.experts * block.width}, "repeated for every expert")
    routed = ops.mul(rec, routed, scores, "weighted input")
    every = _bmm_experts(block, routed, 2 * m.width, "gate_up_proj")
    gate, up = ops.split(rec, every, (m.experts * m.width, m.experts * m.width))
    del every
    product = ops.mul(rec, up, activation(rec, gate, m.activation), "gated")
    del gate, up
    routed = _bmm_experts(block, product, block.width, "down_proj")
    del product
    out = gated(block, x, m.shared_width)
    summed = rec.new({"T": block.width}, routed.itemsize, "sum over experts")
    summed = rec.record(summed, [routed], [], lambda g: [ops.viewed(g.detach())])
    return rec.record(out.view(), [out, summed], [], lambda g: [g, g])


def _bmm_experts(block: LayerRun, x: Tensor, out: int, name: str) -> Tensor:
    """torch.bmm of every token with every expert."""
    m, rec, style = block.layer.mlp, block.rec, block.style
    ins = x.elements["T"] // m.experts
    w = ops.autocast(rec, ops.weight(m.experts * ins * out, style.weight, f"experts.{name}", style.trained))
    x = ops.autocast(rec, x)
    need_x, need_w, x_like, w_like = x.requires_grad, w.requires_grad, x.blueprint(), w.blueprint()
    y = rec.new({"T": m.experts * out}, w.itemsize, name)

    def backward(g: Tensor) -> list[Tensor | None]:
        weight_grad = rec.like(w_like, "weight gradient") if need_w else None
        return [rec.like(x_like, "input gradient") if need_x else None, weight_grad]

    return rec.record(y, [x, w], [x if need_w else None, w if need_x else None], backward)
