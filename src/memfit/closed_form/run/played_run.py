"""The reserved bytes of a run: its allocations played on the allocator, without a limit or at a card's capacity."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from memfit.allocator import UNLIMITED, Allocator, OutOfMemory, PlainAllocator, QuickAllocator, allocator_for
from memfit.closed_form.run.account import Account, Instant
from memfit.closed_form.run.sharded_runs import deepspeed_played, fsdp2_played, three_streams
from memfit.closed_form.run.timeline import clears_cache, on_one_stream, played
from memfit.closed_form.run.unroll import Gauge, Pass, StepRaise
from memfit.nouns.alloc_settings import parse_alloc_conf
from memfit.nouns.footprint import OPTIONAL, SAME_LEVEL, OnCard, peak_maker
from memfit.nouns.plan import BAND_SHARE, verdict_by_replay
from memfit.nouns.tape import Phase


@dataclass(frozen=True, slots=True)
class PlayedPhase:
    """The highest levels of a phase in bytes, and the moments at which the reserved one rose."""

    allocated: int  # 0: not known, because only the pools' totals were played
    reserved: int
    growths: tuple[StepRaise, ...]
    held: int  # reserved when it began

    def followed_by(self, later: PlayedPhase) -> PlayedPhase:
        """Return the whole of a phase that goes on: steps after the first, DDP's buckets after the weights."""
        return PlayedPhase(
            max(self.allocated, later.allocated), max(self.reserved, later.reserved), self.growths + later.growths,
            self.held,
        )  # fmt: skip

    def made_in(self, account: Account, phase: Phase) -> Instant | None:
        """Return the instant that made the reserved level, None where no training step raised it."""
        least = self.reserved - int(self.reserved * SAME_LEVEL)
        telling = [growth for growth in self.growths if growth.reserved >= least]
        found = [(growth.reserved, account.within(phase, growth.step, later=growth.later)) for growth in telling]
        if not found:
            return None
        return found[peak_maker((reserved, instant.requested) for reserved, instant in found)][1]


@dataclass(frozen=True, slots=True)
class PlayedRun:
    """A played run, phase by phase."""

    phases: Mapping[Phase, PlayedPhase]
    beside: int = 0  # bytes in the pools of other streams that are played by themselves
    retries: int = 0  # how often its last optimizer step released the cache
    stepped: QuickAllocator | None = None  # FSDP2's allocator after the first step, to go on from

    @property
    def reserved(self) -> int:
        """Return the highest reserved bytes of the phases that every run has."""
        return max(found.reserved for phase, found in self.phases.items() if phase not in OPTIONAL)


def playable(account: Account) -> bool:
    """Return whether the allocations of a run are known."""
    return on_one_stream(account.recipe) or account.share.streams is not None


def play(
    account: Account, *, evaluates: bool = True, capacity: int | None = None, free: PlayedRun | None = None
) -> PlayedRun | None:
    """Play a run on the allocator; None where it runs out of memory.

    `evaluates`: an evaluation needs more tensors than training. With a `capacity`, the retries of the last step are
    those of every later one, and nothing is played after it that not every run does; `free` is the run without a limit.
    """
    beside = free.beside if free else 0
    room = None if capacity is None else max(capacity - beside, 0)
    allocator, heaps, phases = _begun(account, room, free)
    gauge = Gauge(lambda: allocator.reserved_peak)
    gauge.begin()
    before = retries = 0
    stepped: QuickAllocator | None = None
    try:
        for phase in _phases(account, heaps, gauge, evaluates=evaluates, to_the_end=capacity is None, done=len(phases)):
            allocated = allocator.allocated_peak if on_one_stream(account.recipe) else 0
            known = phases.get(phase)
            found = PlayedPhase(allocated, gauge.level(), tuple(gauge.growths), gauge.held)
            phases[phase] = known.followed_by(found) if known else found
            if phase == "step":
                retries = allocator.num_alloc_retries - before
            before = allocator.num_alloc_retries
            if phase == "load" and known is None and clears_cache(account):
                allocator.empty_cache()
            allocator.reset_peak_stats()
            gauge.begin()
            if phase == "first_step" and free is None and len(heaps) > 1 and isinstance(allocator, PlainAllocator):
                stepped = allocator.copies(UNLIMITED)[0]
    except OutOfMemory:
        return None
    return PlayedRun(phases, gauge.level() - allocator.reserved_peak, retries, stepped)


