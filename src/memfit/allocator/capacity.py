"""Replay a tape on a card: its verdict, the smallest card it runs on, and the reserved bytes above its tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

from memfit.allocator.compact import to_ops
from memfit.allocator.replay import Timeline, replay, retrace
from memfit.allocator.smallest_capacity import NoCapacity, only_compared, smallest_capacity
from memfit.nouns.alloc_settings import LATEST_TORCH, AllocSettings, Torch, parse_alloc_conf
from memfit.nouns.footprint import Fit, OnCard
from memfit.nouns.gpu import Gpu
from memfit.nouns.plan import BAND_SHARE, Judgement, verdict_by_replay
from memfit.nouns.tape import SegmentAlloc, SegmentFree, Tape
from memfit.units import MIB

# Bytes by which a card's CUDA context may differ from its row in the table, by whether that value is unverified.
# Source: published values per card, which spread by 60 MiB where several exist; 100 MiB where there is only one.
CONTEXT_BAND = {False: 60 * MIB, True: 100 * MIB}
Progress = Callable[[str, float], None]


@dataclass(frozen=True, slots=True)
class Slack:
    """The reserved peak on a card without a limit, split into four parts.

    `tensors` are requested bytes. `rounding` is inside blocks: 512-byte steps and remainders too small to split.
    `fragmentation` is free memory that the smallest card needs too, in pieces too small or in the wrong place. `cache`
    is free memory that the allocator would release before it fails.
    """

    tensors: int
    rounding: int
    fragmentation: int
    cache: int


@dataclass(frozen=True, slots=True)
class Capacity:
    """The answer of `memfit replay`; sizes in bytes.

    `free` is the run on a card without a limit, `timeline` the run on the given card, or `free` if none is given.
    `smallest` is the smallest capacity it runs on with its own settings, `other` with `expandable_segments` switched
    over. Both are lower bounds if the run `died` of an out-of-memory, because its tape lacks what came after.
    `reproduced` compares the segments of the replay with the recorded ones: "" if all agree, else the first difference;
    None if the tape has none or was recorded with other settings. `on_card` is the run on the given card in short.
    """

    free: Timeline
    timeline: Timeline
    judgement: Judgement | None
    smallest: int
    other: int
    slack: Slack
    reproduced: str | None
    died: bool = False
    on_card: OnCard | None = None
    needed: Timeline | None = None  # the run on the given card, or where memory runs out there, the one `need` is of


def capacity(
    tape: Tape, settings: AllocSettings, torch: Torch = LATEST_TORCH, gpu: Gpu | None = None, reserve: int = 0,
    progress: Progress = lambda text, share: None, free: Timeline | None = None, search: bool = True,
) -> Capacity:  # fmt: skip
    """Replay a tape without a limit (unless `free` is given), on a card, and on ever smaller cards.

    search: look for the smallest card, which takes longer than all else; without, `smallest` and `other` are 0.
    Raises BadInput for a tape that is damaged.
    """
    ops, streams = to_ops(tape.events, tape.start)

    def smallest_of(settings: AllocSettings) -> int:
        """Return 0 where no card is large enough, because the memory fraction is 0, or none is looked for."""
        if not search:
            return 0
        try:
            return smallest_capacity(ops, streams, settings, torch=torch, start=tape.start)
        except NoCapacity:
            return 0

    progress("replaying", 0.1)
    free = free or replay(tape.events, settings=settings, torch=torch, start=tape.start)
    timeline, judgement, on_card, runs = free, None, None, None
    if gpu is not None:
        timeline, judgement, on_card, runs = _on_card(tape, settings, torch, gpu, reserve, free)
    progress("looking for the smallest card", 0.3)
    smallest = smallest_of(settings)
    progress("the same with the other kind of segments", 0.6)
    other = smallest_of(replace(settings, expandable_segments=not settings.expandable_segments))
    return Capacity(
        free, timeline, judgement, smallest, other, _slack(free, smallest), _reproduced(tape, settings, torch),
        tape.ends_in_oom, on_card, runs,
    )  # fmt: skip


def judged(tape: Tape, settings: AllocSettings, torch: Torch, gpu: Gpu, reserve: int) -> Judgement:
    """Judge a tape on a card, without a search for smaller ones."""
    free = replay(tape.events, settings=settings, torch=torch, start=tape.start)
    return _on_card(tape, settings, torch, gpu, reserve, free)[1]


def _on_card(
    tape: Tape, settings: AllocSettings, torch: Torch, gpu: Gpu, reserve: int, free: Timeline
) -> tuple[Timeline, Judgement, OnCard, Timeline]:
    """Return the run on a card, its verdict by the rule of `verdict_by_replay`, and the run that needs what it says.

    That is the run on the card. If the card stops it, it is the run with a band more, or else without a limit, as in
    an answer of the formulas; what cached blocks would save of it is told by the smallest capacity.

    A tape that ends in an out-of-memory never fits, and is a misfit wherever it runs out, because it needs an unknown
    amount more. The band is the uncertainty of the card's context, and for a predicted tape also that of the
    prediction.
    """
    usable, unlimited = gpu.usable_bytes(reserve), free.peak.reserved
    band = CONTEXT_BAND["context_bytes" in gpu.unverified]
    if tape.source == "formula":
        band = max(band, int(unlimited * BAND_SHARE))

    @cache
    def on(room: int) -> Timeline:
        if unlimited <= room and only_compared(settings):  # equals the run without a limit
            return free.beside(gpu.context_bytes)
        return replay(
            tape.events, capacity=max(room, 0), settings=settings, torch=torch, context=gpu.context_bytes,
            total_memory=gpu.total_bytes, start=tape.start,
        )  # fmt: skip

    timeline = on(usable)

    def retries_on(room: int) -> int | None:
        found = on(room)
        return None if found.oom is not None else found.retries_per_step

    if tape.ends_in_oom:
        verdict: Fit = "tight" if timeline.oom is None else "misfit"
    else:
        verdict = verdict_by_replay(usable, band, retries_on)
    runs = next((run for run in (timeline, on(usable + band)) if run.oom is None), free)
    need = runs.peak.reserved
    card = OnCard(usable, verdict, unlimited, runs.retries_per_step, band)
    return timeline, Judgement(verdict, usable, need, band, usable - need), card, runs


def _slack(free: Timeline, smallest: int) -> Slack:
    peak = free.peak
    kept = min(max(smallest, peak.allocated), peak.reserved) if smallest else peak.reserved
    return Slack(peak.requested, peak.allocated - peak.requested, kept - peak.allocated, peak.reserved - kept)


def _reproduced(tape: Tape, settings: AllocSettings, torch: Torch) -> str | None:
    """Return the difference that `retrace` finds for a tape recorded with these settings; None for any other."""
    if settings != parse_alloc_conf(tape.about.get("alloc_conf", ""), torch):
        return None
    segments = any(isinstance(event, SegmentAlloc | SegmentFree) for event in tape.events)
    if tape.source != "measured" or not (segments or tape.start):
        return None
    return retrace(tape, settings, torch)[0]
