"""Hostile pickles: a corpus and random programs of opcodes. Nothing runs, nothing grows, all are refused in a line."""

from __future__ import annotations

import gzip
import io
import pickle
import pickletools
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from memfit import cli
from memfit.documents.snapshot import pickles, read
from memfit.documents.snapshot.history import tape_of
from memfit.documents.snapshot.pickles import hooked
from memfit.documents.snapshot.shape import Smaller
from memfit.errors import BadInput
from memfit.units import MIB

CORPUS = sorted((Path(__file__).parent / "data" / "pickles").glob("*.pickle"))
FORBIDDEN = ("os.", "subprocess.", "import", "pickle.find_class", "socket.", "shutil.", "ctypes.")
SEEN: list[str] = []
_WATCHING = [False]


def _audit(event: str, _: tuple[Any, ...]) -> None:
    if _WATCHING[0] and event.startswith(FORBIDDEN):
        SEEN.append(event)


sys.addaudithook(_audit)  # hooks stay for the process; it looks only while a file is read


def loaded(content: bytes) -> BadInput | None:
    """Read it as plain data and as a snapshot; return why it was refused. Fails when Python did anything else."""
    SEEN.clear()
    _WATCHING[0] = True
    found: list[BadInput | None] = []
    try:
        for small in (None, Smaller()):
            try:
                tape_of(pickles.loads(content, small))
                found.append(None)
            except BadInput as error:
                found.append(error)
    finally:
        _WATCHING[0] = False
        assert not SEEN, SEEN
    assert (found[0] is None) == (found[1] is None)
    return found[0]


def test_the_corpus_has_every_opcode_that_could_call_or_find_anything() -> None:
    used = {op.name for path in CORPUS for op in _opcodes(path.read_bytes())}
    assert {"GLOBAL", "STACK_GLOBAL", "INST", "OBJ", "NEWOBJ", "NEWOBJ_EX", "REDUCE", "BUILD", "EXT1", "EXT2", "EXT4",
            "PERSID", "BINPERSID", "NEXT_BUFFER", "READONLY_BUFFER"} <= used  # fmt: skip


def _opcodes(content: bytes) -> list[pickletools.OpcodeInfo]:
    found = []
    try:
        for op, _, _ in pickletools.genops(content):
            found.append(op)
    except Exception:  # broken on purpose: what came before counts
        return found
    return found


@pytest.mark.parametrize("path", CORPUS, ids=lambda path: path.stem)
def test_a_hostile_file_is_refused_and_does_nothing(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pickles.loads(b"\x80\x04N.")  # what is imported at the first use is there
    tracemalloc.start()
    try:
        error = loaded(path.read_bytes())
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert error is not None and error.hint and "\n" not in error.message
    assert peak < 64 * MIB
    assert cli.main(["explain", str(path)]) == 2
    out, err = capsys.readouterr()
    lines = err.splitlines()  # CPython itself may complain of a bytearray it could not make, before ours
    assert not out and lines[-2].startswith("error: ") and lines[-1].startswith("hint: ")
    with pytest.raises(BadInput):
        read(path)


CODES = [op.code.encode("latin-1") for op in pickletools.opcodes]
PROGRAMS = st.lists(st.one_of(st.sampled_from(CODES), st.binary(max_size=9)), max_size=60).map(b"".join)


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(PROGRAMS)
@example(b"}\x94")
def test_random_programs_of_opcodes_do_nothing(program: bytes) -> None:
    error = loaded(b"\x80\x04" + program + b".")
    assert error is None or error.hint


# ---- the lean reading ----------------------------------------------------------------------------------------------

SNAPSHOTS = sorted((Path(__file__).parent / "data" / "snapshots").glob("*.pickle.gz"))
DATA = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 63), 1 << 63) | st.floats(allow_nan=False) | st.text(max_size=400),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4) | st.tuples(inner)
    ),
    max_leaves=20,
)


@pytest.mark.parametrize("path", SNAPSHOTS, ids=lambda path: path.name)
def test_a_snapshot_read_leanly_is_the_same_tape(path: Path) -> None:
    content = gzip.decompress(path.read_bytes())
    assert tape_of(pickles.loads(content, Smaller())) == tape_of(pickles.loads(content))
    assert hooked(io.BytesIO(content)) is not None


@given(DATA)
def test_plain_data_comes_back_from_the_lean_reading(data: Any) -> None:
    content = pickle.dumps(data, 4)
    seen: list[Any] = []
    assert pickles.loads(content, lambda found: seen.append(found) or found) == as_lists(data)
    if isinstance(data, dict) and len(data) > 1:
        assert seen[-1] == as_lists(data)


def as_lists(data: Any) -> Any:
    """The same with a list in place of each tuple, which could be a key of a dict."""
    if isinstance(data, dict):
        return {key: as_lists(value) for key, value in data.items()}
    return list(map(as_lists, data)) if isinstance(data, list | tuple) and data else data
