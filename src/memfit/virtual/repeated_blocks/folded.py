"""Rows laid out by size, folded to one storage each, which grows block by block, and laid out again for the whole."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from memfit.nouns.tape import Alloc, Event, Free, RecordStream, Tape
from memfit.virtual.device.ledger import BROADCAST, BUCKET, BUCKET_SIZES, WARM_UP
from memfit.virtual.device.rows import COUNT, Piece, Row
from memfit.virtual.repeated_blocks.unrolled import NotPeriodic, Order, in_order_of_birth, unroll

ROWS = (BROADCAST, BUCKET, WARM_UP)
Rows = Sequence[Row]


def fold(tape: Tape, rows: Rows) -> Tape:
    """Every row as one storage. Raises NotPeriodic where the tape has other rows, or one does not live and die as one."""
    return replace(tape, events=tuple(_numbered(_Fold(rows).events(tape)))) if rows else tape


def _numbered(events: Iterable[Event]) -> Iterator[Event]:
    """Storages by the order of their birth."""
    names: dict[int, int] = {}
    for event in events:
        if isinstance(event, Alloc):
            names[event.id] = len(names)
        yield replace(event, id=names[event.id]) if isinstance(event, Alloc | Free | RecordStream) else event


class _Fold:
    def __init__(self, rows: Rows) -> None:
        self._rows = _laid_out(rows)
        self._next = next(self._rows, None)
        self._first: dict[int, int] = {}  # storage of a row -> the first of it
        self._alive: dict[int, set[int]] = {}  # by first
        self._born = 0  # of the next row
        self._latest = 0  # the first of the row that is being born, or was last
        self._open: int | None = None  # a row that is not wholly dead, and must be before anything is born

    def events(self, tape: Tape) -> Iterator[Event]:
        """Of the tape, folded."""
        for event in tape.events:
            if isinstance(event, Alloc) and event.label in ROWS:
                yield from self._birth(event)
            elif isinstance(event, Free) and event.id in self._first:
                yield from self._death(self._first[event.id], event.id)
            elif self._born or (self._open is not None and not isinstance(event, Free)):
                raise NotPeriodic("something happens between the storages of a row")
            elif isinstance(event, Alloc) and event.label == BUCKET_SIZES:
                yield replace(event, size=COUNT)
            else:
                yield event
        if self._next is not None:
            raise NotPeriodic(f"{self._next.label}: not all rows are there")

    def _birth(self, event: Alloc) -> Iterator[Event]:
        row = self._next
        if row is None or (event.label, event.size) != (row.label, row.sizes[self._born]):
            raise NotPeriodic(f"{event.label}: another row than what was laid out")
        if not self._born:
            self._latest, self._alive[event.id] = event.id, set()
            self._open = event.id if row.label == BROADCAST else self._open
            yield replace(event, size=row.total)
        self._first[event.id] = self._latest
        self._alive[self._latest].add(event.id)
        self._born += 1
        if self._born == len(row.sizes):
            self._born, self._next = 0, next(self._rows, None)

    def _death(self, first: int, number: int) -> Iterator[Event]:
        alive = self._alive[first]
        alive.discard(number)
        if not alive and not self._born:
            self._open = None
            yield Free(first)
        else:
            self._open = first


def unfold(tape: Tape, rows: Rows, arranged: Order = in_order_of_birth) -> Tape:
    """The reverse. Raises NotPeriodic where rows and storages differ."""
    return replace(tape, events=arranged(_unfolded(tape.events, rows))) if rows else tape


def _unfolded(events: Sequence[Event], rows: Rows) -> Iterator[Event]:
    left = list(_laid_out(rows))[::-1]
    names: dict[int, list[int]] = {}  # as the folded tape numbers a storage -> its own
    number = 0
    for event in events:
        if isinstance(event, Alloc):
            sizes = [event.size]
            if event.label in ROWS:
                row = left.pop()
                sizes = row.sizes
                if (row.label, row.total) != (event.label, event.size):
                    raise NotPeriodic(f"{event.label}: {event.size} bytes in blocks, {row.total} in a row")
            elif event.label == BUCKET_SIZES:
                sizes = [COUNT * len(left[-1].sizes)]
            here = list(range(number, number + len(sizes)))
            number += len(sizes)
            made = [replace(event, id=i, size=size) for i, size in zip(here, sizes, strict=True)]
            if event.label == BROADCAST:
                names[event.id] = []
                yield from (made[i] if born else Free(here[i]) for born, i in row.living)
            else:
                names[event.id] = here
                yield from made
        elif isinstance(event, Free | RecordStream):
            yield from (replace(event, id=i) for i in names[event.id])
        else:
            yield event


@dataclass(frozen=True, slots=True)
class _LaidOut:
    label: str
    total: int  # bytes of its tensors, which grow with the depth
    sizes: list[int]
    living: tuple[tuple[bool, int], ...]


def _laid_out(rows: Rows) -> Iterator[_LaidOut]:
    """Those that allocate something; rows that are alike are laid out once."""
    known: dict[Row, _LaidOut] = {}
    for row in rows:
        if row not in known:
            living = tuple(row.living()) if row.label == BROADCAST else ()
            known[row] = _LaidOut(row.label, row.total(), row.sizes(), living)
        if known[row].sizes:
            yield known[row]


# --- what the whole model has laid out ---


def rows_of(three: Sequence[Rows], layers: tuple[int, int, int], whole: int) -> tuple[Row, ...]:
    """The rows of the whole from those of three depths. Raises NotPeriodic where nothing says what they are."""
    known: dict[tuple[Row, ...], Row] = {}
    if len({len(rows) for rows in three}) > 1:
        raise NotPeriodic("more rows at another depth")
    for same in zip(*three, strict=True):
        if same not in known:
            known[same] = _row(same, layers, whole)
    return tuple(known[same] for same in zip(*three, strict=True))


def _row(three: tuple[Row, ...], layers: tuple[int, int, int], whole: int) -> Row:
    least, shallow, deep = three
    if len({(row.label, row.limits, row.arrived) for row in three}) > 1:
        raise NotPeriodic("other limits at another depth")
    found = unroll(_listed(shallow), _listed(deep), layers[1:], "")
    if found.tape(layers[0]).events != _listed(least).events:
        raise NotPeriodic("what is laid out does not repeat")
    made = replace(deep, pieces=tuple(_piece(event) for event in found.tape(whole).events if isinstance(event, Alloc)))
    if len({bool(row.sizes()) for row in (*three, made)}) > 1:
        raise NotPeriodic("nothing is laid out at another depth")
    # the first full bucket is where those of before die: in blocks that do not repeat, or with the last gradient
    if made.arrived:
        full = [(row.first(), row.first() == len(row.pieces)) for row in (*three, made)]
        if len({n for n, _ in full}) > 1 and not all(last for _, last in full):
            raise NotPeriodic("the first bucket is full elsewhere")
    return made


def _listed(row: Row) -> Tape:
    """A list of tensors as a tape."""
    return Tape(tuple(Alloc(i, n, label=str(dtype)) for i, (dtype, n) in enumerate(row.pieces)), "traced")


def _piece(event: Alloc) -> Piece:
    return getattr(torch, event.label.removeprefix("torch.")), event.size
