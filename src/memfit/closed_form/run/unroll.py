"""Play a pass on an allocator or onto a tape, one allocation or free at a time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from memfit.allocator.heap import Heap
from memfit.closed_form.layers.program import GRADIENT, INPUT, Program
from memfit.closed_form.run.micro_step import MicroStep, PlacedProgram, PlacedSegment, SizeMeter
from memfit.nouns.tape import Alloc, EmptyCache, Event, Free, Mark, Phase, Role

WORKSPACE = "cuBLAS workspace"


class TapeWriter(Heap):
    """A heap that records its calls as events, each allocation with its role and label."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._count = 0
        self._phase: Phase = "load"
        self._instants: list[str] = []  # names of parts without an allocation yet
        self.part: PlacedProgram | None = None  # whose events are played

    def begin(self, phase: Phase, instant: str) -> None:
        """Write the beginning of a phase."""
        self._phase = phase
        self.events.append(Mark(phase, instant))

    def instant(self, name: str) -> None:
        """Name the part of the phase that begins with the next allocation."""
        self._instants.append(name)

    def malloc(self, size: int, role: Role = "temporaries", label: str = "") -> int:
        """Write an allocation and return its id; nothing happens for 0 bytes (id 0)."""
        if size <= 0:
            return 0
        self.events += (Mark(self._phase, name) for name in self._instants)
        self._instants.clear()
        self._count += 1
        self.events.append(Alloc(self._count, size, role, label))
        return self._count

    def play(self, events: Sequence[int], sizes: Sequence[int], live: dict[int, Any], at: int = 0) -> int:
        """Write events of the program `part`, see Heap."""
        assert self.part is not None
        title, program = self.part.title, self.part.program
        for position in range(at, len(events)):
            event = events[position]
            if event > 0:
                label = f"{title}, {program.labels.get(event, '')}"
                live[event] = self.malloc(sizes[event], program.roles.get(event, "temporaries"), label)
            elif event:
                self.free(live.pop(-event, None))
            else:
                return position
        return len(events)

    def free(self, block: int | None) -> None:
        """Write that an allocation is freed; 0 is none."""
        if block:
            self.events.append(Free(block))

    def empty_cache(self) -> None:
        """Write a call of empty_cache()."""
        self.events.append(EmptyCache())


@dataclass(frozen=True, slots=True)
class StepRaise:
    """A moment of a phase at which the reserved level rose above all before."""

    reserved: int
    step: int | None  # index among the steps of a micro-step, forward and backward; None: the optimizer step
    later: bool  # in a micro-batch that adds to the gradients of earlier ones


class Gauge:
    """Notes where the reserved level of a played run rises; `level` returns its highest since the phase began."""

    def __init__(self, level: Callable[[], int]) -> None:
        self.level, self.later = level, False
        self.growths: list[StepRaise] = []
        self.held = self._highest = 0  # `held`: the level at the beginning of the phase

    def begin(self) -> None:
        """Begin a phase."""
        self.growths, self.held = [], self.level()
        self._highest = self.held

    def after(self, step: int | None) -> None:
        """Note a rise during a step of the pass, or during the optimizer step."""
        level = self.level()
        if level > self._highest:
            self._highest = level
            self.growths.append(StepRaise(level, step, self.later))


def named(heap: Heap) -> Callable[[int, Role, str], Any]:
    """Return the heap's malloc as a function of size, role and label, which only a tape records."""
    return heap.malloc if isinstance(heap, TapeWriter) else lambda size, role, label: heap.malloc(size)


def free_all(heap: Heap, blocks: Iterable[Any]) -> None:
    """Free blocks in their order."""
    for block in blocks:
        heap.free(block)


