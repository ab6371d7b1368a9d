"""Embeddings of their own for every layer (Gemma 4): looked up and projected once, gated into each block.

Source: Gemma4TextModel.get_per_layer_inputs, project_per_layer_inputs and the end of Gemma4TextDecoderLayer.forward.
"""

from __future__ import annotations

from dataclasses import dataclass

from memfit.closed_form import ops
from memfit.closed_form.engine import Recorder, Tensor
from memfit.closed_form.layers.activations import activation
from memfit.closed_form.layers.modules import Block
from memfit.closed_form.layers.norms import norm
from memfit.closed_form.style import Style
from memfit.nouns.architecture import Architecture, Norm


@dataclass(frozen=True, slots=True)
class PerLayer:
    """The table of all layers' own embeddings."""

    rows: int
    joint: int  # width of all layers' together
    own: int  # width of one layer's
    norm: Norm


def per_layer_of(a: Architecture) -> PerLayer | None:
    """What a model has of it; None for all but Gemma 4's small ones."""
    table = next((w for w in a.embedding if w.module == "embed_tokens_per_layer"), None)
    if table is None:
        return None
    rows, joint = table.shape
    return PerLayer(rows, joint, joint // len(a.layers), a.final_norm or Norm("rms"))


def inputs(rec: Recorder, p: PerLayer, x: Tensor, width: int, itemsize: int, style: Style) -> Tensor:
    """(scaled embedding + normed projection of the token embeddings), scaled: [B, S, L, own]."""
    table = ops.weight(p.rows * p.joint, itemsize, "embed_tokens_per_layer", style.trained)
    own = rec.new({"T": p.joint}, itemsize, "embedding of every layer")

    def backward(g: Tensor) -> list[Tensor | None]:
        dense = rec.new({"1": p.rows * p.joint}, itemsize, "embedding gradient")
        rec.buffer({("embed", p.joint, itemsize): 1}, "embedding sort buffers")
        return [dense]

    own = ops.scale(rec, rec.record(own, [table], [], backward), "scaled embedding of every layer")
    w = ops.weight(p.joint * width, style.weight, "per_layer_model_projection.weight", style.trained)
    projected = ops.scale(rec, ops.linear(rec, x, w, {"T": p.joint}), "scaled projection")
    projected = norm(rec, projected, p.norm, p.own, style, "per_layer_projection_norm")
    return ops.scale(rec, ops.add(rec, projected, own, "projection + embedding"), "inputs of every layer")


def gated_in(block: Block, x: Tensor, own: int) -> Tensor:
    """x + norm(up(act(down(x)) * own input)); the own input's gradient is written into zeros for all layers."""
    rec, style = block.rec, block.style
    given = Tensor(None, {"T": own}, x.itemsize, style.own_input_grad)
    if given.requires_grad:

        def backward(g: Tensor) -> list[Tensor | None]:
            """SelectBackward: a gradient for every layer's input, added to the others' at once."""
            rec.new({"T": style.per_layer}, g.itemsize, "gradient of every layer's input")
            return [None]

        given = rec.record(given.view(), [given], [], backward)
    gate = activation(rec, block.linear("per_layer_input_gate", x, own), block.layer.mlp.activation)
    product = ops.mul(rec, gate, given, "gated input of the layer")
    del gate
    projected = block.linear("per_layer_projection", product, block.width)
    del product
    projected = block.norm(projected, "post_per_layer_input_norm")
    return ops.add(rec, x, projected, "residual")


def scaled_in_place(rec: Recorder, x: Tensor) -> Tensor:
    """hidden_states *= layer_scalar: nothing new forward, a product backward."""
    return rec.record(x.view(), [x], [], lambda g: [rec.like(g, "scaled gradient")])
