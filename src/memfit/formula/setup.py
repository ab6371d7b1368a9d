"""From architecture, recipe and card to the styles that blocks and ends are traced under."""

from __future__ import annotations

from dataclasses import dataclass, replace

from memfit.architecture import Architecture, Layer
from memfit.formula import shifted
from memfit.formula.ends import EmbeddingStyle, HeadStyle
from memfit.formula.numerics import Capability, Numerics, attention_kernel, lora_modules
from memfit.formula.run import MicroStep, micro_step
from memfit.formula.style import Kernel, Style
from memfit.job import Recipe
from memfit.optimizers import Optimizer
from memfit.trainers import Trainer


@dataclass(frozen=True, slots=True)
class Situation:
    """Facts about the data and loop that a recipe does not hold."""

    padded: bool = False
    train: bool = True
    accumulating: bool = False
    use_cache: bool = False
    release_gradients: bool = False  # they are sharded, offloaded or consumed as soon as they exist


def styles_of(a: Architecture, r: Recipe, n: Numerics, t: Trainer, o: Optimizer, capability: Capability | None,
              s: Situation) -> tuple[Style, ...]:  # fmt: skip
    """One style per layer; equal layers get equal styles, so they share a program."""
    full = r.method == "full"
    common = Style(
        weight=n.weight, norm_weight=n.other, autocast=n.autocast, residual=n.residual, trained=full,
        quantization=r.quantization if r.method == "qlora" else "none",
        lora_rank=0 if full else r.lora_rank, lora_targets=frozenset() if full else lora_modules(a, r.lora_targets),
        lora_dropout=r.lora_dropout > 0, adapter=n.adapter,
        checkpointing=r.checkpointing if s.train else "none", dropout=s.train, grad=s.train,
        accumulating=s.accumulating, release_gradients=s.release_gradients, use_cache=s.use_cache,
        code=t.code, quantised_keeps_input=t.quantised_keeps_input, dequantised_cast=t.dequantised_cast,
    )  # fmt: skip
    made: dict[int, Style] = {}
    styles = []
    for i, layer in enumerate(a.layers):
        style = made.get(id(layer))
        if style is None:
            window = layer.attention.window
            masked = s.padded or (window is not None and window < r.sequence_length)
            style = made[id(layer)] = replace(common, kernel=_kernel(layer, r, n, capability, masked), masked=masked)
        # a frozen embedding gives the first block an input without gradient, unless checkpointing asks for one
        frozen_input = i == 0 and not full and r.checkpointing == "none" and s.train
        styles.append(replace(style, input_grad=False) if frozen_input else style)
    return tuple(styles)


def _kernel(layer: Layer, r: Recipe, n: Numerics, capability: Capability | None, masked: bool) -> Kernel:
    width = n.autocast or (n.residual if r.method == "qlora" else n.weight)
    return attention_kernel(layer.attention, r, width, capability, masked)


def ends_of(a: Architecture, r: Recipe, n: Numerics, t: Trainer, s: Situation) -> tuple[EmbeddingStyle, HeadStyle]:
    """Styles of the two ends."""
    full = r.method == "full"
    table = next(w for w in a.embedding if w.kind == "embedding")
    first = a.layers[0].attention
    mask = "none"
    if r.attention == "eager" or not first.sdpa:
        mask = "float"
    elif s.padded:
        mask = "bool"
    names = " ".join(w.name for w in a.embedding)
    embedding = EmbeddingStyle(
        vocabulary=table.shape[0], width=table.shape[1], rotary_dim=max(layer.attention.rotary_dim for layer in a.layers),
        tied=a.tied, tied_in_place=r.loss != "full" or (n.autocast not in (0, n.other)), positions=a.max_positions if a.learned_positions else 0, types="token_type" in names,
        normed=any(w.kind == "norm" for w in a.embedding), scaled=a.embedding_scale, mask=mask, trained=full,
        itemsize=n.other,
    )  # fmt: skip
    head = HeadStyle(
        vocabulary=table.shape[0], width=a.width, norm=a.final_norm, loss=t.head(r.loss), tied=a.tied, trained=full,
        itemsize=n.other, holds_logits=t.holds_logits, softcap=a.logits_softcap, transform=a.task == "masked-lm",
        bias=any(w.kind == "bias" for w in a.head), upcast=a.family not in shifted.SIXTEEN_BIT,
        batched=r.micro_batch > 1,
    )  # fmt: skip
    return embedding, head


def micro_step_of(a: Architecture, r: Recipe, n: Numerics, t: Trainer, o: Optimizer, capability: Capability | None,
                  s: Situation) -> MicroStep:  # fmt: skip
    """The traced micro-step of a recipe."""
    embedding, head = ends_of(a, r, n, t, s)
    return micro_step(a, styles_of(a, r, n, t, o, capability, s), embedding, head)
