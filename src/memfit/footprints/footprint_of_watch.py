"""Turn a watched run into a Footprint and a Timeline, to compare it with a prediction."""

from __future__ import annotations

from functools import reduce

from memfit.allocator.replay import Span, Timeline, highest
from memfit.nouns.footprint import Footprint, Levels, Line, PhasePeak, peak_maker
from memfit.nouns.sample import METERS, Sample, Watched
from memfit.nouns.tape import PHASES, Phase

REST = "all else that was alive (a watch cannot tell it apart)"  # a line that stands for several roles
WHOLE = "whole process, seen from outside"
WHOLE_CARD = (
    "the card's driver (NVML), the growth of the whole card, other processes included: it lists none of this command's"
)
UNTOLD = ("which tensor is what, beyond parameters and optimizer states",)


def footprint_of(watched: Watched) -> Footprint:
    """Return the peaks of every phase with a sample, by role as far as roles were counted."""
    peaks = by_phase(watched.samples)
    phases = tuple(_phase(watched, phase, peaks[phase]) for phase in PHASES if phase in peaks)
    return Footprint(phases, "measured", (measured_by(watched),), UNTOLD)


def measured_by(watched: Watched) -> str:
    """Return what the meter measured, and whether that was the whole card."""
    title = METERS[watched.header.meter].title
    whole = sum(sample.whole_card for sample in watched.samples)
    seen = sum(sample.now.device > 0 for sample in watched.samples)
    if not whole:
        return title
    return WHOLE_CARD if whole == seen else f"{title}; at {whole:,} of {seen:,} looks the whole card, others included"


def cardless(footprint: Footprint) -> bool:
    """Return whether the run had no card, so that `reserved` counts live tensors and `device` resident bytes."""
    return any(facts.title in footprint.assumptions for facts in METERS.values() if facts.compared is None)


def by_phase(samples: tuple[Sample, ...]) -> dict[Phase, Levels]:
    """Return each level's maximum within each phase, in the order of the phases' first samples."""
    peaks: dict[Phase, Levels] = {}
    for sample in samples:
        peaks[sample.phase] = highest(peaks.get(sample.phase, sample.peak), sample.peak)
    return peaks


def timeline_of(watched: Watched) -> Timeline:
    """Return a Timeline with one span per uninterrupted phase; `first` and `at` are indices of samples.

    Without a card the levels of tensors are 0 in a span in which they were never counted.
    """
    spans: list[Span] = []
    first = at = 0
    peak = Levels(0, 0, 0, 0)
    samples = watched.samples
    for index, sample in enumerate(samples):
        if sample.phase != samples[first].phase:
            spans.append(_span(watched, first, at, peak))
            first, at, peak = index, index, Levels(0, 0, 0, 0)
        if sample.peak.allocated > peak.allocated:
            at = index
        peak = highest(peak, sample.peak)
    if samples:
        spans.append(_span(watched, first, at, peak))
    return Timeline(tuple(spans), reduce(highest, (span.peak for span in spans), Levels(0, 0, 0, 0)), 0)


def _span(watched: Watched, first: int, at: int, peak: Levels) -> Span:
    return Span(watched.samples[first].phase, _instant(watched, first), first, at, peak)


def _instant(watched: Watched, index: int) -> str:
    return f"step {watched.samples[index].step}" if METERS[watched.header.meter].roles else WHOLE


def _phase(watched: Watched, phase: Phase, peak: Levels) -> PhasePeak:
    """Return a phase with lines for parameters, from the second step on for optimizer states, and for the rest."""
    facts = METERS[watched.header.meter]
    if not facts.roles or (facts.compared is None and not peak.allocated):  # seen from outside, or never counted
        return PhasePeak(phase, WHOLE, peak, (Line("temporaries", REST, peak.device),))
    sure = {"parameters"} if phase in ("load", "first_step") else {"parameters", "optimizer_states"}
    lines = [Line(role, role.replace("_", " "), size) for role, size in watched.shares if role in sure]
    known = sum(line.bytes for line in lines)
    if known > peak.requested:  # the model was still growing
        lines, known = [], 0
    lines.append(Line("temporaries", REST, peak.requested - known))
    lines.append(Line("fragmentation", "rounding, free pieces and cache", peak.reserved - peak.requested))
    beside = "the process beside its tensors" if facts.compared is None else "CUDA context and other processes"
    lines.append(Line("context", beside, peak.device - peak.reserved))
    of_phase = [(index, sample.peak) for index, sample in enumerate(watched.samples) if sample.phase == phase]
    made = of_phase[peak_maker((levels.reserved or levels.allocated, levels.allocated) for _, levels in of_phase)][0]
    return PhasePeak(phase, _instant(watched, made), peak, tuple(lines))
