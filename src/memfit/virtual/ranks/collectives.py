"""The collectives of torch.distributed: small values travel between the traced ranks, large tensors keep their shape.

They replace the kernels behind PyTorch's operators `c10d::*`, through which every backend is called, also from C++.
What a collective allocates is what ProcessGroupNCCL allocates: the outputs are given, and lists of tensors are gathered
into or scattered from one flat tensor.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from memfit.virtual.device.dispatch import current
from memfit.virtual.device.ledger import GATHERING, REDUCING
from memfit.virtual.device.values import LARGEST, base, keeps
from memfit.virtual.patching import patched
from memfit.virtual.process.host import LARGE
from memfit.virtual.ranks.peers import Group, Peers

_c10d: Any = torch._C._distributed_c10d
_MOST = 1 << 20  # bytes of a value that travels; the values of larger tensors are taken to be this rank's own
_WAITS = ("wait", "synchronize", "block_current_stream")

Parcel = tuple[torch.dtype, tuple[int, ...], bytes]


# --- values ---


def travels(t: Tensor) -> bool:
    """Return whether a tensor of this form travels by value; its senders and receivers have to agree on that."""
    if t.dtype == torch.uint8:
        return keeps(t)
    if t.is_cuda:
        return keeps(t) and t.numel() * t.element_size() <= _MOST
    return t.numel() * t.element_size() < LARGE if t.is_floating_point() else t.numel() <= LARGEST


def _held(t: Tensor) -> Tensor | None:
    """Return the contents of a tensor on the host, None if they are unknown."""
    if not t.is_cuda:
        return t
    return current().values.of(t) if keeps(t) else None


def _written(t: Tensor) -> None:
    """Forget the one number that a large tensor held, which does not travel and is written now."""
    if t.is_cuda:
        current().values.not_constant(t)


def _write(t: Tensor, value: Tensor | None) -> None:
    """Write what a collective has brought."""
    if not t.is_cuda:
        if value is not None:
            t.detach().copy_(value.reshape(t.shape))
        return
    card = current()
    card.ledger.rename(base(t), "copy")
    if value is None:
        card.values.unknown(t)
    else:
        card.values.set(t, value.reshape(t.shape))


def _write_all(outputs: Sequence[Tensor], values: Sequence[Tensor | None]) -> None:
    """Write what the members of a group have sent into tensors that may be parts of one; all of it or nothing."""
    rows = list(zip(outputs, values, strict=True))
    known = all(value is not None and value.numel() == t.numel() for t, value in rows)
    for t, value in rows:
        if t.is_cuda and known:
            current().values.begin(t)
        _write(t, value if known else None)


def _pack(value: Tensor | None) -> Parcel | None:
    if value is None:
        return None
    flat = value.detach().contiguous()
    data = flat.view(-1).view(torch.uint8).numpy().tobytes() if flat.numel() else b""
    return flat.dtype, tuple(flat.shape), data


def _unpack(parcel: Parcel | None) -> Tensor | None:
    if parcel is None:
        return None
    dtype, shape, data = parcel
    if not data:
        return torch.empty(shape, dtype=dtype, device="cpu")
    return torch.frombuffer(bytearray(data), dtype=dtype).reshape(shape)


def _form(t: Tensor) -> tuple[torch.dtype, int]:
    return t.dtype, t.numel()


def _joined(values: Sequence[Tensor | None]) -> Tensor | None:
    known = [v.reshape(-1) for v in values if v is not None]
    return torch.cat(known) if len(known) == len(values) else None


_FOLDS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "MIN": torch.minimum, "MAX": torch.maximum, "PRODUCT": torch.mul, "BAND": torch.bitwise_and,
    "BOR": torch.bitwise_or, "BXOR": torch.bitwise_xor,
}  # fmt: skip


_NAMES = {int(getattr(dist.ReduceOp.RedOpType, name)): name for name in ("SUM", "AVG", *_FOLDS)}


def _operation(op: Any) -> str:
    """Return the name of a boxed ReduceOp; PREMUL_SUM for one with factors of its own."""
    return _NAMES.get(int(op.op()), "PREMUL_SUM")


def _reduced(values: Sequence[Tensor | None], operation: str) -> Tensor | None:
    """Reduce the values of all members; None if one is unknown, or for an operation with factors of its own."""
    known = [v for v in values if v is not None]
    if len(known) < len(values) or operation == "PREMUL_SUM":
        return None
    if operation in ("SUM", "AVG"):
        if known[0].dtype == torch.bool:
            return functools.reduce(torch.logical_or, known)
        total = functools.reduce(torch.add, known)
        if operation == "SUM":
            return total
        return total / len(known) if total.is_floating_point() else total // len(known)
    return functools.reduce(_FOLDS[operation], known)


# --- collectives ---


def _work(result: Sequence[Tensor]) -> Any:
    """Return a finished dist.Work whose future gives `result`, which DDP reads."""
    future: Any = torch.futures.Future()
    future.set_result(list(result))
    return _c10d._create_work_from_future(future)


def _done(result: Sequence[Tensor]) -> Any:
    return _work(result).boxed()


class Collectives:
    """The kernels of `c10d::*` for one rank. groups: those that it is a member of, by their names in PyTorch."""

    def __init__(self, peers: Peers) -> None:
        self.peers = peers
        self.groups: dict[str, Group] = {}

    def _group(self, boxed: Any, operator: str, t: Tensor) -> Group:
        """Return a group, and count the call if NCCL passes its tensors; `t` is one of them."""
        group = self.groups[_c10d.ProcessGroup.unbox(boxed).group_name]
        if t.is_cuda:
            current().communicate(group.key, group.size)
            group.passed[operator] = group.passed.get(operator, 0) + 1
        return group

    def _values(self, group: Group, mine: Tensor | None) -> list[Tensor | None]:
        """Return the values of all members, each of which calls this."""
        return list(map(_unpack, self.peers.exchange(group, _pack(mine))))

    # gathering

    def all_gather(self, output: Tensor, source: Tensor, boxed: Any, *_: Any) -> Any:
        group = self._group(boxed, "all_gather", output)
        self._gather_into(group, output, source)
        if output.is_cuda:
            current().ledger.describe(base(output), GATHERING)
        return output, _done([output])

    def _gather_into(self, group: Group, output: Tensor, source: Tensor) -> None:
        values = self._values(group, _held(source)) if travels(source) else [None]
        _write(output, _joined(values))

    def all_gather_list(self, outputs: list[list[Tensor]], sources: list[Tensor], boxed: Any, *_: Any) -> Any:
        """Gather into one flat tensor, then copy; tensors of several sizes are broadcast one by one instead."""
        source, even = sources[0], len({t.numel() for t in outputs[0]}) == 1
        group = self._group(boxed, "all_gather", source)
        if source.is_cuda and even:
            current().touch([sum(t.numel() * t.element_size() for t in outputs[0])], "all_gather")
        values = self._values(group, _held(source)) if travels(source) else [None] * group.size
        _write_all(outputs[0], values)
        return outputs, _done(outputs[0])

    def all_gather_lists(self, outputs: list[list[Tensor]], sources: list[Tensor], boxed: Any, *_: Any) -> Any:
        group = self._group(boxed, "all_gather", sources[0])
        for position, source in enumerate(sources):
            values = self._values(group, _held(source)) if travels(source) else [None] * group.size
            for row, value in zip(outputs, values, strict=True):
                _write(row[position], value)
        return _done([t for row in outputs for t in row])

    def all_gather_several(self, outputs: list[Tensor], sources: list[Tensor], boxed: Any, *_: Any) -> Any:
        group = self._group(boxed, "all_gather", sources[0])
        for output, source in zip(outputs, sources, strict=True):
            self._gather_into(group, output, source)
        return _done(outputs)

    def gather(self, outputs: list[list[Tensor]], sources: list[Tensor], boxed: Any, root: int, *_: Any) -> Any:
        group = self._group(boxed, "gather", sources[0])
        values = self._values(group, _held(sources[0])) if travels(sources[0]) else [None] * group.size
        if group.me == root:
            _write_all(outputs[0], values)
        return _done(outputs[0] if outputs else [])

    # spreading

    def broadcast(self, tensors: list[Tensor], boxed: Any, root: int, slot: int = 0, *_: Any) -> Any:
        group = self._group(boxed, "broadcast", tensors[0])
        for t in tensors:
            if travels(t):
                value = _unpack(self.peers.from_one(group, root, _pack(_held(t))))
                if self.peers.stands_for(group, root) != self.peers.rank:
                    _write(t, value)
            elif group.me != root:
                _written(t)
        return tensors, _done(tensors)

    def scatter(self, outputs: list[Tensor], sources: list[list[Tensor]], boxed: Any, root: int, *_: Any) -> Any:
        group = self._group(boxed, "scatter", outputs[0])
        if travels(outputs[0]):
            rows = [_pack(_held(t)) for t in sources[0]] if group.me == root else None
            found = self.peers.from_one(group, root, rows)
            _write(outputs[0], _unpack(found[group.me]) if found is not None else None)
        else:
            _written(outputs[0])
        return outputs, _done(outputs)

    # reducing

    def all_reduce(
        self, results: list[Tensor], boxed: Any, op: Any, _indices: Any, asynchronous: bool = True, *_: Any
    ) -> Any:
        """Reduce; hold the results until somebody waits for them, as NCCL's watchdog thread does until it polls."""
        group = self._group(boxed, "all_reduce", results[0])
        for t in results:
            self._reduce_in_place(group, t, op)
        work = _work(results)
        card, backward = current(), torch._C._current_graph_task_id()
        if asynchronous and backward >= 0 and card.answers.late_watchdog and any(t.is_cuda for t in results):
            held = card.held_by_watchdog.get(backward, {})
            card.held_by_watchdog = {backward: held}  # releases what earlier backward passes left
            held[work] = list(results)
        return results, work.boxed()

    def _reduce_in_place(self, group: Group, t: Tensor, op: Any) -> None:
        if travels(t):
            value = _reduced(self._values(group, _held(t)), _operation(op))
            if value is not None:
                _write(t, value)
        else:
            _written(t)

    def all_reduce_several(self, tensors: list[Tensor], boxed: Any, op: Any, *_: Any) -> Any:
        group = self._group(boxed, "all_reduce", tensors[0])
        for t in tensors:
            self._reduce_in_place(group, t, op)
        return _done(tensors)

    def reduce(self, tensors: list[Tensor], boxed: Any, op: Any, root: int, *_: Any) -> Any:
        group = self._group(boxed, "reduce", tensors[0])
        for t in tensors:
            if travels(t):
                value = _reduced(self._values(group, _held(t)), _operation(op))
                if group.me == root and value is not None:
                    _write(t, value)
            else:
                _written(t)
        return _done(tensors)

    def reduce_scatter(self, output: Tensor, source: Tensor, boxed: Any, op: Any, *_: Any) -> Any:
        group = self._group(boxed, "reduce_scatter", output)
        self._reduce_into(group, output, source, op)
        for t in (output, source):
            if t.is_cuda:
                current().ledger.describe(base(t), REDUCING)
        return output, _done([output])

    def _reduce_into(self, group: Group, output: Tensor, source: Tensor, op: Any) -> None:
        value = _reduced(self._values(group, _held(source)), _operation(op)) if travels(source) else None
        count = output.numel()
        _write(output, None if value is None else value.reshape(-1)[group.me * count : (group.me + 1) * count])

    def reduce_scatter_list(
        self, outputs: list[Tensor], sources: list[list[Tensor]], boxed: Any, op: Any, *_: Any
    ) -> Any:
        """Copy the inputs into one flat tensor, then reduce; inputs of several sizes are reduced one by one instead."""
        group = self._group(boxed, "reduce_scatter", outputs[0])
        rows, even = sources[0], len({t.numel() for t in sources[0]}) == 1
        if rows[0].is_cuda and even:
            current().touch([sum(t.numel() * t.element_size() for t in rows)], "reduce_scatter")
        value = None
        if even and travels(rows[0]):
            for position, row in enumerate(rows):
                found = _reduced(self._values(group, _held(row)), _operation(op))
                value = found if position == group.me else value
        _write(outputs[0], value)
        return outputs, _done(outputs)

    def reduce_scatter_several(self, outputs: list[Tensor], sources: list[Tensor], boxed: Any, op: Any, *_: Any) -> Any:
        group = self._group(boxed, "reduce_scatter", outputs[0])
        for output, source in zip(outputs, sources, strict=True):
            self._reduce_into(group, output, source, op)
        return _done(outputs)

    # all to all

    def all_to_all(
        self, output: Tensor, source: Tensor, boxed: Any, received: Sequence[int], sent: Sequence[int], *_: Any
    ) -> Any:
        """Exchange parts. Parts of floating point with sizes of their own keep their shape only."""
        group = self._group(boxed, "all_to_all", output)
        uneven = bool(received) or bool(sent)
        if source.is_floating_point() and (uneven or not travels(source)):
            _write(output, None)
            return _done([output])
        held = _held(source)
        mine = None
        if held is not None and held.numel() * held.element_size() <= _MOST:
            parts = list(sent) or [source.shape[0] // group.size] * group.size
            mine = [_pack(part) for part in held.split(parts)]
        rows = self.peers.exchange(group, mine)
        value = _joined([None if row is None else _unpack(row[group.me]) for row in rows])
        _write(output, value if value is not None and value.numel() == output.numel() else None)
        return _done([output])

    def all_to_all_list(self, outputs: list[Tensor], sources: list[Tensor], boxed: Any, *_: Any) -> Any:
        group = self._group(boxed, "all_to_all", outputs[0])
        values: list[Tensor | None] = [None] * group.size
        if not sources[0].is_floating_point() or len({t.numel() for t in (*sources, *outputs)}) == 1:
            mine = [_pack(_held(t)) if travels(t) else None for t in sources]
            values = [_unpack(row[group.me]) for row in self.peers.exchange(group, mine)]
        for t, value in zip(outputs, values, strict=True):
            _write(t, value if value is not None and value.numel() == t.numel() else None)
        return outputs, _done(outputs)

    # messages between two ranks

    def send(self, tensors: list[Tensor], boxed: Any, to: int, tag: int = 0) -> Any:
        group = self._group(boxed, "send", tensors[0])
        for t in tensors:
            if travels(t):
                self.peers.send(group, to, _form(t), _pack(_held(t)))
        return _done(tensors)

    def receive(self, tensors: list[Tensor], boxed: Any, source: int, tag: int = 0) -> Any:
        group = self._group(boxed, "recv", tensors[0])
        for t in tensors:
            _write(t, _unpack(self.peers.receive(group, source, _form(t))) if travels(t) else None)
        return _done(tensors)

    def receive_from_any(self, tensors: list[Tensor], boxed: Any, tag: int = 0) -> Any:
        """Receive from the next member, as which of them comes first is not known."""
        group = self.groups[_c10d.ProcessGroup.unbox(boxed).group_name]
        return self.receive(tensors, boxed, (group.me + 1) % group.size, tag)

    def barrier(self, chooser: Tensor, boxed: Any, *_: Any) -> Any:
        """Reduce one number, as NCCL has no barrier of its own."""
        if chooser.is_cuda:
            current().touch([4], "barrier")
        self.peers.exchange(self._group(boxed, "barrier", chooser), None)
        return _done([])

    def monitored_barrier(self, chooser: Tensor, boxed: Any, *_: Any) -> None:
        self.peers.exchange(self._group(boxed, "barrier", chooser), None)

    @contextmanager
    def registered(self) -> Iterator[None]:
        """Use these kernels for the length of the block, and release what a waited-for work holds."""
        kernels = {
            "_allgather_base_": self.all_gather, "allgather_": self.all_gather_list,
            "allgather_coalesced_": self.all_gather_lists, "allgather_into_tensor_coalesced_": self.all_gather_several,
            "gather_": self.gather, "broadcast_": self.broadcast, "scatter_": self.scatter,
            "allreduce_": self.all_reduce, "allreduce_coalesced_": self.all_reduce_several, "reduce_": self.reduce,
            "_reduce_scatter_base_": self.reduce_scatter, "reduce_scatter_": self.reduce_scatter_list,
            "reduce_scatter_tensor_coalesced_": self.reduce_scatter_several, "alltoall_base_": self.all_to_all,
            "alltoall_": self.all_to_all_list, "send": self.send, "recv_": self.receive,
            "recv_any_source_": self.receive_from_any, "barrier": self.barrier,
            "monitored_barrier_": self.monitored_barrier,
        }  # fmt: skip
        library, functional = torch.library.Library("c10d", "IMPL"), torch.library.Library("_c10d_functional", "IMPL")
        waited = torch.library.get_kernel("_c10d_functional::wait_tensor", "CUDA").call_boxed

        def wait_tensor(keys: Any, t: Tensor) -> Any:
            _release(t)
            return waited(keys, t)

        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # "Overriding a previously registered kernel"
                for name, kernel in kernels.items():
                    for device in ("CUDA", "CPU"):
                        library.impl(name, kernel, device, allow_override=True)
                functional.impl("wait_tensor", wait_tensor, "CUDA", with_keyset=True, allow_override=True)
            with patched(_c10d.Work, {name: _releasing(getattr(_c10d.Work, name)) for name in _WAITS}):
                yield
        finally:
            library._destroy()
            functional._destroy()


def _releasing(real: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method of Work that waits, after which the watchdog holds the work's tensors no longer."""

    def wait(work: Any, *args: Any, **kwargs: Any) -> Any:
        for held in current().held_by_watchdog.values():
            held.pop(work, None)
        return real(work, *args, **kwargs)

    return wait


def _release(t: Tensor) -> None:
    """Let the watchdog hold no longer the results that share the memory of `t`, for which somebody has waited."""
    for held in current().held_by_watchdog.values():
        for work in [work for work, tensors in held.items() if any(base(one) == base(t) for one in tensors)]:
            del held[work]
