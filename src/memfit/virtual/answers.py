"""What the card answers when code reads data it does not have: sane defaults that can be set."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from memfit.virtual.values import LARGEST, Values

_INDICES = (
    "topk",
    "sort",
    "argsort",
    "argmax",
    "argmin",
    "multinomial",
    "max",
    "min",
    "mode",
    "kthvalue",
    "searchsorted",
)


@dataclass(slots=True)
class Answers:
    """Defaults for what nobody can know before the run.

    number: what `.item()` and copies to the host give for floating point (a loss, a norm); truth: for booleans.
    balanced: unknown indices (of a router, say) go round all their possible values; otherwise all are 0.
    late_watchdog: NCCL's watchdog thread, which holds the result of an all-reduce of gradients until it next looks (every
    100 ms), does so only once the next backward pass reduces; otherwise at once. Recorded runs show both.
    """

    number: float = 1.0
    truth: bool = False
    balanced: bool = True
    late_watchdog: bool = True
    asked: dict[str, int] = field(default_factory=dict)  # how often each operator had to be answered

    def item(self, t: Tensor) -> Any:
        """The one element of a tensor."""
        self._ask("item")
        if t.dtype == torch.bool:
            return self.truth
        return self.number if t.is_floating_point() else 0

    def to_host(self, out: Tensor) -> Tensor:
        """Fill a tensor on the host that unknown data is copied to."""
        self._ask("copy to the host")
        if out.numel() <= LARGEST:
            out.fill_(self.truth if out.dtype == torch.bool else self.number if out.is_floating_point() else 0)
        return out

    def nonzero(self, mask: Tensor) -> Tensor:
        """Every element counts as true."""
        self._ask("nonzero")
        return torch.ones(mask.shape, dtype=torch.bool).nonzero()

    def stand_in(self, values: Values, x: Any) -> Any:
        """Arguments on the host: what is known as it is, unknown booleans true, other unknown data zero."""
        if isinstance(x, Tensor):
            known = values.of(x)
            if known is not None:
                return known
            self._ask("data-dependent shape")
            filler = torch.ones if x.dtype == torch.bool else torch.zeros
            return filler(x.shape, dtype=x.dtype)
        return type(x)(self.stand_in(values, i) for i in x) if type(x) in (list, tuple) else x

    def fill(self, values: Values, op: Any, made: list[Tensor]) -> None:
        """Give the outputs of an operator values that are not known; only indices get any."""
        name = op._schema.name.removeprefix("aten::")
        if name not in _INDICES:
            return
        for t in made:
            if t.dtype == torch.int64:
                self._ask(name)
                values.set(t, self._indices(t))

    def _indices(self, t: Tensor) -> Tensor:
        if not self.balanced:
            return torch.zeros(t.shape, dtype=t.dtype)
        return torch.arange(t.numel()).reshape(t.shape)

    def _ask(self, what: str) -> None:
        self.asked[what] = self.asked.get(what, 0) + 1
