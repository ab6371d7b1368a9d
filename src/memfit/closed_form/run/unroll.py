"""Unroll a pass into the sizes and frees an allocator sees, every tensor by itself, onto a tape or an allocator."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from memfit.closed_form.layers.program import GRADIENT, INPUT, Program
from memfit.closed_form.run.micro_step import MicroStep, Part, Step
from memfit.closed_form.run.peak import Meter


class Memory(Protocol):
    """What a run is played on. A block is whatever `malloc` returns; what is falsy is no block."""

    def malloc(self, size: int) -> Any:
        """A block of `size` bytes; none for 0 bytes."""

    def free(self, block: Any) -> None:
        """Free a block once."""


@dataclass(slots=True)
class Tape:
    """Events as integers: n > 0 allocates n bytes under the next index (from 1), n < 0 frees index -n."""

    events: list[int] = field(default_factory=list)
    count: int = 0

    def malloc(self, size: int) -> int:
        """Allocate `size` bytes; returns the index that frees them. Nothing happens for 0 bytes (index 0)."""
        if size <= 0:
            return 0
        self.count += 1
        self.events.append(size)
        return self.count

    def free(self, block: int) -> None:
        """Free an index once; 0 is nothing."""
        if block:
            self.events.append(-block)


@dataclass(slots=True)
class Pass:
    """One forward and backward being played on a memory."""

    memory: Memory
    meter: Meter
    micro: MicroStep
    live: dict[Part, dict[int, Any]] = field(default_factory=dict)
    gradients: list[Any] = field(default_factory=list)
    waiting: Any = None  # the head's gradient of a tied table
    sizes: dict[int, list[int]] = field(default_factory=dict)
    late: tuple[int, ...] = ()  # buffers that exist from the first gradient to the end of the backward
    due: int = 0  # bytes of the workspace that the thread's first product takes

    def run(self, workspace: int) -> None:
        """Play the pass; cuBLAS takes a workspace of `workspace` bytes in each direction (0: it has them already)."""
        flow, self.due = None, workspace
        for step in self.micro.forward:
            flow = self._segment(step, flow)
        for step in self.micro.exits:
            self._segment(step, None)
        flow, buffers, self.due = None, list[Any](), workspace
        for number, step in enumerate(self.micro.backward):
            flow = self._segment(step, flow, backward=True)
            if number == 0:
                buffers = [self.memory.malloc(size) for size in self.late]
        for buffer in buffers:
            self.memory.free(buffer)
        for part, live in self.live.items():
            for held in part.program.attributes:
                self.memory.free(live.pop(held, None))

    def sizes_of(self, program: Program) -> list[int]:
        """Bytes by local id."""
        return [self.meter.bytes(program.sizes.get(i, {})) for i in range(max(program.sizes, default=0) + 1)]

    def _segment(self, step: Step, flow: Any, backward: bool = False) -> Any:
        """Play one segment; `flow` is the hidden state or gradient that comes in; returns the one that goes out."""
        program, malloc, free = step.part.program, self.memory.malloc, self.memory.free
        live = self.live.setdefault(step.part, {})
        if not backward:
            live.setdefault(INPUT, flow)
        else:
            live[GRADIENT] = flow
            if program is self.micro.embedding.program:
                live[program.waiting] = self.waiting
        sizes = self.sizes.get(id(program)) or self.sizes.setdefault(id(program), self.sizes_of(program))
        for event in step.segment.marked if self.due else step.segment.events:
            if event > 0:
                live[event] = malloc(sizes[event])
            elif event:
                free(live.pop(-event, None))
            else:
                malloc(self.due)
                self.due = 0
        if step.segment is program.leave:
            return flow
        if not backward:
            return live.get(program.output)
        out = live.pop(program.input_gradient, None)
        if program.waiting:
            self.waiting = live.pop(program.waiting, None)
        self.gradients += [block for local, block in live.items() if block and program.roles[local] == "gradients"]
        return out
