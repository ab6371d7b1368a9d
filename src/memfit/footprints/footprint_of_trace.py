"""Turn a traced tape into a Footprint: the tensors alive at the worst instant of each phase, by role and name."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace

from memfit.allocator.capacity import Capacity
from memfit.allocator.player import alive_at
from memfit.allocator.replay import Timeline
from memfit.nouns.footprint import OPTIONAL, PAGED, PAGED_IN, Footprint, Levels, Line, PhasePeak
from memfit.nouns.tape import Alloc, Mark, Phase, Role, Tape

SHOWN = 0.01  # share of the live bytes; smaller groups of tensors share a line
_NUMBER = re.compile(r"(?<![A-Za-z0-9])\d+(?![A-Za-z0-9])")
_WRAPPERS = re.compile(r"base_model\.model\.|_fsdp_wrapped_module\.|\bmodule\.|\.base_layer\b|\.default\b")


def judged(tape: Tape) -> Tape:
    """Return the tape up to resuming and merging, which not every run does and which no verdict depends on."""
    for position, event in enumerate(tape.events):
        if isinstance(event, Mark) and event.phase in OPTIONAL:
            return replace(tape, events=tape.events[:position])
    return tape


def footprint_of(
    tape: Tape, timeline: Timeline, assumptions: tuple[str, ...], unknowns: tuple[str, ...], context: int,
    nccl: int = 0, answer: Capacity | None = None,
) -> Footprint:  # fmt: skip
    """Return the phases of a replayed tape with their peaks; `context` and `nccl` bytes are added to each.

    `answer` replayed the tape's beginning at a card's capacity. The phases in it are those on that card, or, if it does
    not run there, those with a band more, or without a limit.
    """
    card = answer.on_card if answer else None
    if answer and answer.needed and answer.needed.oom is None:
        timeline = answer.needed.followed_by(timeline)
    phases = (_phase(tape, timeline, phase, levels, context, nccl) for phase, levels in timeline.by_phase().items())
    return Footprint(tuple(phases), "traced", assumptions, unknowns, on_card=card)


def _phase(tape: Tape, timeline: Timeline, phase: Phase, peak: Levels, context: int, nccl: int) -> PhasePeak:
    """Return a phase with its maximal levels, and the lines of the event that made the highest reserved level."""
    span, at = timeline.peak_of(phase)
    lines = _lines(alive_at(tape.events, at, tape.start))
    tensors = sum(line.bytes for line in lines)
    lines.append(Line("context", "CUDA context and loaded modules", context))
    if nccl:
        lines.append(Line("context", "NCCL buffers", nccl))
    paged = int(tape.about.get("paged", 0)) if phase in PAGED_IN else 0
    if paged:
        lines.append(Line("context", PAGED, paged))
    lines.append(Line("fragmentation", "rounding, free pieces and cache", peak.reserved - tensors))
    levels = Levels(peak.requested, peak.allocated, peak.reserved, peak.reserved + context + nccl + paged)
    held = next(span.held for span in timeline.spans if span.phase == phase)
    return PhasePeak(phase, span.instant, levels, tuple(lines), held)


def _lines(alive: tuple[Alloc, ...]) -> list[Line]:
    """Return the bytes of every role by name, all layers together; small groups share a line."""
    groups: dict[Role, Counter[str]] = {}
    for event in alive:
        groups.setdefault(event.role, Counter())[general(event.label)] += event.size
    least = SHOWN * sum(event.size for event in alive)
    lines: list[Line] = []
    for role, sizes in groups.items():
        shown = {label: size for label, size in sizes.items() if size >= least or len(sizes) == 1}
        lines += [Line(role, label, size) for label, size in shown.items()]
        small = sizes.total() - sum(shown.values())
        if small:
            kinds = len(sizes) - len(shown)
            label = f"{kinds} smaller kinds of tensors" if kinds > 1 else "1 kind of small tensor"
            lines.append(Line(role, label, small))
    return lines


def general(label: str) -> str:
    """Return one name for all layers, without wrappers: `layers.*.mlp` for `base_model.model.layers.3.mlp`."""
    return _NUMBER.sub("*", _WRAPPERS.sub("", label))
