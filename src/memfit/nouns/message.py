"""The noun Message: what one out-of-memory message of PyTorch, CUDA or a kernel says, in bytes."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

Kind = Literal[
    "cuda", "hip", "xpu", "mps", "driver", "cublas", "cudnn", "nccl", "bitsandbytes", "vllm", "tensorflow", "jax",
    "on-chip", "host"
]  # fmt: skip
FULL = 0.9  # of the card: the rest is context, and pieces as they are in any cache


@dataclass(frozen=True, slots=True)
class Message:
    """One out-of-memory message.

    Sizes are None where it does not give them; `others` are (process, bytes) besides this one.
    """

    kind: Kind
    tried: int | None = None
    total: int | None = None
    free: int | None = None
    allocated: int | None = None
    unallocated: int | None = None  # reserved by PyTorch, without a tensor
    reserved: int | None = None
    in_process: int | None = None  # all of this process, including its context
    private: int | None = None  # of CUDA graphs' pools
    allowed: int | None = None  # by set_per_process_memory_fraction
    others: tuple[tuple[int, int], ...] = ()
    advises_expandable: bool = False
    too_large: bool = False  # the platform makes no single allocation of this size, whatever is free

    @property
    def outside(self) -> int | None:
        """Bytes of the card outside this process's PyTorch allocator; None where they are not known."""
        if self.total is None or self.free is None or self.reserved is None:
            return None
        return max(self.total - self.free - self.reserved, 0)

    @property
    def limited(self) -> bool:
        """Whether a limit that was set for this process refused the request, while the card had room for it."""
        return bool(self.allowed) and self.free is not None and self.tried is not None and self.free >= self.tried

    @property
    def full(self) -> float:
        """The share of the card that tensors of this process fill, 0 where it is not known or below FULL."""
        share = self.allocated / self.total if self.allocated and self.total else 0.0
        return share if share >= FULL else 0.0

    @property
    def facts(self) -> int:
        """The number of sizes that are given."""
        return sum(getattr(self, f.name) is not None for f in fields(self) if f.default is None)
