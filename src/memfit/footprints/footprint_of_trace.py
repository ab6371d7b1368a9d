"""Turn a traced tape into a Footprint: the tensors alive at the worst instant of each phase, by role and name."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace

from memfit.allocator.player import alive_at
from memfit.allocator.replay import Span, Timeline
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
    tape: Tape, timeline: Timeline, assumptions: tuple[str, ...], unknowns: tuple[str, ...], context: int, nccl: int = 0
) -> Footprint:
    """Return the phases of a replayed tape with their worst instants; `context` and `nccl` bytes are added to each."""
    largest: dict[Phase, Span] = {}
    for span in timeline.spans:
        if span.phase not in largest or span.peak.allocated > largest[span.phase].peak.allocated:
            largest[span.phase] = span
    peaks = timeline.by_phase()
    phases = tuple(_phase(tape, span, peaks[phase], context, nccl) for phase, span in largest.items())
    return Footprint(phases, "traced", assumptions, unknowns)


def _phase(tape: Tape, span: Span, peak: Levels, context: int, nccl: int) -> PhasePeak:
    """Return a phase with its maximal levels, and the lines of the instant at which most is allocated."""
    lines = _lines(alive_at(tape.events, span.at, tape.start))
    tensors = sum(line.bytes for line in lines)
    lines.append(Line("context", "CUDA context and loaded modules", context))
    if nccl:
        lines.append(Line("context", "NCCL buffers", nccl))
    paged = int(tape.about.get("paged", 0)) if span.phase in PAGED_IN else 0
    if paged:
        lines.append(Line("context", PAGED, paged))
    lines.append(Line("fragmentation", "rounding, free pieces and cache", peak.reserved - tensors))
    levels = Levels(peak.requested, peak.allocated, peak.reserved, peak.reserved + context + nccl + paged)
    return PhasePeak(span.phase, span.instant, levels, tuple(lines))


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
