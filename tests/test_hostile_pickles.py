"""Hostile pickles: a corpus and random programs of opcodes. Nothing runs, nothing grows, all are refused in a line."""

from __future__ import annotations

import gzip
import pickle
import pickletools
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from memfit import cli
from memfit.documents.snapshot import pickles, read
from memfit.documents.snapshot.history import tape_of
from memfit.documents.snapshot.shape import TraceEntry
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


ENGINES = [None, pickles.engine] if pickles.engine else [None]


def loads(content: bytes) -> Any:
    """Return what a pickle holds. Fails where the parser and its compiled twin, if it is there, do not agree."""
    found: list[Any] = []
    for engine in ENGINES:
        pickles.engine = engine  # pytest's monkeypatch would import something while imports are watched
        try:
            found.append(pickles.loads(content))
        except BadInput as error:
            said = "damaged" if "is damaged" in error.message else error.message  # how, each says in its own words
            found.append((said, error.hint, error))
        finally:
            pickles.engine = ENGINES[-1]
    if isinstance(found[0], tuple):  # a pickle's own tuples are read as lists
        assert all(one[:2] == found[0][:2] for one in found)
        raise found[0][2]
    assert all(same(one, found[0]) for one in found)
    return found[0]


def same(one: Any, other: Any) -> bool:
    """Are two results equal? Each pair of items is compared once, however often and deep it lies in them."""
    seen: set[tuple[int, int]] = set()
    left = [(one, other)]
    while left:
        a, b = left.pop()
        if type(a) is not type(b):
            return False
        if (id(a), id(b)) in seen:
            continue
        seen.add((id(a), id(b)))
        if isinstance(a, TraceEntry):
            left += [(getattr(a, name), getattr(b, name)) for name in a.__struct_fields__]
        elif isinstance(a, dict) and list(a) == list(b):
            left += zip(a.values(), b.values(), strict=True)
        elif isinstance(a, list) and len(a) == len(b):
            left += zip(a, b, strict=True)
        elif repr(a) != repr(b):
            return False
    return True


def loaded(content: bytes, load: Callable[[bytes], Any] = loads) -> BadInput | None:
    """Read it as a snapshot; return why it was refused. Fails when Python did anything else."""
    SEEN.clear()
    _WATCHING[0] = True
    try:
        tape_of(load(content))
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


@pytest.mark.parametrize("engine", ENGINES, ids=["python", "compiled"][: len(ENGINES)])
@pytest.mark.parametrize("path", CORPUS, ids=lambda path: path.stem)
def test_a_hostile_file_is_refused_and_does_nothing(
    path: Path, engine: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pickles, "engine", engine)
    pickles.loads(b"\x80\x04N.")  # what is imported at the first use is there
    tracemalloc.start()
    try:
        error = loaded(path.read_bytes(), pickles.loads)
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
        assert tape_of(loads(pickle.dumps(plain, protocol))) == expected


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
        found = loads(content)["device_traces"][0]
    kept = [event | {"frames": event.get("frames", ())} for event in events]
    names = ("action", "addr", "size", "stream", "time_us", "user_metadata", "pool_id", "frames")
    for one, other in zip(found[1:], kept[1:], strict=True):
        if other["action"] == "free_requested":
            assert one.action == other["action"]
        else:
            assert as_lists([getattr(one, name) for name in names]) == as_lists([other[name] for name in names])


def event(**given: Any) -> dict[str, Any]:
    """An event as torch records it."""
    return {"action": "alloc", "addr": 1 << 44, "size": 512, "stream": 0, "time_us": 7, "pool_id": (0, 0), **given}


@pytest.mark.parametrize("depth", [999, 1000, 1001, 1002, 2500])  # pickles write lists in parts of 1,000
def test_equal_stacks_deeper_than_a_part_of_a_list_are_whole(depth: int) -> None:
    frames = [{"name": "f", "filename": "a.py", "line": line} for line in range(depth)]
    trace = [event(frames=list(frames)) for _ in range(5)]
    for found in loads(pickle.dumps({"device_traces": [trace]}))["device_traces"][0][1:]:
        assert found.frames == frames


def test_an_event_that_is_listed_twice_is_the_event_twice() -> None:
    one, other = event(frames=[]), event(frames=[], size=1024)
    found = loads(pickle.dumps([one, other, other, dict(other), other]))
    assert [entry.size for entry in found[1:]] == [1024] * 4


def test_nothing_is_added_to_a_stack_that_others_share() -> None:
    shared = b"\x80\x04]\x94(N\x94]\x94(h\x01e"  # [None, [None]], whose inner list stands for all equal ones
    assert loads(shared + b"]\x94(h\x01ee.") == [None, [None], [None]]
    with pytest.raises(BadInput, match="damaged"):
        loads(shared + b"h\x02Nae.")


SMALL = pickle.dumps(
    {
        "device_traces": [[event(frames=[{"name": "f"}], time_us=n) for n in range(9)]],
        "allocator_settings": {"max_split_size": -1, "roundup_power2_divisions": {}},
        "segments": [],
    },
    protocol=4,
)
CUTS = st.lists(
    st.tuples(st.integers(0, len(SMALL)), st.integers(0, 6), st.one_of(st.sampled_from(CODES), st.binary(max_size=4))),
    max_size=4,
)


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None, max_examples=300)
@given(CUTS, st.integers(0, len(SMALL)))
@example([(0, 0, b"")], 40)
@example([(len(SMALL) - 1, 0, b"X\xff\xff\xff\xff")], 0)  # a text of 4 GiB
@example([(2, 9, b"\x95" + b"\xff" * 8)], 0)  # a frame of 16 EiB
@example([(len(SMALL) - 1, 0, b"(" * 5000)], 0)
@example([(len(SMALL) - 1, 0, b"\x8a\x09" + b"\x80" * 9)], 0)
def test_a_damaged_snapshot_is_read_or_refused_alike(cuts: list[tuple[int, int, bytes]], left: int) -> None:
    content = SMALL
    for place, gone, put in cuts:
        content = content[:place] + put + content[place + gone :]
    for damaged in (content, content[: len(content) - left]):
        error = loaded(damaged)
        assert error is None or error.hint


@settings(deadline=None, max_examples=40)
@given(DATA, st.sampled_from(PROTOCOLS))
def test_plain_data_comes_back(data: Any, protocol: int) -> None:
    assert loads(pickle.dumps(data, protocol)) == as_lists(data)


def as_lists(data: Any) -> Any:
    """The same with a list in place of each tuple, which could be a key of a dict."""
    if isinstance(data, dict):
        return {key: as_lists(value) for key, value in data.items()}
    return list(map(as_lists, data)) if isinstance(data, list | tuple) else data
