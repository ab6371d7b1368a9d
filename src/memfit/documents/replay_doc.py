"""The JSON document of a replay; codec.py knows it among the others."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from memfit.allocator.capacity import Capacity, Slack
from memfit.allocator.replay import Timeline
from memfit.nouns.footprint import Levels, Source
from memfit.nouns.gpu import Gpu
from memfit.nouns.plan import Verdict
from memfit.nouns.tape import Phase, Tape


class SpanDoc(Struct, frozen=True, kw_only=True):
    """One phase of a replayed tape: its peaks in bytes, and the part of it that allocated most."""

    phase: Phase
    instant: str
    levels: Levels


class OomDoc(Struct, frozen=True, kw_only=True):
    """Where a replayed tape runs out of memory, in PyTorch's words. `event` counts from 0; sizes in bytes."""

    phase: Phase
    instant: str
    event: int
    requested: int
    tried: int
    device_free: int
    message: str


class ReplayDoc(Struct, frozen=True, kw_only=True):
    """`memfit replay --json`. `gpu`, `verdict`, `fits`, `usable` and `band` are null where no card was named."""

    schema: Literal["memfit.replay/1"] = "memfit.replay/1"
    source: Source
    about: dict[str, str]
    events: int
    gpu: Gpu | None
    torch: str
    alloc_conf: str
    peak: Levels
    phases: tuple[SpanDoc, ...]
    retries: int
    oom: OomDoc | None
    verdict: Verdict | None
    fits: bool | None
    usable: int | None
    band: int | None
    died: Annotated[
        bool, Meta(description="the run ended out of memory: what it would have needed afterwards is unknown")
    ]
    smallest: Annotated[
        int, Meta(description="bytes of the smallest capacity it runs on; at least, if it died; 0: none")
    ]
    smallest_other: Annotated[int, Meta(description="the same with expandable segments switched the other way")]
    slack: Slack
    ending: Annotated[
        Literal["enough", "finished", "oom"] | None,
        Meta(description="of a traced script: after enough steps, by itself, or out of memory"),
    ] = None
    steps: Annotated[int | None, Meta(description="optimizer steps that a traced script made")] = None
    notes: Annotated[tuple[str, ...], Meta(description="of a traced script: what was taken for granted")] = ()
    reproduced: Annotated[str | None, Meta(description="'' when every recorded segment was taken and given back alike")]


def replay_doc(
    tape: Tape, found: Capacity, gpu: Gpu | None, torch: str, alloc_conf: str, **of_script: Any
) -> ReplayDoc:
    """A tape on a card, or on one without a limit; of a traced script with its ending, steps and notes."""
    judgement, timeline = found.judgement, found.timeline
    phases = (
        SpanDoc(phase=phase, instant=timeline.worst_of(phase).instant, levels=levels)
        for phase, levels in timeline.by_phase().items()
    )
    return ReplayDoc(
        source=tape.source, about=tape.about, events=len(tape.events), gpu=gpu, torch=torch, alloc_conf=alloc_conf,
        peak=timeline.peak, phases=tuple(phases), retries=timeline.retries, oom=_oom(timeline),
        verdict=judgement.verdict if judgement else None, fits=judgement.verdict == "fits" if judgement else None,
        usable=judgement.usable if judgement else None, band=judgement.band if judgement else None,
        died=found.died, smallest=found.smallest, smallest_other=found.other, slack=found.slack, reproduced=found.reproduced,
        **of_script,
    )  # fmt: skip


def _oom(timeline: Timeline) -> OomDoc | None:
    oom, span = timeline.oom, timeline.oom_span
    if oom is None or span is None:
        return None
    return OomDoc(
        phase=span.phase, instant=span.instant, event=timeline.oom_at or 0, requested=oom.requested, tried=oom.tried,
        device_free=oom.device_free, message=oom.message,
    )  # fmt: skip
