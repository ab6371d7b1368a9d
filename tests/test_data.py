"""Data: every file type and layout gives exact counts, and nothing a file can hold ends in a traceback."""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from memfit.data import files, tokens
from memfit.data.dataset import read_dataset
from memfit.data.samples import (
    ALPACA,
    ALPACA_NOTE,
    CHAT_NOTE,
    CHAT_TOKENS,
    END,
    KNOWN_FIELDS,
    LAYOUTS,
    NO_ROLE,
    NOT_TEXT,
    TOOLS,
    TOOLS_NOTE,
)
from memfit.errors import BadInput
from memfit.extras import MissingExtra, install_command

TEXTS = ["one", "second", "the third sample"]
LENGTHS = tuple(len(t) + END for t in TEXTS)


def write(path: Path, records: list[Any]) -> Path:
    """One JSON value per line."""
    path.write_text("".join(json.dumps(r) + "\n" for r in records), encoding="utf-8")
    return path


def lengths_of(path: Path, **options: Any) -> list[int]:
    dataset = read_dataset(path, "bytes", **options)
    return [t for t, n in dataset.lengths.counts for _ in range(n)]


# ---- file types ----------------------------------------------------------------------------------------------------


def as_jsonl(path: Path) -> None:
    write(path, [{"text": t} for t in TEXTS])


def as_json_list(path: Path) -> None:
    path.write_text(json.dumps([{"text": t} for t in TEXTS], indent=2))


def as_json_texts(path: Path) -> None:
    path.write_text(json.dumps(TEXTS))


def as_txt(path: Path) -> None:
    path.write_text("\r\n".join([*TEXTS, "", "  "]))


def as_csv(path: Path) -> None:
    path.write_text("id,text\n" + "".join(f'{i},"{t}"\n' for i, t in enumerate(TEXTS)))


def as_tsv(path: Path) -> None:
    path.write_text("id\ttext\n" + "".join(f"{i}\t{t}\n" for i, t in enumerate(TEXTS)))


def as_bom(path: Path) -> None:
    path.write_text("".join(json.dumps({"text": t}) + "\n" for t in TEXTS), encoding="utf-8-sig")


def as_parquet(path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    import pyarrow.parquet as parquet

    parquet.write_table(arrow.table({"text": TEXTS, "image": [b"\0" * 9] * 3}), path)


@pytest.mark.parametrize(
    ("name", "put"),
    [
        ("a.jsonl", as_jsonl),
        ("a.ndjson", as_jsonl),
        ("a.JSONL", as_bom),
        ("a.json", as_json_list),
        ("a.json", as_json_texts),
        ("a.json", as_jsonl),
        ("a.json", as_bom),
        ("a.txt", as_txt),
        ("a.csv", as_csv),
        ("a.tsv", as_tsv),
        ("a.parquet", as_parquet),
    ],
)
def test_file_types(tmp_path: Path, name: str, put: Any) -> None:
    put(tmp_path / name)
    dataset = read_dataset(tmp_path / name, "bytes")
    assert dataset.lengths.counts == tuple((n, 1) for n in sorted(LENGTHS))
    assert dataset.layouts == (("text", 3),)
    assert dataset.longest[0][0] == max(LENGTHS)
    assert (dataset.broken, dataset.complete, dataset.estimate, dataset.notes) == (0, True, False, ())


def test_every_file_type_is_tested() -> None:
    assert set(files.READERS) == {".jsonl", ".ndjson", ".json", ".txt", ".csv", ".tsv", ".parquet"}


# ---- layouts -------------------------------------------------------------------------------------------------------

CHAT = [{"role": "user", "content": "abc"}, {"role": "assistant", "content": "de"}]
PICTURE = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "abc"}]}]
CASES: list[tuple[str, dict[str, Any], int]] = [
    ("text", {"text": "abcd"}, 4 + END),
    ("text", {"text": "é"}, 2 + END),
    ("input_ids", {"input_ids": [1, 2, 3], "text": "not counted twice"}, 3),
    ("input_ids", {"input_ids": "[1, 2]"}, 2),
    ("messages", {"messages": CHAT}, 5 + 2 * CHAT_TOKENS),
    ("messages", {"messages": json.dumps(CHAT)}, 5 + 2 * CHAT_TOKENS),
    ("messages", {"messages": []}, 0),
    ("messages", {"messages": [{"role": "assistant", "content": None, "tool_calls": [1]}]}, 3 + CHAT_TOKENS),
    ("messages", {"messages": PICTURE}, 3 + CHAT_TOKENS),
    ("conversations", {"conversations": [{"from": "human", "value": "abc"}]}, 3 + CHAT_TOKENS),
    ("prompt+completion", {"prompt": "abc", "completion": "de"}, 5 + END),
    ("prompt+completion", {"prompt": CHAT[:1], "completion": CHAT[1:]}, 5 + 2 * CHAT_TOKENS + END),
    ("prompt+response", {"prompt": "abc", "response": "de"}, 5 + END),
    ("question+answer", {"question": "abc", "answer": "de"}, 5 + END),
    ("instruction+input+output", {"instruction": "a", "input": "b", "output": "c"}, len(ALPACA) - 6 + 3 + END),
    ("instruction+input+output", {"instruction": "a", "output": "c"}, len(ALPACA) - 6 + 2 + END),
]


