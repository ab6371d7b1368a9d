"""Readers of untrusted files: bombs cost what their size is worth, damage ends in a line, nothing runs."""

from __future__ import annotations

import copy
import gzip
import json
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import fuzz
from memfit.catalogue.cards import parse_gpu
from memfit.errors import BadInput
from memfit.explain import explain, read_text
from memfit.reading import settings_text

sys.addaudithook(fuzz.watch)  # hooks stay for the process; it looks only while a command reads

OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 8.00 GiB"
STEP = {"filename": "/x/train.py", "line": 3, "name": "step"}
ALIVE = {"size": 512, "requested_size": 512, "state": "active_allocated", "frames": []}
MAPPED = 2 << 20
ALLOCS = {
    "id": [1] * 8000, "size": [1536] * 8000, "role": ["temporaries"] * 8000, "label": [0] * 8000, "stream": [0] * 8000
}  # fmt: skip


def event(action: str, size: int, address: int, **other: Any) -> dict[str, Any]:
    return {"action": action, "size": size, "addr": address, "stream": 0, "frames": [STEP], **other}


def segment(address: int, blocks: list[Any], size: int) -> dict[str, Any]:
    return {"address": address, "total_size": size, "blocks": blocks, "segment_type": "small", "is_expandable": False}


def snapshot(segments: list[Any], trace: list[Any]) -> bytes:
    return pickle.dumps({"segments": segments, "device_traces": [trace]}, 4)


def tape(columns: bytes) -> bytes:
    return b'{"schema":"memfit.tape/1","source":"traced","about":{},"strings":["x"],' + columns + b"}"


def keys(number: int) -> bytes:
    """A dict of integers that all have the hash 0."""
    made = b"".join(pickle.dumps(((1 << 61) - 1) << n, 2)[2:-1] + b"N" for n in range(1, number))
    return b"\x80\x04}(" + made + b"u."


def bombs() -> dict[str, bytes]:
    shared = [ALIVE] * 2000
    stack = [STEP] * 8000
    laughs: list[Any] = [1]
    for _ in range(40):
        laughs = [laughs] * 9
    held = [dict(ALIVE) for _ in range(3000)]
    turns = [[STEP], [{"filename": "", "line": 0, "name": "torch::autograd::Engine::x"}]]
    many = [event("segment_map", MAPPED, 2 * n * MAPPED) for n in range(5000)]
    return {
        "shared references": snapshot([segment(0, shared, 512 * 2000)] * 2000, []),
        "a stack shared by all": snapshot(
            [segment(0, held, 512 * 3000)], [event("alloc", 512, 512 * n, frames=stack) for n in range(3000)]
        ),
        "a frame that repeats": snapshot(
            [segment(0, [ALIVE], 512)], [event("alloc", 512, 0, frames=[{**STEP, "line": laughs, "name": laughs}])]
        ),
        "thousands of parts": snapshot(
            [segment(0, held, 512 * 3000)], [event("alloc", 512, 512 * n, frames=turns[n % 2]) for n in range(3000)]
        ),
        "thousands of maps": snapshot([], [*many, *({**one, "action": "segment_unmap"} for one in many)]),
        "equal hashes": keys(2000),
        "many dicts": b"\x80\x04](" + b"}" * 1_000_000 + b"e.",
        "a long memo": b"\x80\x04Nr\xff\xff\xff\xfe.",
        "packed twice": gzip.compress(gzip.compress(bytes(64 << 20))),
        "packed events": gzip.compress(tape(b'"events":"' + b"E" * (16 << 20) + b'"')),
        "thousands of releases": tape(
            b'"events":"'
            + b"A" * 8000
            + b"F" * 4000
            + b"E" * 8000
            + b'","allocs":'
            + json.dumps(ALLOCS).encode()
            + b',"frees":'
            + json.dumps(list(range(1, 8000, 2))).encode()
        ),
        "a recording of no size": b'{"format":"x","op":"O","size":[-1],"addr":[0],"stream":[0]}',
        "deep JSON": tape(b'"x":' + b"[" * 200_000),
    }


@pytest.mark.skipif(sys.platform != "linux", reason="the address space is limited on Linux")
def test_bombs_cost_what_their_size_is_worth(tmp_path: Path) -> None:
    """In a process of its own: the peak of this one may be higher already."""
    files = []
    for name, content in bombs().items():
        path = tmp_path / name.replace(" ", "-")
        path.write_bytes(content)
        files.append(str(path))
    program = (
        "import sys; from pathlib import Path; sys.path.insert(0, sys.argv[1]); import fuzz\n"
        "sys.addaudithook(fuzz.watch)\n"
        "for file in sys.argv[2:]:\n"
        "    for command in ('explain {}', 'replay {}'):\n"
        "        if rule := fuzz.tried(command, Path(file)): print(file, command, rule)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(Path(fuzz.__file__).parent), *files],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    assert not done.stdout


@pytest.mark.parametrize(
    "text",
    [
        "a: &a {" + ", ".join(f"k{n}: 1" for n in range(300)) + "}\n"
        + "".join(f"b{n}: &b{n} {{<<: [{', '.join(['*a' if not n else f'*b{n - 1}'] * 40)}]}}\n" for n in range(4)),
        "a0: &a0 [x, x, x]\n" + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 30)),
        "a." * 200_000 + "b = 1",
        "a = 0x" + "f" * 4000,
        '{"a": ' + "9" * 4299 + "}",
        "a: 1" + ":1" * 200_000,
        "\n".join(f"{((1 << 61) - 1) * n}: 1" for n in range(1, 5000)),
        "a: &a [*a]",
        "a: !!int ''",
        "a: " + "[" * 50_000,
    ],
    ids=["merge keys", "aliases", "dotted", "hexadecimal", "digits", "base 60", "hashes", "a cycle", "empty", "deep"],
)  # fmt: skip
def test_settings_that_unfold_are_refused(text: str) -> None:
    with pytest.raises(BadInput) as caught:
        settings_text.parsed(text, "a file")
    assert caught.value.hint and len(caught.value.message) < 300