def _begun(
    account: Account, room: int | None, free: PlayedRun | None
) -> tuple[Allocator | QuickAllocator, tuple[Any, ...], dict[Phase, PlayedPhase]]:
    """Return the default stream's allocator, the heaps of all streams, and the phases that need not be played again.

    Up to the first step a run is the same on every card that has what it reserved by then.
    """
    if free and free.stepped and room is not None:
        before: tuple[Phase, ...] = ("load", "first_step")
        done = {phase: free.phases[phase] for phase in before}
        if max(found.reserved for found in done.values()) <= room:
            streams = free.stepped.copies(room)
            return streams[0], tuple(streams), done
    allocator = allocator_for(parse_alloc_conf(account.recipe.alloc_conf), room)
    sharded = not on_one_stream(account.recipe) and not account.recipe.zero
    return allocator, three_streams(allocator) if sharded else (allocator,), {}


def _phases(
    account: Account, heaps: tuple[Any, ...], gauge: Gauge, *, evaluates: bool, to_the_end: bool, done: int
) -> Iterator[Phase]:
    """Play the phases of a run and yield each at its end; `done`: loading and the first step were played."""
    if len(heaps) == 3:
        yield from fsdp2_played(account, heaps, gauge, evaluates=evaluates or to_the_end, done=min(done, 1))
        return
    if not on_one_stream(account.recipe):
        yield from deepspeed_played(account, heaps[0], gauge, evaluates=evaluates or to_the_end)
        return
    yield from played(account, heaps[0], gauge)
    if evaluates:
        Pass(heaps[0], account.meter, account.micro(train=False)).run(0)
        yield "eval"
    if to_the_end and account.resumes:
        yield from _afterwards(account, heaps[0])


def _afterwards(account: Account, allocator: Any) -> Iterator[Phase]:
    """Play resuming and merging, from an empty cache."""
    again, before = account.again, account.static
    allocator.empty_cache()
    allocator.reset_peak_stats()
    allocator.malloc(again.adapter - before.adapter + again.states - before.states)
    yield "resume"
    if account.recipe.method != "full":
        for merge in account.merging:
            merge.play(allocator)
        yield "merge"


def on_card(
    account: Account, free: PlayedRun, tensors: int, capacity: int, *, evaluates: bool
) -> tuple[OnCard, PlayedRun]:
    """Return how a run does on a card of `capacity` bytes, and the run as it is there.

    `free` is the run without a limit, `tensors` its highest allocated bytes, some of which may not be played. The run
    is played again only where the card's capacity could matter. A run that the capacity stops is returned as it is with
    a band more, or, where that stops it too, without a limit.
    """
    unlimited = max(free.reserved, tensors)
    band = int(unlimited * BAND_SHARE)
    if unlimited + band <= capacity:
        return OnCard(capacity, "fits", unlimited, band=band), free
    if tensors - int(tensors * BAND_SHARE) > capacity:
        return OnCard(capacity, "misfit", unlimited, band=band), free
    runs: dict[int, PlayedRun | None] = {}

    def retries_on(room: int) -> int | None:
        if room not in runs and unlimited <= room:
            runs[room] = free
        elif room not in runs:
            tried = tensors <= room and play(account, evaluates=evaluates, capacity=room, free=free)
            runs[room] = tried or None
        found = runs[room]
        return None if found is None else found.retries

    verdict = verdict_by_replay(capacity, band, retries_on)
    here = runs[capacity] or runs.get(capacity + band)
    return OnCard(capacity, verdict, unlimited, here.retries if here else 0, band), here or free
