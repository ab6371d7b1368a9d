"""Sharded runs under FSDP2 and DeepSpeed, played on an allocator for each stream.

FSDP2 is played group by group: gather, compute, reduce. Source: torch 2.13 _fully_shard/_fsdp_param_group.py and
_fsdp_collectives.py; groups as accelerate 1.15 wraps a model. For DeepSpeed the default stream is played, and the pools
of the other streams are added.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from memfit.allocator import Allocator, PlainAllocator, QuickAllocator
from memfit.allocator.heap import Heap
from memfit.closed_form.layers.program import PREFETCH, REDUCED, REDUCTION, Program
from memfit.closed_form.numerics import adapted, adapter_weights
from memfit.closed_form.parallel.share import Share, part
from memfit.closed_form.run.account import Account
from memfit.closed_form.run.micro_step import PlacedSegment
from memfit.closed_form.run.timeline import load, optimizer_step
from memfit.closed_form.run.unroll import Gauge, Pass, free_all
from memfit.closed_form.static import Stored
from memfit.nouns.architecture import Weight
from memfit.nouns.tape import STEPS, Phase
from memfit.tables.combinations import head_apart
from memfit.tables.loading import loading_of
from memfit.tables.quantization import CHECKPOINTS, QUANTIZATIONS

REDUCE = -1  # stands among the sizes of tensors for the moment of a reduction


@dataclass(frozen=True, slots=True, eq=False)
class ShardGroup:
    """Weights that are gathered together; sizes in bytes."""

    whole: tuple[int, ...]  # every weight as it is loaded
    shares: tuple[int, ...]  # one GPU's share of every weight as it is stored
    gathered: tuple[int, ...]  # every weight as it is gathered
    cast: int  # one GPU's share in the dtype that is sent; 0 if it is stored in that dtype
    reduced: int  # the whole gradients
    received: int  # one GPU's share of the gradients as reduced; 0 if that dtype is kept
    kept: int  # one GPU's share of the gradients in the dtype of the weights


@dataclass(frozen=True, slots=True)
class ModelGroups:
    """FSDP groups of a model. With tied embeddings `first` holds embedding and head, and `last` is None.

    `root` holds every parameter not in another group. With `again`, it holds embedding and head, and is gathered again
    for the backward: it is `first`, and `root` is empty.
    """

    root: ShardGroup
    first: ShardGroup
    blocks: tuple[ShardGroup, ...]
    last: ShardGroup | None
    again: bool = False


def fsdp2_played(
    account: Account, memories: tuple[Any, ...], gauge: Gauge, *, evaluates: bool, done: int = 0
) -> Iterator[Phase]:
    """Play a run on the heaps of three streams; yield each phase at its end.

    Loading and the first `done` steps are left out, because the heaps come from a run after them.
    """
    groups, allocator = groups_of(account), memories[0]
    if not done:
        _load(account, groups, allocator)
        yield "load"
    for number in range(done, STEPS):
        _step(account, groups, memories, gauge, first=number == 0)
        yield "step" if number else "first_step"
    _save(groups, allocator)
    yield "save"
    if evaluates:
        _evaluate(account, groups, memories)
        yield "eval"


def three_streams(allocator: Allocator | QuickAllocator) -> tuple[Any, Any, Any]:
    """Return heaps of the default stream, of FSDP2's all-gathers and of its reductions, on one card."""
    if isinstance(allocator, Allocator):
        return allocator, _StreamHeap(allocator, 1), _StreamHeap(allocator, 2)
    gathering, reducing = PlainAllocator(), PlainAllocator()
    allocator.share_card(gathering, reducing)
    return allocator, gathering, reducing


class _StreamHeap(Heap):
    """One stream of an allocator."""

    def __init__(self, allocator: Allocator, stream: int) -> None:
        self._allocator, self._stream = allocator, stream

    def malloc(self, size: int) -> Any:
        return self._allocator.malloc(size, self._stream)

    def free(self, block: Any) -> None:
        self._allocator.free(block)

    def empty_cache(self) -> None:
        self._allocator.empty_cache()


