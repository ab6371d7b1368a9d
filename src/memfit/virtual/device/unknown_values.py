"""What the card answers when code reads data it does not have: sane defaults that can be set."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, arange, ones, zeros  # by value: DeepSpeed puts its own in torch's place

from memfit.errors import BadInput, UnknownName
from memfit.virtual.device.shapes import describe
from memfit.virtual.device.values import LARGEST, Values, base, tensors

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

_JOINED = frozenset({"mul", "bitwise_and", "logical_and", "all"})  # true where their operands are
_JUDGES = _JOINED | {"eq", "ne"}

# a setting of --answer -> the field it sets, and what may stand behind the sign
SETTINGS: dict[str, tuple[str, Callable[[str], Any], str]] = {
    "item": ("number", float, "a number"),
    "mask": ("truth", {"true": True, "false": False}.__getitem__, "true or false"),
    "routing": ("balanced", {"balanced": True, "first": False}.__getitem__, "balanced or first"),
}


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

    @classmethod
    def of(cls, settings: Iterable[str]) -> Answers:
        """From `item=2.5`, `mask=true`, `routing=first`. Raises BadInput for any other."""
        made = cls()
        for setting in settings:
            name, _, text = setting.partition("=")
            if name not in SETTINGS:
                raise UnknownName("answer", name, SETTINGS, hint="such as item=1.0")
            attribute, read, allowed = SETTINGS[name]
            try:
                setattr(made, attribute, read(text.strip()))
            except (KeyError, ValueError):
                raise BadInput(f"answer {name}={text[:40]} means nothing", hint=f"{name} takes {allowed}") from None
        return made

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

    def vouch(self, values: Values, op: Any, args: tuple[Any, ...], out: Any) -> None:
        """Remember which booleans `isfinite` is made of."""
        name = op._schema.name.removeprefix("aten::")
        if name in _JUDGES and _sound(values, name, args) is True:
            values.vouch(t for t in tensors(out) if t.dtype == torch.bool)

    def nonzero(self, mask: Tensor) -> Tensor:
        """Every element counts as true."""
        self._ask("nonzero")
        return ones(mask.shape, dtype=torch.bool).nonzero()

    def stand_in(self, values: Values, x: Any) -> Any:
        """Arguments on the host: what is known as it is, unknown booleans true, other unknown data zero."""
        if isinstance(x, Tensor):
            known = values.of(x)
            if known is not None:
                return known
            self._ask("data-dependent shape")
            filler = ones if x.dtype == torch.bool else zeros
            return filler(x.shape, dtype=x.dtype)
        return type(x)(self.stand_in(values, i) for i in x) if type(x) in (list, tuple) else x

    def fill(self, values: Values, op: Any, args: tuple[Any, ...], made: list[Tensor]) -> None:
        """Give the outputs of an operator values that are not known: indices get some, and what says that numbers are finite."""
        name = op._schema.name.removeprefix("aten::")
        sound = _sound(values, name, args)
        if sound is not None:
            for t in made:
                values.set(t, torch.full((), sound, device="cpu").expand(t.shape))
        if name not in _INDICES:
            return
        for t in made:
            if t.dtype == torch.int64:
                self._ask(name)
                values.set(t, self._indices(t, _choices(op, args)))

    def _indices(self, t: Tensor, choices: int) -> Tensor:
        if not self.balanced:
            return zeros(t.shape, dtype=t.dtype)
        return (arange(t.numel()) % choices).reshape(t.shape)

    def _ask(self, what: str) -> None:
        self.asked[what] = self.asked.get(what, 0) + 1


def _sound(values: Values, name: str, args: tuple[Any, ...]) -> bool | None:
    """What holds where all numbers are finite: `x == x`, `abs(x) != inf`, both of them, all of either; None for anything else."""
    if name in ("isnan", "isinf"):
        return False
    if name in _JOINED:
        return all(isinstance(x, Tensor) and values.sound(x) for x in args[:2]) or None
    if name not in ("eq", "ne") or len(args) < 2:
        return None
    one, other = args[:2]
    if isinstance(other, float) and math.isinf(other):
        return name == "ne"
    same = isinstance(one, Tensor) and isinstance(other, Tensor) and describe(one) == describe(other)
    at = base(one) if same else 0
    return name == "eq" if at and at == base(other) and one.storage_offset() == other.storage_offset() else None


def _choices(op: Any, args: tuple[Any, ...]) -> int:
    """Out of how many an index was chosen: the size of the dimension that the operator went along."""
    given = dict(zip((a.name for a in op._schema.arguments), args, strict=False))
    source = next(a for a in args if isinstance(a, Tensor))
    dim = given.get("dim", None if op._schema.name in ("aten::argmax", "aten::argmin") else -1)
    return max(source.numel() if dim is None or not source.dim() else source.shape[dim], 1)
