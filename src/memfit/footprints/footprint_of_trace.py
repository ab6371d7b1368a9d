"""A traced tape as a Footprint: what was alive at the worst instant of each phase, by role and by name."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from memfit.allocator.player import alive_at
from memfit.allocator.replay import Span, Timeline
from memfit.nouns.footprint import OPTIONAL, Footprint, Levels, Line, PhasePeak
from memfit.nouns.tape import Alloc, Mark, Phase, Role, Tape

SHOWN = 0.01  # of what is alive: smaller groups of tensors share a line
_NUMBER = re.compile(r"(?<![A-Za-z0-9])\d+(?![A-Za-z0-9])")
_WRAPPERS = re.compile(r"base_model\.model\.|_fsdp_wrapped_module\.|\bmodule\.|\.base_layer\b|\.default\b")


def judged(tape: Tape) -> Tape:
    """Return the tape up to resuming and merging, which not every run does and which decide no verdict."""
    for position, event in enumerate(tape.events):
        if isinstance(event, Mark) and event.phase in OPTIONAL:
            return replace(tape, events=tape.events[:position])
    return tape


def footprint_of(
    tape: Tape, timeline: Timeline, assumptions: tuple[str, ...], unknowns: tuple[str, ...], context: int, nccl: int = 0
) -> Footprint:
    """Return the phases of a replayed tape, each with what was alive at its worst, and `context` and `nccl` on top."""
    largest: dict[Phase, Span] = {}
    for span in timeline.spans:
        if span.phase not in largest or span.peak.allocated > largest[span.phase].peak.allocated:
            largest[span.phase] = span
    peaks = timeline.by_phase()
    phases = tuple(_phase(tape, span, peaks[phase], context, nccl) for phase, span in largest.items())
    return Footprint(phases, "traced", assumptions, unknowns)


def _phase(tape: Tape, span: Span, peak: Levels, context: int, nccl: int) -> PhasePeak:
    """Return a phase: its levels are its maxima, its lines are of the instant at which most is allocated."""
    lines = _lines(alive_at(tape.events, span.at, tape.start))
    tensors = sum(line.bytes for line in lines)
    lines.append(Line("context", "CUDA context and loaded modules", context))
    if nccl:
        lines.append(Line("context", "NCCL buffers", nccl))
    lines.append(Line("fragmentation", "rounding, free pieces and cache", peak.reserved - tensors))
    levels = Levels(peak.requested, peak.allocated, peak.reserved, peak.reserved + context + nccl)
    return PhasePeak(span.phase, span.instant, levels, tuple(lines))


def _lines(alive: tuple[Alloc, ...]) -> list[Line]:
    """Return the bytes of every role by name, layers taken together; small groups share a line."""
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
            lines.append(
                Line(role, f"{kinds} {'smaller kinds of tensors' if kinds > 1 else 'kind of small tensor'}", small)
            )
    return lines


def general(label: str) -> str:
    """Return `layers.*.mlp` for `base_model.model.layers.3.mlp`: one name for all layers, without wrappers."""
    return _NUMBER.sub("*", _WRAPPERS.sub("", label))


def by_module(tape: Tape, span: Span) -> Mapping[str, int]:
    """Return the bytes alive at a span's worst instant by the module that made them, largest first."""
    sizes: Counter[str] = Counter()
    for event in alive_at(tape.events, span.at, tape.start):
        place, found, _ = event.label.partition(": ")
        sizes[general(place) if found else ""] += event.size
    return dict(sizes.most_common())
