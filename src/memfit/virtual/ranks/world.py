"""torch.distributed on a virtual card: this process is rank 0 of a world of any size; other ranks do not exist."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import device_mesh, distributed_c10d
from torch.distributed.tensor import _sharding_prop
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the backend

from memfit.virtual.device.dispatch import current
from memfit.virtual.device.ledger import BROADCAST, BUCKET, BUCKET_SIZES, GATHERING, REDUCING
from memfit.virtual.device.values import base, keeps
from memfit.virtual.patching import environment, patched

_c10d: Any = torch._C._distributed_c10d
_NCCL = (2, 29, 7)  # the NCCL that PyTorch 2.13 was built with; DDP asks for 2.10 before it sends bfloat16


@contextmanager
def world(size: int) -> Iterator[None]:
    """Run the block in the environment that torchrun gives rank 0.

    Every backend is PyTorch's fake one: NCCL allocates nothing through PyTorch beyond the outputs passed to it.
    """
    real = distributed_c10d._new_process_group_helper

    def helper(group_size: int, rank: int, ranks: Any, backend: Any, store: Any, *args: Any, **kwargs: Any) -> Any:
        kwargs |= {"backend_options": None, "device_id": None}
        return real(group_size, rank, ranks, dist.Backend("fake"), store, *args, **kwargs)

    variables = {
        "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(min(size, 8)),
        "MASTER_ADDR": "localhost", "MASTER_PORT": "29500",
    }  # fmt: skip
    started = {"init_process_group": lambda *_, **__: None}  # the group exists already when the script makes it
    nccl = {"is_nccl_available": lambda: True, "_register_builtin_comm_hook": _builtin_hook}
    # prepare_for_forward only counts passes, of which DDP's reducer times 1 to 10 with CUDA events (reducer.cpp)
    uncounted = {"prepare_for_forward": lambda *_: None}
    with (
        environment(variables),
        # init_process_group installs a hook that prefixes lines with the rank
        patched(sys, {"excepthook": sys.excepthook}),
        patched(distributed_c10d, {"_new_process_group_helper": helper}),
        patched(_c10d.Reducer, uncounted),
        patched(torch.cuda.nccl, {"version": lambda: _NCCL}),
        patched(_sharding_prop, _quick_propagation()),
        _collectives(),
        _ddp_buffers_labelled(),
    ):
        distributed_c10d._world.group_count = 0  # a group that failed to be made has left its number
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
        try:
            with patched(dist, started | nccl), patched(distributed_c10d, started), patched(device_mesh, started):
                yield
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
            forget()


def forget() -> None:
    """Reset accelerate's state, which otherwise lives as long as the process."""
    state: Any = sys.modules.get("accelerate.state")
    if state is not None:
        state.AcceleratorState._reset_state(reset_partial_state=True)


def _builtin_hook(reducer: Any, kind: Any) -> None:
    """Register the Python equivalent of a C++ communication hook, which accepts results of a Python process group."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    twin = {"ALLREDUCE": "allreduce_hook", "FP16_COMPRESS": "fp16_compress_hook"}[kind.name]
    _c10d._register_comm_hook(reducer, None, getattr(default_hooks, twin))


@contextmanager
def _ddp_buffers_labelled() -> Iterator[None]:
    """Label what DDP's C++ code allocates: broadcasts, buckets of gradients, bucket sizes that the ranks exchange."""

    def labelled(real: Any, label: Callable[[list[str], tuple[Any, ...]], list[str]]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            labels = current().ledger.labels
            start = len(labels)
            done = real(*args)
            labels[start:] = label(labels[start:], args)
            return done

        return call

    def of_init(made: list[str], args: tuple[Any, ...]) -> list[str]:
        count = len(args[2])  # the buckets come first, then the map of used parameters
        return [BUCKET] * count + made[count:]

    def of_rebuild(made: list[str], _: Any) -> list[str]:
        # Reducer::sync_bucket_indices sends the indices, then the sizes
        return [made[0], BUCKET_SIZES] + [BUCKET] * (len(made) - 2) if len(made) > 2 else made

    reducer, broadcast = _c10d.Reducer, vars(dist)["_broadcast_coalesced"]
    methods = {"__init__": of_init, "_rebuild_buckets": of_rebuild}
    with (
        patched(reducer, {name: labelled(getattr(reducer, name), label) for name, label in methods.items()}),
        patched(dist, {"_broadcast_coalesced": labelled(broadcast, lambda made, _: [BROADCAST] * len(made))}),
    ):
        yield


def _quick_propagation() -> dict[str, Any]:
    """Replace DTensor's check that scans a whole list of tensors once for each of them by one scan per list.

    With the thousand parameters of a deep model the scans take half of the time. Empty where PyTorch has no such
    function.
    """
    real = getattr(_sharding_prop, "_propagate_use_strided_shard_flag", None)
    if real is None:
        return {}
    plain: list[Any] = [None]  # the last list scanned, if it has no strided shard

    def propagate(strategy: Any, schema: Any) -> None:
        if schema is plain[0]:
            return
        if any(type(p) is _StridedShard for spec in schema.args_spec for p in spec.placements):
            real(strategy, schema)
        else:
            plain[0] = schema

    return {"_propagate_use_strided_shard_flag": propagate}


@contextmanager
def _collectives() -> Iterator[None]:
    """Replace the fake backend's collectives, which copy once per rank and return no result, by single copies."""
    library = torch.library.Library("c10d", "IMPL")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # "Overriding a previously registered kernel"
            for name, kernel in _COLLECTIVES.items():
                library.impl(name, kernel, "CUDA", allow_override=True)
        yield
    finally:
        library._destroy()


def _done(result: Sequence[Tensor]) -> Any:
    """Return a finished dist.Work in the form that operators return; DDP reads its result."""
    future: Any = torch.futures.Future()
    future.set_result(list(result))
    return _c10d._create_work_from_future(future).boxed()


def _all_gather(output: Tensor, source: Tensor, *_: Any) -> Any:
    if source.numel():
        output.view(-1, source.numel()).copy_(source.view(1, -1))
    current().ledger.describe(base(output), GATHERING)
    return output, _done([output])


def _reduce_scatter(output: Tensor, source: Tensor, *_: Any) -> Any:
    output.view(-1).copy_(source.view(-1)[: output.numel()])
    for t in (output, source):
        current().ledger.describe(base(t), REDUCING)
    return output, _done([output])


def _all_gather_list(outputs: list[list[Tensor]], sources: list[Tensor], *_: Any) -> Any:
    """Gather into one flat tensor, then copy, as ProcessGroupNCCL::allgather does."""
    current().touch([sum(t.numel() * t.element_size() for t in outputs[0])], "all_gather")
    if keeps(sources[0]):
        for t in outputs[0]:
            t.copy_(sources[0])
    return outputs, _done(outputs[0])


def _all_reduce(results: list[Tensor], _group: Any, _op: Any, _indices: Any, asynchronous: bool = True, *_: Any) -> Any:
    """Reduce; hold the result if nobody waits for it, as NCCL's watchdog thread does until it next polls."""
    card, backward = current(), torch._C._current_graph_task_id()
    if asynchronous and backward >= 0 and card.answers.late_watchdog:
        held = card.held_by_watchdog.get(backward, [])
        card.held_by_watchdog = {backward: [*held, *results]}  # releases what earlier backward passes left
    return results, _done(results)


_COLLECTIVES = {
    "_allgather_base_": _all_gather, "_reduce_scatter_base_": _reduce_scatter, "allgather_": _all_gather_list,
    "allreduce_": _all_reduce,
}  # fmt: skip
