"""torch.distributed on a virtual card: the process is rank 0 of a world of any size whose other ranks do not exist."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import device_mesh, distributed_c10d

from memfit.virtual.patching import patched

if TYPE_CHECKING:
    from memfit.virtual.card import Card

_REGISTERED: list[torch.library.Library] = []


@contextmanager
def world(card: Card, size: int) -> Iterator[None]:
    """While the context is open the script runs as torchrun would start its rank 0; nothing is if `size` is 1.

    Any backend is PyTorch's own fake one: NCCL allocates nothing through PyTorch beside the outputs it is given.
    """
    if size == 1:
        yield
        return
    from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the backend

    _register()
    real = distributed_c10d._new_process_group_helper

    def helper(group_size: int, rank: int, ranks: Any, backend: Any, store: Any, *args: Any, **kwargs: Any) -> Any:
        kwargs |= {"backend_options": None, "device_id": None}
        return real(group_size, rank, ranks, dist.Backend("fake"), store, *args, **kwargs)

    environment = {
        "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(min(size, 8)),
        "MASTER_ADDR": "localhost", "MASTER_PORT": "29500",
    }  # fmt: skip
    started = {"init_process_group": lambda *_, **__: None}  # by the script, which finds its group already there
    with patch.dict(os.environ, environment), patched(distributed_c10d, {"_new_process_group_helper": helper}):
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
        try:
            with patched(dist, started), patched(distributed_c10d, started), patched(device_mesh, started):
                yield
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()


def _register() -> None:
    """The fake backend copies once per rank; here one copy that is repeated tells as much."""
    if _REGISTERED:
        return
    library = torch.library.Library("c10d", "IMPL")
    library.impl("_allgather_base_", _all_gather, "CUDA", allow_override=True)
    library.impl("_reduce_scatter_base_", _reduce_scatter, "CUDA", allow_override=True)
    _REGISTERED.append(library)


def _all_gather(output: Tensor, source: Tensor, group: Any, asynchronous: bool = True, timeout: int = -1) -> Any:
    if source.numel():
        output.view(-1, source.numel()).copy_(source.view(1, -1))
    return output, _done(output, group, asynchronous, timeout)


def _reduce_scatter(
    output: Tensor, source: Tensor, group: Any, how: Any, asynchronous: bool = True, timeout: int = -1
) -> Any:
    output.view(-1).copy_(source.view(-1)[: output.numel()])
    return output, _done(output, group, asynchronous, timeout)


def _done(t: Tensor, group: Any, asynchronous: bool, timeout: int) -> Any:
    """Work that is done, as the fake backend makes it."""
    return torch.ops.c10d.broadcast_([t], group, 0, 0, asynchronous, timeout)[1]