def groups_of(account: Account) -> ModelGroups:
    """Return the groups of a run."""
    a, r = account.architecture, account.recipe
    made: dict[int, ShardGroup] = {}
    names = adapted(a, r.lora_targets) if r.method != "full" else frozenset()
    blocks = []
    for layer in a.layers:
        adapters = adapter_weights(layer.weights, names, r.lora_rank) if names else []
        group = made.get(id(layer)) or made.setdefault(id(layer), _group(account, layer.weights, adapters))
        blocks.append(replace(group))  # a copy for each layer, because groups are compared by identity
    tokens, head = max(a.embedding, key=lambda w: w.numel), (*a.final, *a.head)
    if account.trainer.ends_in_root:
        ends = _group(account, (*a.embedding, *head), [])
        return ModelGroups(_group(account, (), []), ends, tuple(blocks), None, again=True)
    root = _group(account, [w for w in a.embedding if w is not tokens], [])
    if a.tied:
        return ModelGroups(root, _group(account, (tokens, *head), []), tuple(blocks), None)
    return ModelGroups(root, _group(account, (tokens,), []), tuple(blocks), _group(account, head, []))


def _group(account: Account, weights: Sequence[Weight], adapters: Sequence[Weight]) -> ShardGroup:
    n, r, compute = account.numerics, account.recipe, account.traced.weight
    full, gpus = r.method == "full", r.num_gpus
    row = (QUANTIZATIONS | CHECKPOINTS).get(r.quantization) if r.method == "qlora" else None
    linear = "linear" if row is not None and adapters else ""
    stored, sent, cast = [], [], 0
    for w in weights:
        if row is not None and w.kind == linear:
            stored.append(row.payload(w.numel))
            sent.append(row.payload(w.numel))
            continue
        stored.append(w.numel * n.weight)
        sent.append(w.numel * compute)
        cast += part(w.numel * compute, gpus) if n.weight != compute else 0
    stored += [w.numel * n.adapter for w in adapters]
    sent += [w.numel * account.traced.adapter for w in adapters]
    cast += sum(part(w.numel * compute, gpus) for w in adapters) if n.adapter != account.traced.adapter else 0
    trained, wide = (weights, n.weight) if full else (adapters, n.adapter)
    elements, width = sum(w.numel for w in trained), compute if full else account.traced.adapter
    kept = part(elements, gpus) * wide
    if r.offloaded_by_fsdp:  # the shares are copied to the card to be sent
        cast += sum(part(size, gpus) for size in stored)
    return ShardGroup(
        tuple(stored), tuple(part(size, gpus) for size in stored), tuple(sent), cast, elements * width,
        part(elements, gpus) * width if width != wide else 0, kept,
    )  # fmt: skip


def _load(account: Account, groups: ModelGroups, memory: Heap) -> None:
    """Load and shard every group, as tables/loading.py describes it."""
    scales = [Stored(item.stays[1:]) for item in account.static.stored if len(item.stays) > 1]
    load(scales, memory)
    _LOADED[loading_of(account.recipe)](account, groups, memory)
    load([Stored((size,)) for size in account.architecture.buffers], memory)


def _keep_shares(account: Account, group: ShardGroup, memory: Heap) -> None:
    """Allocate the shares of a group, which leave the card at once where FSDP2 offloads them."""
    for size in group.shares:
        share = memory.malloc(size)
        if account.recipe.offloaded_by_fsdp:
            memory.free(share)


def _load_from_host(account: Account, groups: ModelGroups, memory: Heap) -> None:
    """Move every group to the card and shard it; accelerate holds embedding and head whole until the end."""
    ends: list[Any] = []
    for group in (*groups.blocks, groups.first, groups.last, groups.root):
        if group is None:
            continue
        whole = [memory.malloc(size) for size in group.whole]
        _keep_shares(account, group, memory)
        ends += whole
        if group in groups.blocks:
            free_all(memory, ends)
            ends = []
    free_all(memory, ends)


def _load_one_by_one(account: Account, groups: ModelGroups, memory: Heap) -> None:
    """Put one whole weight after the other on the card, and keep this GPU's share."""
    for group in (groups.root, groups.first, *groups.blocks, groups.last):
        for whole, share in zip(group.whole, group.shares, strict=True) if group else ():
            passing = memory.malloc(whole)
            memory.malloc(share)
            memory.free(passing)
    if account.architecture.tied:  # the state dict holds the matrix under both its names
        again = [memory.malloc(max(groups.first.whole)), memory.malloc(max(groups.first.shares))]
        free_all(memory, again)