@dataclass(slots=True)
class Pass:
    """One forward and backward, played on a heap."""

    memory: Heap
    meter: SizeMeter
    micro: MicroStep
    live: dict[PlacedProgram, dict[int, Any]] = field(default_factory=dict)
    gradients: list[Any] = field(default_factory=list)
    aside: Any = None  # the embedded text while a tower runs, and its gradient while the tower's backward does
    # between programs, see Program.hands; of equal names the first that was left is the first that is taken
    carried: dict[str, deque[Any]] = field(default_factory=dict)
    late: tuple[int, ...] = ()  # buffers that exist from the first gradient to the end of the backward
    until_reduced: Sequence[Any] = ()  # blocks that are freed when the first gradient is there
    due: int = 0  # bytes of the workspace that the next product of cuBLAS allocates
    gauge: Gauge | None = None
    multiplied: bool = False  # cuBLAS ran before the first forward
    keeps_graph: bool = False  # the graph lives until the next forward is over
    kept: list[Any] = field(default_factory=list)  # what the graph before holds, then what this one does
    keeps_cache: bool = False  # of keys and values, which outlive the forward
    cache: list[list[Any]] = field(default_factory=list)  # of each block

    def run(self, workspace: int) -> None:
        """Play the pass; cuBLAS allocates `workspace` bytes in the forward and in the backward (0: it did before)."""
        writer = self.memory if isinstance(self.memory, TapeWriter) else None
        note = self.gauge.after if self.gauge else lambda step: None
        flow, self.due = None, 0 if self.multiplied else workspace
        for number, step in enumerate(self.micro.forward):
            if writer and step.instant == "loss":
                writer.instant("loss")
            flow = self._segment(step, flow)
            note(number)
        if self.keeps_cache:
            lives = [(block.program.cached, self.live[block]) for block in self.micro.blocks]
            self.cache = [[live.pop(id) for id in cached] for cached, live in lives]
        for step in self.micro.exits:
            self._segment(step, None)
        free_all(self.memory, self.kept)
        flow, begun = None, len(self.micro.forward) + len(self.micro.exits)
        for number, step in enumerate(self.micro.compared, begun):
            flow = self._segment(step, flow)
            note(number)
        flow, buffers, self.due = None, list[Any](), workspace
        first = len(self.micro.until_loss.steps)
        for number, step in enumerate(self.micro.backward, first):
            if writer and step.segment.events:
                writer.instant(step.instant)
            flow = self._segment(step, flow, backward=True)
            if number == first:
                buffers = [self.memory.malloc(size) for size in self.late]
                free_all(self.memory, self.until_reduced)
            note(number)
        free_all(self.memory, buffers)
        self.kept = [live.pop(held, None) for part, live in self.live.items() for held in part.program.attributes]
        if not self.keeps_graph:
            free_all(self.memory, self.kept)

    def sizes_of(self, program: Program) -> list[int]:
        """Return the sizes by local id, as `Heap.play` takes them."""
        return self.meter.sizes_of(program)

    def _segment(self, step: PlacedSegment, flow: Any, backward: bool = False) -> Any:
        """Play one segment: `flow` is the incoming hidden state or gradient; return the outgoing one."""
        program = step.part.program
        live = self.live.setdefault(step.part, {})
        if not backward:
            live.setdefault(INPUT, flow)
            if program.aside[0]:
                live.setdefault(program.aside[0], self.aside)
        else:
            first = program is self.micro.embedding.program
            live[GRADIENT] = self.aside if first and self.micro.images else flow
        for name, taken in program.takes.items():
            if self.carried.get(name):
                live[taken] = self.carried[name].popleft()
        sizes = self.sizes_of(program)
        if isinstance(self.memory, TapeWriter):
            self.memory.part = step.part
        events = step.segment.marked if self.due else step.segment.events
        at = 0
        while (at := self.memory.play(events, sizes, live, at)) < len(events):
            self._left(step, events[at])
            at += 1
        if step.segment is program.leave:
            return flow
        for name, handed in program.hands.items():
            if handed in live:
                self.carried.setdefault(name, deque()).append(live.pop(handed))
        if not backward:
            if program is self.micro.embedding.program:
                self.aside = live.get(program.output)
            return live.get(program.output)
        if program.aside[0]:
            self.aside = live.pop(program.aside[1], None)
        out = live.pop(program.input_gradient, None)
        self.gradients += [block for local, block in live.items() if block and program.roles[local] == "gradients"]
        return out

    def _left(self, step: PlacedSegment, event: int) -> None:
        """Play an event that the heap leaves to the pass: 0, the first product of cuBLAS."""
        named(self.memory)(self.due, "workspace", WORKSPACE)
        self.due = 0
