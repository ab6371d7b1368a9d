"""The noun Row: tensors that are laid out by their sizes, whatever the module, and what is allocated of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist

from memfit.virtual.device.ledger import BROADCAST, BUCKET, WARM_UP

COUNT = 4  # bytes in which the ranks tell each other the size of a bucket (Reducer::sync_bucket_indices)
_IN_FLIGHT = 2  # broadcasts under way at once (maxInFlight in torch/csrc/distributed/c10d/comm.cpp)
Piece = tuple[torch.dtype, int]  # of a tensor: its elements


@dataclass(frozen=True, slots=True)
class Row:
    """Tensors that were laid out together: `label` says as what; limits: bytes from which a group is full, in turn.

    arrived: gradients in the order of their arrival, which are grouped as they came. Of a warm-up, which asks once for
    as much as will be loaded: the bytes as one tensor, and most that it asks for.
    """

    label: str
    pieces: tuple[Piece, ...]
    limits: tuple[int, ...]
    arrived: bool = False

    def groups(self) -> list[list[int]]:
        """Places in `pieces` of what lies together, by PyTorch's own rules."""
        made = [torch.empty(n, dtype=dtype, device="meta") for dtype, n in self.pieces]
        order = list(range(len(made))) if self.arrived else []
        found, _ = dist._compute_bucket_assignment_by_size(made, list(self.limits), [], order)  # type: ignore[attr-defined]
        return list(reversed(found)) if self.label == BUCKET and not self.arrived else list(found)

    def first(self) -> int:
        """How many gradients have arrived when the first bucket is full."""
        return max(self.groups()[0]) + 1

    def sizes(self) -> list[int]:
        """Bytes of what is allocated, in order; a single tensor is broadcast from where it lies."""
        if self.label == WARM_UP:
            return [min(self.total(), *self.limits) // 2 * 2]  # as float16
        at_least = 2 if self.label == BROADCAST else 1
        return [sum(map(self._bytes, group)) for group in self.groups() if len(group) >= at_least]

    def announced(self) -> int:
        """Bytes in which the ranks tell each other the sizes of rebuilt buckets; 0 of other rows."""
        return COUNT * len(self.groups()) if self.arrived else 0

    def total(self) -> int:
        """Bytes of all tensors."""
        return sum(map(self._bytes, range(len(self.pieces))))

    def _bytes(self, place: int) -> int:
        dtype, elements = self.pieces[place]
        return dtype.itemsize * elements

    def living(self) -> Iterator[tuple[bool, int]]:
        """Of a broadcast: births (True) and deaths in order, by place in `sizes`."""
        sent: list[int | None] = []
        number = 0
        for group in self.groups():
            if len(sent) >= _IN_FLIGHT and (done := sent.pop(0)) is not None:
                yield False, done
            sent.append(number if len(group) > 1 else None)
            if len(group) > 1:
                yield True, number
                number += 1
        yield from ((False, done) for done in sent if done is not None)
