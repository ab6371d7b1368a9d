"""The parameters that DeepSpeed's ZeRO-3 holds whole while a pass runs: its coordinator, played over counts of elements.

Source: DeepSpeed 0.19.8 partitioned_param_coordinator.py and partition_parameters.py, with the defaults of zero/config.py.
The first two passes only record the order of the modules: each is gathered when it runs and released at once. From then
on what comes next is gathered ahead, and what comes again soon is kept, up to a billion elements: 2 GB of 16-bit
weights, on every card, whatever their number.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

from memfit.closed_form.numerics import adapter_weights
from memfit.nouns.architecture import Architecture, Layer, Weight

# DeepSpeed's default buckets hold 5e8 elements, 1 GB each in bf16; 5e7 still saturates a link
BUCKET = 50_000_000  # reduce_bucket_size and stage3_prefetch_bucket_size as memfit's exports write them: elements
MOST_LIVE = 1_000_000_000  # stage3_max_live_parameters, DeepSpeed's default: elements
REUSED_WITHIN = 1_000_000_000  # stage3_max_reuse_distance, DeepSpeed's default: elements
PERSISTENT = 100_000  # stage3_param_persistence_threshold, DeepSpeed's default: smaller weights stay whole
STAGES = ("entry", "forward", "loss", "loss_backward", "last", "middle", "first", "embedding")


class Level(NamedTuple):
    """Elements held beside the shards, in one part of a pass."""

    fetching: int = 0  # while gathered parameters are copied out of the collective's output
    running: int = 0  # while a module runs

    def most(self, other: Level) -> Level:
        return Level(max(self.fetching, other.fetching), max(self.running, other.running))


@dataclass(slots=True, eq=False)
class _Parameter:
    """One weight. `handle`: the gathering it is in flight with."""

    numel: int
    available: bool  # gathered and waited for; what persists is from the first step on, and counted elsewhere
    handle: _Handle | None = None
    used_last: int = -1  # the step up to which it has been fetched
    block: int = 0  # what it lies in, by number

    @property
    def persists(self) -> bool:
        return self.numel <= PERSISTENT


@dataclass(slots=True, eq=False)
class _Handle:
    """Parameters gathered together, and the output of the collective that all are copied out of (0: it is theirs)."""

    waited: set[_Parameter]
    members: tuple[_Parameter, ...]
    flat: int
    block: int = 0
    complete: bool = False


class _Step(NamedTuple):
    """A module called, forward or backward."""

    stage: str
    parameters: tuple[_Parameter, ...]


@dataclass(slots=True)
class _Coordinator:
    """PartitionedParameterCoordinator; levels in elements."""

    steps: Sequence[_Step]
    gpus: int
    level: int = 0
    born: list[int] = field(default_factory=list)  # elements of every block
    events: list[int] = field(default_factory=list)  # n > 0: a block of n elements; n < 0: the end of block -n, from 1
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
        """The first `count` steps of a pass; `recorded`: the order of the modules is known."""
        for p in dict.fromkeys(p for step in self.steps for p in step.parameters if p.handle is not None):
            self._wait(p)  # it was fetched ahead, and nothing used it
            self._give_back(p)
        self.available = 0
        self.queue = (
            deque((p, at) for at, step in enumerate(self.steps) for p in step.parameters) if recorded else deque()
        )
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
        limit, found, size = min(MOST_LIVE - self.available, BUCKET), list[_Parameter](), 0
        while self.queue and size < limit:
            p, used = self.queue.popleft()
            p.used_last = max(p.used_last, used)
            if not p.available and p.handle is None and p not in found:
                found.append(p)
                size += p.numel
        self._gather(found)

    def _gather(self, found: list[_Parameter]) -> None:
        if not found:
            return
        self.available += sum(p.numel for p in found)
        padded = [-(-p.numel // self.gpus) * self.gpus for p in found]
        together = len(found) > 1 and self.gpus > 1
        handle = _Handle(set(found), tuple(found), sum(padded) if together else 0)
        if together:
            handle.block = self._malloc(sum(padded))
        for p, size in zip(found, padded, strict=True):
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
            soon = coming is not None and self.passed[coming] - self.passed[at + 1] < REUSED_WITHIN
            if p.available and not p.persists and not (recorded and (p.used_last > at + 1 or soon)):
                self._give_back(p)

    def _give_back(self, p: _Parameter) -> None:
        p.available = False
        self._free(p.block)
        self.available -= p.numel


@lru_cache(maxsize=256)
def levels(
    a: Architecture, gpus: int, rank: int, targets: frozenset[str], recomputed: bool, recorded: bool, evaluated: bool
) -> tuple[dict[str, Level], tuple[int, ...]]:
    """The highest levels of the parts of a pass, and its blocks as events. rank: of the adapters on `targets`, 0 for none."""
    ends, blocks = _modules(a, rank, targets)
    embedding, *head = ends
    loss = [_Step("loss", m) for m in head]
    forward = [_Step("entry", embedding), *(_Step("forward", m) for block in blocks for m in block), *loss]
    steps = [*forward, *(_Step("loss_backward", m) for m in reversed(head))]
    for at in range(len(blocks) - 1, -1, -1):
        stage = "last" if at == len(blocks) - 1 else "middle" if at else "first"
        again = blocks[at] if recomputed else []
        steps += [_Step(stage, m) for m in (*again, *reversed(blocks[at]))]
    steps.append(_Step("embedding", embedding))
    coordinator = _Coordinator(steps, gpus)
    found: dict[str, Level] = dict.fromkeys(STAGES, Level())
    for _ in range(2):
        for stage, level in coordinator.run(len(forward) if evaluated else len(steps), recorded=recorded):
            found[stage] = found[stage].most(level)
    return found, tuple(coordinator.events)


def fills(a: Architecture) -> tuple[int, ...]:
    """Elements that are reduced together when a bucket is full, one bucket after the other."""
    found, filled = [], 0
    blocks = [w for layer in reversed(a.layers) for w in reversed(layer.weights)]
    for w in (*reversed((*a.final, *a.head)), *blocks, *a.embedding):
        if filled and filled + w.numel > BUCKET:
            found.append(filled)
            filled = 0
        filled += w.numel
    return tuple(size for size in (*found, filled) if size <= BUCKET)


def _modules(
    a: Architecture, rank: int, targets: frozenset[str]
) -> tuple[list[tuple[_Parameter, ...]], list[list[tuple[_Parameter, ...]]]]:
    """Modules in the order they are called in, each with its own parameters: the embedding and the ends, every block."""

    def of(weights: Iterable[Weight]) -> list[tuple[_Parameter, ...]]:
        modules: dict[str, list[_Parameter]] = {}
        for w in weights:
            path = w.name.rpartition(".")[0]
            for parent in _parents(path):
                modules.setdefault(parent, [])
            modules.setdefault(path, []).append(_Parameter(w.numel, w.numel <= PERSISTENT))
        return [tuple(m) for m in modules.values()]

    def block(layer: Layer) -> list[tuple[_Parameter, ...]]:
        adapters = adapter_weights(layer.weights, targets, rank) if rank else []
        return [(), *of([*layer.weights, *adapters])]

    embedding = tuple(p for m in of(a.embedding) for p in m)
    ends = [embedding, *of((*a.final, *a.head))]
    if a.tied:
        ends.append(embedding)
    return ends, [block(layer) for layer in a.layers]


def _parents(path: str) -> list[str]:
    pieces = path.split(".")
    return [".".join(pieces[:n]) for n in range(1, len(pieces))]


def persisting(a: Architecture, rank: int, targets: frozenset[str]) -> int:
    """Elements of the weights that stay whole from the first step on."""
    adapters = adapter_weights(a.weights, targets, rank) if rank else []
    return sum(w.numel for w in (*a.weights, *adapters) if w.numel <= PERSISTENT)
