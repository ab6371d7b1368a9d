"""Readers, one per file type: they yield numbered records and broken lines without holding a whole file."""

from __future__ import annotations

import codecs
import csv
import io
import json
import os
import re
from collections.abc import Callable, Collection, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TextIO

from memfit.errors import BadInput, UnknownName
from memfit.extras import MissingExtra
from memfit.reading import bounds
from memfit.units import MIB, human

LINE_LIMIT = 64 * MIB  # a longer line is reported as broken
CHUNK = 1 * MIB
ROWS = 256  # Parquet rows read at once


class Record(NamedTuple):
    """One record: its value and the number, from 1, of its line, row or sample."""

    line: int
    value: Any


@dataclass(frozen=True, slots=True)
class Broken:
    """A line that cannot be used, and why."""

    line: int
    reason: str


Read = Generator[Record | Broken, None, None]
Reader = Callable[[BinaryIO, Collection[str]], Read]  # (the open file, fields of interest)


def reader_for(path: Path) -> Reader:
    """Choose the reader by the file's suffix. Raises BadInput for a path that is no readable file of samples."""
    hint = f"give one file: {', '.join(READERS)}"
    if not path.exists():
        raise BadInput(
            f"{path} does not exist", hint="check the path; a dataset on the Hub must be saved to a file first"
        )
    if not path.is_file():
        raise BadInput(f"{path} is {'a folder' if path.is_dir() else 'not a regular file'}", hint=hint)
    reader = READERS.get(path.suffix.lower())
    if reader is None:
        raise UnknownName("file type", path.suffix or path.name, READERS, hint=hint)
    if reader is not _parquet:
        with path.open("rb") as file:
            if b"\0" in file.read(CHUNK):
                raise BadInput(f"{path} is not a text file in UTF-8 (it holds zero bytes)", hint="convert it to UTF-8")
    return reader


def _lines(file: BinaryIO) -> Read:
    """Yield decoded lines, and Broken for those that are too long or not UTF-8."""
    number = 0
    while line := file.readline(LINE_LIMIT):
        number += 1
        if len(line) == LINE_LIMIT and not line.endswith(b"\n"):
            while (rest := file.readline(LINE_LIMIT)) and not rest.endswith(b"\n"):
                pass
            yield Broken(number, f"longer than {human(LINE_LIMIT)}")
            continue
        try:
            yield Record(number, line.decode("utf-8-sig" if number == 1 else "utf-8"))
        except UnicodeDecodeError as error:
            yield Broken(number, f"not UTF-8 (byte {error.start + 1} of the line)")


def _text(file: BinaryIO, _: Collection[str] = ()) -> Read:
    """Yield one sample per line that is not blank, as Hugging Face datasets reads .txt."""
    for line in _lines(file):
        if isinstance(line, Broken):
            yield line
        elif line.value.strip():
            yield Record(line.line, line.value.rstrip("\r\n"))


def _json_lines(file: BinaryIO, _: Collection[str] = ()) -> Read:
    """Yield one JSON value per line that is not blank."""
    for line in _text(file):
        if isinstance(line, Broken):
            yield line
            continue
        try:
            yield Record(line.line, json.loads(line.value))
        except (ValueError, RecursionError) as error:
            yield Broken(line.line, _json_reason(error))


def _json(file: BinaryIO, _: Collection[str] = ()) -> Read:
    """Read a list of samples, or one sample per line; refuse a single object that spans several lines."""
    start = file.read(CHUNK).removeprefix(codecs.BOM_UTF8).lstrip()
    file.seek(0)
    if start.startswith(b"["):
        return _json_list(file)
    first = next(_json_lines(file), None)
    file.seek(0)
    if isinstance(first, Broken):
        raise BadInput(
            f"{file.name} is neither a list of samples nor one sample per line (line {first.line}: {first.reason})",
            hint="write it as [sample, ...], or as .jsonl with one sample per line",
        )
    return _json_lines(file)


_GAP = re.compile(r"[\s,]*")


