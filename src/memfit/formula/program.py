"""Block programs: one block traced forward and backward, folded into what it keeps and how high it reaches."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from memfit.architecture import Layer
from memfit.formula.codes import CODES
from memfit.formula.engine import Recorder, Tensor
from memfit.formula.modules import Block
from memfit.formula.size import Basis, Size, added, covers
from memfit.formula.style import Style
from memfit.tape import Role

INPUT, GRADIENT = 1, 2  # ids of the hidden states that come in and of the gradient of those that go out


@dataclass(frozen=True, eq=False)
class Segment:
    """A run of events inside a program: the peaks above its start and what it leaves behind."""

    events: tuple[int, ...]
    peaks: tuple[tuple[Size, int], ...]  # candidates for the highest level, with the event index
    left: Size  # level at the end relative to the start
    left_by_role: dict[Role, dict[Basis, int]]

    @staticmethod
    def of(events: list[int], sizes: dict[int, dict[Basis, int]], roles: dict[int, Role]) -> Segment:
        level: dict[Basis, int] = {}
        peaks: list[tuple[Size, int]] = [({}, -1)]
        for i, id in enumerate(events):
            added(level, sizes[abs(id)], 1 if id > 0 else -1)
            if id > 0 and (i + 1 == len(events) or events[i + 1] < 0):
                now = {k: v for k, v in level.items() if v}
                if not any(covers(p, now) for p, _ in peaks):
                    peaks = [(p, j) for p, j in peaks if not covers(now, p)]
                    peaks.append((now, i))
        return Segment(
            tuple(events), tuple(peaks), {k: v for k, v in level.items() if v}, by_role(events, sizes, roles)
        )


def by_role(
    events: Iterable[int], sizes: dict[int, dict[Basis, int]], roles: dict[int, Role]
) -> dict[Role, dict[Basis, int]]:
    """The level after `events`, split by role."""
    split: dict[Role, dict[Basis, int]] = {}
    for id in events:
        added(split.setdefault(roles[abs(id)], {}), sizes[abs(id)], 1 if id > 0 else -1)
    return split


@dataclass(frozen=True, eq=False)
class Program:
    """A traced block. Ids are local; INPUT and GRADIENT come from outside, `output` and `input_gradient` go out."""

    forward: Segment
    exit: Segment  # when the autocast region ends
    backward: Segment
    sizes: dict[int, dict[Basis, int]]
    roles: dict[int, Role]
    labels: dict[int, str]
    output: int
    input_gradient: int  # 0: none
    lingering: Size  # see Recorder.lingering


@lru_cache(maxsize=4096)
def block_program(layer: Layer, style: Style, width: int) -> Program:
    """Trace one block under a style. Raises Unsupported for parts that are not modelled."""
    rec = Recorder(style.autocast, style.grad)
    rec.accumulating, rec.release_gradients = style.accumulating, style.release_gradients
    hidden: dict[Basis, int] = {"T": width}
    x = rec.new(hidden, style.residual, "hidden states")
    gradient = rec.new(hidden, style.residual, "gradient of the block's output")
    rec.events.clear()
    out, kept, saves = _run_forward(rec, layer, style, width, x)
    del x
    forward, rec.events = rec.events, []
    rec.exit_autocast()
    exit_events, rec.events = rec.events, []
    output = out.storage.id if out.storage else 0
    result = None
    if style.grad:
        result = _run_backward(rec, layer, style, width, out, kept, saves, [gradient])
    del gradient, out
    backward = [e for e in rec.events if e != -output] if style.grad else []
    received = result.storage.id if result is not None and result.storage else 0
    return finished(rec, forward, exit_events, backward, output, received)


def finished(
    rec: Recorder, forward: list[int], exit_events: list[int], backward: list[int], output: int, received: int
) -> Program:
    """The program of what `rec` has seen; what dies with the recorder from here on is no event.

    What flows between programs has one role on both sides: hidden states are activations, their gradients temporary.
    """
    rec.roles[INPUT] = rec.roles[output] = "activations"
    rec.roles[GRADIENT] = rec.roles[received] = "temporaries"
    first, middle, last = (Segment.of(events, rec.sizes, rec.roles) for events in (forward, exit_events, backward))
    rec.events = []
    lingering: dict[Basis, int] = {}
    for id in rec.lingering:
        added(lingering, rec.sizes[id])
    return Program(first, middle, last, rec.sizes, rec.roles, rec.labels, output, received, lingering)


def _run_forward(rec: Recorder, layer: Layer, style: Style, width: int, x: Tensor) -> tuple[Tensor, list[Tensor], int]:
    """The forward; with checkpointing only the input stays (`kept`), on the host when offloaded."""
    x.requires_grad = style.grad and style.input_grad
    rec.keep = style.checkpointing in ("none",)
    out = CODES[style.code].block(Block(rec, layer, style, width), x)
    saves, rec.saves, rec.keep = rec.saves, 0, True
    kept: list[Tensor] = []
    if style.grad and style.checkpointing == "full":
        rec.roles[INPUT] = "activations"
        kept = [Tensor(x.storage, x.elements, x.itemsize)]
    return out, kept, saves


def _run_backward(
    rec: Recorder,
    layer: Layer,
    style: Style,
    width: int,
    out: Tensor,
    kept: list[Tensor],
    saves: int,
    grads: list[Tensor],
) -> Tensor | None:
    if style.checkpointing == "none":
        return rec.backward(out, grads.pop())
    x = kept.pop() if kept else rec.new({"T": width}, style.residual, "hidden states fetched back", "activations")
    x.requires_grad = style.input_grad
    rec.stop_at = saves
    again = CODES[style.code].block(Block(rec, layer, style, width), x)
    rec.stop_at, rec.silent = None, False
    rec.exit_autocast()
    root = Tensor(None, again.elements, again.itemsize, True, again.grad_fn)
    del again
    result = rec.backward(root, grads.pop())
    del x
    return result
