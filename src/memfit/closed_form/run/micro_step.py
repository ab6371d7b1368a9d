"""One micro-step as a list of segments: embedding, blocks, head and back, ready to be folded or unrolled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from typing import NamedTuple

from memfit.closed_form.layers.embedding import EmbeddingStyle, embedding_program
from memfit.closed_form.layers.head import HeadStyle, head_program
from memfit.closed_form.layers.program import Program, ProgramPart, block_program
from memfit.closed_form.size import Basis, Size, added
from memfit.closed_form.style import Style
from memfit.nouns.architecture import Architecture


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """A program in its place: block `index` (from 0), or an end of the model."""

    program: Program
    title: str
    index: int = -1


@dataclass(frozen=True, slots=True)
class Step:
    """A segment at its moment."""

    instant: str
    segment: ProgramPart
    part: Part


class Run(NamedTuple):
    """Neighbouring steps that share a segment: `times` of them from step `first` on."""

    segment: ProgramPart
    first: int
    times: int


@dataclass(frozen=True, slots=True, eq=False)
class Stretch:
    """Steps in order of time, those from `begin` on also as runs: a model of equal blocks has few."""

    steps: tuple[Step, ...]
    begin: int
    runs: tuple[Run, ...]

    @staticmethod
    def of(steps: Sequence[Step], before: Sequence[Step] = ()) -> Stretch:
        first, runs = len(before), []
        for _, equal in groupby(steps, key=lambda step: id(step.segment)):
            run = tuple(equal)
            runs.append(Run(run[0].segment, first, len(run)))
            first += len(run)
        return Stretch((*before, *steps), len(before), tuple(runs))


@dataclass(frozen=True, eq=False)
class MicroStep:
    """Forward and backward of one micro-batch."""

    embedding: Part
    blocks: tuple[Part, ...]
    head: Part

    @cached_property
    def forward(self) -> list[Step]:
        """In order of time."""
        first = [Step("forward, embedding", self.embedding.program.forward, self.embedding)]
        middle = [Step("forward", p.program.forward, p) for p in self.blocks]
        leaving = [p for p in (self.embedding, *self.blocks) if p.program.leave.events]
        leave = [Step("end of the body", p.program.leave, p) for p in leaving]
        return [*first, *middle, *leave, Step("loss", self.head.program.forward, self.head)]

    def before(self, step: int) -> Stretch:
        """The first `step` steps of the forward."""
        if step not in self.begun:
            self.begun[step] = Stretch.of(self.forward[:step])
        return self.begun[step]

    @cached_property
    def begun(self) -> dict[int, Stretch]:
        """What `before` has made, by its number of steps."""
        return {}

    @cached_property
    def lingering(self) -> Size:
        """What the graph of the step before still holds while a loop that keeps `loss` runs the next forward."""
        total: dict[Basis, int] = {}
        for part in (self.embedding, *self.blocks, self.head):
            added(total, part.program.lingering)
        return total

    @cached_property
    def exits(self) -> list[Step]:
        """What the end of the forward frees."""
        parts = [self.embedding, *self.blocks, self.head]
        return [Step("end of forward", p.program.exit, p) for p in parts if p.program.exit.events]

    @cached_property
    def until_loss(self) -> Stretch:
        """The forward and the frees at its end, to be folded."""
        return Stretch.of([*self.forward, *self.exits])

    @cached_property
    def from_loss(self) -> Stretch:
        """The backward, to be folded; what came before belongs to its peak."""
        return Stretch.of(self.backward, before=self.until_loss.steps)

    @cached_property
    def stages(self) -> tuple[Stretch, ...]:
        """The pass where other weights are gathered in each part of it, in the order of `sharding.Gathered`."""
        loss, exits = self.forward[-1:], self.exits
        head, *blocks, embedding = self.backward
        parts = [self.forward[:-1], [*loss, *exits], [head], blocks[:1], blocks[1:-1], blocks[1:][-1:], [embedding]]
        found: list[Stretch] = []
        for part in parts:
            found.append(Stretch.of(part, before=found[-1].steps if found else ()))
        return tuple(found)

    @cached_property
    def backward(self) -> list[Step]:
        """In order of time."""
        first = [Step("backward of the loss", self.head.program.backward, self.head)]
        middle = [Step(f"backward of block {p.index + 1}", p.program.backward, p) for p in reversed(self.blocks)]
        return [*first, *middle, Step("backward of the embedding", self.embedding.program.backward, self.embedding)]


def micro_step(
    architecture: Architecture, styles: Sequence[Style], embedding: EmbeddingStyle, head: HeadStyle
) -> MicroStep:
    """Trace the distinct blocks once; `styles` has one entry per layer."""
    blocks = []
    known: dict[tuple[int, int], Program] = {}
    for i, (layer, style) in enumerate(zip(architecture.layers, styles, strict=True)):
        key = (id(layer), id(style))
        if key not in known:
            known[key] = block_program(layer, style, architecture.width)
        blocks.append(Part(known[key], f"block {i + 1}", i))
    end_style = replace(styles[-1], checkpointing="none", input_grad=True)
    first = replace(styles[0], checkpointing="none", input_grad=True)
    above = head_program(head, end_style)
    below = embedding_program(replace(embedding, awaited=bool(above.waiting)), first)
    return MicroStep(Part(below, "embedding"), tuple(blocks), Part(above, "head"))