def _json_list(file: BinaryIO) -> Read:
    """Yield the elements of one JSON list, reading in chunks; stop at the first syntax error."""
    decoder = json.JSONDecoder()
    with _decoded(file) as text:
        buffer, at, number = text.read(CHUNK).lstrip()[1:], 0, 1
        while True:
            at = _after_gap(buffer, at)
            if buffer.startswith("]", at):
                return
            try:
                value, at = decoder.raw_decode(buffer, at)
            except (ValueError, RecursionError) as error:
                waiting = len(buffer) - at
                # double the buffer, so that a long element is parsed a few times and not thousands
                more = text.read(max(CHUNK, waiting)) if waiting < LINE_LIMIT else ""
                if not more:
                    yield Broken(number, f"{_json_reason(error)}; nothing after it was read")
                    return
                buffer, at = buffer[at:] + more, 0
                continue
            yield Record(number, value)
            number += 1


def _after_gap(buffer: str, at: int) -> int:
    """Return the position after the space and commas between two elements."""
    gap = _GAP.match(buffer, at)
    return gap.end() if gap else at


def _json_reason(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"not JSON: {error.msg} (column {error.colno})"
    return "not JSON: nested too deeply" if isinstance(error, RecursionError) else f"not JSON: {str(error)[:60]}"


def _table(delimiter: str) -> Reader:
    """Return a reader of tables whose first line names the columns; empty cells count as missing."""

    def read(file: BinaryIO, fields: Collection[str]) -> Read:
        before = csv.field_size_limit(LINE_LIMIT)  # global in the csv module; its default refuses cells over 128 KiB
        try:
            with _decoded(file) as text:
                yield from _rows(text, delimiter)
        finally:
            csv.field_size_limit(before)

    return read


def _rows(text: TextIO, delimiter: str) -> Read:
    rows = csv.reader(iter(lambda: text.readline(LINE_LIMIT), ""), delimiter=delimiter)
    header: list[str] = []
    while True:
        try:
            row = next(rows, None)
        except csv.Error as error:
            yield Broken(rows.line_num, f"not CSV: {error}")
            continue
        if row is None:
            return
        if not header:
            header = row
        elif row:
            yield Record(rows.line_num, {k: v for k, v in zip(header, row, strict=False) if v})


@contextmanager
def _decoded(file: BinaryIO) -> Iterator[TextIO]:
    """Provide the file as text; bytes that are not UTF-8 become lone surrogates. The caller closes the file."""
    text = io.TextIOWrapper(file, encoding="utf-8-sig", errors="surrogateescape", newline="")
    try:
        yield text
    finally:
        text.detach()


def _parquet(file: BinaryIO, fields: Collection[str]) -> Read:
    """Yield the rows of a Parquet file; read only the columns of interest if it has any."""
    try:
        import pyarrow as arrow  # type: ignore[import-untyped,import-not-found,unused-ignore]
        import pyarrow.parquet as parquet  # type: ignore[import-untyped,import-not-found,unused-ignore]
    except ImportError:
        raise MissingExtra("reading .parquet files", "train") from None
    number, size = 0, os.fstat(file.fileno()).st_size
    try:
        table = parquet.ParquetFile(file)
        if (rows := table.metadata.num_rows) > size:  # equal rows pack to nothing, and each takes its time
            raise BadInput(f"{file.name} has {rows:,} rows in {size:,} bytes", hint="leave out rows that are equal")
        columns = [name for name in table.schema_arrow.names if name in fields] or None
        batches = table.iter_batches(batch_size=ROWS, columns=columns, use_threads=False)
        while (batch := _next_rows(batches, size, file.name)) is not None:
            for row in batch:
                number += 1
                yield Record(number, row)
    except (arrow.ArrowException, ValueError) as error:
        reason = str(error).splitlines()[0][:100] if str(error) else type(error).__name__
        yield Broken(number + 1, f"not Parquet: {reason}; nothing after it was read")


def _next_rows(batches: Iterator[Any], size: int, name: str) -> list[Any] | None:
    """Return the next rows, None at the end; a page or a dictionary may unfold to any size, so memory is bounded."""
    with bounds.memory(size, name, "write it again in smaller row groups, or as JSON lines"):
        batch = next(batches, None)
        return None if batch is None else batch.to_pylist()


READERS: dict[str, Reader] = {
    ".jsonl": _json_lines, ".ndjson": _json_lines, ".json": _json, ".txt": _text,
    ".csv": _table(","), ".tsv": _table("\t"), ".parquet": _parquet,
}  # fmt: skip
