"""Real values of small integer, boolean and scalar tensors on the card, so that data-dependent code takes its real way."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import _C, Tensor, empty  # by value: DeepSpeed puts its own in torch's place

_functorch = _C._functorch
LARGEST = 1 << 22  # elements of an integer or boolean tensor whose values are kept
SMALL = 64  # elements of a floating-point tensor whose values are kept


def keeps(t: Tensor) -> bool:
    """Whether values of a tensor of this kind and size are kept at all."""
    return t.numel() <= (SMALL if t.is_floating_point() or t.is_complex() else LARGEST)


def tensors(x: Any) -> Iterator[Tensor]:
    """The tensors among arguments, nested in lists or not."""
    if isinstance(x, Tensor):
        yield x
    elif isinstance(x, list | tuple):
        for i in x:
            yield from tensors(i)


def base(t: Tensor) -> int:
    """Address of a tensor's storage; 0 if it has no elements.

    Not by `untyped_storage()`: a storage that Python has seen counts one more reference, and the autograd engine then
    no longer adds gradients in place.
    """
    while _functorch.is_functorch_wrapped_tensor(t):  # vmap and grad pass wrappers, which have no storage
        t = _functorch.get_unwrapped(t)
    return int(t.data_ptr() - t.storage_offset() * t.element_size()) if t.numel() else 0


class Values:
    """Known contents by storage: each is a storage on the host with the same layout, so views and writes stay true.

    size_at: the bytes of the storage at an address.
    """

    def __init__(self, size_at: Callable[[int], int]) -> None:
        self._size_at = size_at
        self._known: dict[int, torch.UntypedStorage] = {}
        self._sound: set[int] = set()  # booleans that are true wherever numbers are finite

    def forget(self, address: int) -> None:
        """The storage at `address` died."""
        self._known.pop(address, None)
        self._sound.discard(address)

    def vouch(self, made: Iterable[Tensor]) -> None:
        """These booleans say that numbers are numbers: all of them are true, however many there are."""
        self._sound.update(base(t) for t in made)

    def sound(self, t: Tensor) -> bool:
        """Were these booleans vouched for?"""
        return base(t) in self._sound

    def of(self, t: Tensor) -> Tensor | None:
        """The contents of a tensor of the card as a tensor on the host, sharing memory with those of its views."""
        if not t.is_cuda:
            return t
        storage = self._known.get(base(t))
        if storage is None:
            return empty(t.shape, dtype=t.dtype) if t.numel() == 0 else None
        return empty(0, dtype=t.dtype).set_(storage, t.storage_offset(), t.shape, t.stride())

    def set(self, t: Tensor, value: Tensor) -> None:
        """Tell what a tensor of the card holds; `value` is on the host."""
        address = base(t)
        if not address or not keeps(t):
            return
        if address not in self._known:
            size = self._size_at(address)
            if t.numel() * t.element_size() != size:
                return  # the rest of its storage stays unknown, so all of it
            self._known[address] = torch.UntypedStorage(size)
        held = self.of(t)
        assert held is not None
        held.copy_(value)

    def unknown(self, t: Tensor) -> None:
        """Something unknown was written."""
        self._known.pop(base(t), None)

    def run(self, op: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The operator's result on the known contents; None if some are not known."""
        missing = False

        def held(x: Any) -> Any:
            nonlocal missing
            if isinstance(x, Tensor):
                value = self.of(x)
                missing = missing or value is None
                return value
            if type(x) in (list, tuple):
                return type(x)(map(held, x))
            return torch.device("cpu") if isinstance(x, torch.device) else x

        args, kwargs = held(args), {k: held(v) for k, v in kwargs.items() if not isinstance(v, torch.Generator)}
        if missing:
            return None
        try:
            return op(*args, **kwargs)
        except NotImplementedError:  # the host has no kernel for this dtype: what the card would hold is not known
            return None
        except RuntimeError as error:
            if "to Tensor" not in str(error) and "of type 'Tensor'" not in str(error):
                raise
            return op(*as_tensors(op, args), **kwargs)


def as_tensors(op: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Numbers where an operator has tensors: kernels get them as themselves, and few operators take them so (`x % 3` does not)."""
    wanted = [str(argument.type) == "Tensor" for argument in op._schema.arguments]
    numbers = (tensor and not isinstance(x, Tensor) and x is not None for x, tensor in zip(args, wanted, strict=False))
    return tuple(torch.scalar_tensor(x, dtype=dtype_of(x)) if n else x for x, n in zip(args, numbers, strict=True))


def dtype_of(number: Any) -> torch.dtype:
    """Of the tensor that stands for a number of Python's."""
    return {bool: torch.bool, int: torch.int64, complex: torch.complex128}.get(type(number), torch.float64)
