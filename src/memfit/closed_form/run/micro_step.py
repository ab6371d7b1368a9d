"""One micro-step as a sequence of segments, from the embedding to the head and back, and its peak in requested bytes.

`unroll` plays the same sequence tensor by tensor.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import groupby
from typing import Literal, NamedTuple

from memfit.closed_form.layers.columns import column_program
from memfit.closed_form.layers.embedding import EmbeddingStyle, embedding_program
from memfit.closed_form.layers.head import HeadStyle, head_program
from memfit.closed_form.layers.program import TIED, Program, ProgramPart, block_program, by_role
from memfit.closed_form.size import Basis, Dims, Size, added
from memfit.closed_form.style import Style
from memfit.nouns.architecture import Architecture, Layer
from memfit.nouns.tape import Role

WITHOUT_GRADIENTS = "forward without gradients"  # of the reference model


@dataclass(frozen=True, slots=True, eq=False)
class PlacedProgram:
    """A program and its place in the model: block `index` (from 0), or -1 for embedding and head."""

    program: Program
    title: str
    index: int = -1


@dataclass(frozen=True, slots=True)
class PlacedSegment:
    """A segment of a placed program, and the name of the moment at which it runs."""

    instant: str
    segment: ProgramPart
    part: PlacedProgram


class EqualSegments(NamedTuple):
    """Neighbouring steps that share a segment: `times` of them from step `first` on."""

    segment: ProgramPart
    first: int
    times: int


@dataclass(frozen=True, slots=True, eq=False)
class Stretch:
    """Steps in order of time. Those from `begin` on are also grouped into `runs` of equal segments."""

    steps: tuple[PlacedSegment, ...]
    begin: int
    runs: tuple[EqualSegments, ...]

    @staticmethod
    def of(steps: Sequence[PlacedSegment], before: Sequence[PlacedSegment] = ()) -> Stretch:
        first, runs = len(before), []
        for _, equal in groupby(steps, key=lambda step: id(step.segment)):
            run = tuple(equal)
            runs.append(EqualSegments(run[0].segment, first, len(run)))
            first += len(run)
        return Stretch((*before, *steps), len(before), tuple(runs))


@dataclass(frozen=True, eq=False)
class MicroStep:
    """Forward and backward of one micro-batch, and between them the forward of a reference model, if there is one."""

    embedding: PlacedProgram
    blocks: tuple[PlacedProgram, ...]
    head: PlacedProgram
    reference: MicroStep | None = None
    encoder: tuple[PlacedProgram, ...] = ()  # embedding, blocks and end of an encoder, before those of its decoder
    # ... of the first column of pairs of texts, which returns before the second begins
    column: tuple[PlacedProgram, ...] = ()
    # of images in a text: what embeds patches, the blocks of the tower, what makes tokens of them, what joins the text
    images: tuple[PlacedProgram, ...] = ()

    @cached_property
    def forward(self) -> list[PlacedSegment]:
        """Return the steps of the forward in order of time."""
        body = _through((self.embedding, *self.images, *self.blocks))
        if self.images:  # the tower returns before its tokens are joined to the text
            stem = self.images[0]
            body = [step for step in body if step.segment is not stem.program.leave]
            body.insert(len(self.images), PlacedSegment("end of the tower", stem.program.leave, stem))
        first = [*_through(self.column), *_ends(self.column[:-1]), *_through(self.encoder)]
        return [*first, *body, PlacedSegment("loss", self.head.program.forward, self.head)]

    @cached_property
    def parts(self) -> tuple[PlacedProgram, ...]:
        """Return all programs in the order in which they run forward."""
        return (*self.column, *self.encoder, self.embedding, *self.images, *self.blocks, self.head)

    def before(self, step: int) -> Stretch:
        """Return the first `step` steps of the forward."""
        if step not in self.begun:
            self.begun[step] = Stretch.of(self.forward[:step])
        return self.begun[step]

    @cached_property
    def begun(self) -> dict[int, Stretch]:
        """Cache the stretches of `before` by their number of steps."""
        return {}

    @cached_property
    def lingering(self) -> Size:
        """Return the bytes that the previous step's graph holds during a forward, in a loop that keeps `loss`."""
        total: dict[Basis, int] = {}
        for part in self.parts:
            added(total, part.program.lingering)
            for held in part.program.attributes:
                added(total, part.program.sizes[held])
        return total

    @cached_property
    def exits(self) -> list[PlacedSegment]:
        """Return the steps in which the end of the forward frees tensors."""
        return _ends(self.parts[max(len(self.column) - 1, 0) :])

    @cached_property
    def compared(self) -> list[PlacedSegment]:
        """Return the steps of the reference model's forward."""
        if self.reference is None:
            return []
        return [replace(step, instant=WITHOUT_GRADIENTS) for step in (*self.reference.forward, *self.reference.exits)]

    @cached_property
    def until_loss(self) -> Stretch:
        """Return the forward and the frees at its end, and those of the reference model."""
        return Stretch.of([*self.forward, *self.exits, *self.compared])

    @cached_property
    def from_loss(self) -> Stretch:
        """Return the backward; its peaks include the steps before."""
        return Stretch.of(self.backward, before=self.until_loss.steps)

    @cached_property
    def stages(self) -> tuple[Stretch, ...]:
        """Return the parts of a pass in which different weights are gathered, in the order of `share.Gathered`."""
        loss = [*self.forward[-1:], *self.exits, *self.compared]
        head, *blocks, embedding = self.backward
        parts = [self.forward[:-1], loss, [head], blocks[:1], blocks[1:-1], blocks[1:][-1:], [embedding]]
        found: list[Stretch] = []
        for part in parts:
            found.append(Stretch.of(part, before=found[-1].steps if found else ()))
        return tuple(found)

    @cached_property
    def backward(self) -> list[PlacedSegment]:
        """Return the steps of the backward in order of time."""
        names = {self.head: "the loss", self.embedding: "the embedding"}
        return [
            PlacedSegment(f"backward of {names.get(p, p.title)}", p.program.backward, p) for p in reversed(self.parts)
        ]


