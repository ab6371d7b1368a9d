"""The flame graph and the map of segments of a page: every byte of a snapshot is shown, and no text becomes markup."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from memfit.documents.snapshot import pickled, read
from memfit.documents.snapshot.frames import stacks_of
from memfit.explain.history.reading import memory_of, segments_of
from memfit.nouns.tape import Alloc, Free, Piece, Segment, Tape
from memfit.report.pictures_html import flame, pictures, segment_map, stacks_of_groups
from memfit.units import MIB

OURS = Path(__file__).parent / "data" / "snapshots"
SNAPSHOTS = sorted(OURS.glob("*.pickle.gz"))


@pytest.mark.parametrize("path", SNAPSHOTS, ids=lambda path: path.name)
def test_every_live_byte_is_in_a_segment(path: Path) -> None:
    tape = read(path)
    assert tape.device is not None
    stacks = stacks_of(pickled(path), tape.device or 0)
    assert all(size > 0 for size in stacks.values())
    memory, segments = memory_of(tape), segments_of(tape)
    there = [piece for segment in segments for piece in segment.pieces if piece.mapped]
    assert sum(piece.size for piece in there) == memory.reserved
    assert sum(piece.size for piece in there if piece.alloc) == memory.allocated
    assert sum(group.bytes for group in memory.groups) == memory.requested
    assert "<script" not in pictures(memory, stacks, segments)


def test_boxes_are_as_wide_as_their_bytes_and_lie_below_their_callers() -> None:
    page = flame(
        {("main (a.py:1)", "f (a.py:2)"): 30, ("main (a.py:1)", "g (a.py:3)"): 10, ("other (b.py:1)",): 60}, "", ""
    )
    boxes = re.findall(r'left:([\d.]+)%;width:([\d.]+)%;top:(\d+)px" title="(\w+)', page)
    assert boxes == [
        ("0.000", "60.000", "0", "other"), ("60.000", "40.000", "0", "main"), ("60.000", "30.000", "19", "f"),
        ("90.000", "10.000", "19", "g"),
    ]  # fmt: skip


def test_names_cannot_become_markup() -> None:
    evil = '"><script>alert(1)</script>'
    alloc = Alloc(0, MIB, "parameters", evil)
    page = pictures(
        memory_of(Tape((alloc,), "traced")),
        {(evil,): 1},
        (Segment(0, 0, False, False, (Piece(MIB, alloc), Piece(MIB))),),
    )
    assert "<script" not in page and 'title=""' not in page


def test_thin_neighbours_are_one_and_no_byte_is_lost() -> None:
    pieces = (*(Piece(512, Alloc(n, 512, "activations")) for n in range(1000)), Piece(MIB))
    page = segment_map((Segment(0, 0, False, False, pieces),), "")
    widths = [float(w) for w in re.findall(r'<b class="\w+" style="width:([\d.]+)%', page)]
    assert len(widths) == 2 and sum(widths) == pytest.approx(100, abs=0.01)


def test_without_stacks_roles_and_lines_stand_for_them() -> None:
    tape = Tape((Alloc(0, MIB, "parameters", "w (x.py:1)"), Alloc(1, MIB), Free(1)), "traced")
    assert stacks_of_groups(memory_of(tape).groups)["parameters", "x.py:1", "w"] == MIB


def test_nothing_makes_no_picture() -> None:
    page = pictures(memory_of(Tape((), "traced")), {}, ())
    assert "0 segments" in page and "by stack" not in page
