"""Unroll a run into the sizes and frees an allocator sees: load, two optimizer steps, every tensor by itself."""

from __future__ import annotations

from dataclasses import dataclass, field

from memfit.formula.fold import Meter
from memfit.formula.program import GRADIENT, INPUT
from memfit.formula.run import MicroStep, Part, Step


@dataclass(slots=True)
class Tape:
    """Events as integers: n > 0 allocates n bytes under the next index (from 1), n < 0 frees index -n."""

    events: list[int] = field(default_factory=list)
    count: int = 0

    def alloc(self, size: int) -> int:
        """Allocate `size` bytes; returns the index that frees them. Nothing happens for 0 bytes (index 0)."""
        if size <= 0:
            return 0
        self.count += 1
        self.events.append(size)
        return self.count

    def free(self, index: int) -> None:
        """Free an index once; 0 is nothing."""
        if index:
            self.events.append(-index)


@dataclass(slots=True)
class Pass:
    """One forward and backward being written onto a tape."""

    tape: Tape
    meter: Meter
    micro: MicroStep
    live: dict[Part, dict[int, int]] = field(default_factory=dict)
    gradients: list[int] = field(default_factory=list)
    sizes: dict[int, list[int]] = field(default_factory=dict)

    def run(self, workspace: int) -> None:
        """Write the pass; cuBLAS takes a workspace of `workspace` bytes in each direction (0: it has them already)."""
        flow = 0
        for step in self.micro.forward:
            flow = self._segment(step, flow)
        if workspace:
            self.tape.alloc(workspace)
        for step in self.micro.exits:
            self._segment(step, 0)
        flow = 0
        for number, step in enumerate(self.micro.backward):
            flow = self._segment(step, flow, backward=True)
            if number == 0 and workspace:
                self.tape.alloc(workspace)

    def _segment(self, step: Step, flow: int, backward: bool = False) -> int:
        """Write one segment; `flow` is the hidden state or gradient that comes in; returns the one that goes out."""
        program, tape = step.part.program, self.tape
        live = self.live.setdefault(step.part, {})
        if not backward:
            live.setdefault(INPUT, flow)
        else:
            live[GRADIENT] = flow
        sizes = self.sizes.get(id(program))
        if sizes is None:
            count = max(program.sizes, default=0) + 1
            sizes = self.sizes[id(program)] = [self.meter.bytes(program.sizes.get(i, {})) for i in range(count)]
        for event in step.segment.events:
            if event > 0:
                live[event] = tape.alloc(sizes[event])
            else:
                tape.free(live.pop(-event, 0))
        if step.segment is program.leave:
            return flow
        if not backward:
            return live.get(program.output, 0)
        out = live.pop(program.input_gradient, 0)
        self.gradients += [index for local, index in live.items() if index and program.roles[local] == "gradients"]
        return out
