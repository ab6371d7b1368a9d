"""The smallest card a tape runs on: a bisection of replays, which share the part that is equal on all cards left."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

from memfit.allocator import QUICK, UNLIMITED, Allocator, Beginning, OutOfMemory
from memfit.allocator.blocks import PRIVATE_POOLS
from memfit.allocator.compact import EMPTY_CACHE, ONE_STREAM, play_ops, used
from memfit.allocator.player import begun
from memfit.allocator.quick import Undecided
from memfit.errors import BadInput
from memfit.nouns.alloc_settings import LATEST_TORCH, AllocSettings, Torch
from memfit.nouns.tape import Segment
from memfit.units import MIB


class NoCapacity(BadInput):
    """The tape runs on no card, however large."""


class Attempt(NamedTuple):
    """A run on a card: whether it fit, peaks of requested and reserved bytes, and the smallest total it was refused."""

    fits: bool
    requested: int
    reserved: int
    refused: int


Try = Callable[[int | None, int], Attempt]  # (capacity or None for any, a capacity known to fail) -> Attempt


def smallest_capacity(
    ops: Sequence[int],
    streams: Mapping[int, int] = ONE_STREAM,
    settings: AllocSettings = AllocSettings(),  # noqa: B008  (frozen)
    granularity: int = 2 * MIB,
    torch: Torch = LATEST_TORCH,
    start: Sequence[Segment] = (),
) -> int:
    """Return the smallest multiple of `granularity` bytes that a tape in its compact form runs on.

    Raises NoCapacity if none suffices. The search is a bisection: a run may also fit on some still smaller card,
    because retries shuffle the segments, but on the one just below it does not.
    """
    plain = settings in QUICK and all(stream < PRIVATE_POOLS for stream in streams.values())
    if plain and torch == LATEST_TORCH and not start:
        attempt: Try = SharedBeginning(ops, streams, expandable_segments=settings.expandable_segments)
    else:
        attempt = from_the_start(ops, streams, settings, torch, start)
    return bisect(attempt, granularity, only_compared=only_compared(settings))


def only_compared(settings: AllocSettings) -> bool:
    """Return whether the allocator uses the capacity only to compare a total with it.

    A run that fits is then the same on any card down to its reserved peak, and a run that fails on any card below the
    smallest total it was refused. This does not hold where the capacity also sets the limit of a fraction or the length
    of an expandable segment.
    """
    return (
        settings.per_process_memory_fraction is None
        and not settings.expandable_segments
        and not settings.throw_on_cudamalloc_oom
    )


def bisect(attempt: Try, granularity: int, *, only_compared: bool) -> int:
    """Search over multiples of `granularity` bytes; `only_compared`: the result of that function."""
    unlimited = attempt(None, 0)
    if not unlimited.fits:
        raise NoCapacity(
            "no card is large enough", hint="raise per_process_memory_fraction, or look for a damaged tape"
        )
    low = max(unlimited.requested - 1, 0) // granularity * granularity  # too small, unless nothing is requested
    high = -(-unlimited.reserved // granularity) * granularity
    while not only_compared and not attempt(high, low).fits:
        low, high = high, 2 * high
    while high - low > granularity:
        middle = (low + high) // 2 // granularity * granularity
        tried = attempt(middle, low)
        if tried.fits:
            high = -(-tried.reserved // granularity) * granularity if only_compared else middle
        else:
            low = (tried.refused - 1) // granularity * granularity if only_compared else middle
    return high


def from_the_start(
    ops: Sequence[int], streams: Mapping[int, int], settings: AllocSettings, torch: Torch, start: Sequence[Segment]
) -> Try:
    """Return attempts that play the whole tape, on the allocator with every setting."""

    def attempt(capacity: int | None, _: int) -> Attempt:
        allocator = Allocator(capacity, settings, torch)
        fits = True
        try:
            play_ops(allocator, ops, streams, list(begun(allocator, start).values()))
        except OutOfMemory:
            fits = False
        return Attempt(fits, allocator.requested_peak, allocator.reserved_peak, allocator.least_refused)

    return attempt


class SharedBeginning:
    """Attempts on the quick allocators, which share their beginning.

    Above a capacity that is known to fail, runs are equal on all cards up to the first request that this capacity
    refuses. That part is played once, and each attempt continues from a copy.
    """

    def __init__(
        self, ops: Sequence[int], streams: Mapping[int, int] = ONE_STREAM, *, expandable_segments: bool
    ) -> None:
        self._ops = caught_up(ops, streams)
        self._allocations = [position for position, op in enumerate(self._ops) if op >= 0]
        found = {stream: place for place, stream in enumerate(sorted({0, *streams.values()}))}
        self._places = [found[streams.get(n, 0)] for n in range(len(self._allocations))] if len(found) > 1 else ()
        self._shared = [Beginning(expandable_segments=expandable_segments) for _ in found]
        self._shared[0].share_card(*self._shared[1:])
        self._blocks: list[int] = []
        self._at = 0  # operations that have been played on `_shared`

    def __call__(self, capacity: int | None, low: int) -> Attempt:
        """Try a capacity above `low`, which must not fall from one call to the next."""
        requested = 0
        if capacity is None:
            requested = requested_peak(self._ops)
            capacity, low = UNLIMITED, requested - 1
        self._advance(low)
        allocators, fits = self._shared[0].copies(capacity), True
        try:
            allocators[0].play_ops(self._ops[self._at :], self._blocks.copy(), self._places)
        except OutOfMemory:
            fits = False
        refused = min(allocator.least_refused for allocator in allocators)
        return Attempt(fits, requested, allocators[0].reserved_peak, refused)

    def _advance(self, low: int) -> None:
        for allocator in self._shared:
            allocator.above(low)
        try:
            self._shared[0].play_ops(self._ops[self._at :], self._blocks, self._places)
            self._at = len(self._ops)
        except Undecided:
            self._at = self._allocations[len(self._blocks)]


def caught_up(ops: Sequence[int], streams: Mapping[int, int]) -> Sequence[int]:
    """Return the operations without those of record_stream, whose storages are freed when all streams have caught up.

    That is at the next malloc or empty_cache.
    """
    if not streams:
        return ops
    shared, waiting, made = set[int](), list[int](), list[int]()
    for op in ops:
        if op < EMPTY_CACHE:
            number, stream = used(op)
            if stream != streams.get(number, 0):
                shared.add(number)
        elif EMPTY_CACHE < op < 0 and ~op in shared:
            waiting.append(op)
        else:
            if waiting and (op > 0 or op == EMPTY_CACHE):
                made += waiting
                waiting = []
            made.append(op)
    return made


def requested_peak(ops: Sequence[int]) -> int:
    """Return the highest sum of requested bytes."""
    sizes = [op for op in ops if op >= 0]
    return max(accumulate(op if op >= 0 else -sizes[~op] for op in ops if op != EMPTY_CACHE), default=0)
