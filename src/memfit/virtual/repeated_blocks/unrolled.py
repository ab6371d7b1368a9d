"""The tape of a deep model from those of two shallow ones: where the deeper has one block more, that block is repeated.

An event is told by what happens, whatever the layer, and by where, said in three ways: a layer by its number, by its
distance from the last, and from the layer named before; a storage by its age among the living of its kind, from the
youngest and from the oldest, and among all of its kind so far. In the next block, or in a deeper model, the same event
has one of these in common: which one, the two tapes tell. A size that only one of them has is the other's, grown.

Storages that die in a row, with nothing in between, are in the order of their birth here, if nothing else is asked for:
whatever their order, the same free blocks are left. torch 2.12 alone breaks ties among free blocks by that order; there it
is left as it was, and may be too irregular to be unrolled.
"""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from memfit.nouns.tape import Alloc, Event, Free, Mark, RecordStream, Role, Tape

Order = Callable[[Iterable[Event]], tuple[Event, ...]]  # of the same events, deaths in a row arranged
Where = tuple[int, int, int]
_NOWHERE = (0, 0, 0)
_FIRST, _SECOND, _THIRD = 1, 2, 4  # ways to say where, as bits


class NotPeriodic(Exception):
    """The tapes differ by more than blocks."""


@dataclass(frozen=True, slots=True, eq=False)
class _Kind:
    """Storages that differ in their layer alone: their label before and after it, their bytes on either tape."""

    head: str
    tail: str | None  # None: the label names no layer
    role: Role
    stream: int
    small: int
    large: int


@dataclass(slots=True)
class _Step:
    """An event of any block: what happens (a birth, a death, use on a stream, or what names no storage), and to which kind."""

    what: Literal["birth", "death"] | int | Event
    kind: _Kind | None = None
    where: Where = _NOWHERE
    ways: int = _FIRST | _SECOND | _THIRD  # those that hold in every block, at every depth

    def like(self, other: _Step) -> int:
        """The ways in which both are in the same place; 0 where they are not the same."""
        if self.kind is not other.kind or self.what != other.what:
            return 0
        (a, b, c), (x, y, z) = self.where, other.where
        return (a == x) | (b == y) << 1 | (c == z) << 2


@dataclass(frozen=True, slots=True)
class Unrolled:
    """What two tapes have in common: parts in order, of which some come once per `period` of layers.

    The shallower one, with `layers` layers, has those once.
    """

    parts: tuple[tuple[bool, tuple[_Step, ...]], ...]  # is it repeated, what happens
    layers: int
    period: int
    about: dict[str, str]
    arranged: Order

    def tape(self, layers: int) -> Tape:
        """The tape with so many layers; one period less than the shallower had is the least. Raises NotPeriodic."""
        more, rest = divmod(layers - self.layers, self.period)
        if rest or more < -1:
            raise NotPeriodic(f"{layers} layers are not {self.layers} and periods of {self.period}")
        writer = _Writer(layers, more)
        for repeated, steps in self.parts:
            for _ in range(1 + more if repeated else 1):
                writer.play(steps)
        return Tape(self.arranged(writer.events), "traced", dict(self.about))


def in_order_of_birth(events: Iterable[Event]) -> tuple[Event, ...]:
    """The same events, storages that die in a row in the order of their birth."""
    ordered: list[Event] = []
    row: list[Free] = []
    for event in events:
        if isinstance(event, Free):
            row.append(event)
            continue
        if row:
            row.sort(key=_number)
            ordered += row
            row = []
        ordered.append(event)
    row.sort(key=_number)
    return (*ordered, *row)


def _number(event: Free) -> int:
    return event.id


def unroll(
    shallow: Tape, deep: Tape, layers: tuple[int, int], blocks: str, arranged: Order = in_order_of_birth
) -> Unrolled:
    """Read the tapes of two models of so many layers each, alike but for one period of blocks.

    blocks: what labels call the list of blocks ("layers" in "model.layers.3.mlp"). arranged: how storages that die in a
    row are ordered; `tuple` leaves them as they are. Raises NotPeriodic.
    """
    tapes = tuple(replace(tape, events=arranged(tape.events)) for tape in (shallow, deep))
    try:
        return _unroll(tapes, layers, _Split(blocks), arranged, by_fate=False)
    except NotPeriodic:
        return _unroll(tapes, layers, _Split(blocks), arranged, by_fate=True)


