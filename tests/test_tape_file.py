"""Saved tapes: what is written is read back the same, and nothing else is."""

from __future__ import annotations

import gzip
import json
import pickle
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memfit.documents import tape_file
from memfit.documents.snapshot import read
from memfit.errors import BadInput
from memfit.nouns.tape import (
    PHASES,
    ROLES,
    Alloc,
    EmptyCache,
    Event,
    Free,
    Mark,
    Oom,
    Piece,
    RecordStream,
    Segment,
    SegmentAlloc,
    SegmentFree,
    Tape,
)

WORDS, IDS, SIZES = st.text(max_size=12), st.integers(-(2**40), 2**62), st.integers(0, 2**50)
ALLOCS = st.builds(Alloc, IDS, SIZES, st.sampled_from(ROLES), WORDS, st.integers(0, 2**40))
EVENTS = st.one_of(
    ALLOCS,
    st.builds(Free, IDS),
    st.builds(Mark, st.sampled_from(PHASES), WORDS),
    st.builds(SegmentAlloc, SIZES, SIZES),
    st.builds(SegmentFree, SIZES, SIZES),
    st.builds(Oom, SIZES, SIZES, WORDS),
    st.just(EmptyCache()),
    st.builds(RecordStream, IDS, st.integers(0, 2**62)),
)
PIECES = st.builds(Piece, SIZES, st.none() | ALLOCS, st.booleans())
SEGMENTS = st.builds(
    Segment, SIZES, st.integers(0, 9), st.booleans(), st.booleans(), st.lists(PIECES, max_size=3).map(tuple)
)
TAPES = st.builds(
    Tape, st.lists(EVENTS, max_size=30).map(tuple), st.sampled_from(["formula", "traced", "measured"]),
    st.dictionaries(WORDS, WORDS, max_size=3), st.lists(SEGMENTS, max_size=2).map(tuple),
)  # fmt: skip


@given(tape=TAPES)
def test_a_tape_comes_back_equal(tape: Tape) -> None:
    content = tape_file.dumps(tape)
    assert tape_file.loads(content) == tape
    assert tape_file.dumps(tape_file.loads(content)) == content


def test_a_file_from_before_requests_that_failed_had_a_label_is_read() -> None:
    data = json.loads(document())
    del data["ooms"]["label"]
    assert Oom(5) in tape_file.loads(json.dumps(data).encode()).events


def test_every_kind_of_event_has_a_letter() -> None:
    assert {kind for _, kind in tape_file.KINDS.values()} == set(get_args(Event))


def test_a_million_events_take_a_few_megabytes() -> None:
    """By the share of a hundred thousand."""
    events: list[Event] = []
    for number in range(50_000):
        events += (
            Alloc(number, 512 * (number % 977), "activations", f"block {number % 32}, mlp {number % 7}"),
            Free(number),
        )
    assert len(tape_file.dumps(Tape(tuple(events), "traced"))) < 500_000


def test_the_file_is_read_by_its_content(tmp_path: Path) -> None:
    tape = Tape((Mark("load", "weights"), Alloc(1, 5), Free(1)), "traced", {"torch": "2.13"})
    path = tmp_path / "any.name"
    path.write_bytes(tape_file.dumps(tape))
    assert read(path) == tape
    path.write_bytes(gzip.decompress(path.read_bytes()))
    assert read(path) == tape


def document(**changes: Any) -> bytes:
    tape = Tape((Mark("load", "w"), Alloc(1, 5, label="x"), SegmentAlloc(0, 2), Oom(5), Free(1)), "traced")
    data = json.loads(gzip.decompress(tape_file.dumps(tape)))
    for key, value in changes.items():
        place = data
        *path, last = key.split("__")
        for step in path:
            place = place[step]
        place[last] = value
    return json.dumps(data).encode()


DAMAGED = {
    "a later version": document(schema="memfit.tape/2"),
    "no source": document(source="guessed"),
    "an unknown letter": document(events="MASOFX"),
    "an event too many": document(events="MASOFF"),
    "an event too few": document(events="MASO"),
    "a label that is not there": document(allocs__label=[9]),
    "a column too short": document(allocs__size=[]),
    "an unknown role": document(allocs__role=["weights"]),
    "a size as text": document(allocs__size=["5"]),
    "marks of two lengths": document(marks__instant=[]),
    "segments of two lengths": document(segment_allocs__size=[]),
    "ooms of two lengths": document(ooms__free=[]),
    "not JSON": b"{",
    "no object": b"[]",
    "a pickle": pickle.dumps({"schema": "memfit.tape/1"}),
}


@pytest.mark.parametrize("content", DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_tape_is_refused(content: bytes) -> None:
    with pytest.raises(BadInput) as caught:
        tape_file.loads(content)
    assert caught.value.hint


def test_columns_a_later_memfit_adds_are_passed_over() -> None:
    assert tape_file.loads(document(new_column=[1])) == tape_file.loads(document())


def test_devices_and_pipes_are_written_to_and_stay(tmp_path: Path) -> None:
    import os
    import stat
    import threading

    from memfit.documents.output_files import check_free, write_files
    from memfit.errors import BadInput, Refused

    pipe, read = tmp_path / "pipe", list[bytes]()
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: read.append(pipe.read_bytes()))
    reader.start()
    write_files({pipe: b"written"}, force=False)
    reader.join(10)
    assert read == [b"written"] and stat.S_ISFIFO(pipe.stat().st_mode)
    with pytest.raises(BadInput):
        write_files({Path("/dev/full"): b"x"}, force=True)
    assert stat.S_ISCHR(Path("/dev/full").stat().st_mode)
    with pytest.raises(BadInput):
        check_free([tmp_path], force=True)
    file, link = tmp_path / "file", tmp_path / "link"
    file.touch(0o600)
    link.symlink_to(file)
    with pytest.raises(Refused):
        check_free([file], force=False)
    with pytest.raises(Refused):
        check_free([link], force=False)
    write_files({file: b"new", link: b"other"}, force=True)
    assert file.read_bytes() == b"new" and stat.S_IMODE(file.stat().st_mode) == 0o600
    assert not link.is_symlink() and link.read_bytes() == b"other"


def test_a_long_tape_is_written_so_that_it_can_be_read(tmp_path: Path) -> None:
    """What a file may take grows with its size on disk, and such a tape packs to next to nothing."""
    events = (Mark("step", "s"), *(event for n in range(1, 120_001) for event in (Alloc(n, 512), Free(n))))
    path = tmp_path / "long.tape.gz"
    path.write_bytes(tape_file.dumps(Tape(events, "traced")))
    assert len(read(path).events) == len(events)