@pytest.mark.parametrize("text", ['{"a": {"b": 1, "b": 2}}', "a: 1\na: 2\n", "a: {b: 1, b: [1]}\n", "a = 1\na = 2\n"])
def test_a_key_with_two_values_is_refused(text: str) -> None:
    with pytest.raises(BadInput, match="not valid"):
        settings_text.parsed(text, "a file")


@pytest.mark.parametrize("text", ['{"a": 2, "a": 2}', "a: 2\na: 2\n", "b: &x {a: 1}\n<<: *x\na: 2\n"])
def test_a_key_that_stands_twice_with_one_value_has_it(text: str) -> None:
    assert settings_text.parsed(text, "a file")["a"] == 2


def test_what_is_no_file_is_refused_and_not_waited_for(tmp_path: Path, ran: Any, monkeypatch: Any) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", "/dev/zero", tmp_path):
        for command in (["explain", path], ["replay", path], ["compare", path, path]):
            code, out, err = ran(*command)
            assert (code, out) == (2, "") and err.count("\n") == 2
    monkeypatch.setattr(sys, "stdin", None)
    assert ran("explain", "-")[0] == 2


FUZZED = pytest.mark.parametrize("seconds", [4, pytest.param(120, marks=pytest.mark.nightly)])


@FUZZED
def test_damaged_files_end_in_an_answer_or_a_line(seconds: int, tmp_path: Path) -> None:
    count, broken = fuzz.campaign(seconds, seconds, tmp_path)
    assert count > 20 and not broken


JUNK = st.one_of(
    st.none(), st.booleans(), st.integers(-(1 << 70), 1 << 70), st.floats(), st.text(max_size=5),
    st.sampled_from([[], {}, [[]], [None], {"": None}, "\x1b[2J", "\ud800", "9" * 5000, [0] * 3000, 1 << 63, -1]),
)  # fmt: skip


def others(found: Any, draw: Callable[[Any], Any]) -> Any:
    """Return nested data with one of its parts replaced, left out or given twice."""
    if not isinstance(found, dict | list) or not found or draw(st.integers(0, 5)) == 0:
        return draw(JUNK)
    keys = list(found) if isinstance(found, dict) else range(len(found))
    key, made = draw(st.sampled_from(keys)), copy.copy(found)
    what = draw(st.integers(0, 9))
    if what == 0:
        del made[key]
    elif what == 1 and isinstance(made, dict):
        made[draw(JUNK.filter(lambda one: isinstance(one, str)))] = found[key]
    elif what == 1:
        made.insert(0, found[key])
    else:
        made[key] = others(found[key], draw)
    return made


WRITTEN: dict[str, tuple[Callable[[bytes], Any], Callable[[Any], bytes]]] = {
    ".pickle": (pickle.loads, lambda made: pickle.dumps(made, 4)),
    ".yaml": (yaml.safe_load, lambda made: yaml.safe_dump(made).encode()),
    ".jsonl": (
        lambda text: [json.loads(line) for line in text.splitlines()],
        lambda made: "\n".join(map(json.dumps, made if isinstance(made, list) else [made])).encode(),
    ),
}  # of the others, which are JSON, see below
SHAPED = {
    path: content for path, content in fuzz.corpus().items() if path.suffix not in (".log", ".txt", ".csv", ".toml")
}


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_data_of_another_shape_end_in_an_answer_or_a_line(data: st.DataObject, tmp_path: Path) -> None:
    """What the byte mutator seldom makes: a file that its format takes, with a part that means nothing."""
    path = data.draw(st.sampled_from(list(SHAPED)))
    read, write = WRITTEN.get(path.suffix, (json.loads, lambda made: json.dumps(made).encode()))
    made = others(read(SHAPED[path]), data.draw)
    file = tmp_path / f"x{fuzz.ending(path)}"
    try:
        file.write_bytes(write(made))
    except (UnicodeEncodeError, TypeError):  # a lone surrogate in a pickle
        hypothesis.reject()
    command = data.draw(st.sampled_from(fuzz.COMMANDS[fuzz.ending(path)]))
    rule = fuzz.tried(command, file)
    assert not rule, (command, rule)


@pytest.mark.parametrize("liked", ["-", "_", "1", " ", "B", "a: ", 'File "a", line 1, in '])
def test_a_long_line_takes_no_longer_than_its_length_is_worth(liked: str) -> None:
    """A line of 100 KB of what patterns like, as of minified source in a traceback; the bound is far above linear."""
    line = (liked * 100_000)[:100_000]
    begun = time.process_time()
    explain(read_text(f"Traceback (most recent call last):\n{line}\n{OOM}\n{line}\n"))
    with pytest.raises(BadInput):
        parse_gpu(line[:60_000])
    assert time.process_time() - begun < 5
