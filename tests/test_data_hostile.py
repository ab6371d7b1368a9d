"""Data that is broken, odd, hostile or huge: reported with its line or refused with a hint, never a traceback."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tracemalloc
from pathlib import Path
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from memfit.data import files
from memfit.data.dataset import read_dataset
from memfit.data.samples import END
from memfit.errors import BadInput, MemfitError
from memfit.units import MIB

SAMPLE = b'{"text": "abc"}\n'
SAMPLE_LENGTH = 3 + END


def put(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


# ---- broken lines --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"{", "not JSON: Expecting property name"),
        (b'{"text": "abc"', "not JSON: Expecting ',' delimiter"),
        (b"nonsense", "not JSON: Expecting value"),
        (b"[" * 100_000, "not JSON: nested too deeply"),
        (b'{"text": ' + b"9" * 5000 + b"}", "not JSON: Exceeds the limit"),
        (b'{"text": "\xff\xfe"}', "not UTF-8 (byte 11 of the line)"),
        (b'{"text": "\\ud800"}', "not valid Unicode"),
        (b'{"messages": [{"role": "user", "content": "\\udfff"}]}', "not valid Unicode"),
        (b"42", "not a number"),
        (b"true", "not true or false"),
        (b"null", "not null"),
        (b"[1, 2]", "not a list"),
        (b"{}", "no known fields; found none"),
        (b'{"prompt": "a"}', "no known fields; found 'prompt'"),
        (b'{"text": null}', "no known fields; found 'text'"),
        (b'{"text": {"a": 5}}', "'text' is not text but an object"),
        (b'{"text": ["a"]}', "'text' is not text but a list"),
        (b'{"messages": {}}', "not a list of objects"),
        (b'{"messages": ["a"]}', "not a list of objects"),
        (b'{"messages": "[["}', "not a list of objects"),
        (b'{"input_ids": [1, "a"]}', "not a list of whole numbers"),
        (b'{"input_ids": [1.5]}', "not a list of whole numbers"),
        (b'{"prompt": {}, "completion": "a"}', "'prompt' is not text but an object"),
        (b'{"instruction": "a", "output": []}', "'output' is not text but a list"),
        (b'{"instruction": "a", "input": [1], "output": "b"}', "'input' is not text but a list"),
    ],
    ids=lambda v: v[:24].decode("latin-1") if isinstance(v, bytes) else "",
)
def test_broken_lines_are_reported(tmp_path: Path, line: bytes, reason: str) -> None:
    path = put(tmp_path / "a.jsonl", SAMPLE + b"\n" + line + b"\n" + SAMPLE)
    dataset = read_dataset(path, "bytes")
    assert dataset.lengths.counts == ((SAMPLE_LENGTH, 2),)
    assert dataset.broken == 1
    assert dataset.examples[0].line == 3
    assert reason in dataset.examples[0].reason


def test_only_a_few_examples_are_kept(tmp_path: Path) -> None:
    dataset = read_dataset(put(tmp_path / "a.jsonl", b"7\n" * 100 + SAMPLE))
    assert dataset.broken == 100
    assert [b.line for b in dataset.examples] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("text", "found", "line"),
    [
        ('[{"text": "a"}, {"text": "b"', 1, 2),
        ('[{"text": "a"} {"text": "b"}, nonsense, {"text": "c"}]', 2, 3),
        ('[{"text": "a"}, ' + "[" * 100_000, 1, 2),
        ('[{"text": "a"}', 1, 2),
    ],
)
def test_broken_json_list_keeps_what_came_before(tmp_path: Path, text: str, found: int, line: int) -> None:
    path = tmp_path / "a.json"
    path.write_text(text)
    dataset = read_dataset(path)
    assert (dataset.lengths.count, dataset.broken, dataset.examples[0].line) == (found, 1, line)
    assert "nothing after it was read" in dataset.examples[0].reason


def test_odd_csv(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(b'\xef\xbb\xbfid,text\n1,"two\nlines"\n2\n\n3,,extra\n4,\xff\n5,ok,more,cells\n6,"never closed\n')
    dataset = read_dataset(path, "bytes")
    assert dataset.lengths.counts == ((2 + END, 1), (9 + END, 1), (13 + END, 1))
    assert [(b.line, b.reason[:24]) for b in dataset.examples] == [
        (4, "no known fields; found '"),
        (6, "no known fields; found '"),
        (7, "the text is not valid Un"),
    ]


def test_csv_cells_may_be_large_but_not_endless(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.csv"
    path.write_text(f"text\n{'x' * 200_000}\n")
    assert read_dataset(path, "bytes").lengths.counts == ((200_000 + END, 1),)
    monkeypatch.setattr(files, "LINE_LIMIT", 1000)
    path.write_text(f'text\n"{"x" * 2500}"\nabc\n')
    dataset = read_dataset(path, "bytes")
    assert dataset.broken >= 1
    assert "field larger than field limit" in dataset.examples[0].reason


def test_cut_off_parquet(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    import pyarrow.parquet as parquet

    path = tmp_path / "a.parquet"
    parquet.write_table(arrow.table({"text": ["a", "b"]}), path)
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(BadInput, match="not Parquet"):
        read_dataset(path)


# ---- files that cannot be used -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b"", "no samples"),
        ("a.json", b"", "no samples"),
        ("a.json", b"[]", "no samples"),
        ("a.json", b"  \n ", "no samples"),
        ("a.txt", b"\n\n", "no samples"),
        ("a.csv", b"", "no samples"),
        ("a.csv", b"text\n", "no samples"),
        ("a.jsonl", b"\x7fELF\x02\x01\0\0", "zero bytes"),
        ("a.jsonl", '{"text": "a"}'.encode("utf-16"), "zero bytes"),
        ("a.jsonl", Random(0).randbytes(4000).replace(b"\0", b"\1"), "none of the"),
        ("a.json", b'{\n "data": [\n {"text": "a"}\n ]\n}', "neither a list of samples nor one"),
        ("a.jsonl", b'{"body": "a"}', "none of the 1 record .* found 'body'"),
        ("a.parquet", b"not parquet at all", "not Parquet"),
        ("a.parquet", b"", "not Parquet"),
        ("a.xlsx", b"PK", "unknown file type '.xlsx'"),
        ("train", b"a", "unknown file type 'train'"),
    ],
)
def test_unusable_files(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    if name.endswith(".parquet"):
        pytest.importorskip("pyarrow")
    path = put(tmp_path / name, content)
    with pytest.raises(BadInput, match=message) as caught:
        read_dataset(path)
    assert caught.value.hint


@pytest.mark.parametrize(("name", "message"), [("missing.jsonl", "does not exist"), ("", "is a folder")])
def test_no_such_file(tmp_path: Path, name: str, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        read_dataset(tmp_path / name)


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.jsonl")
    with pytest.raises(BadInput, match="not a regular file"):
        read_dataset(tmp_path / "a.jsonl")


def test_unreadable_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = put(tmp_path / "a.jsonl", SAMPLE)

    def refuse(*args: object, **options: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(BadInput, match="cannot be read: Permission denied"):
        read_dataset(path)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=150)
@given(st.sampled_from(sorted(set(files.READERS) - {".parquet"})), st.binary(max_size=400))
def test_any_bytes_give_a_dataset_or_a_memfit_error(tmp_path: Path, suffix: str, content: bytes) -> None:
    path = put(tmp_path / f"a{suffix}", content)
    try:
        assert read_dataset(path).lengths.count > 0
    except MemfitError as error:
        assert error.hint


# ---- large input ---------------------------------------------------------------------------------------------------


def test_a_line_of_50_mb_is_the_longest_sample(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    size = 50_000_000
    path.write_bytes(b'{"text": "a"}\n{"text": "' + b"x" * size + b'"}\n')
    assert read_dataset(path, "bytes").longest[0] == (size + END, 2)


def test_an_endless_line_is_skipped_not_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "LINE_LIMIT", 64 * 1024)
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "' + b"x" * (20 * MIB) + b'"}\n' + SAMPLE)
    tracemalloc.start()
    try:
        dataset = read_dataset(path, "bytes")
        held = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert dataset.lengths.counts == ((SAMPLE_LENGTH, 1),)
    assert (dataset.examples[0].line, dataset.examples[0].reason) == (1, "longer than 64.0 KiB")
    assert held < 4 * MIB


def test_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text("[" + ",".join(json.dumps({"text": "x" * (n % 500)}) for n in range(40_000)) + "]")
    tracemalloc.start()
    try:
        assert read_dataset(path, "bytes").lengths.count == 40_000
        held = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert held < path.stat().st_size


@pytest.mark.skipif(sys.platform != "linux", reason="the address space is limited on Linux")
@pytest.mark.parametrize(("rows", "length"), [(1, 90 << 20), (400_000, 100)], ids=["a page", "equal rows"])
def test_parquet_that_unfolds_is_refused(rows: int, length: int, tmp_path: Path) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    column = arrow.DictionaryArray.from_arrays(arrow.array([0] * rows, arrow.int32()), arrow.array(["x" * length]))
    parquet.write_table(arrow.table({"text": column}), tmp_path / "a.parquet", compression="zstd")
    assert (tmp_path / "a.parquet").stat().st_size < MIB
    done = subprocess.run(
        [sys.executable, "-m", "memfit", "data", str(tmp_path / "a.parquet")],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2 and done.stderr.startswith("error: ") and "bug in memfit" not in done.stderr
