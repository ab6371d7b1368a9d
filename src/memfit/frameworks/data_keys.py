"""The data of a run: as another framework's file names it, and the columns of its samples as the data has them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from memfit.data.files import Broken, Record, reader_for
from memfit.data.samples import KNOWN_FIELDS, UnusableError, sample_of
from memfit.errors import MemfitError, Unsupported
from memfit.frameworks.keys import parse
from memfit.frameworks.script import NO_DATA
from memfit.nouns.job import Columns, Job

LOOKED_AT = 100  # records read in search of a usable one
_KINDS = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet", ".txt": "text"}
_CHATS = ("messages", "role", "content", "user", "assistant")
_ALPACA = ("instruction", "input", "output")
_PLAIN = "{instruction}"  # the format of a prompt that is learned from as it is
_SHAREGPT = ("conversations", "from", "value", "human", "gpt")


@dataclass(frozen=True, slots=True, kw_only=True)
class Data:
    """The data of a file. `used` are keys that are understood, `lost` what other frameworks are not given."""

    path: str = ""  # "": as the framework's own reader says
    columns: Columns | None = None
    eval_path: str = ""
    used: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()


def read(data: Mapping[str, Any], framework: str, path: Path) -> Data:
    """Return the data of a file at `path`."""
    reader = _READERS.get(framework)
    return reader(data, path) if reader else Data()


# ---- axolotl


def _axolotl(data: Mapping[str, Any], _path: Path) -> Data:
    entries, held_out = data.get("datasets"), data.get("test_datasets")
    first = entries[0] if isinstance(entries, list) and entries else None
    if not isinstance(first, Mapping):
        return Data()
    columns, known = _axolotl_columns(first)
    lost = [f"datasets[0].{key}" for key in first if key not in ("path", "ds_type", *known)]
    lost += [f"datasets[{i}]" for i in range(1, len(entries))]  # type: ignore[arg-type]
    evaluated = held_out[0] if isinstance(held_out, list) and held_out else {}
    eval_path = evaluated.get("path") if isinstance(evaluated, Mapping) else None
    return Data(
        columns=columns,
        eval_path=eval_path if isinstance(eval_path, str) else "",
        used=("datasets", *(["test_datasets"] if isinstance(eval_path, str) else [])),
        lost=tuple(lost),
    )


def _axolotl_columns(entry: Mapping[str, Any]) -> tuple[Columns | None, tuple[str, ...]]:
    """Return the columns of a dataset by its `type`, and the keys that are expressed by them."""
    kind = entry.get("type")
    if kind == "alpaca":
        return Columns(fields=_ALPACA), ("type",)
    if kind == "completion":
        return Columns(fields=(_word(entry.get("field"), "text"),)), ("type", "field")
    if kind == "chat_template":
        names = entry.get("message_property_mappings")
        names = names if isinstance(names, Mapping) else {}
        role = _word(names.get("role") or entry.get("message_field_role"), "role")
        content = _word(names.get("content") or entry.get("message_field_content"), "content")
        fields = (_word(entry.get("field_messages"), "messages"),)
        user, assistant = _CHATS[3:] if role == "role" else _SHAREGPT[3:]  # axolotl knows both
        known = ("type", "chat_template", "field_messages", "message_property_mappings",
                 "message_field_role", "message_field_content")  # fmt: skip
        found = Columns(fields=fields, chat=True, role=role, content=content, user=user, assistant=assistant)
        return found, known if set(names) <= {"role", "content"} else tuple(set(known) - {"message_property_mappings"})
    if isinstance(kind, Mapping) and set(kind) <= {"field_instruction", "field_output", "format", "no_input_format"}:
        formats = {kind.get("format", _PLAIN), kind.get("no_input_format", _PLAIN)}
        pair = _word(kind.get("field_instruction"), ""), _word(kind.get("field_output"), "")
        if all(pair) and formats == {_PLAIN}:
            return Columns(fields=pair), ("type",)
    return None, ()


def _word(value: object, default: str) -> str:
    return value if isinstance(value, str) and value else default


# ---- LLaMA-Factory


def _llamafactory(data: Mapping[str, Any], path: Path) -> Data:
    """Return the data whose names a file lists, as dataset_info.json in its `dataset_dir` describes them."""
    folder = _word(data.get("dataset_dir"), "data")
    names = [[one.strip() for one in _word(data.get(key), "").split(",")] for key in ("dataset", "eval_dataset")]
    info = next((read for base in (path.parent, Path()) if (read := _info(base / folder))), None)
    if info is None:
        return Data(lost=("dataset",) if names[0] != [""] else ())
    found, columns = _entry(info[1].get(names[0][0]), info[0])
    held_out, _ = _entry(info[1].get(names[1][0]), info[0])
    lost = [f"dataset {name}" for name in names[0][1:]] + ([] if found and columns else ["dataset"] * bool(names[0][0]))
    used = ("dataset_dir", "dataset", *(["eval_dataset"] if held_out else []))
    return Data(path=found, columns=columns, eval_path=held_out, used=used, lost=tuple(lost))


def _info(folder: Path) -> tuple[Path, Mapping[str, Any]] | None:
    try:
        found = parse(folder / "dataset_info.json")
    except MemfitError:
        return None
    return (folder, found) if isinstance(found, Mapping) else None


def _entry(entry: object, folder: Path) -> tuple[str, Columns | None]:
    """Return the path of a dataset and its columns; a key that is missing from `columns` or `tags` has no default."""
    if not isinstance(entry, Mapping):
        return "", None
    file = _word(entry.get("file_name"), "")
    path = str((folder / file).resolve()) if file else _word(entry.get("hf_hub_url"), "")
    names = entry.get("columns")
    tags = entry.get("tags")
    if entry.get("ranking") or not isinstance(names, Mapping | None) or not isinstance(tags, Mapping | None):
        return path, None
    if entry.get("formatting", "alpaca") == "alpaca":
        given = dict(zip(("prompt", "query", "response"), _ALPACA, strict=True)) if names is None else names
        fields = tuple(_word(given.get(name), "") for name in ("prompt", "query", "response"))
        return path, Columns(fields=tuple(name for name in fields if name)) if fields[0] else None
    if entry.get("formatting") != "sharegpt":
        return path, None
    messages = _SHAREGPT[0] if names is None else _word(names.get("messages"), "")
    words = [
        default if tags is None else _word(tags.get(f"{name}_tag"), "")
        for name, default in zip(_CHATS[1:], _SHAREGPT[1:], strict=True)
    ]
    if not (messages and all(words)):
        return path, None
    role, content, user, assistant = words
    return path, Columns(
        fields=(messages,), chat=True, role=role, content=content, user=user, assistant=assistant
    )  # fmt: skip


# ---- TRL


def _trl(data: Mapping[str, Any], _path: Path) -> Data:
    lost = [name for name in ("dataset_config", "dataset_train_split") if data.get(name) not in (None, "train")]
    column = data.get("dataset_text_field")
    columns = Columns(fields=(column,)) if isinstance(column, str) and column != "text" else None
    return Data(columns=columns, used=("dataset_text_field",), lost=tuple(lost))


_READERS: dict[str, Callable[[Mapping[str, Any], Path], Data]] = {
    "axolotl": _axolotl, "llamafactory": _llamafactory, "transformers": _trl,
}  # fmt: skip


# ---- the layout of a training file


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