def _load_whole(account: Account, groups: ModelGroups, memory: Heap) -> None:
    """Load all 4-bit weights on every rank, group after group, before they are sharded."""
    memory.free(memory.malloc(account.warmup))
    every = [group for group in (groups.root, groups.first, *groups.blocks, groups.last) if group]
    passing = account.static.passing
    whole: dict[ShardGroup, list[Any]] = {}
    for group in every:
        whole[group] = []
        for size in group.whole:
            beside = memory.malloc(passing if size < passing and group in groups.blocks else 0)
            whole[group].append(memory.malloc(size))
            memory.free(beside)
    for group in every:
        _keep_shares(account, group, memory)
        free_all(memory, whole[group])


_LOADED = {"whole": _load_whole, "host": _load_from_host, "sharded": _load_one_by_one}


def _step(account: Account, groups: ModelGroups, memories: tuple[Any, ...], gauge: Gauge, *, first: bool) -> None:
    """Play the passes of one step, each of which reduces its gradients, then the optimizer step."""
    memory, gathering, reducing = memories
    s, gpus = account.static, account.recipe.num_gpus
    gradients: dict[ShardGroup, Any] = {}
    for number in range(min(account.recipe.accumulation, 2)):
        batch = [memory.malloc(8 * account.recipe.tokens) for _ in range(3)]
        gauge.later = number > 0
        one = _pass_of(account)(
            memory=memory, meter=account.meter, micro=account.micro(accumulating=bool(number)),
            groups=groups, gathering=gathering, reducing=reducing, sums=gradients,
            away=account.recipe.offloaded_by_fsdp,
            early=groups.again or account.trainer.head(account.recipe.loss) == "fused", gauge=gauge,
            by_loss=not groups.again and head_apart(account.recipe, account.architecture),
        )  # fmt: skip
        one.run(account.workspace if first and number == 0 else 0)
        free_all(memory, batch)
    if not account.recipe.offloaded_by_fsdp:  # else the CPU steps
        for size in (size for group in s.state_tensors for size in group) if first else ():
            memory.malloc(part(size, gpus))
        optimizer_step([tuple(part(size, gpus) for size in group) for group in s.step_groups], memory)
    gauge.after(None)
    free_all(reducing, gradients.values())


def _save(groups: ModelGroups, memory: Heap) -> None:
    """Gather one weight after the other, as a full state dict does."""
    for group in (groups.first, groups.blocks[0], groups.last):
        for size in group.whole if group else ():
            memory.free(memory.malloc(size))


def _evaluate(account: Account, groups: ModelGroups, memories: tuple[Any, ...]) -> None:
    """Evaluate two batches; groups that the first forward does not reshard stay whole for the second."""
    memory, gathering, reducing = memories
    left: dict[ShardGroup, list[Any]] = {}
    for _ in range(2):
        one = _pass_of(account)(
            memory=memory, meter=account.meter, micro=account.micro(train=False),
            groups=groups, gathering=gathering, reducing=reducing, whole=left, train=False,
            away=account.recipe.offloaded_by_fsdp, by_loss=head_apart(account.recipe, account.architecture),
        )  # fmt: skip
        one.run(0)


