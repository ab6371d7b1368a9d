"""torch.distributed on a virtual card: this process is one rank of a world of any size, as torchrun starts it."""

from __future__ import annotations

import hashlib
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch.distributed import device_mesh, distributed_c10d
from torch.distributed.tensor import DTensor, Shard, _sharding_prop
from torch.distributed.tensor.placement_types import _StridedShard
from torch.optim import optimizer
from torch.testing._internal.distributed import fake_pg  # registers the backend

from memfit.errors import BadInput
from memfit.virtual.device.dispatch import current
from memfit.virtual.device.ledger import BROADCAST, BUCKET, BUCKET_SIZES
from memfit.virtual.patching import environment, patched, when_imported
from memfit.virtual.ranks.collectives import Collectives
from memfit.virtual.ranks.distinct import spreads_experts
from memfit.virtual.ranks.peers import Group, Peers
from memfit.virtual.ranks.place import Place

_c10d: Any = torch._C._distributed_c10d
_BACKEND = dist.Backend(dist.Backend.FAKE)
assert fake_pg


class World:
    """The process groups of one rank."""

    def __init__(self, place: Place, peers: Peers) -> None:
        self.place, self.peers = place, peers
        self.collectives = Collectives(peers)
        peers.groups = self.collectives.groups
        self._store = Store(peers)  # C++ calls its methods as long as this object lives
        self._made: Counter[tuple[int, ...]] = Counter()
        self._helper = distributed_c10d._new_process_group_helper
        self._init = distributed_c10d.init_process_group
        self._device = distributed_c10d._get_object_coll_device
        self._asked = ""  # the backend that the script asked for the default group
        self._stepped = False
        self._backends: dict[str, str] = {}  # name of a group -> the backend that the script asked for

    def start(self, backend: Any = None, rank: int | None = None, size: int | None = None) -> None:
        """Make the default group."""
        distributed_c10d._world.group_count = 0  # a group that failed to be made has left its number
        rank = self.place.rank if rank is None or rank < 0 else rank
        size = self.place.world_size if size is None or size < 1 else size
        self._asked = str(backend or "")
        self._init("fake", store=self._store, rank=rank, world_size=size)

    def init_process_group(
        self, backend: Any = None, init_method: Any = None, timeout: Any = None, world_size: int = -1, rank: int = -1,
        *_: Any, **__: Any,
    ) -> None:  # fmt: skip
        """Replace torch.distributed's function: the group lies on the virtual card, whatever its backend."""
        if not dist.is_initialized():
            self.start(backend, rank, world_size)

    def helper(
        self, size: int, rank: int, ranks: Any, backend: Any, store: Any, name: Any, *args: Any, **words: Any
    ) -> Any:
        """Replace the function that makes a group: its backend is PyTorch's fake one, its values travel."""
        words |= {"backend_options": None, "device_id": None}
        members = tuple(ranks) or tuple(range(size))
        text = str(words.get("group_desc") or "")
        self.peers.described.append((text, members))
        made = self._helper(size, rank, ranks, _BACKEND, store, name, *args, **words)
        if isinstance(made[0], _c10d.ProcessGroup):
            turn = self._made[members]
            self._made[members] += 1
            key = hashlib.sha1(repr(members).encode(), usedforsecurity=False).hexdigest()[:16]
            self._backends[str(name)] = self._asked if str(backend) == "fake" else str(backend)
            self.collectives.groups[str(name)] = Group(f"{key}.{turn}", members, rank, text)
        return made

    def object_device(self, group: Any = None) -> str:
        """Return where objects are sent from: NCCL alone sends from the card, else the host does."""
        group = group or distributed_c10d._get_default_group()
        asked = self._backends.get(str(group.group_name), "")
        return "cuda" if asked in ("nccl", "cuda:nccl") else self._device(group)

    def backend_name(self, group: Any = None) -> str:
        """Return the name of the backend that the script asked for, as dist.get_backend does."""
        group = group or distributed_c10d._get_default_group()
        return self._backends.get(str(group.group_name)) or "nccl"

    def mesh_made(self, real: Callable[..., None]) -> Callable[..., None]:
        """Return the constructor of a mesh that describes a dimension which spreads experts over all ranks.

        PyTorch makes no group for it, but takes the default one, whose description says nothing.
        """

        def made(mesh: Any, *args: Any, **words: Any) -> None:
            real(mesh, *args, **words)
            everyone = tuple(range(self.place.world_size))
            for name, size in zip(mesh.mesh_dim_names or (), mesh.shape, strict=False):
                described = f"mesh_{name}", everyone
                if size == len(everyone) and spreads_experts(name) and described not in self.peers.described:
                    self.peers.described.append(described)

        return made

    def mesh_device(self, real: Callable[..., Any]) -> Callable[..., Any]:
        """Return the method with which a mesh chooses the device of LOCAL_RANK where the script has used none yet."""

        def setup(mesh: Any) -> Any:
            card, made = current(), real(mesh)
            if not card.named and not card.ledger.blocks:
                card.use(self.place.local_rank)
            return made

        return setup

    def before_step(self, stepping: Any, *_: Any) -> None:
        """Note uneven shards among the weights that an optimizer steps."""
        if not self._stepped:
            weights = [p for group in stepping.param_groups for p in group["params"]]
            self.peers.shards.update(_uneven_shards(p for p in weights if isinstance(p, DTensor)))
            self._stepped = True
            self.peers.before_step()

    def expert_group(self) -> tuple[int, int]:
        """Return the position, in the groups over which experts are spread, of the rank whose experts are favoured, and
        their size; (0, 1) without such groups.
        """
        for rank in (self.peers.favoured, self.peers.rank):
            for text, ranks in self.peers.described:
                if rank in ranks and len(ranks) > 1 and spreads_experts(text):
                    return ranks.index(rank), len(ranks)
        return 0, 1

    def partly_saved(self, module: Any) -> AbstractContextManager[None]:
        """Let the traced ranks save a distributed checkpoint as if there were no others, whose parts nobody has."""
        traced, dedup, validate = self.peers.traced, module.dedup_save_plans, module._validate_global_plan
        if len(traced) == self.place.world_size:
            return nullcontext()
        valid: Any = [] if "errors" in validate.__code__.co_varnames else True  # a list of errors since 2.13

        def of_traced(plans: list[Any], *args: Any, **words: Any) -> Any:
            if len(plans) == self.place.world_size:  # not of a smaller group
                plans = [plan if rank in traced else replace(plan, items=[]) for rank, plan in enumerate(plans)]
            return dedup(plans, *args, **words)

        return patched(module, {"dedup_save_plans": of_traced, "_validate_global_plan": lambda *_: valid})

    def split_group(
        self, parent_pg: Any = None, split_ranks: Any = None, timeout: Any = None, pg_options: Any = None,
        group_desc: str | None = None, *_: Any, **__: Any,
    ) -> Any:  # fmt: skip
        """Replace dist.split_group by one group for each list of ranks; return this rank's."""
        outer = self.collectives.groups[str((parent_pg or distributed_c10d._get_default_group()).group_name)]
        mine = None
        for positions in split_ranks or []:
            ranks = [outer.ranks[p] for p in positions]
            made = dist.new_group(ranks, group_desc=group_desc)
            mine = made if self.peers.rank in ranks else mine
        return mine

    def functions(self) -> dict[str, Any]:
        """Return the replacements in torch.distributed, by name."""
        return {
            "init_process_group": self.init_process_group, "split_group": self.split_group,
            "get_backend": self.backend_name, "_register_builtin_comm_hook": _builtin_hook,
            **dict.fromkeys(("TCPStore", "FileStore"), lambda *_, **__: self._store),
        }  # fmt: skip


