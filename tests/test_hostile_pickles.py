"""Hostile pickles: a corpus and random programs of opcodes. Nothing runs, nothing grows, all are refused in a line."""

from __future__ import annotations

import gzip
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
    """Read it as a snapshot; return why it was refused. Fails when Python did anything else."""
    SEEN.clear()
    _WATCHING[0] = True
    try:
        tape_of(pickles.loads(content))
    except BadInput as error:
        return error
    finally:
        _WATCHING[0] = False
        assert not SEEN, SEEN
    return None


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


# ---- against Python's own unpickler --------------------------------------------------------------------------------

SNAPSHOTS = sorted((Path(__file__).parent / "data" / "snapshots").glob("*.pickle.gz"))
DATA = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 63), 1 << 63) | st.floats(allow_nan=False) | st.text(max_size=400),
    lambda inner: (
        st.lists(inner, max_size=5)
        | st.lists(inner, max_size=5).map(tuple)
        | st.dictionaries(st.text(max_size=5), inner, max_size=4)
    ),
    max_leaves=20,
)
PROTOCOLS = range(2, pickle.HIGHEST_PROTOCOL + 1)


@pytest.mark.parametrize("path", SNAPSHOTS, ids=lambda path: path.name)
def test_a_snapshot_of_any_protocol_is_the_same_tape(path: Path) -> None:
    plain = pickle.loads(gzip.decompress(path.read_bytes()))
    expected = tape_of(plain)
    for protocol in PROTOCOLS:
        assert tape_of(pickles.loads(pickle.dumps(plain, protocol))) == expected


TEXTS = st.sampled_from(["", "N/A", "long " * 9, "ü", "alloc"])  # kept short: equal ones are remembered
NUMBERS = st.sampled_from([0, 255, 256, 65_535, 65_536, (1 << 31) - 1, 1 << 31, 1 << 47])
LINES = st.integers(0, 300).map(lambda line: {"name": "f", "filename": "a.py", "line": line})
FRAMES = st.lists(st.lists(LINES, max_size=4), min_size=1, max_size=3)
EVENT = st.fixed_dictionaries(
    {"action": st.sampled_from(["alloc", "free_requested", "free_completed", "segment_map"]), "addr": NUMBERS,
     "size": NUMBERS, "stream": NUMBERS, "time_us": NUMBERS, "user_metadata": TEXTS,
     "pool_id": st.tuples(NUMBERS, NUMBERS)},
    optional={"compile_context": TEXTS},
)  # fmt: skip


@settings(deadline=None, max_examples=40)
@given(st.lists(EVENT, max_size=12), FRAMES, st.data(), st.sampled_from(PROTOCOLS), st.integers(20, 90))
def test_every_event_is_read_as_python_reads_it(
    events: list[dict[str, Any]], stacks: list[Any], drawn: st.DataObject, protocol: int, chunk: int
) -> None:
    place = drawn.draw(st.integers(0, 8))  # PyTorch writes the stack last; who makes a file by hand may not
    for event in events:
        shared, rest = drawn.draw(st.sampled_from([None, *stacks])), list(event.items())
        if shared is not None:
            stack = ("frames", drawn.draw(st.sampled_from([shared, list(shared)])))
            event.clear()
            event.update([*rest[:place], stack, *rest[place:]])
    content = pickle.dumps({"device_traces": [events]}, protocol)
    with pytest.MonkeyPatch.context() as patched:  # so that ends of what is read fall into events
        patched.setattr(pickles, "CHUNK", chunk)
        patched.setattr(pickles, "AHEAD", chunk // 2)
        found = pickles.loads(content)["device_traces"][0]
    kept = [event | {"frames": event.get("frames", ())} for event in events]
    names = ("action", "addr", "size", "stream", "time_us", "user_metadata", "pool_id", "frames")
    for one, other in zip(found[1:], kept[1:], strict=True):
        if other["action"] == "free_requested":
            assert one.action == other["action"]
        else:
            assert as_lists([getattr(one, name) for name in names]) == as_lists([other[name] for name in names])


@settings(deadline=None, max_examples=40)
@given(DATA, st.sampled_from(PROTOCOLS))
def test_plain_data_comes_back(data: Any, protocol: int) -> None:
    assert pickles.loads(pickle.dumps(data, protocol)) == as_lists(data)


def as_lists(data: Any) -> Any:
    """The same with a list in place of each tuple, which could be a key of a dict."""
    if isinstance(data, dict):
        return {key: as_lists(value) for key, value in data.items()}
    return list(map(as_lists, data)) if isinstance(data, list | tuple) else data
