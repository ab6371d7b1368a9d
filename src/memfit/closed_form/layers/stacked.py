"""LoRA on a parameter that is no linear layer's: stacked experts and routers, as peft.tuners.lora.ParamWrapper runs it.

While the wrapped module runs, its weight is a parametrization: W + s * B A is computed in full, once to check it when it
is registered and once for the product, and is cached until the module returns. autograd keeps the second one, and the
gradient of it is as large again. Source: PEFT 0.21, torch.nn.utils.parametrize.
"""

from __future__ import annotations

from memfit.closed_form import ops
from memfit.closed_form.engine import Recorder, Tensor
from memfit.closed_form.layers.modules import Block

Factors = tuple[Tensor, Tensor]  # B [experts, out, rank] and A [experts, rank, in] in the dtype of the weight


def expert_factors(block: Block) -> dict[str, Factors]:
    """The factors of the experts' adapters by parameter, the outermost wrapper first; they live until the experts return."""
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


def expert_weight(block: Block, name: str, elements: int, factors: dict[str, Factors]) -> Tensor:
    """The weight that the product takes: the stored one, or a new one with the adapter folded in (torch.baddbmm)."""
    rec, style = block.rec, block.style
    if name not in factors:
        return ops.weight(elements, style.weight, f"experts.{name}", style.trained)
    lhs, rhs = factors[name]
    b_like, a_like = lhs.blueprint(), rhs.blueprint()

    def backward(g: Tensor) -> list[Tensor | None]:
        product = rec.like(b_like, "gradient of B")
        b_grad = rec.like(product, "scaled gradient of B")
        product = rec.like(a_like, "gradient of A")
        copied = rec.like(b_like, "contiguous B")
        del copied
        return [b_grad, rec.like(product, "scaled gradient of A")]

    return rec.record(_folded(rec, elements, factors[name]), [lhs, rhs], [lhs, rhs], backward)


def router_weight(block: Block, elements: int) -> Tensor:
    """The router's weight; PEFT adapts it as one matrix: the product, scaled, and the sum, checked and made again."""
    rec, style = block.rec, block.style
    if not style.lora_rank or "gate.weight" not in style.lora_targets:
        return ops.weight(elements, style.weight, "router.weight", style.trained)
    rank, outs = style.lora_rank, block.layer.mlp.experts
    a = ops.weight(elements // outs * rank, style.adapter, "router.lora_A", True)
    b = ops.weight(outs * rank, style.adapter, "router.lora_B", True)
    delta = ops.scale(rec, ops.linear(rec, b, a, {"1": elements}, label="B A"), "scaled B A")
    delta = ops.cast(rec, delta, style.weight, "scaled B A")
    stored = ops.constant({"1": elements}, style.weight)
    checked = ops.add(rec, stored, delta, "weight with adapter")
    del checked
    return ops.add(rec, stored, delta, "weight with adapter")


def _factors(block: Block, name: str, of_b: int, of_a: int) -> Factors:
    """Both as views per expert, cast where the adapter is wider; B's is permuted, so its gradient is copied back."""
    rec, style = block.rec, block.style
    a, b = (
        ops.weight(of_a, style.adapter, f"{name}.lora_A", True),
        ops.weight(of_b, style.adapter, f"{name}.lora_B", True),
    )
    by_expert = rec.record(b.view(), [b], [], lambda g: [rec.like(g, "contiguous gradient")])
    return ops.cast(rec, by_expert, style.weight, "lora_B"), ops.cast(rec, a, style.weight, "lora_A")


def _folded(rec: Recorder, elements: int, factors: Factors) -> Tensor:
    """baddbmm: the weight copied, the product added to it; B, permuted, is copied for it."""
    out = rec.new({"1": elements}, factors[0].itemsize, "experts with adapters")
    copied = rec.like(factors[0], "contiguous B")
    del copied
    return out
