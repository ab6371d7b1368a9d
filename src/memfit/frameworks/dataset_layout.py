"""Read the layout of a training file's samples from its first usable record, for targets that depend on it."""

from __future__ import annotations

from contextlib import closing, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from memfit.data.files import Broken, Record, reader_for
from memfit.data.samples import KNOWN_FIELDS, UnusableError, sample_of
from memfit.errors import MemfitError, Unsupported
from memfit.frameworks.script import NO_DATA
from memfit.nouns.job import Columns, Job

LOOKED_AT = 100  # records read in search of a usable one
_KINDS = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet", ".txt": "text"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout(Columns):
    """The columns of a data file, or of a dataset on the Hub."""

    path: str

    @property
    def kind(self) -> str:
        """Return the file's type as Hugging Face datasets calls it; "" for a dataset on the Hub."""
        return _KINDS.get(Path(self.path).suffix.lower(), "")


def layout_for(job: Job, framework: str) -> Layout:
    """Return the layout of a job's data. Raises Unsupported for a file type that the framework does not read."""
    path = job.dataset
    if Path(path).suffix.lower() in (".tsv", ".ndjson"):
        raise Unsupported(
            f"{framework} reads no {Path(path).suffix} files", hint="save it as .jsonl, or take --target trl"
        )
    return layout_of(path, job.training.columns)


def layout_of(path: str, columns: Columns | None = None) -> Layout:
    """Return the layout of a file: `columns` if they are known, and chats in `messages` if it cannot be read."""
    if columns is not None:
        return Layout(path=path or NO_DATA, **asdict(columns))
    with suppress(MemfitError, OSError, ValueError):
        value = _first(Path(path))
        if value is not None:
            return _layout(path, value)
    return Layout(path=path or NO_DATA, fields=("messages",), chat=True)


def _first(path: Path) -> dict[str, Any] | None:
    """Return the first usable record as an object."""
    read = reader_for(path)
    with path.open("rb") as file, closing(read(file, KNOWN_FIELDS)) as records:
        for _, record in zip(range(LOOKED_AT), records, strict=False):
            with suppress(UnusableError):
                if not isinstance(record, Broken):
                    sample_of(record)
                    return record.value if isinstance(record.value, dict) else {"text": record.value}
    return None


def _layout(path: str, value: dict[str, Any]) -> Layout:
    fields = tuple(name for name in sample_of(Record(1, value)).layout.split("+") if name in value)
    messages = value[fields[0]]
    if not (isinstance(messages, list) and messages and isinstance(messages[0], dict)):
        return Layout(path=path, fields=fields)
    role, content = ("from", "value") if "from" in messages[0] else ("role", "content")
    roles = {message.get(role) for message in messages}
    return Layout(
        path=path, fields=fields, chat=True, role=role, content=content,
        user="human" if "human" in roles else "user", assistant="gpt" if "gpt" in roles else "assistant",
    )  # fmt: skip