@pytest.mark.parametrize(("layout", "record", "expected"), CASES)
def test_layouts(tmp_path: Path, layout: str, record: dict[str, Any], expected: int) -> None:
    dataset = read_dataset(write(tmp_path / "a.jsonl", [record]), "bytes")
    assert dataset.lengths.counts == ((expected, 1),)
    assert dataset.layouts == ((layout, 1),)
    assert (NOT_TEXT in dataset.notes) == (record.get("messages") is PICTURE)
    chats = any(isinstance(v, list) for k, v in record.items() if k != "input_ids") or layout == "messages"
    assert (CHAT_NOTE in dataset.notes) == chats
    assert (ALPACA_NOTE in dataset.notes) == (layout == "instruction+input+output")


def test_what_stands_in_other_columns_is_counted(tmp_path: Path) -> None:
    """A chat template writes tools and a system prompt before the messages; Alpaca's history is turns before it."""
    tools = [{"type": "function", "function": {"name": "f"}}, {"name": "g"}]
    written = len(TOOLS.format("\n".join(map(json.dumps, tools))))
    alpaca = {"instruction": "a", "output": "c"}
    cases: list[tuple[dict[str, Any], int]] = [
        ({"messages": CHAT, "tools": tools}, 5 + 2 * CHAT_TOKENS + written),
        ({"messages": CHAT, "tools": json.dumps(tools)}, 5 + 2 * CHAT_TOKENS + written),
        ({"prompt": CHAT[:1], "completion": CHAT[1:], "tools": tools}, 5 + 2 * CHAT_TOKENS + END + written),
        ({"prompt": "abc", "completion": "de", "tools": tools}, 5 + END),
        ({"conversations": CHAT, "system": "xyz"}, 5 + 3 + 3 * CHAT_TOKENS),
        ({**alpaca, "system": "xyz", "history": [["q", "a"]]}, len(ALPACA) - 6 + 2 + END + 3 + 2 + 3 * CHAT_TOKENS),
        ({"messages": CHAT, "tools": [], "system": "", "history": []}, 5 + 2 * CHAT_TOKENS),
    ]
    for record, expected in cases:
        dataset = read_dataset(write(tmp_path / "a.jsonl", [record]), "bytes")
        assert dataset.lengths.counts == ((expected, 1),), record
        assert (TOOLS_NOTE in dataset.notes) is (expected > written)


@pytest.mark.parametrize(
    ("record", "said"),
    [
        ({"messages": CHAT, "chosen": "a", "rejected": "b"}, "preferences"),
        ({"messages": [{"content": "hi"}]}, NO_ROLE),
    ],
)
def test_what_train_py_cannot_learn_is_no_sample(tmp_path: Path, record: dict[str, Any], said: str) -> None:
    with pytest.raises(BadInput, match=said):
        read_dataset(write(tmp_path / "a.jsonl", [record]), "bytes")


