"""The stack of TRL's long-context benchmark in April 2026: TRL 1.1, accelerate 1.13, Liger 0.7.

Source: liger_kernel/transformers/monkey_patch.py and ops/fused_linear_cross_entropy.py of 0.7.0, the newest release
between 2026-02-12 and 2026-04-30; accelerate/utils/fsdp_utils.py of 1.13.0.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from memfit.closed_form.engine import Tensor
from memfit.closed_form.layers.block import forward
from memfit.closed_form.layers.head import LOSSES, liger
from memfit.closed_form.layers.linears import LayerRun
from memfit.closed_form.style import CODES, Code
from memfit.tables.trainers import trainer


def block(run: LayerRun, x: Tensor) -> Tensor:
    """transformers' block; Liger before 0.8.5 does not replace the norms of queries and keys of an existing Qwen3."""
    if run.style.liger:
        style = replace(run.style, liger=replace(run.style.liger, head_norm="own"))
        run = LayerRun(run.rec, run.layer, style, run.width)
    return forward(run, x)


CODES["liger<0.8.5"] = Code(block=block)
LOSSES["liger<0.8.1"] = partial(liger, product=True)
PROFILE = replace(
    trainer("trl==1.1"), code="liger<0.8.5", heads=(("full", "full"), ("fused", "liger<0.8.1")),
    liger_layers=True, ends_in_root=True,
)  # fmt: skip