def _ends(parts: Sequence[PlacedProgram]) -> list[PlacedSegment]:
    return [PlacedSegment("end of forward", p.program.exit, p) for p in parts if p.program.exit.events]


def _through(parts: Sequence[PlacedProgram]) -> list[PlacedSegment]:
    """Return the forward of an embedding and the blocks behind it, and the frees when that body returns."""
    steps = [PlacedSegment("forward" if n else "forward, embedding", p.program.forward, p) for n, p in enumerate(parts)]
    return steps + [PlacedSegment("end of the body", p.program.leave, p) for p in parts if p.program.leave.events]


def micro_step(
    architecture: Architecture, styles: Sequence[Style], embedding: EmbeddingStyle, head: HeadStyle
) -> MicroStep:
    """Trace each distinct block once; `styles` has one entry per layer."""
    blocks = placed_blocks(architecture.layers, styles, architecture.width)
    end_style = replace(styles[-1], checkpointing="none", input_grad=True)
    first = replace(styles[0], checkpointing="none", input_grad=True)
    above = head_program(head, end_style)
    below = embedding_program(replace(embedding, awaited=TIED in above.hands), first)
    return MicroStep(PlacedProgram(below, "embedding"), blocks, PlacedProgram(above, "head"))


def columns(
    architecture: Architecture, styles: Sequence[Style], embedding: EmbeddingStyle, head: HeadStyle
) -> MicroStep:
    """Trace the two columns of a batch of pairs of texts, which run one after the other."""
    first, second = (_column(architecture, styles, embedding, head, which) for which in ("first", "second"))
    return MicroStep(second[0], second[1:-1], second[-1], column=first)


def _column(
    architecture: Architecture, styles: Sequence[Style], embedding: EmbeddingStyle, head: HeadStyle,
    which: Literal["first", "second"],
) -> tuple[PlacedProgram, ...]:  # fmt: skip
    made = {id(style): replace(style, column=which) for style in styles}
    own, before = [made[id(style)] for style in styles], "anchor " if which == "first" else ""
    below, above = (replace(style, checkpointing="none", input_grad=True) for style in (own[0], own[-1]))
    return (
        PlacedProgram(embedding_program(embedding, below), f"{before}embedding"),
        *placed_blocks(architecture.layers, own, architecture.width, before),
        PlacedProgram(column_program(head, above), f"{before}pooling"),
    )


def placed_blocks(
    layers: Sequence[Layer], styles: Sequence[Style], width: int, before: str = ""
) -> tuple[PlacedProgram, ...]:
    """Trace each distinct block of a stack once; `before`: what precedes "block 1" in its title."""
    known: dict[tuple[int, int], Program] = {}
    blocks = []
    for i, (layer, style) in enumerate(zip(layers, styles, strict=True)):
        key = (id(layer), id(style))
        if key not in known:
            known[key] = block_program(layer, style, width)
        blocks.append(PlacedProgram(known[key], f"{before}block {i + 1}", i))
    return tuple(blocks)