def _uneven_shards(weights: Iterable[DTensor]) -> dict[tuple[int, ...], tuple[int, ...]]:
    """Return for each mesh dimension with uneven shards its ranks, and a number for each that tells equal ones."""
    rows: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
    for weight in weights:
        mesh = weight.device_mesh
        for dimension, placement in enumerate(weight.placements):
            if isinstance(placement, Shard):
                size, count = mesh.size(dimension), weight.shape[placement.dim]
                chunk = -(-count // size)
                ranks = tuple(dist.get_process_group_ranks(mesh.get_group(dimension)))
                rows.setdefault(ranks, []).append(tuple(max(min(count - i * chunk, chunk), 0) for i in range(size)))
    found = {}
    for ranks, held in rows.items():
        columns = list(zip(*held, strict=True))
        numbers = {column: number for number, column in enumerate(dict.fromkeys(columns))}
        if len(numbers) > 1:
            found[ranks] = tuple(numbers[column] for column in columns)
    return found


class Store(_c10d.Store):  # type: ignore[misc]
    """The key-value store of a job: what one traced rank sets, the others get; reading waits."""

    def __init__(self, peers: Peers) -> None:
        super().__init__()
        self._peers, self._timeout = peers, timedelta(minutes=30)

    def set(self, key: str, value: str | bytes) -> None:
        self._peers.store_set(key, value.encode() if isinstance(value, str) else bytes(value))

    def get(self, key: str) -> bytes:
        found = self._peers.store_get(key)
        if found is None:
            raise BadInput(
                f"rank {self._peers.rank} waits for the key {key!r}, which no traced rank sets",
                hint="trace the rank that sets it too: --ranks all, or 0,3",
            )
        return found

    def add(self, key: str, amount: int) -> int:
        return self._peers.store_add(key, amount)

    def wait(self, keys: list[str], *_: Any) -> None:
        for key in keys:
            self.get(key)

    def check(self, keys: list[str]) -> bool:
        return self._peers.store_has(keys)

    def delete_key(self, key: str) -> bool:
        return self._peers.store_delete(key)

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout


@contextmanager
def world(place: Place, peers: Peers | None = None, started: bool = True) -> Iterator[World]:
    """Run the block in the environment that torchrun gives this rank. started: with the default group already made."""
    made = World(place, peers or Peers(place.rank))
    # prepare_for_forward only counts passes, of which DDP's reducer times 1 to 10 with CUDA events (reducer.cpp)
    uncounted = {"prepare_for_forward": lambda *_: None}
    inner = {"_new_process_group_helper": made.helper, "_get_object_coll_device": made.object_device}
    functions = made.functions()
    by_value = {name: functions[name] for name in ("init_process_group", "split_group", "get_backend")}
    meshes, setup = device_mesh.DeviceMesh, "_setup_world_group_and_device"
    choosing = {setup: made.mesh_device(getattr(meshes, setup))} if hasattr(meshes, setup) else {}
    choosing["__init__"] = made.mesh_made(meshes.__init__)
    step_hook = optimizer.register_optimizer_step_pre_hook(made.before_step)
    current().answers.routing.group = made.expert_group
    with (
        environment(place.variables()),
        # init_process_group installs a hook that prefixes lines with the rank
        patched(sys, {"excepthook": sys.excepthook}),
        patched(_c10d.Reducer, uncounted),
        patched(_sharding_prop, _quick_propagation()),
        made.collectives.registered(),
        _ddp_buffers_labelled(),
        patched(distributed_c10d, functions | inner),
        patched(dist, functions),
        patched(device_mesh, by_value),
        when_imported({"torch.distributed.checkpoint.default_planner": made.partly_saved}),
        patched(meshes, choosing),
    ):
        try:
            if started:
                made.start("nccl")
            yield made
        finally:
            step_hook.remove()
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


# --- processes that a script starts itself ---


class _Ended:
    """What `spawn(join=False)` returns: all processes have ended."""

    processes: tuple[Any, ...] = ()

    def join(self, *_: Any, **__: Any) -> bool:
        return True

    def pids(self) -> list[int]:
        return []


@contextmanager
def in_this_process(place: Place) -> Iterator[None]:
    """Let torch.multiprocessing.spawn call its function here, as the process of this rank on its machine."""

    def start_processes(
        fn: Any, args: tuple[Any, ...] = (), nprocs: int = 1, join: bool = True, *_: Any, **__: Any
    ) -> _Ended | None:
        fn(min(place.local_rank, nprocs - 1), *args)
        return None if join else _Ended()

    words = {"spawn": start_processes, "start_processes": start_processes}
    module: Any = sys.modules["torch.multiprocessing.spawn"]  # as an attribute that name is the function
    with patched(torch.multiprocessing, words), patched(module, words):
        yield
