"""Find what the tapes of two shallow models repeat per block, and write the tape of a model of any depth.

The package's docstring explains the method with an example.
"""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from typing import Any, Literal

from memfit.nouns.tape import Alloc, Event, Free, Mark, RecordStream, Role, Tape

_FIRST, _SECOND, _THIRD = 1, 2, 4  # ways to say where an event takes place, as bits


class NotPeriodic(Exception):
    """The tapes differ by more than blocks."""


@dataclass(frozen=True, slots=True, eq=False)
class _Kind:
    """Storages that differ in their layer alone: their label before and after the layer, their bytes on either tape."""

    head: str
    tail: str | None  # None: the label names no layer
    role: Role
    stream: int
    small: int
    large: int


@dataclass(slots=True)
class _Step:
    """An event of any block: what happens, to which kind of storage, and where, in three ways."""

    what: Literal["birth", "death"] | int | Event  # a number: the stream the storage is used on; an Event: no storage
    kind: _Kind | None = None
    where: tuple[int, int, int] = (0, 0, 0)
    ways: int = _FIRST | _SECOND | _THIRD  # those that hold in every block and at every depth

    def like(self, other: _Step) -> int:
        """Return the ways in which both take place at the same point; 0 where they do not match."""
        if self.kind is not other.kind or self.what != other.what:
            return 0
        (a, b, c), (x, y, z) = self.where, other.where
        return (a == x) | (b == y) << 1 | (c == z) << 2


def in_order_of_birth(events: Iterable[Event]) -> tuple[Event, ...]:
    """Return the events with every row of consecutive deaths in the order of the storages' births.

    Any order of such deaths leaves the same free blocks, but the traced one may follow no rule from block to block.
    """
    ordered: list[Event] = []
    for _, row in groupby(events, lambda event: isinstance(event, Free)):
        ordered += sorted(row, key=lambda event: event.id if isinstance(event, Free) else 0)
    return tuple(ordered)


def unroll(shallow: Tape, deep: Tape, layers: tuple[int, int], blocks: str) -> Callable[[int], Tape]:
    """Return a function from a number of layers to the tape, given tapes of two models that differ by one period.

    layers: how many each has. blocks: the name of the list of blocks ("layers" in "model.layers.3.mlp"). Raises
    NotPeriodic; the function raises it too for a depth that is no whole number of periods away from the shallow one,
    or more than one period below it.
    """
    split = _splitter(blocks)
    try:
        parts = _compared((shallow, deep), layers, split, by_death=False)
    except NotPeriodic:
        parts = _compared((shallow, deep), layers, split, by_death=True)

    def tape(count: int) -> Tape:
        more, rest = divmod(count - layers[0], layers[1] - layers[0])
        if rest or more < -1:
            raise NotPeriodic(f"{count} layers are not {layers[0]} and periods of {layers[1] - layers[0]}")
        steps = (step for repeated, part in parts for _ in range(1 + more if repeated else 1) for step in part)
        return Tape(tuple(_events(steps, count, more)), "traced", dict(shallow.about))

    return tape


def _compared(tapes: tuple[Tape, Tape], layers: tuple[int, int], split: Split, *, by_death: bool) -> list[_Part]:
    """Return the common steps of both tapes in order, in parts."""
    looks = _looks(tapes[0], split, by_death), _looks(tapes[1], split, by_death)
    kinds = _kinds(tapes, looks)
    one, two = (list(_steps(*of, kinds, split)) for of in zip(tapes, layers, looks, (0, 1), strict=True))
    return list(_parts(one, two))


# --- kinds of storages ---

_Part = tuple[bool, tuple[_Step, ...]]  # whether it comes once per period, and its steps
Split = Callable[[str], tuple[str, str | None, int]]
Look = tuple[Any, ...]  # label before and after the layer, role, stream; and when it died (see `_looks`)
Kinds = dict[tuple[Look, int, int], _Kind]  # by look, bytes, and which of the tapes


def _splitter(blocks: str) -> Split:
    """Return a function that splits a label: before its layer, after it (None: it names no layer), and the layer."""
    pattern = re.compile(rf"(?<!\w){re.escape(blocks)}\.(\d+)(?!\w)")

    @cache
    def split(label: str) -> tuple[str, str | None, int]:
        found = pattern.search(label)
        return (label[: found.start(1)], label[found.end(1) :], int(found[1])) if found else (label, None, 0)

    return split


def _looks(tape: Tape, split: Split, by_death: bool) -> dict[int, Look]:
    """Return by id how every storage looks: what all storages of its kind share.

    by_death: storages without a layer in their label (a mixture's gradients, say) look different if they die at
    different points: after the birth of another kind of storage, or in another instant of the run.
    """
    looks: dict[int, Look] = {}
    born: Look = ()
    instant: Event | None = None
    for event in tape.events:
        if isinstance(event, Mark):
            instant = event
        elif isinstance(event, Alloc):
            born = split(event.label)[:2]
            looks[event.id] = *born, event.role, event.stream, None
        elif isinstance(event, Free) and by_death and looks[event.id][1] is None:
            looks[event.id] = *looks[event.id][:4], (born, instant)
    return looks


