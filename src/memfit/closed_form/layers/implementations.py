"""Whose model code runs: transformers' classes, or the model that a framework brings itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from memfit.closed_form.engine import Tensor
from memfit.closed_form.layers import block, litgpt, torchtune
from memfit.closed_form.layers.modules import Block
from memfit.nouns.architecture import Architecture


@dataclass(frozen=True, slots=True)
class Code:
    """One row: the forward of a block, and which weights are stored."""

    block: Callable[[Block, Tensor], Tensor]
    stored: Callable[[Architecture], Architecture] = lambda a: a


CODES: dict[str, Code] = {
    "transformers": Code(block.forward),
    "litgpt": Code(litgpt.block, litgpt.stored),
    "torchtune": Code(torchtune.block),
}