@dataclass(slots=True, kw_only=True)
class _ShardedPass(Pass):
    """A pass that gathers each group before it is used and reduces its gradients after it."""

    groups: ModelGroups
    gathering: Heap
    reducing: Heap
    train: bool = True
    away: bool = False  # shards are on the host, and reduced gradients are sent there
    early: bool = False  # the last block is gathered before the backward of the head
    by_loss: bool = False  # the loss gathers the head, on the default stream or on the host
    whole: dict[ShardGroup, list[Any]] = field(default_factory=dict)  # gathered weights
    output: Any = None  # output of the last all-gather
    sent: Any = None  # input of the last reduce-scatter
    sums: dict[ShardGroup, Any] = field(default_factory=dict)  # reduced gradients
    sizes: dict[Program, list[int]] = field(default_factory=dict)

    def sizes_of(self, program: Program) -> list[int]:
        """Return the bytes by local id; the outputs of a reduction count 0, because another stream allocates them."""
        if program not in self.sizes:
            self.sizes[program] = sizes = self.meter.sizes_of(program).copy()
            for local, label in program.labels.items():
                if label in (*REDUCED, REDUCTION, PREFETCH):
                    sizes[local] = REDUCE if label == REDUCTION else 0
        return self.sizes[program]

    def run(self, workspace: int) -> None:
        """Play the pass; the last reduce-scatter's input is freed at its end."""
        if self.groups.root not in self.whole:
            self._gather(self.groups.root)
            self._copy_out(self.groups.root)
        Pass.run(self, workspace)
        self._drop_output()
        for group in list(self.whole):
            if self.train or self.groups.again or (self.by_loss and group is self.groups.last):
                self._drop(group)
        self._drop_sent()

    def _segment(self, step: PlacedSegment, flow: Any, backward: bool = False) -> Any:
        if step.segment is step.part.program.leave or step.segment is step.part.program.exit:
            return Pass._segment(self, step, flow, backward)
        group = self._group(step)
        if backward:
            self._before_backward(step, group)
        else:
            self._before_forward(group)
        flow = Pass._segment(self, step, flow, backward)
        if backward and not self.train:
            return flow
        if backward:
            self._after_backward(step, group)
        elif group is not self.groups.last and not (group is self.groups.first and self.groups.last is None):
            self._drop(group)
        return flow

    def _left(self, step: PlacedSegment, event: int) -> None:
        if event:
            self._reduce(self._group(step))
        else:
            Pass._left(self, step, event)

    def _group(self, step: PlacedSegment) -> ShardGroup:
        if step.part.index >= 0:
            return self.groups.blocks[step.part.index]
        return self.groups.first if step.part is self.micro.embedding else self.groups.last or self.groups.first

    def _before_forward(self, group: ShardGroup) -> None:
        if self.by_loss and group is self.groups.last:
            if not self.away:  # else the loss is computed on the host
                self._copy_out(group)
        elif group not in self.whole:
            before, self.output = self.output, None
            self._gather(group)
            self._copy_out(group)
            self.gathering.free(before)

    def _before_backward(self, step: PlacedSegment, group: ShardGroup) -> None:
        if step.part is self.micro.head or not self.train:
            self._drop_output()
            if self.groups.again and self.train:
                self._drop(group)
                self._gather(group)
                self._copy_out(group)
                self._drop_output()
            if self.early:
                self._gather(self.groups.blocks[-1])
            return
        if group in self.whole or (step.part is self.micro.embedding and not group.reduced):
            return
        self._copy_out(group)
        self._drop_output()
        index = step.part.index
        if index > 0 or (index == 0 and self.groups.last):
            self._gather(self.groups.blocks[index - 1] if index else self.groups.first)

    def _after_backward(self, step: PlacedSegment, group: ShardGroup) -> None:
        if step.part is self.micro.head and not self.early:
            self._gather(self.groups.blocks[-1])
        if step.part is not self.micro.head or self.groups.last:
            if group in self.whole and group.kept:  # gradients added to earlier ones are not reduced yet
                self._reduce(group)
            self._drop(group)
        if step.part is self.micro.embedding:  # frees the head's gradient of a tied table
            free_all(self.memory, self.gradients)
            self.gradients = []

    def _gather(self, group: ShardGroup) -> None:
        cast = self.gathering.malloc(group.cast)
        self.output = self.gathering.malloc(sum(group.gathered))
        self.gathering.free(cast)

    def _copy_out(self, group: ShardGroup) -> None:
        self.whole[group] = [self.memory.malloc(size) for size in group.gathered]

    def _reduce(self, group: ShardGroup) -> None:
        """Free the gathered weights, then copy the gradients together, reduce, cast and add them to earlier ones."""
        if group is self.groups.first:
            self._reduce(self.groups.root)
        self._drop(group)
        self._drop_sent()
        self.sent = self.memory.malloc(group.reduced)
        received = self.reducing.malloc(group.received)
        share = self.reducing.malloc(group.kept)
        self.reducing.free(received)
        if self.away or group in self.sums:
            self.reducing.free(share)
        else:
            self.sums[group] = share

    def _drop(self, group: ShardGroup) -> None:
        free_all(self.memory, self.whole.pop(group, ()))

    def _drop_output(self) -> None:
        self.gathering.free(self.output)
        self.output = None

    def _drop_sent(self) -> None:
        self.memory.free(self.sent)
        self.sent = None


