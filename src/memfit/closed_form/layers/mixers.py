"""Which code mixes the tokens of a layer: one row per kind of attention."""

from __future__ import annotations

from collections.abc import Callable

from memfit.closed_form.engine import Tensor
from memfit.closed_form.layers import classic
from memfit.closed_form.layers.attention import llama4, softmax_attention
from memfit.closed_form.layers.latent import latent
from memfit.closed_form.layers.linear_attention import gated_delta_net
from memfit.closed_form.layers.modules import Block
from memfit.errors import Unsupported
from memfit.nouns.architecture import Attention

MIXERS: dict[str, Callable[[Block, Tensor, Attention], Tensor]] = {
    "softmax": softmax_attention, "mla": latent, "linear": gated_delta_net, "llama4": llama4, **classic.CODES,
}  # fmt: skip


def attention(block: Block, x: Tensor) -> Tensor:
    """One attention sub-block from normed hidden states to the output projection."""
    a = block.layer.attention
    mixer = MIXERS.get(a.code or a.kind)
    if mixer is None:
        raise Unsupported(
            f"activations of {a.kind} attention are not modelled", hint="'memfit models' lists what is covered"
        )
    block.rec.enter("attention")
    try:
        return mixer(block, x, a)
    finally:
        block.rec.leave()