def _unroll(
    tapes: tuple[Tape, ...], layers: tuple[int, int], split: _Split, arranged: Order, *, by_fate: bool
) -> Unrolled:
    looks = tuple(_looks(tape, split, by_fate) for tape in tapes)
    kinds = _sizes(tapes, looks)
    one, two = (list(_steps(*of, split)) for of in zip(tapes, layers, looks, kinds, strict=True))
    return Unrolled(tuple(_parts(one, two)), layers[0], layers[1] - layers[0], tapes[0].about, arranged)


# --- tapes as steps ---


class Fate(NamedTuple):
    """When a storage dies: what was born last before that, its label before and after its layer, and in which instant."""

    head: str
    tail: str | None
    mark: str


# Of a storage: label before and after its layer, role, stream; its fate, if it names no layer.
Look = tuple[str, str | None, Role, int, Fate | None]
Kinds = dict[tuple[Look, int], _Kind]  # with its bytes


def _looks(tape: Tape, split: _Split, by_fate: bool) -> dict[int, Look]:
    """Of every storage, by id. by_fate: when it dies tells apart those that die elsewhere in a block."""
    looks: dict[int, Look] = {}
    mark = ""
    last = Fate("", None, mark)
    for event in tape.events:
        if isinstance(event, Mark):
            mark = f"{event.phase}: {event.instant}"
            last = last._replace(mark=mark)
        elif isinstance(event, Alloc):
            head, tail = split(event.label)[:2]
            last = Fate(head, tail, mark)
            looks[event.id] = head, tail, event.role, event.stream, None
        elif isinstance(event, Free) and by_fate and looks[event.id][1] is None:
            looks[event.id] = *looks[event.id][:4], last
    return looks


def _sizes(tapes: tuple[Tape, ...], looks: tuple[dict[int, Look], ...]) -> tuple[Kinds, Kinds]:
    """The kinds of either tape. Of what looks the same, sizes that one tape alone has are paired in their order."""
    seen: tuple[dict[Look, dict[int, None]], ...] = (defaultdict(dict), defaultdict(dict))
    for sizes, tape, of in zip(seen, tapes, looks, strict=True):
        for event in tape.events:
            if isinstance(event, Alloc):
                sizes[of[event.id]][event.size] = None
    kinds: tuple[Kinds, Kinds] = ({}, {})
    for look in seen[0] | seen[1]:
        mine, other = seen[0].get(look, {}), seen[1].get(look, {})
        less, more = [s for s in mine if s not in other], [s for s in other if s not in mine]
        if len(less) != len(more):
            raise NotPeriodic(f"{look[0]} has {len(less)} sizes in one and {len(more)} in the other")
        for a, b in [*zip(less, more, strict=True), *((s, s) for s in mine if s in other)]:
            kinds[0][look, a] = kinds[1][look, b] = _Kind(*look[:4], a, b)
    return kinds


class _Split:
    """A label before and after its layer, and the layer."""

    def __init__(self, blocks: str) -> None:
        self._pattern = re.compile(rf"(?<!\w){re.escape(blocks)}\.(\d+)(?!\w)")
        self._known: dict[str, tuple[str, str | None, int]] = {}

    def __call__(self, label: str) -> tuple[str, str | None, int]:
        if label not in self._known:
            found = self._pattern.search(label)
            parts = (label[: found.start(1)], label[found.end(1) :], int(found[1])) if found else (label, None, 0)
            self._known[label] = parts
        return self._known[label]


