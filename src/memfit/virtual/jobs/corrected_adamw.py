"""SimpleTuner's AdamW for bf16 weights, which keeps what rounding takes of them, written after its source.

Its operations (optimizers/adamw_bfloat16, stochastic) go weight by weight, and round at random: what they allocate is
the same here, the values are not.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class AdamWBF16(torch.optim.Optimizer):
    """AdamW with two moments and a correction of each weight, all as wide as the weight."""

    def __init__(self, params: Any, lr: float = 1e-4) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update every weight that has a gradient."""
        for weight in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            state = self.state[weight]
            for name in ("exp_avg", "exp_avg_sq", "shift"):
                if name not in state:
                    state[name] = torch.zeros_like(weight)
            _add(state["exp_avg"], weight.grad)
            state["exp_avg_sq"].addcmul_(weight.grad, weight.grad)
            _add(state["shift"], state["exp_avg"] / state["exp_avg_sq"].sqrt().add_(1e-8))
            before = weight.clone()
            _add(weight, state["shift"])
            _add(state["shift"], before.sub_(weight))


def _add(to: Tensor, what: Tensor) -> None:
    """Add in fp32, and round at random."""
    whole = what.to(torch.float32, copy=True).add_(to)
    noise = torch.randint_like(whole, 1 << 16, dtype=torch.int32)
    to.copy_(noise.add_(whole.view(torch.int32)).bitwise_and_(-65536).view(torch.float32))
