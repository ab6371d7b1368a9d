"""The screen of a replayed tape: verdict, where memory runs out, the peak of each phase, bytes beyond the tensors."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from memfit.allocator.capacity import Capacity
from memfit.allocator.replay import Timeline
from memfit.nouns.alloc_settings import AllocSettings
from memfit.nouns.gpu import Gpu
from memfit.nouns.tape import Alloc, Tape
from memfit.report.layout import Ends, commands, hanging, paragraphs, table, text
from memfit.report.words import (
    DOT,
    VERDICT_WORDS,
    card_room,
    card_title,
    need_words,
    phase_title,
    retry_words,
    room,
    withheld_words,
)
from memfit.units import gib

SOURCES = {
    "formula": "predicted by the formulas",
    "traced": "traced on a virtual card",
    "measured": "recorded on a card",
}
ENDS_IN_OOM = "the run ended where memory ran out, so what it would have needed afterwards is not known"
MODEL_AGREES = "took and returned every segment as recorded"


def replay_view(
    name: str, tape: Tape, found: Capacity, settings: AllocSettings, torch: str, alloc_conf: str,
    gpu: Gpu | None, next_up: Sequence[str] = (), count: int = 1, rank: int = 0, routing: str = "",
) -> Group:  # fmt: skip
    """Show the answer of `memfit replay`; with several cards the tape is of one rank.

    routing: how the need depends on what a router does.
    """
    judgement = found.judgement
    card = card_title(gpu, count) if gpu else "a card without a limit"
    head = text(f"{name}{f', rank {rank} of {count},' if count > 1 else ''} on {card}", "bold")
    usable = text(card_room(gpu, judgement.usable, count) if gpu and judgement else "no card named")
    allocations = sum(isinstance(event, Alloc) for event in tape.events)
    conf = alloc_conf or "default allocator"
    about = f"{allocations:,} allocations, {SOURCES[tape.source]}{DOT}PyTorch {torch}{DOT}{conf}"
    parts: list[RenderableType] = [Ends(head, usable), text(about, "dim"), ""]
    if judgement is not None:
        words, style = VERDICT_WORDS[judgement.verdict]
        parts += [hanging(Text(words, style), [*withheld_words(judgement, ""), *_grounds(found, routing)]), ""]
    parts += [_phases(found.timeline), "", _slack(found), "", paragraphs(facts(found, settings))]
    if next_up:
        parts += ["", commands(next_up)]
    return Group(*parts)


def _grounds(found: Capacity, routing: str) -> list[str]:
    """Return the reason for the verdict: the peak, or where memory runs out."""
    timeline, judgement = found.timeline, found.judgement
    assert judgement is not None
    span, run = timeline.oom_span, found.needed or timeline
    nccl = max(judgement.need - run.peak.reserved, 0)
    need = f"{need_words(judgement.need, found.free.peak.reserved + nccl, nccl)}{DOT}{room(judgement)}"
    if timeline.oom is None or span is None:
        return [line for line in (need, routing, retry_words(found.on_card, judgement)) if line]
    times = "once" if timeline.retries == 1 else f"{timeline.retries} times"
    retried = f"{DOT}returned cached blocks {times} to go on, which takes time" if timeline.retries else ""
    where = f"out of memory in {span.instant} ({phase_title(span.phase)}), event {timeline.oom_at}{retried}"
    return [where, timeline.oom.message, *([] if found.died or run.oom else [need]), *([routing] if routing else [])]


def routing_words(share: float, even: int, uneven: int | None) -> str:
    """Return what a run needs with tokens routed evenly over experts, and with `share` times that for a rank's."""
    more = f"up to {share:.3g} times the even share for the experts of a rank"
    if uneven is None:
        return f"that is with tokens routed evenly over the experts; with {more} it runs out of memory"
    return f"{gib(even, 2)} GiB with tokens routed evenly; judged by {gib(uneven, 2)} GiB with {more}"


def _phases(timeline: Timeline) -> RenderableType:
    made = table("phase", "worst instant", ">requested", ">allocated", ">reserved", ">device")
    for phase, levels in timeline.by_phase().items():
        sizes = (levels.requested, levels.allocated, levels.reserved, levels.device)
        made.add_row(phase_title(phase), text(timeline.peak_of(phase)[0].instant), *(gib(x, 2) for x in sizes))
    return made


def _slack(found: Capacity) -> RenderableType:
    """Show the parts that add up to the reserved peak on a card without a limit."""
    slack, peak = found.slack, found.free.peak.reserved
    made = table("without a limit it reserves", ">GiB", ">share")
    rows = (
        ("tensors", slack.tensors),
        ("rounding to blocks", slack.rounding),
        ("fragmentation: needed, but not occupied by tensors", slack.fragmentation),
        ("cache: returned when memory runs short", slack.cache),
    )
    for title, size in rows:
        made.add_row(title, gib(size, 2), f"{size / peak:.1%}" if peak else "")
    made.add_row(Text("reserved", "bold"), gib(peak, 2), "")
    return made


def facts(found: Capacity, settings: AllocSettings) -> list[tuple[str, str]]:
    """List the smallest capacity the tape runs on, and whether the replay agrees with the recording."""
    as_is, other = ("with", "without") if settings.expandable_segments else ("without", "with")
    bound = "at least " if found.died else ""
    smallest = DOT.join(
        f"{bound}{gib(size, 2)} GiB {how} expandable segments" if size else f"none {how} expandable segments"
        for size, how in ((found.smallest, as_is), (found.other, other))
    )
    checked = MODEL_AGREES if found.reproduced == "" else f"differs from the recording: {found.reproduced}"
    return [
        ("smallest:", f"{smallest} (for tensors; a card needs its CUDA context on top)"),
        ("note:", ENDS_IN_OOM if found.died else ""),
        ("model:", "" if found.reproduced is None else checked),
    ]