def _steps(tape: Tape, layers: int, looks: dict[int, Look], kinds: Kinds, split: _Split) -> Iterator[_Step]:
    """A tape of a model of `layers` layers."""
    named = 0
    births: dict[int, tuple[_Kind, int]] = {}  # id -> its kind, and how many of it were born before
    living: dict[_Kind, list[int]] = defaultdict(list)
    born: dict[_Kind, int] = defaultdict(int)
    for event in tape.events:
        if isinstance(event, Alloc):
            kind, layer = kinds[looks[event.id], event.size], split(event.label)[2]
            births[event.id] = kind, born[kind]
            born[kind] += 1
            living[kind].append(event.id)
            if kind.tail is None:
                yield _Step("birth", kind)
                continue
            yield _Step("birth", kind, (layer, layers - 1 - layer, layer - named))
            named = layer
        elif isinstance(event, Free | RecordStream):
            kind, nth = births[event.id]
            same = living[kind]
            oldest = same.index(event.id)
            where = len(same) - oldest, oldest, born[kind] - nth
            if isinstance(event, RecordStream):
                yield _Step(event.stream, kind, where)
                continue
            del same[oldest]
            yield _Step("death", kind, where)
        else:
            yield _Step(event)


class _Stock:
    """The storages of a kind, by number, and what they are called, by layer."""

    __slots__ = ("born", "labels", "living", "size")

    def __init__(self, size: int) -> None:
        self.size = size
        self.born: list[int] = []
        self.living: list[int] = []
        self.labels: dict[int, str] = {}


class _Writer:
    """Plays steps to events, for a model of `layers` layers, `more` periods above the shallower of the tapes."""

    def __init__(self, layers: int, more: int) -> None:
        self.events: list[Event] = []
        self._layers, self._more, self._named, self._number = layers, more, 0, 0
        self._stocks: dict[_Kind, _Stock] = {}

    def play(self, steps: Sequence[_Step]) -> None:
        """Once."""
        for step in steps:
            if step.kind is None:
                self.events.append(step.what)  # type: ignore[arg-type]
            elif step.what == "birth":
                self._birth(step.kind, step)
            else:
                self._touch(step.kind, step)

    def _birth(self, kind: _Kind, step: _Step) -> None:
        stock = self._stocks.get(kind)
        if stock is None:
            stock = self._stocks[kind] = _Stock(kind.small + (kind.large - kind.small) * self._more)
        label = kind.head
        if kind.tail is not None:
            layer = self._named = self._layer(step)
            label = stock.labels.get(layer) or stock.labels.setdefault(layer, sys.intern(f"{label}{layer}{kind.tail}"))
        number = self._number
        self.events.append(Alloc(number, stock.size, kind.role, label, kind.stream))
        stock.born.append(number)
        stock.living.append(number)
        self._number = number + 1

    def _layer(self, step: _Step) -> int:
        first, from_last, further = step.where
        if step.ways & _FIRST:
            return first
        return self._layers - 1 - from_last if step.ways & _SECOND else self._named + further

    def _touch(self, kind: _Kind, step: _Step) -> None:
        youngest, oldest, age = step.where
        try:
            stock = self._stocks[kind]
            living = stock.living
            at = -youngest if step.ways & _FIRST else oldest if step.ways & _SECOND else living.index(stock.born[-age])
            number = living[at]
        except (KeyError, IndexError, ValueError):
            raise NotPeriodic(f"{kind.head}: what should die there has died before") from None
        if step.what == "death":
            del living[at]
            self.events.append(Free(number))
        else:
            self.events.append(RecordStream(number, step.what))  # type: ignore[arg-type]


# --- where the deeper tape has more ---


def _parts(one: list[_Step], two: list[_Step]) -> Iterator[tuple[bool, tuple[_Step, ...]]]:
    """Walk both; where they part, the deeper one must go through a block once more."""
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
                raise NotPeriodic(f"{step.what} is elsewhere in the next block")
        yield False, tuple(two[done : j - length])
        yield True, tuple(two[j - length : j])
        j = done = j + length
    yield False, tuple(two[done:])


def _once_more(one: list[_Step], two: list[_Step], i: int, j: int) -> int:
    """How many steps of `two`, from j on, repeat those before and lead back to `one` at i: the way that leads furthest."""
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