@dataclass(slots=True, kw_only=True)
class _FlatPass(_ShardedPass):
    """A pass under FSDP1: units are gathered in place, on the gathering stream, and the root's stays whole.

    record_stream keeps a freed unit from the next gather: it is available to the one after. Source: torch 2.13,
    _flat_param.py (_free_unsharded_flat_param).
    """

    def run(self, workspace: int) -> None:
        """Play the pass with the root's weights whole."""
        ends = [group for group in (self.groups.root, self.groups.first, self.groups.last) if group]
        root = self.gathering.malloc(sum(sum(group.gathered) for group in ends))
        Pass.run(self, workspace)
        for group in list(self.whole):
            self._drop(group)
        self.gathering.free(self.output)
        self.output = None
        self.gathering.free(root)
        self._drop_sent()

    def _before_forward(self, group: ShardGroup) -> None:
        self._take(group)

    def _before_backward(self, step: PlacedSegment, group: ShardGroup) -> None:
        if self.train:
            self._take(group if step.part is not self.micro.head else self.groups.blocks[-1])

    def _after_backward(self, step: PlacedSegment, group: ShardGroup) -> None:
        if step.part.index > 0:
            self._take(self.groups.blocks[step.part.index - 1])
        self._drop(group)

    def _take(self, group: ShardGroup) -> None:
        if group in self.groups.blocks and group not in self.whole:
            self.whole[group] = [self.gathering.malloc(sum(group.gathered))]

    def _drop(self, group: ShardGroup) -> None:
        for unit in self.whole.pop(group, ()):
            self.gathering.free(self.output)
            self.output = unit


def _pass_of(account: Account) -> type[_ShardedPass]:
    return _FlatPass if account.share.flat else _ShardedPass


# ---- DeepSpeed -----------------------------------------------------------------------------------------------------


def deepspeed_played(
    account: Account, allocator: Allocator | QuickAllocator, gauge: Gauge, *, evaluates: bool
) -> Iterator[Phase]:
    """Play STEPS steps and an evaluation on an allocator and the pools of other streams; yield each phase."""
    share, pools = account.share, _Streams()
    gauge.level = lambda: allocator.reserved_peak + pools.reserved
    if account.recipe.method == "qlora" and account.recipe.shard == "parameters":  # whole, until ZeRO-3 shards them
        free_all(allocator, [allocator.malloc(account.load().requested)])
    for size in _lasting(account):
        allocator.malloc(size)
    for number in range(STEPS):
        pools.play(share if number else share.first or share)
        gauge.begin()
        _deepspeed_step(account, allocator, gauge, states=number == 0)
        yield "step" if number else "first_step"
    if not evaluates:
        return
    pools.play(share.evaluated or share)
    Pass(allocator, account.meter, account.micro(train=False)).run(0)
    yield "eval"


class _Streams:
    """The pools of the other two streams: one for gathered weights, one for reduced gradients."""

    def __init__(self) -> None:
        self.gathering, self.reducing = PlainAllocator(), PlainAllocator()
        self.beside = 0  # reduced bytes beyond the largest bucket

    @property
    def reserved(self) -> int:
        return self.gathering.reserved_peak + self.reducing.reserved_peak + self.beside

    def play(self, share: Share) -> None:
        """Play one pass."""
        streams = share.streams
        if streams is None:
            return
        live: dict[int, int] = {}
        count = 0
        for event in streams.events:
            if event > 0:
                count += 1
                live[count] = self.gathering.malloc(event)
            else:
                self.gathering.free(live.pop(-event))
        free_all(self.gathering, live.values())
        for size in streams.reduced:
            self.reducing.free(self.reducing.malloc(size))
        self.beside = max(self.beside, streams.reducing - max(streams.reduced, default=0))


def _lasting(account: Account) -> list[int]:
    """Return the sizes of DeepSpeed's flat tensors, which exist from loading on."""
    share = account.share
    gradients = share.gradients if share.lasting_gradients else 0
    return [share.weights, share.master, gradients, share.buckets, account.static.buffers]


def _deepspeed_step(account: Account, memory: Heap, gauge: Gauge, *, states: bool) -> None:
    """Play the passes of one step, then the optimizer step; `states`: it allocates the states."""
    gradients: list[Any] = []
    for number in range(1 if account.released else min(account.recipe.accumulation, 2)):
        batch = [memory.malloc(8 * account.recipe.tokens) for _ in range(3)]
        gauge.later = number > 0
        micro = account.micro(accumulating=gauge.later)
        one = Pass(memory, account.meter, micro, late=account.share.late, gauge=gauge)
        one.run(account.workspace if states and number == 0 else 0)
        gradients += one.gradients
        free_all(memory, batch)
    for group in account.share.step_tensors:
        held = [memory.malloc(size) for size in group]
        if states and group is account.share.step_tensors[-1]:
            for _ in range(2):
                memory.malloc(account.share.states // 2)
        free_all(memory, held)
    gauge.after(None)
    free_all(memory, gradients)