def _kinds(tapes: tuple[Tape, Tape], looks: tuple[dict[int, Look], dict[int, Look]]) -> Kinds:
    """Return the kinds of both tapes. Sizes that only one tape has are paired with the other's, in order."""
    seen: tuple[dict[Look, dict[int, None]], ...] = (defaultdict(dict), defaultdict(dict))
    for sizes, tape, of in zip(seen, tapes, looks, strict=True):
        for event in tape.events:
            if isinstance(event, Alloc):
                sizes[of[event.id]][event.size] = None
    kinds: Kinds = {}
    for look in seen[0] | seen[1]:
        mine, other = seen[0].get(look, {}), seen[1].get(look, {})
        less, more = [s for s in mine if s not in other], [s for s in other if s not in mine]
        if len(less) != len(more):
            raise NotPeriodic(f"{look[0]} has {len(less)} sizes in one and {len(more)} in the other")
        for a, b in [*zip(less, more, strict=True), *((s, s) for s in mine if s in other)]:
            head, tail, role, stream, _ = look
            kinds[look, a, 0] = kinds[look, b, 1] = _Kind(head, tail, role, stream, a, b)
    return kinds


# --- events to steps and back ---


def _steps(tape: Tape, layers: int, looks: dict[int, Look], which: int, kinds: Kinds, split: Split) -> Iterator[_Step]:
    """Read the tape of a model of `layers` layers as steps."""
    named = 0  # the layer named last
    births: dict[int, tuple[_Kind, int]] = {}  # id -> its kind, and how many of it were born before
    living: dict[_Kind, list[int]] = defaultdict(list)
    born: dict[_Kind, int] = defaultdict(int)
    for event in tape.events:
        if isinstance(event, Alloc):
            kind, layer = kinds[looks[event.id], event.size, which], split(event.label)[2]
            births[event.id] = kind, born[kind]
            born[kind] += 1
            living[kind].append(event.id)
            if kind.tail is None:
                yield _Step("birth", kind)
            else:
                yield _Step("birth", kind, (layer, layers - 1 - layer, layer - named))
                named = layer
        elif isinstance(event, Free | RecordStream):
            kind, nth = births[event.id]
            oldest = living[kind].index(event.id)
            where = len(living[kind]) - oldest, oldest, born[kind] - nth
            if isinstance(event, Free):
                del living[kind][oldest]
            yield _Step("death" if isinstance(event, Free) else event.stream, kind, where)
        else:
            yield _Step(event)


def _events(steps: Iterable[_Step], layers: int, more: int) -> Iterator[Event]:
    """Turn steps into the events of a model of `layers` layers, `more` periods above the shallower of the tapes."""
    named = number = 0  # the layer named last, and the next storage
    born: dict[_Kind, list[int]] = defaultdict(list)
    living: dict[_Kind, list[int]] = defaultdict(list)
    for step in steps:
        kind, (first, second, third) = step.kind, step.where
        if kind is None:
            yield step.what  # type: ignore[misc]
        elif step.what == "birth":
            label = kind.head
            if kind.tail is not None:
                ways = step.ways
                named = first if ways & _FIRST else layers - 1 - second if ways & _SECOND else named + third
                label = sys.intern(f"{label}{named}{kind.tail}")
            yield Alloc(number, kind.small + (kind.large - kind.small) * more, kind.role, label, kind.stream)
            born[kind].append(number)
            living[kind].append(number)
            number += 1
        else:
            alive = living[kind]
            try:
                if step.ways & (_FIRST | _SECOND):
                    at = -first if step.ways & _FIRST else second
                else:
                    at = alive.index(born[kind][-third])
                touched = alive[at]
            except (IndexError, ValueError):
                raise NotPeriodic(f"{kind.head}: the storage that should die here is already dead") from None
            if step.what == "death":
                del alive[at]
                yield Free(touched)
            else:
                yield RecordStream(touched, step.what)  # type: ignore[arg-type]


# --- where the deeper tape has more ---


def _parts(one: list[_Step], two: list[_Step]) -> Iterator[_Part]:
    """Walk both tapes; where they differ, the deeper one must go through one more period."""
    i = j = done = 0
    while i < len(one) or j < len(two):
        if i < len(one) and j < len(two) and (ways := one[i].like(two[j])):
            two[j].ways &= ways
            i, j = i + 1, j + 1
            continue
        length = _once_more(one, two, i, j)
        if j - length < done:
            raise NotPeriodic("two repeated parts overlap")
        for step, again in zip(two[j - length : j], two[j : j + length], strict=True):
            step.ways &= step.like(again)
            if not step.ways:
                raise NotPeriodic(f"{step.what} takes place elsewhere in the next block")
        yield False, tuple(two[done : j - length])
        yield True, tuple(two[j - length : j])
        j = done = j + length
    yield False, tuple(two[done:])


def _once_more(one: list[_Step], two: list[_Step], i: int, j: int) -> int:
    """Return how many steps of `two` from j on repeat those before j and lead back to `one` at i.

    Of several lengths, take the one after which the tapes match for longest. Raises NotPeriodic where there is none.
    """
    best = furthest = 0
    for length in range(1, min(j, len(two) - j, len(two) - len(one)) + 1):
        after = j + length
        if i == len(one):
            if after < len(two):
                continue
        elif after == len(two) or one[i].kind is not two[after].kind:
            continue
        if all(two[k - length].like(two[k]) for k in range(j, after)):
            k = 0
            while i + k < len(one) and after + k < len(two) and one[i + k].like(two[after + k]):
                k += 1
            if k + 1 > furthest:
                best, furthest = length, k + 1
    if not best:
        raise NotPeriodic(f"event {j} of the deeper tape: {two[j].what if j < len(two) else 'the end'}")
    return best
