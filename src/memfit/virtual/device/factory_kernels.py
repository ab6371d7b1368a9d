"""Operators that are no computation: factories, copies between host and card, resizing, and reads of the data."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, empty  # by value: DeepSpeed puts its own in torch's place
from torch._C import DispatchKey

from memfit.virtual.device.ledger import UNNAMED
from memfit.virtual.device.values import base, keeps

if TYPE_CHECKING:
    from memfit.virtual.device.card import Card

Args = tuple[Any, ...]
Words = dict[str, Any]


def contiguous(shape: Any) -> tuple[int, ...]:
    """Strides of a contiguous tensor."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def _empty(card: Card, op: Any, args: Args, kwargs: Words) -> Tensor:
    shape, layout = tuple(args[0]), kwargs.get("memory_format")
    if layout is None or layout in (torch.contiguous_format, torch.preserve_format):
        stride = contiguous(shape)
    else:
        stride = empty(shape, device="meta", memory_format=layout).stride()
    return card.tensor((shape, stride, kwargs.get("dtype") or torch.get_default_dtype()), UNNAMED)


def _empty_strided(card: Card, op: Any, args: Args, kwargs: Words) -> Tensor:
    dtype = kwargs.get("dtype") or torch.get_default_dtype()
    return card.tensor((tuple(args[0]), tuple(args[1]), dtype), UNNAMED)


def _copy(card: Card, op: Any, args: Args, kwargs: Words) -> Tensor:
    """copy_: host to card, card to host or within the card."""
    self, source = args[0], args[1]
    if self.is_cuda:
        card.ledger.rename(base(self), "copy")
        value = card.values.of(source) if keeps(self) and keeps(source) else None
        if value is None:
            card.values.unknown(self)
        else:
            card.values.set(self, value)
        return self
    value = card.values.of(source) if keeps(source) else None
    if value is not None:
        return self.copy_(value)
    return card.answers.to_host(self)


def _resize(card: Card, op: Any, args: Args, kwargs: Words) -> Tensor:
    self, shape = args[0], tuple(args[1])
    need = self.element_size() * max(torch.Size(shape).numel(), 0) + self.storage_offset() * self.element_size()
    storage = self.untyped_storage()
    if need > storage.nbytes():
        fresh = card.tensor((shape, contiguous(shape), self.dtype), "resize_")
        storage = fresh.untyped_storage()
        offset = 0
    else:
        offset = self.storage_offset()
    torch.ops.aten.set_.source_Storage_storage_offset._op_dk(
        DispatchKey.CPU, self, storage, offset, shape, contiguous(shape)
    )
    return self


def _set(card: Card, op: Any, args: Args, kwargs: Words) -> Tensor:
    if op._overloadname == "source_Tensor":
        source = args[1]
        args = (args[0], source.untyped_storage(), source.storage_offset(), source.shape, source.stride())
    elif op._overloadname == "source_Storage":
        count = args[1].nbytes() // args[0].element_size()
        args = (args[0], args[1], 0, (count,), (1,))
    return torch.ops.aten.set_.source_Storage_storage_offset._op_dk(DispatchKey.CPU, *args)


def _item(card: Card, op: Any, args: Args, kwargs: Words) -> Any:
    value = card.values.of(args[0])
    return card.answers.item(args[0]) if value is None else value.item()


def _nonzero(card: Card, op: Any, args: Args, kwargs: Words) -> Tensor:
    mask = args[0]
    value = card.values.of(mask) if keeps(mask) else None
    found = torch.nonzero(value) if value is not None else card.answers.nonzero(mask)
    # the kernel writes one row per dimension and returns its transpose
    shape = tuple(found.shape)
    out = card.tensor((shape, (1, max(shape[0], 1)), torch.int64), "nonzero")
    card.values.set(out, found)
    return out


def _equal(card: Card, op: Any, args: Args, kwargs: Words) -> bool:
    a, b = (card.values.of(t) if keeps(t) else None for t in args[:2])
    return True if a is None or b is None else torch.equal(a, b)


def _ignore(card: Card, op: Any, args: Args, kwargs: Words) -> None:
    return None


def _false(card: Card, op: Any, args: Args, kwargs: Words) -> bool:
    return False


SPECIAL = {
    "empty.memory_format": _empty,
    "empty_strided": _empty_strided,
    "copy_": _copy,
    "resize_": _resize,
    "set_": _set,
    "_local_scalar_dense": _item,
    "nonzero": _nonzero,
    "equal": _equal,
    "record_stream": _ignore,
    "is_pinned": _false,
    "_nested_tensor_from_mask_left_aligned": _false,  # TransformerEncoder takes its padded way, which needs more
    **{f"_use_{library}_ctc_loss{kind}": _false for library in ("cudnn", "miopen") for kind in ("", ".Tensor")},
}