def test_numbers_are_texts(tmp_path: Path) -> None:
    dataset = read_dataset(write(tmp_path / "a.jsonl", [{"prompt": 1234, "completion": False}]), "bytes")
    assert dataset.lengths.counts == ((4 + 5 + END, 1),)


def test_every_layout_is_tested() -> None:
    assert {layout for layout, _, _ in LAYOUTS} == {layout for layout, _, _ in CASES}
    assert "input" in KNOWN_FIELDS


def test_text_field_reads_that_field_alone(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{"body": "abc", "text": "longer text"}])
    dataset = read_dataset(path, "bytes", text_field="body")
    assert dataset.lengths.counts == ((3 + END, 1),)
    assert dataset.layouts == (("body", 1),)


def test_text_field_of_parquet(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    import pyarrow.parquet as parquet

    parquet.write_table(arrow.table({"body": ["abc"]}), tmp_path / "a.parquet")
    assert lengths_of(tmp_path / "a.parquet", text_field="body") == [3 + END]


# ---- reading -------------------------------------------------------------------------------------------------------


def test_longest_samples_are_named_by_line(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{"text": "x" * n} for n in (1, 50, 3, 90, 5, 6, 50)])
    assert read_dataset(path, "bytes").longest == ((91, 4), (51, 2), (51, 7), (7, 6), (6, 5))


def test_limit_stops_early_and_says_so(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{"text": "x"}] * 10)
    assert (read_dataset(path, limit=4).lengths.count, read_dataset(path, limit=4).complete) == (4, False)
    assert read_dataset(path, limit=10).complete
    with pytest.raises(BadInput, match="limit"):
        read_dataset(path, limit=0)


@pytest.mark.parametrize(("name", "put"), [("a.csv", as_csv), ("a.json", as_json_list), ("a.parquet", as_parquet)])
def test_stopping_early_leaves_nothing_open(tmp_path: Path, name: str, put: Any) -> None:
    before = csv.field_size_limit()
    put(tmp_path / name)
    assert lengths_of(tmp_path / name, limit=1) == [LENGTHS[0]]
    assert csv.field_size_limit() == before


def test_progress_reaches_the_end(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{"text": "x" * 2000}] * 2000)
    seen: list[tuple[int, int]] = []
    read_dataset(path, progress=lambda done, total: seen.append((done, total)))
    assert len(seen) > 3
    assert seen == sorted(seen)
    assert seen[-1] == (path.stat().st_size, path.stat().st_size)


def test_summary_is_plain_json(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{"text": "abc"}, {"x": 1}])
    summary = json.loads(json.dumps(read_dataset(path, "bytes").summary()))
    assert summary["lengths"]["samples"] == 1
    assert summary["longest"] == [{"tokens": 4, "line": 1}]
    assert summary["broken_examples"] == [{"line": 2, "reason": "no known fields; found 'x'"}]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=50)
@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=50), min_size=1, max_size=20))
def test_all_formats_agree(tmp_path: Path, texts: list[str]) -> None:
    expected = sorted(len(t.encode()) + END for t in texts)
    records = [{"text": t} for t in texts]
    assert lengths_of(write(tmp_path / "a.jsonl", records)) == expected
    (tmp_path / "a.json").write_text(json.dumps(records, ensure_ascii=False), encoding="utf-8")
    assert lengths_of(tmp_path / "a.json") == expected


@pytest.mark.parametrize("chunk", [1, 2, 3, 7, 64])
def test_json_lists_may_break_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    path = tmp_path / "a.json"
    path.write_text('[ {"text": "a]b,"} ,\n{"text": "\\"c\\\\"},{"text":"é😀"} ]', encoding="utf-8")
    monkeypatch.setattr(files, "CHUNK", chunk)
    with path.open("rb") as file:
        found = [r.value["text"] for r in files._json_list(file) if isinstance(r, files.Record)]
    assert found == ["a]b,", '"c\\', "é😀"]


# ---- tokenizers ----------------------------------------------------------------------------------------------------


