"""One GPU's share under DeepSpeed's ZeRO, with the sizes of its configuration: buckets, gathered weights, copies.

ZeRO-3's PartitionedParameterCoordinator decides which parameters are whole while a pass runs; it is played here with
counts of elements. The first two passes record the order of the modules: each is gathered when it runs and released
afterwards. Later passes prefetch the next modules, and keep those that run again soon, up to a billion elements: 2 GB
of 16-bit weights on every card, whatever the number of cards.

Source: DeepSpeed 0.19.8 stage_1_and_2.py, stage3.py, partitioned_param_coordinator.py and partition_parameters.py, with
the defaults of zero/config.py; traced and recorded (tests/data/deepspeed_runs.json).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

from memfit.closed_form.numerics import Numerics, adapted, adapter_weights
from memfit.closed_form.parallel.share import Gathered, Share, Streams, part
from memfit.closed_form.static import Static
from memfit.nouns.architecture import Architecture, Layer, Weight
from memfit.nouns.job import Recipe
from memfit.nouns.zero_settings import ZeroSettings, parse_zero_conf

STAGES = ("entry", "forward", "loss", "loss_backward", "last", "middle", "first", "embedding")


class Level(NamedTuple):
    """Elements allocated beside the shards during one part of a pass."""

    fetching: int = 0  # while gathered parameters are copied out of the collective's output
    running: int = 0  # while a module runs

    def most(self, other: Level) -> Level:
        return Level(max(self.fetching, other.fetching), max(self.running, other.running))


@dataclass(slots=True, eq=False)
class _Parameter:
    """One weight; `handle` is its all-gather, until that is waited for."""

    numel: int
    persists: bool  # it stays whole, and is counted elsewhere
    available: bool  # gathered and waited for
    handle: _Handle | None = None
    used_last: int = -1  # the step up to which it has been fetched
    block: int = 0  # number of its allocation


@dataclass(slots=True, eq=False)
class _Handle:
    """Parameters gathered together. `flat`: elements of the output they are copied out of; 0: they are the output."""

    waited: set[_Parameter]
    members: tuple[_Parameter, ...]
    flat: int
    block: int = 0
    complete: bool = False


class _Step(NamedTuple):
    """A call of a module in the forward or backward."""

    stage: str
    parameters: tuple[_Parameter, ...]


@dataclass(slots=True)
class _Coordinator:
    """PartitionedParameterCoordinator, with levels in elements."""

    steps: Sequence[_Step]
    gpus: int
    sizes: ZeroSettings
    level: int = 0
    born: list[int] = field(default_factory=list)  # elements of every allocation
    # n > 0: an allocation of n elements; n < 0: the end of allocation -n, counted from 1
    events: list[int] = field(default_factory=list)
    available: int = 0
    highest: int = 0
    queue: deque[tuple[_Parameter, int]] = field(default_factory=deque)
    passed: list[int] = field(default_factory=list)  # elements of the modules before each step
    again: list[tuple[int | None, ...]] = field(default_factory=list)  # when the parameters of a step come next

    def __post_init__(self) -> None:
        total, coming = 0, dict[_Parameter, int]()
        for step in self.steps:
            self.passed.append(total)
            total += sum(p.numel for p in step.parameters)
        for at in range(len(self.steps) - 1, -1, -1):
            self.again.append(tuple(coming.get(p) for p in self.steps[at].parameters))
            coming.update(dict.fromkeys(self.steps[at].parameters, at))
        self.again.reverse()
        self.passed.append(total)

    def run(self, count: int, *, recorded: bool = True) -> Iterator[tuple[str, Level]]:
        """Run the first `count` steps of a pass, and yield the level of each; `recorded`: their order is known."""
        for p in dict.fromkeys(p for step in self.steps for p in step.parameters if p.handle is not None):
            self._wait(p)  # it was prefetched and not used
            self._give_back(p)
        self.available = 0
        uses = ((p, at) for at, step in enumerate(self.steps) for p in step.parameters)
        self.queue = deque(uses if recorded else ())
        for step in self.steps:
            for p in step.parameters:
                p.used_last = -1
        for at, step in enumerate(self.steps[:count]):
            self.highest = self.level
            self._fetch(at, step.parameters, recorded)
            yield step.stage, Level(self.highest, self.level)
            self._release(at, recorded)

    def _fetch(self, at: int, wanted: tuple[_Parameter, ...], recorded: bool) -> None:
        self._gather([p for p in wanted if not p.available and p.handle is None])
        for p in wanted:
            self._wait(p)
        if not recorded:
            return
        for _ in range(sum(p.used_last < at for p in wanted)):
            p, used = self.queue.popleft()
            p.used_last = used
        limit = min(self.sizes.max_live_parameters - self.available, self.sizes.prefetch_bucket_size)
        ahead, size = list[_Parameter](), 0
        while self.queue and size < limit:
            p, used = self.queue.popleft()
            p.used_last = max(p.used_last, used)
            if not p.available and p.handle is None and p not in ahead:
                ahead.append(p)
                size += p.numel
        self._gather(ahead)

    def _gather(self, parameters: list[_Parameter]) -> None:
        if not parameters:
            return
        self.available += sum(p.numel for p in parameters)
        padded = [-(-p.numel // self.gpus) * self.gpus for p in parameters]
        together = len(parameters) > 1 and self.gpus > 1
        handle = _Handle(set(parameters), tuple(parameters), sum(padded) if together else 0)
        if together:
            handle.block = self._malloc(sum(padded))
        for p, size in zip(parameters, padded, strict=True):
            p.handle = handle
            p.block = 0 if together else self._malloc(size)

    def _wait(self, p: _Parameter) -> None:
        handle = p.handle
        if handle is None:
            return
        if not handle.complete:
            handle.complete = True
            for member in handle.members:
                member.available = True
                if handle.flat:
                    member.block = self._malloc(member.numel)
        p.handle = None
        handle.waited.discard(p)
        if not handle.waited and handle.flat:
            self._free(handle.block)

    def _malloc(self, numel: int) -> int:
        self.level += numel
        self.highest = max(self.highest, self.level)
        self.events.append(numel)
        self.born.append(numel)
        return len(self.born)

    def _free(self, block: int) -> None:
        self.level -= self.born[block - 1]
        self.events.append(-block)

    def _release(self, at: int, recorded: bool) -> None:
        for p, coming in zip(self.steps[at].parameters, self.again[at], strict=True):
            soon = coming is not None and self.passed[coming] - self.passed[at + 1] < self.sizes.max_reuse_distance
            if p.available and not p.persists and not (recorded and (p.used_last > at + 1 or soon)):
                self._give_back(p)

    def _give_back(self, p: _Parameter) -> None:
        p.available = False
        self._free(p.block)
        self.available -= p.numel


@lru_cache(maxsize=256)
def levels(
    a: Architecture,
    gpus: int,
    rank: int,
    targets: frozenset[str],
    recomputed: bool,
    recorded: bool,
    evaluated: bool,
    sizes: ZeroSettings,
) -> tuple[dict[str, Level], tuple[int, ...]]:
    """Return the highest level in each part of a pass, and the allocations as events. rank: of adapters; 0: none."""
    ends, blocks = _modules(a, rank, targets, sizes.param_persistence_threshold)
    embedding, *head = ends
    loss = [_Step("loss", m) for m in head]
    forward = [_Step("entry", embedding), *(_Step("forward", m) for block in blocks for m in block), *loss]
    steps = [*forward, *(_Step("loss_backward", m) for m in reversed(head))]
    for at in range(len(blocks) - 1, -1, -1):
        stage = "last" if at == len(blocks) - 1 else "middle" if at else "first"
        again = blocks[at] if recomputed else []
        steps += [_Step(stage, m) for m in (*again, *reversed(blocks[at]))]
    steps.append(_Step("embedding", embedding))
    coordinator = _Coordinator(steps, gpus, sizes)
    highest: dict[str, Level] = dict.fromkeys(STAGES, Level())
    for _ in range(2):
        for stage, level in coordinator.run(len(forward) if evaluated else len(steps), recorded=recorded):
            highest[stage] = highest[stage].most(level)
    return highest, tuple(coordinator.events)


def fills(a: Architecture, bucket: int) -> tuple[int, ...]:
    """Return the elements of each bucket of at most `bucket` when it is reduced, one after the other."""
    full, filled = [], 0
    blocks = [w for layer in reversed(a.layers) for w in reversed(layer.weights)]
    for w in (*reversed((*a.final, *a.head)), *blocks, *a.embedding):
        if filled and filled + w.numel > bucket:
            full.append(filled)
            filled = 0
        filled += w.numel
    return tuple(size for size in (*full, filled) if size <= bucket)


def _modules(
    a: Architecture, rank: int, targets: frozenset[str], persistent: int
) -> tuple[list[tuple[_Parameter, ...]], list[list[tuple[_Parameter, ...]]]]:
    """Return the parameters of each module in the order of calls: of embedding and head, and of every block."""

    def of(weights: Iterable[Weight]) -> list[tuple[_Parameter, ...]]:
        modules: dict[str, list[_Parameter]] = {}
        for w in weights:
            path = w.name.rpartition(".")[0]
            for parent in accumulate(path.split(".")[:-1], "{}.{}".format):
                modules.setdefault(parent, [])
            modules.setdefault(path, []).append(_Parameter(w.numel, w.numel <= persistent, w.numel <= persistent))
        return [tuple(m) for m in modules.values()]

    def block(layer: Layer) -> list[tuple[_Parameter, ...]]:
        adapters = adapter_weights(layer.weights, targets, rank) if rank else []
        return [(), *of([*layer.weights, *adapters])]

    embedding = tuple(p for m in of(a.embedding) for p in m)
    ends = [embedding, *of((*a.final, *a.head))]
    if a.tied:
        ends.append(embedding)
    return ends, [block(layer) for layer in a.layers]


def persisting(a: Architecture, rank: int, targets: frozenset[str], persistent: int) -> int:
    """Return the elements of the weights that stay whole from the first step on."""
    adapters = adapter_weights(a.weights, targets, rank) if rank else []
    return sum(w.numel for w in (*a.weights, *adapters) if w.numel <= persistent)


NORM_BYTES = 8  # per element: the norm of the gradients is computed in fp64 (get_norm_dtype), weight by weight
NOTHING = Gathered(*[0] * 8)


def in_backward(held: Gathered, size: int) -> Gathered:
    """Return `held` with `size` more bytes in every part of the backward that runs blocks."""
    return replace(
        held, last=held.last + size, middle=held.middle + size, first=held.first + size, embedding=held.embedding + size
    )


def stage_0(s: Static, n: Numerics, whole: Share) -> Share:
    """BF16_Optimizer: takes a step while it is constructed, and widens all gradients before each step."""
    widened = s.trained * n.master
    return replace(whole, gradients=s.gradients + widened, early_states=True, loading=s.base + widened)


def stages_1_and_2(a: Architecture, r: Recipe, n: Numerics, s: Static, whole: Share) -> Share:
    """ZeRO-1 and -2: weights are whole; both buckets exist from the first gradient to the end of the backward.

    Like ZeRO-2, ZeRO-1 reduces gradients at the end of an accumulation; until then it keeps them whole. A gradient
    larger than a bucket is copied whole for the part of it that stays. A later micro-batch makes a second set of the
    sharded gradients in the pool, which is added to the first at its end (independent_gradient_partition_epilogue).
    The gradient of a tied table is whole, and reduced, at the end of the backward only.
    """
    away, bucket = r.offload != "none", _sizes(a, r).reduce_bucket_size
    released = r.shard == "gradients" or away or r.accumulation == 1
    share, largest = part(s.trained, r.num_gpus), _largest_trained(a, r, s)
    cut = max((largest - share) * n.gradient, _apart_in_blocks(a, r, n)) if largest > bucket else 0
    shared = 0 if away else share * n.gradient + cut if released else s.gradients
    apart, waiting = _apart(a, r, n, s)
    reduced, at_end = _reduced(n, s, bucket)
    buckets = 2 * bucket * n.gradient
    copied = max(reduced, _apart_in_blocks(a, r, n))
    late = buckets + waiting + copied
    norm = NORM_BYTES * min(largest, share)
    # a head larger than a bucket is reduced by itself, and offloaded, when the next gradient comes
    sent = 0 if a.tied or not apart else norm * away
    gathered = replace(in_backward(NOTHING, late), last=late + (0 if a.tied else apart) + sent, embedding=late + apart)
    used = replace(in_backward(NOTHING, copied), last=copied + sent)
    kept = shared if released else 0
    again = kept if r.accumulation > 1 and not away else 0
    return replace(
        whole, gradients=shared, states=_left(r, whole.states), master=_left(r, whole.master),
        release_gradients=released,
        buckets=largest * n.gradient if away else 0,  # temp_grad_buffer_for_gpu_offload
        gathered=gathered,
        streams=Streams(0, kept + again + copied + at_end + norm * away, used, kept, reduced=_fills(a, r, n)),
        step_bytes=max(at_end + buckets, norm + buckets * away, _widened(a, r, n, s)), loading=_flattened(r, s),
        late=(buckets // 2, buckets // 2, waiting),
        step_tensors=() if away else ((norm,), _parts_and_whole(a, r, n, s)),
    )  # fmt: skip


def stage_3(a: Architecture, r: Recipe, n: Numerics, s: Static, whole: Share) -> Share:
    """ZeRO-3: weights are sharded; one bucket and the sharded gradients exist from the beginning on."""
    on_card, sizes = r.offload == "none", _sizes(a, r)
    bucket = sizes.reduce_bucket_size * n.gradient
    apart, waiting = _apart(a, r, n, s)
    reduced, at_end = _reduced(n, s, sizes.reduce_bucket_size)
    # each offloaded gradient has a copy on the card, and another in fp64 for its norm
    norm = 0 if on_card else (NORM_BYTES + n.gradient) * part(_largest_trained(a, r, s), r.num_gpus)
    after = at_end + norm * bool(at_end)
    norm = 0 if at_end else norm
    found = replace(
        whole, weights=0 if r.offload == "parameters" else part(whole.weights, r.num_gpus),
        gradients=part(whole.gradients, r.num_gpus) if on_card else 0, states=_left(r, whole.states),
        master=_left(r, whole.master), buckets=bucket, release_gradients=True, lasting_gradients=True,
        step_bytes=_widened(a, r, n, s), loading=_sharding(a, r, n, s, bucket),
        late=(waiting,), step_tensors=(_parts_and_whole(a, r, n, s),) if on_card else (),
    )  # fmt: skip

    def during(*, recorded: bool, evaluated: bool = False) -> Share:
        live, events = _live(a, r, n, s, recorded=recorded, evaluated=evaluated)
        held = Gathered(*(level.running for level in live))
        beside = reduced + norm
        gathered, used = in_backward(held, waiting + beside + apart), in_backward(held, beside)
        pools = Streams(
            max(level.fetching for level in live), beside + after, used, events=events, reduced=_fills(a, r, n)
        )
        # a bucket that was never full is reduced while the embedding is still gathered
        step = max(found.step_bytes, (after + held.embedding) * bool(after))
        return replace(found, gathered=gathered, streams=pools, step_bytes=step)

    steady = during(recorded=True)
    whole_weights = persisting(a, *_adapters(a, r), sizes.param_persistence_threshold) * n.weight
    return replace(
        steady, buckets=bucket + whole_weights, first=during(recorded=r.accumulation > 1),
        evaluated=during(recorded=True, evaluated=True),
    )  # fmt: skip


def _live(
    a: Architecture, r: Recipe, n: Numerics, s: Static, *, recorded: bool, evaluated: bool
) -> tuple[list[Level], tuple[int, ...]]:
    """Return the bytes of gathered weights in each part of a pass; 4-bit weights count with their average width."""
    width = (s.base + s.scales) / s.parameters if r.method == "qlora" else n.weight
    elements, events = levels(
        a, r.num_gpus, *_adapters(a, r), r.checkpointing != "none", recorded, evaluated, _sizes(a, r)
    )
    live = [Level(*(int(numel * width) for numel in elements[stage])) for stage in STAGES]
    return live, tuple(int(event * width) if event > 0 else event for event in events)


def _sizes(a: Architecture, r: Recipe) -> ZeroSettings:
    return parse_zero_conf(r.zero_conf, a.width)


def _adapters(a: Architecture, r: Recipe) -> tuple[int, frozenset[str]]:
    return (0, frozenset()) if r.method == "full" else (r.lora_rank, adapted(a, r.lora_targets))


def _left(r: Recipe, size: int) -> int:
    """Return the bytes of the optimizer that stay on the card."""
    return part(size, r.num_gpus) if r.offload == "none" else 0


def _apart(a: Architecture, r: Recipe, n: Numerics, s: Static) -> tuple[int, int]:
    """Return the bytes of the largest gradient above a bucket, and of a tied one, kept until its second half."""
    if r.method != "full":
        return 0, 0
    largest = s.largest * n.gradient
    return largest if s.largest > _sizes(a, r).reduce_bucket_size else 0, largest if a.tied else 0


def _apart_in_blocks(a: Architecture, r: Recipe, n: Numerics) -> int:
    """Return the bytes of the largest gradient of a block if it is larger than a bucket, else 0."""
    largest = max(w.numel for layer in a.kinds for w in layer.weights) if r.method == "full" else 0
    return largest * n.gradient if largest > _sizes(a, r).reduce_bucket_size else 0


def _parts_and_whole(a: Architecture, r: Recipe, n: Numerics, s: Static) -> tuple[int, int]:
    """Return the bytes of this rank's gradients joined, and of the same in fp32; ZeRO-3 steps by sub-groups."""
    share = _sub_group(a, r, s) if r.shard == "parameters" else part(s.trained, r.num_gpus)
    return share * n.gradient, share * n.master


