"""Tapes as bytes: gzipped JSON in columns, versioned and checked when read; a few MB for a million events.

One letter per event gives its kind, and each kind has its own columns of values, in the order of its events. Each
label is stored once. The version in `schema` is raised when a column changes its meaning or is removed, not when one
is added. Nothing in a file is ever executed.
"""

from __future__ import annotations

import gzip
import re
from collections.abc import Iterator
from itertools import accumulate, repeat
from operator import attrgetter
from typing import Any, Literal

import msgspec
from msgspec import Struct

from memfit.errors import BadInput
from memfit.nouns.tape import (
    Alloc,
    EmptyCache,
    Event,
    Free,
    Mark,
    Oom,
    Phase,
    RecordStream,
    Role,
    Segment,
    SegmentAlloc,
    SegmentFree,
    Tape,
)
from memfit.reading import bounds
from memfit.units import LARGEST

SCHEMA: Literal["memfit.tape/1"] = "memfit.tape/1"
COMPRESSION = 6  # of 9; 9 takes four times as long for 3 % less
EVENT = 300  # bytes that reading and replaying an event takes, at most; 220 were measured over a million
LONGEST = 4096  # characters of a name, which many events may share
WIDEST = 1 << 64  # of ids, addresses and streams
COUNTS, DIGITS = ("capacity", "total_memory", "paged", "device"), 20  # numbers among the facts; their most digits
Source = Literal["formula", "traced", "measured"]
# letter -> (key of its columns, noun); the noun's fields are the columns
KINDS: dict[str, tuple[str, type[Event]]] = {
    "A": ("allocs", Alloc), "F": ("frees", Free), "M": ("marks", Mark), "S": ("segment_allocs", SegmentAlloc),
    "R": ("segment_frees", SegmentFree), "O": ("ooms", Oom), "E": ("empty_caches", EmptyCache),
    "U": ("uses", RecordStream),
}  # fmt: skip
_BEGINS = re.compile(rb'\s{0,9}\{\s{0,9}"schema"\s{0,9}:\s{0,9}"memfit\.tape/')
LETTERS = {kind: letter for letter, (_, kind) in KINDS.items()}


class AllocColumns(Struct, frozen=True):
    """Allocations. Ids are differences to the id before, labels are indices into `strings`."""

    id: list[int] = []
    size: list[int] = []
    role: list[Role] = []
    label: list[int] = []
    stream: list[int] = []


class SizeColumns(Struct, frozen=True):
    """Segments taken from the driver or returned to it, in bytes."""

    address: list[int] = []
    size: list[int] = []


class OomColumns(Struct, frozen=True):
    """Requests that could not be served, in bytes."""

    size: list[int] = []
    free: list[int] = []
    label: list[int] | None = None  # indices into `strings`; earlier files have none


class UseColumns(Struct, frozen=True):
    """Storages that a second stream uses (`record_stream`)."""

    id: list[int] = []
    stream: list[int] = []


class MarkColumns(Struct, frozen=True):
    """Instants; their names are indices into `strings`."""

    phase: list[Phase] = []
    instant: list[int] = []


class TapeDoc(Struct, frozen=True, kw_only=True):
    """The whole file."""

    schema: Literal["memfit.tape/1"] = SCHEMA
    source: Source
    about: dict[str, str]
    events: str
    strings: list[str]
    allocs: AllocColumns = AllocColumns()
    frees: list[int] = []
    marks: MarkColumns = MarkColumns()
    segment_allocs: SizeColumns = SizeColumns()
    segment_frees: SizeColumns = SizeColumns()
    ooms: OomColumns = OomColumns()
    uses: UseColumns = UseColumns()
    start: tuple[Segment, ...] = ()


def dumps(tape: Tape) -> bytes:
    """Return the file of a tape, packed unless it is very long; equal tapes give equal bytes."""
    of: dict[str, list[Any]] = {letter: [] for letter in KINDS}
    for event in tape.events:
        of[LETTERS[type(event)]].append(event)
    strings: dict[str, int] = {}

    def place(text: str) -> int:
        return strings.setdefault(text, len(strings))

    births, marks = of["A"], of["M"]
    document = TapeDoc(
        source=tape.source,
        about=tape.about,
        events="".join([LETTERS[type(event)] for event in tape.events]),
        allocs=AllocColumns(
            _steps([a.id for a in births]), [a.size for a in births], [a.role for a in births],
            [place(a.label) for a in births], [a.stream for a in births],
        ),
        frees=[free.id for free in of["F"]],
        marks=MarkColumns([m.phase for m in marks], [place(m.instant) for m in marks]),
        segment_allocs=SizeColumns(*_columns(of["S"], "address", "size")),
        segment_frees=SizeColumns(*_columns(of["R"], "address", "size")),
        ooms=OomColumns(
            [oom.size for oom in of["O"]], [oom.free for oom in of["O"]], [place(oom.label) for oom in of["O"]]
        ),
        uses=UseColumns(*_columns(of["U"], "id", "stream")),
        strings=list(strings),
        start=tape.start,
    )  # fmt: skip
    text = msgspec.json.encode(document)
    packed = gzip.compress(text, COMPRESSION, mtime=0)
    # what a file may take grows with its size on disk, and a very long tape packs to less than it is worth
    return packed if len(tape.events) * EVENT <= bounds.most_memory(len(packed)) else text