# ---- the highest level ---------------------------------------------------------------------------------------------


class SizeMeter:
    """The sizes of one batch in bytes; each basis, segment and stretch is evaluated once."""

    def __init__(self, dims: Dims) -> None:
        self.dims = dims
        self.values: dict[Basis, int] = {}
        self.tops: dict[ProgramPart, tuple[int, int, int]] = {}
        self.peaks: dict[Stretch, Peak] = {}
        self.sizes: dict[Program, list[int]] = {}

    def bytes(self, size: Size) -> int:
        """Return `size` in bytes."""
        total = 0
        values = self.values
        for basis, coefficient in size.items():
            value = values.get(basis)
            if value is None:
                value = values[basis] = self.dims.value(basis)
            total += coefficient * value
        return total

    def sizes_of(self, program: Program) -> list[int]:
        """Return the bytes of a program's tensors by their local ids."""
        found = self.sizes.get(program)
        if found is None:
            every = range(max(program.sizes, default=0) + 1)
            found = self.sizes[program] = [self.bytes(program.sizes.get(i, {})) for i in every]
        return found

    def top(self, segment: ProgramPart) -> tuple[int, int, int]:
        """Return a segment's highest level above its start, the index of its event, and what the segment leaves."""
        best, at = 0, -1
        for size, index in segment.peaks:
            height = self.bytes(size)
            if height > best:
                best, at = height, index
        self.tops[segment] = best, at, self.bytes(segment.left)
        return self.tops[segment]


@lru_cache(maxsize=256)
def meter_of(dims: Dims) -> SizeMeter:
    """Return the one meter for all recipes of a batch, which share most segments."""
    return SizeMeter(dims)


@dataclass(frozen=True, slots=True, eq=False)
class Peak:
    """The highest level of a stretch, in bytes above its start, and the event at which it is reached."""

    height: int
    stretch: Stretch
    done: int  # steps completed before
    event: int | None  # index in the step after those; None: before it
    left: int = 0  # level at the end of the stretch, in bytes above its start

    @property
    def steps(self) -> Sequence[PlacedSegment]:
        """Return the steps completed before the peak."""
        return self.stretch.steps[: self.done]

    @property
    def step(self) -> PlacedSegment | None:
        """Return the step in which the peak is reached; None if it is reached before any."""
        return None if self.event is None else self.stretch.steps[self.done]

    @property
    def by_role(self) -> Mapping[Role, Size]:
        """Return what is alive at the peak, by role."""
        return _alive(self.stretch, self.done, self.event)


@lru_cache(maxsize=4096)
def _alive(stretch: Stretch, done: int, event: int | None) -> Mapping[Role, Size]:
    """Return the bytes alive after `done` steps and the beginning of the next, as polynomials of the batch."""
    total: dict[Role, dict[Basis, int]] = {}
    for segment, times in Counter(step.segment for step in stretch.steps[:done]).items():
        for role, size in segment.left_by_role.items():
            added(total.setdefault(role, {}), size, times)
    if event is not None:
        begun = stretch.steps[done].segment
        for role, size in by_role(begun.events[: event + 1], begun.sizes, begun.roles).items():
            added(total.setdefault(role, {}), size)
    return total


def fold(stretch: Stretch, meter: SizeMeter) -> Peak:
    """Return the peak of a stretch, cached in the meter."""
    known = meter.peaks.get(stretch)
    if known is None:
        known = meter.peaks[stretch] = _folded(stretch, meter)
    return known


def _folded(stretch: Stretch, meter: SizeMeter) -> Peak:
    tops = meter.tops
    height, where, event, level = 0, -1, -1, 0
    for segment, first, times in stretch.runs:
        top, index, left = tops.get(segment) or meter.top(segment)
        highest = times - 1 if left > 0 else 0  # the last of equal steps, if each leaves something allocated
        if level + highest * left + top > height:
            height, where, event = level + highest * left + top, first + highest, index
        level += times * left
    if where < 0:
        return Peak(height, stretch, stretch.begin, None, level)
    return Peak(height, stretch, where, event, level)


def peak_within(stretch: Stretch, meter: SizeMeter, step: int) -> Peak:
    """Return the highest level of a stretch within its step of this index, which is `begin` or later."""
    level = 0
    for segment, first, times in stretch.runs:
        top, event, left = meter.tops.get(segment) or meter.top(segment)
        if step < first + times:
            level += (step - first) * left
            return Peak(level + top, stretch, step, event if event >= 0 else None, level + left)
        level += times * left
    return Peak(level, stretch, len(stretch.steps), None, level)