@pytest.fixture
def tokenizer_folder(tmp_path: Path) -> Path:
    """A tokenizer of whole words with <s> before each sequence, saved with truncation and padding switched on."""
    library = pytest.importorskip("tokenizers")
    from tokenizers import models, pre_tokenizers, processors

    tokenizer = library.Tokenizer(models.WordLevel({"<s>": 0, "[UNK]": 1, "a": 2}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=4)
    folder = tmp_path / "model"
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.mark.parametrize("name", ["", "tokenizer.json"])
def test_own_tokenizer(tmp_path: Path, tokenizer_folder: Path, name: str) -> None:
    path = write(
        tmp_path / "a.jsonl",
        [{"text": "a b c d e f g h"}, {"prompt": "a", "completion": "b c"}, {"input_ids": [1]}, {"messages": CHAT}],
    )
    dataset = read_dataset(path, tokenizer_folder / name)
    start = 1  # <s>, once per sequence, and not before ready token ids
    expected = sorted([8 + END + start, 3 + END + start, 1, 2 + 2 * CHAT_TOKENS + start])
    assert [t for t, _ in dataset.lengths.counts] == expected
    assert (dataset.tokenizer, dataset.estimate) == (str(tokenizer_folder / name), False)


def test_long_texts_are_tokenised_in_pieces(
    tmp_path: Path, tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokens, "PIECE", 100)
    monkeypatch.setattr(tokens, "GROUP", 250)
    words = [997, 3, 0, 500]
    counted = tokens.find_tokenizer(tokenizer_folder).count(["word " * n for n in words])
    assert counted == words


@given(st.text(st.sampled_from(" abcé\n"), max_size=300), st.integers(1, 50))
def test_pieces_are_the_whole_text(text: str, size: int) -> None:
    before = tokens.PIECE
    try:
        tokens.PIECE = size
        pieces = list(tokens._pieces(text))
    finally:
        tokens.PIECE = before
    assert "".join(pieces) == text
    assert all(len(p) <= size for p in pieces)


@pytest.mark.parametrize(("text", "expected"), [("", 0), ("a", 1), ("abcd", 1), ("abcde", 2), ("中文中文", 3)])
def test_estimate_is_labelled(tmp_path: Path, text: str, expected: int) -> None:
    dataset = read_dataset(write(tmp_path / "a.jsonl", [{"text": text}]))
    assert dataset.lengths.longest == expected + END
    assert dataset.estimate
    assert "estimate" in dataset.tokenizer


@pytest.mark.parametrize("content", [b"", b"{}", b"null", b"\xff\xfe", b'{"model": {"type": "BPE"}}', b"[" * 10_000])
def test_broken_tokenizer(tmp_path: Path, content: bytes) -> None:
    pytest.importorskip("tokenizers")
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(BadInput, match=r"is not a tokenizer\.json"):
        read_dataset(write(tmp_path / "a.jsonl", [{"text": "a"}]), tmp_path)


@pytest.mark.parametrize(("name", "message"), [("gone", "does not exist"), ("", "holds no tokenizer.json")])
def test_missing_tokenizer(tmp_path: Path, name: str, message: str) -> None:
    with pytest.raises(BadInput, match=message) as caught:
        read_dataset(write(tmp_path / "a.jsonl", [{"text": "a"}]), tmp_path / name)
    assert "tokenizer.json" in caught.value.hint


def test_tokenizer_that_fails_on_the_text(tmp_path: Path) -> None:
    library = pytest.importorskip("tokenizers")
    library.Tokenizer(library.models.WordLevel({"a": 0}, unk_token="[UNK]")).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(BadInput, match="fails on this text"):
        read_dataset(write(tmp_path / "a.jsonl", [{"text": "unheard of"}]), tmp_path)


@pytest.mark.parametrize(
    ("module", "name", "extra"), [("tokenizers", "a.jsonl", "data"), ("pyarrow", "a.parquet", "train")]
)
def test_missing_extras(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str, name: str, extra: str) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    write(tmp_path / name, [{"text": "a"}])
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingExtra) as caught:
        read_dataset(tmp_path / name, tmp_path if module == "tokenizers" else None)
    assert caught.value.hint == install_command(extra)