def known(content: bytes) -> bool:
    """Return whether an unpacked file begins as a tape does."""
    return _BEGINS.match(content) is not None


def loads(content: bytes) -> Tape:
    """Read a tape from JSON, gzipped or not. Raises BadInput for anything else and for columns that do not agree."""
    text = bounds.unpacked(content, "the tape", "gunzip FILE") if content.startswith(bounds.GZIP) else content
    try:
        document = msgspec.json.decode(text, type=TapeDoc)
        return Tape(tuple(_events(_checked(document))), document.source, document.about, document.start)
    except msgspec.ValidationError as error:
        raise BadInput(f"this is not a tape of memfit: {error}", hint=f"this memfit reads {SCHEMA}") from None
    except (msgspec.DecodeError, OSError, EOFError, UnicodeError, RecursionError) as error:
        raise BadInput(f"this is not a tape of memfit: {error}", hint="write one with --save-tape") from None
    except (StopIteration, IndexError, KeyError):
        raise BadInput("the tape is damaged: its columns do not agree", hint="record or copy it again") from None


def _checked(document: TapeDoc) -> TapeDoc:
    """Return a document whose numbers and texts are in range. Raises BadInput."""
    births, pieces = document.allocs, [piece for segment in document.start for piece in segment.pieces]
    sizes = (
        births.size, document.segment_allocs.size, document.segment_frees.size, document.ooms.size, document.ooms.free,
        [piece.size for piece in pieces], [piece.alloc.size for piece in pieces if piece.alloc],
    )  # fmt: skip
    numbers = (
        births.id, births.stream, document.frees, document.uses.id, document.uses.stream,
        document.segment_allocs.address, document.segment_frees.address,
        [segment.address for segment in document.start], [segment.stream for segment in document.start],
    )  # fmt: skip
    if any(column and not (min(column) >= 0 and max(column) <= LARGEST) for column in sizes):
        raise BadInput(f"a size in the tape is not from 0 to {LARGEST} bytes", hint="record or copy it again")
    if any(column and not (min(column) >= -WIDEST and max(column) <= WIDEST) for column in numbers):
        raise BadInput("a number in the tape is out of range", hint="record or copy it again")
    texts = (*document.strings, *(piece.alloc.label for piece in pieces if piece.alloc))
    if max(map(len, texts), default=0) > LONGEST:
        raise BadInput(f"a text in the tape has more than {LONGEST} characters", hint="record or copy it again")
    if any(not (value.isdecimal() and len(value) < DIGITS) for key, value in document.about.items() if key in COUNTS):
        raise BadInput(f"{' or '.join(COUNTS)} of the tape is no number", hint="record or copy it again")
    return document


def _events(document: TapeDoc) -> list[Event]:
    strings, births, marks = document.strings, document.allocs, document.marks
    columns = (births.id, births.size, births.role, births.label, births.stream)
    lengths = {len(column) for column in columns}
    if len(lengths) > 1 or len(marks.phase) != len(marks.instant):
        raise IndexError
    labels, ooms = [strings[at] for at in births.label], document.ooms
    oom_labels = [strings[at] for at in ooms.label] if ooms.label is not None else [""] * len(ooms.size)
    made: dict[str, Iterator[Event]] = {
        "A": map(Alloc, accumulate(births.id), births.size, births.role, labels, births.stream),
        "F": map(Free, document.frees),
        "M": (Mark(phase, strings[at]) for phase, at in zip(marks.phase, marks.instant, strict=True)),
        "S": map(SegmentAlloc, document.segment_allocs.address, document.segment_allocs.size),
        "R": map(SegmentFree, document.segment_frees.address, document.segment_frees.size),
        "O": map(Oom, ooms.size, ooms.free, oom_labels),
        "U": map(RecordStream, document.uses.id, document.uses.stream),
        "E": repeat(EmptyCache()),
    }
    events = [next(made[letter]) for letter in document.events]
    if any(next(rest, None) is not None for letter, rest in made.items() if letter != "E"):
        raise IndexError
    return events


def _steps(numbers: list[int]) -> list[int]:
    return [now - before for before, now in zip([0, *numbers], numbers, strict=False)]


def _columns(events: list[Any], *names: str) -> Iterator[list[int]]:
    for name in names:
        yield list(map(attrgetter(name), events))