def _sub_group(a: Architecture, r: Recipe, s: Static) -> int:
    """Return the elements that ZeRO-3 steps at once: at least one weight's share (_create_fp16_sub_groups)."""
    size = max(_sizes(a, r).sub_group_size, part(_largest_trained(a, r, s), r.num_gpus))
    return min(part(s.trained, r.num_gpus), size)


def _widened(a: Architecture, r: Recipe, n: Numerics, s: Static) -> int:
    return sum(_parts_and_whole(a, r, n, s)) if r.offload == "none" else 0


def _largest_trained(a: Architecture, r: Recipe, s: Static) -> int:
    """Return the elements of the largest weight that gets a gradient."""
    if r.method == "full":
        return s.largest
    return max((w.numel for w in adapter_weights(a.weights, adapted(a, r.lora_targets), r.lora_rank)), default=0)


def _flattened(r: Recipe, s: Static) -> int:
    """Return the bytes beyond the master weights while ZeRO-1 and -2 flatten trained weights, or zero their gradients.

    The flat copy is gone when the states are initialised with zeros as wide as the master weights.
    """
    trained = s.base if r.method == "full" else s.adapter
    if r.offload != "none":
        return trained
    master = part(s.master, r.num_gpus)
    return max(trained - master, master)


def _sharding(a: Architecture, r: Recipe, n: Numerics, s: Static, bucket: int) -> int:
    """Return the bytes of a whole weight, its share on the way to the host, and in full fine-tuning the bucket."""
    whole = s.base + s.scales if r.method == "qlora" else s.largest * n.weight
    arriving = whole + (part(whole, r.num_gpus) if r.offload == "parameters" else 0)
    if r.method != "full":
        return max(bucket, arriving)
    # the master weights are made from a copy, before gradients and bucket exist
    copied = _sub_group(a, r, s) * n.master if r.offload == "none" else 0
    return max(bucket + arriving, copied - part(s.gradients, r.num_gpus))


def _reduced(n: Numerics, s: Static, bucket: int) -> tuple[int, int]:
    """Return the bytes copied out of a bucket: (during the backward, at its end if none is full before)."""
    size = min(bucket, s.trained) * n.gradient
    return (size, 0) if s.trained > bucket else (0, size)


def _fills(a: Architecture, r: Recipe, n: Numerics) -> tuple[int, ...]:
    return (
        tuple(numel * n.gradient for numel in fills(a, _sizes(a, r).reduce_bucket_size)) if r.method == "full" else ()
    )
