"""Values of small integer, boolean and scalar tensors on the card, and defaults for reads of unknown values."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import _C, Tensor, arange, empty, ones, zeros  # by value: DeepSpeed puts its own in torch's place

from memfit.errors import BadInput, UnknownName
from memfit.virtual.device.generators import drawing
from memfit.virtual.device.host_copies import HostCopies
from memfit.virtual.device.routing import SHARES, Routing
from memfit.virtual.device.shapes import as_tensors, describe, is_number_for_tensor

# --- known values ---

Number = bool | int | float | complex
_functorch = _C._functorch
LARGEST = 1 << 22  # elements of an integer or boolean tensor whose values are kept
SMALL = 64  # elements of a floating-point tensor whose values are kept
MOST_BYTES = 1 << 26  # elements of a tensor of bytes whose values are kept: pickled objects on their way to other ranks


def keeps(t: Tensor) -> bool:
    """Return whether values of a tensor of this dtype and size are kept at all."""
    if t.is_floating_point() or t.is_complex():
        return t.numel() <= SMALL
    return t.numel() <= (MOST_BYTES if t.dtype == torch.uint8 else LARGEST)


def tensors(x: Any) -> Iterator[Tensor]:
    """Yield the tensors among arguments, also those in nested lists."""
    if isinstance(x, Tensor):
        yield x
    elif isinstance(x, list | tuple):
        for i in x:
            yield from tensors(i)


def base(t: Tensor) -> int:
    """Return the address of a tensor's storage; 0 if it has no elements.

    `untyped_storage()` is avoided: it makes a Python object that holds a reference to the storage, with which the
    autograd engine no longer adds gradients in place.
    """
    while _functorch.is_functorch_wrapped_tensor(t):  # vmap and grad pass wrappers without storage
        t = _functorch.get_unwrapped(t)
    return int(t.data_ptr() - t.storage_offset() * t.element_size()) if t.numel() else 0


class Values:
    """Known contents of storages, each in a host storage of the same layout, so that views share what is written.

    A storage that is too large to be kept, and holds one number everywhere, is kept as that number. size_at: returns
    the bytes of the storage at an address.
    """

    def __init__(self, size_at: Callable[[int], int]) -> None:
        self._size_at = size_at
        self._known: dict[int, torch.UntypedStorage] = {}
        # address -> the number everywhere, or on the host where it is not zero; of which dtype
        self.constants: dict[int, tuple[Number | Tensor, torch.dtype]] = {}
        self._unwritten: set[int] = set()  # addresses of storages in whose undefined contents nothing was written yet
        self._finite_tests: set[int] = set()  # addresses of booleans that are true if all numbers are finite

    def forget(self, address: int) -> None:
        """Drop what is known of the storage at `address`, which was freed."""
        self._known.pop(address, None)
        self.constants.pop(address, None)
        self._unwritten.discard(address)
        self._finite_tests.discard(address)

    def mark_unwritten(self, t: Tensor) -> None:
        """Remember that a new tensor's contents are undefined: they are zeros as soon as a part of them is written."""
        if keeps(t) and (address := base(t)):
            self._unwritten.add(address)

    def mark_finite_test(self, made: Iterable[Tensor]) -> None:
        """Remember that these booleans, which may be too many to be kept, test for finite numbers: all are true."""
        self._finite_tests.update(base(t) for t in made)

    def is_finite_test(self, t: Tensor) -> bool:
        """Return whether these booleans test for finite numbers."""
        return base(t) in self._finite_tests

    def of(self, t: Tensor) -> Tensor | None:
        """Return a tensor's contents as a host tensor that shares memory with its views' contents; None if unknown."""
        if not t.is_cuda:
            return t
        storage = self._known.get(base(t))
        if storage is None:
            if (number := self.constant(t)) is not None:
                return torch.full((), number, dtype=t.dtype, device="cpu").expand(t.shape)
            return empty(t.shape, dtype=t.dtype) if t.numel() == 0 else None
        return empty(0, dtype=t.dtype).set_(storage, t.storage_offset(), t.shape, t.stride())

    def set(self, t: Tensor, value: Tensor) -> None:
        """Record what a tensor of the card holds; `value` is on the host."""
        if self.make_room(t):
            held = self.of(t)
            assert held is not None
            held.copy_(value)

    def make_room(self, t: Tensor) -> bool:
        """Make a host storage for what is about to be written to a tensor; return whether its contents are kept."""
        address = base(t)
        if not address or not keeps(t):
            return False
        self.constants.pop(address, None)
        if address not in self._known:
            size = self._size_at(address)
            if t.numel() * t.element_size() == size:
                self._known[address] = torch.UntypedStorage(size)
            elif address in self._unwritten:
                self.begin(t)
            else:
                return False  # the rest of the storage is unknown, and contents are kept for whole storages only
        return True

    def begin(self, t: Tensor) -> None:
        """Take an unknown storage as zeros, so that its parts can be recorded one after the other."""
        address = base(t)
        self.constants.pop(address, None)
        if address and address not in self._known and keeps(t):
            self._known[address] = zeros(self._size_at(address), dtype=torch.uint8, device="cpu").untyped_storage()

    def unknown(self, t: Tensor) -> None:
        """Forget the contents of a tensor to which something unknown was written."""
        self._known.pop(address := base(t), None)
        self._unwritten.discard(address)
        self.not_constant(t)

    def constant(self, t: Tensor) -> Number | None:
        """Return the number that a large storage holds everywhere; None for other contents."""
        found = self._everywhere(t)
        return None if isinstance(found, Tensor) else found

    def pattern(self, t: Tensor) -> Tensor | None:
        """Return where a large storage of floating point is not zero, as booleans on the host; None if unknown."""
        found = self._everywhere(t)
        return found.as_strided(t.shape, t.stride(), t.storage_offset()) if isinstance(found, Tensor) else None

    def set_pattern(self, t: Tensor, put: Tensor) -> None:
        """Record where numbers were put into zeros: maps of which expert a token takes are made so."""
        if t.numel() * t.element_size() == self._size_at(base(t)) and t.is_contiguous():
            self.constants[base(t)] = put.contiguous(), t.dtype
        else:
            self.unknown(t)

    def _everywhere(self, t: Tensor) -> Number | Tensor | None:
        number, dtype = self.constants.get(base(t), (None, None)) if self.constants and t.is_cuda else (None, None)
        return number if dtype == t.dtype else None

    def set_constant(self, t: Tensor, number: Number) -> None:
        """Record that a number was written everywhere into a tensor that is too large to be kept."""
        address = base(t)
        if t.numel() * t.element_size() == self._size_at(address):
            self._known.pop(address, None)
            self.constants[address] = number, t.dtype
        elif self.constant(t) != number:  # the rest of the storage holds something else
            self.unknown(t)

    def not_constant(self, t: Tensor) -> None:
        """Note that something may have been written into a tensor that is no constant any more."""
        if self.constants:
            self.constants.pop(base(t), None)

    def run(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the operator's result on the known contents; None if some are not known."""
        missing, generator = False, None

        def held(x: Any) -> Any:
            nonlocal missing, generator
            if isinstance(x, _C.Generator):
                generator = x
                return None
            if isinstance(x, Tensor):
                value = self.of(x)
                missing = missing or value is None
                return value
            if type(x) in (list, tuple):
                return type(x)(map(held, x))
            return torch.device("cpu") if isinstance(x, torch.device) else x

        args, kwargs = held(args), {k: held(v) for k, v in kwargs.items()}
        if missing:
            return None
        try:
            if _RANDOM in op.tags:
                with drawing(generator):
                    return op(*args, **kwargs)
            return op(*args, **kwargs)
        except NotImplementedError:  # the host has no kernel for this dtype
            if op._schema.name not in _IN_FLOAT:
                return None
            found = op(*(x.double() if isinstance(x, Tensor) else x for x in args), **kwargs)
            return found.to(args[0].dtype)
        except RuntimeError as error:
            if is_number_for_tensor(error):
                return op(*as_tensors(op, args), **kwargs)
            # CUDA's kernel leaves empty what the host's reads: the buffer of log_sigmoid's backward
            if any(not t.numel() for t in tensors(args)):
                return None
            raise


_IN_FLOAT = ("aten::histc",)  # whole numbers are computed in floating point where the host has no kernel for them

# operators that return the number that all elements are
_SAME = frozenset({"max", "min", "amax", "amin", "mean", "all", "any", "median"})
_RANDOM = torch.Tag.nondeterministic_seeded


def of_constants(values: Values, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], numel: int) -> Number | None:
    """Return what an operator on constants makes each of `numel` numbers; None where that is not one known number.

    It is computed on one element in as many dimensions, by which PyTorch decides the dtype of a result.
    """
    name = op._schema.name.removeprefix("aten::").removesuffix("_")
    pointwise = torch.Tag.pointwise in op.tags and _RANDOM not in op.tags
    if not (pointwise or name in _SAME or name == "sum"):
        return None
    outs = [a.name for a in op._schema.arguments if a.is_out]

    def one(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        number = values.constant(x)
        if number is None and x.numel() == 1 and (held := values.of(x)) is not None:
            number = held.item()
        if number is None:
            raise LookupError
        return torch.full([1] * x.dim(), number, dtype=x.dtype, device="cpu")

    try:
        given = [one(x) for x in args]
        words = {
            k: torch.empty([1] * v.dim(), dtype=v.dtype, device="cpu") if k in outs else one(v)
            for k, v in kwargs.items() if k != "device"
        }  # fmt: skip
        result = op(*as_tensors(op, tuple(given)), **words)
    except (LookupError, RuntimeError, NotImplementedError, TypeError):  # unknown, or the host has no such kernel
        return None
    if not isinstance(result, Tensor) or result.numel() != 1:
        return None
    number: Number = (result * (args[0].numel() // max(numel, 1)) if name == "sum" else result).item()
    return number


# --- unknown values ---

# operators that return indices
_INDICES = (
    "topk", "sort", "argsort", "argmax", "argmin", "multinomial", "max", "min", "mode", "kthvalue", "searchsorted"
)  # fmt: skip
_JOINED = frozenset({"mul", "bitwise_and", "logical_and", "all"})  # true if their operands are
_JUDGES = _JOINED | {"eq", "ne"}

# a setting of --answer -> the field it sets, how its value is read, and what values it takes
SETTINGS: dict[str, tuple[str, Callable[[str], Any], str]] = {
    "item": ("number", float, "a number"),
    "mask": ("truth", {"true": True, "false": False}.__getitem__, "true or false"),
    "routing": ("routing", Routing.of, SHARES),
}


@dataclass(slots=True)
class Answers:
    """Defaults for values that are only known in the real run.

    number: what `.item()` and copies to the host return for floating point (a loss, a norm); truth: for booleans.
    routing: how a router spreads tokens over experts; other unknown indices run through all possible values in turn.
    late_watchdog: NCCL's watchdog thread, which polls every 100 ms, releases the result of an all-reduce of gradients
    when the next backward pass reduces; otherwise at once. Recorded runs show both.
    """

    number: float = 1.0
    truth: bool = False
    routing: Routing = field(default_factory=Routing)
    late_watchdog: bool = True
    reads: dict[str, int] = field(default_factory=dict)  # how often each kind of unknown value was read
    _copies: HostCopies = field(default_factory=HostCopies)

    @classmethod
    def of(cls, settings: Iterable[str]) -> Answers:
        """Read settings such as `item=2.5`, `mask=true`, `routing=first`. Raises BadInput for any other."""
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
        """Return the default for the only element of a tensor."""
        self._count("item")
        if t.dtype == torch.bool:
            return self.truth
        return self.number if t.is_floating_point() else 0

    def to_host(self, out: Tensor) -> Tensor:
        """Fill a host tensor to which unknown data is copied."""
        self._count("copy to the host")
        value = self.truth if out.dtype == torch.bool else self.number if out.is_floating_point() else 0
        self._copies.fill(out, value)
        return out

    def known_to_host(self, out: Tensor, number: Number) -> Tensor:
        """Fill a host tensor to which a constant is copied."""
        self._copies.fill(out, number)
        return out

    def mark_finite_tests(self, values: Values, op: Any, args: tuple[Any, ...], out: Any) -> None:
        """Remember booleans that test for finite numbers, from the operators of which `isfinite` is composed."""
        name = op._schema.name.removeprefix("aten::")
        if name in _JUDGES and _finite_test(values, name, args) is True:
            values.mark_finite_test(t for t in tensors(out) if t.dtype == torch.bool)

    def nonzero(self, mask: Tensor) -> Tensor:
        """Return the indices of all elements: each counts as true."""
        self._count("nonzero")
        return ones(mask.shape, dtype=torch.bool).nonzero()

    def stand_in(self, values: Values, x: Any) -> Any:
        """Return arguments on the host: known values as they are, unknown booleans true, other unknown values zero."""
        if isinstance(x, Tensor):
            known = values.of(x)
            if known is not None:
                return known
            self._count("data-dependent shape")
            filler = ones if x.dtype == torch.bool else zeros
            return filler(x.shape, dtype=x.dtype)
        return type(x)(self.stand_in(values, i) for i in x) if type(x) in (list, tuple) else x

    def fill(self, values: Values, op: Any, args: tuple[Any, ...], made: list[Tensor]) -> None:
        """Give defaults to outputs that are indices or that test for finite numbers; others stay unknown."""
        name = op._schema.name.removeprefix("aten::")
        result = _finite_test(values, name, args)
        if result is not None:
            for t in made:
                values.set(t, torch.full((), result, device="cpu").expand(t.shape))
        if name not in _INDICES:
            return
        for t in made:
            if t.dtype == torch.int64:
                self._count(name)
                values.set(t, self._indices(values, t, name, op, args))

    def _indices(self, values: Values, t: Tensor, name: str, op: Any, args: tuple[Any, ...]) -> Tensor:
        source, dim = _reduced(op, args)
        choices = source.numel() if dim is None else max(source.shape[dim], 1)
        last = dim is not None and dim % source.dim() == source.dim() - 1
        if dim is not None and name == "topk" and (put := values.pattern(source)) is not None:
            # a router with a capacity drops the tokens of each expert that have the lowest probability
            self.routing.assumed.setdefault(
                f"a router's capacity lets each of its experts take {t.shape[dim]} tokens at most"
            )
            return put.int().topk(t.shape[dim], dim).indices
        if last and self.routing.routes(name, source.dim(), choices):
            k = t.shape[-1] if t.dim() == source.dim() else 1
            return self.routing.experts_of(t.numel() // max(k, 1), k, choices).reshape(t.shape)
        if self.routing.share == 0:
            return zeros(t.shape, dtype=t.dtype)
        return (arange(t.numel()) % choices).reshape(t.shape)

    def routing_map(self, values: Values, made: Tensor, k: int, groups: tuple[int, int]) -> Tensor:
        """Fill a map of which `k` experts each token takes, which a router's own kernel makes; return it."""
        self._count("routing map")
        tokens, experts = made.shape
        put = zeros(made.shape, dtype=torch.bool, device="cpu")
        values.set(made, put.scatter_(1, self.routing.experts_of(tokens, k, experts, groups), True))
        return made

    def _count(self, what: str) -> None:
        self.reads[what] = self.reads.get(what, 0) + 1


def _finite_test(values: Values, name: str, args: tuple[Any, ...]) -> bool | None:
    """Return what a test yields if all numbers are finite: `x == x`, `abs(x) != inf`, their conjunction; else None."""
    if name in ("isnan", "isinf"):
        return False
    if name in _JOINED:
        return all(isinstance(x, Tensor) and values.is_finite_test(x) for x in args[:2]) or None
    if name not in ("eq", "ne") or len(args) < 2:
        return None
    one, other = args[:2]
    if isinstance(other, float) and math.isinf(other):
        return name == "ne"
    same = isinstance(one, Tensor) and isinstance(other, Tensor) and describe(one) == describe(other)
    at = base(one) if same else 0
    return name == "eq" if at and at == base(other) and one.storage_offset() == other.storage_offset() else None


def _reduced(op: Any, args: tuple[Any, ...]) -> tuple[Tensor, int | None]:
    """Return what an operator's indices point into: a tensor and the dimension that was reduced, None for all."""
    given = dict(zip((a.name for a in op._schema.arguments), args, strict=False))
    source = next(a for a in args if isinstance(a, Tensor))
    dim = given.get("dim", None if op._schema.name in ("aten::argmax", "aten::argmin") else -1)
    return source, dim if source.dim() else None
