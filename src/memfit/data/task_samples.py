"""The samples of each task: the columns that hold one, and what is counted of it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, NamedTuple

from memfit.data.files import Record, reader_for
from memfit.data.media import pixels, seconds
from memfit.data.samples import CHAT_TOKENS, END, Example, Text, UnusableError, messages_of, parsed, text_of
from memfit.errors import MemfitError
from memfit.tables.tasks import TASKS

Lines = tuple[tuple[str, ...], ...]
_PAIR: Lines = (
    ("prompt", "chosen", "rejected"), ("question", "chosen", "rejected"), ("instruction", "chosen", "rejected"),
    ("chosen", "rejected"),
)  # fmt: skip
_HEARD: Lines = tuple(
    ("audio", name) for name in ("text", "sentence", "transcription", "transcript", "normalized_text")
)
# by a task's key where it has columns of its own, else by its kind of sample; the first line that a record has is read
COLUMNS: dict[str, Lines] = {
    "text": (("text",), ("sentence",), ("content",)),
    "label": (
        ("text", "label"), ("sentence", "label"), ("premise", "hypothesis", "label"),
        ("sentence1", "sentence2", "label"), ("question", "sentence", "label"), ("text", "labels"),
    ),
    "token-labels": (("tokens", "ner_tags"), ("tokens", "tags"), ("tokens", "labels"), ("words", "labels")),
    "text-to-text": (
        ("source", "target"), ("text", "summary"), ("document", "summary"), ("article", "highlights"),
        ("prompt", "completion"), ("question", "answer"), ("instruction", "output"), ("input", "output"),
        ("text", "target"),
    ),
    "pair": _PAIR,
    "choice": _PAIR,
    "kto": (("prompt", "completion", "label"), ("prompt", "response", "label"), ("question", "answer", "label")),
    "prompt": (
        ("prompt", "answer"), ("question", "answer"), ("problem", "solution"), ("problem", "answer"),
        ("prompt", "completion"),
    ),
    "anchor": (
        ("anchor", "positive"), ("question", "answer"), ("query", "answer"), ("query", "positive"),
        ("query", "document"), ("sentence1", "sentence2"), ("premise", "hypothesis"), ("title", "body"),
    ),
    "pictures": (
        ("images", "messages"), ("images", "prompt", "completion"), ("image", "messages"),
        ("image", "prompt", "completion"), ("image", "question", "answer"),
    ),
    "image": (("pixel_values", "label"), ("image", "label"), ("img", "label"), ("image", "labels")),
    "features": _HEARD,
    "waveform": _HEARD,
    "noise": (("image", "text"), ("image", "caption"), ("image", "prompt"), ("image", "en_text")),
}  # fmt: skip


class Kind(NamedTuple):
    """One kind of sample."""

    key: str  # of COLUMNS
    joined: bool = False  # texts are cut from one long text, so that each sequence is as long as it may be

    @property
    def lines(self) -> Lines:
        """Return the lines of columns, of which a record has one."""
        return COLUMNS[self.key]

    @property
    def fields(self) -> frozenset[str]:
        """Return the names of all columns."""
        return frozenset(name for line in self.lines for name in line) | {"file_name"}

    @property
    def filed(self) -> bool:
        """Return whether samples may be the files of a folder."""
        return any({"image", "audio"} & {*line} for line in self.lines)

    @property
    def heard(self) -> bool:
        """Return whether a sample is a recording."""
        return self.key in ("features", "waveform")

    @property
    def words(self) -> str:
        """Return the lines as words: 'text and label; sentence and label'."""
        return "; ".join(" and ".join(line) for line in self.lines)

    def read(self, record: Record, folder: Path | None) -> Example:
        """Read a record; folder: where its files lie, None: they are not looked for. Raises UnusableError."""
        value = {"text": record.value} if isinstance(record.value, str) else record.value
        if not isinstance(value, dict):
            raise UnusableError("a sample must be an object with fields")
        if "file_name" in value:  # of a folder's metadata, whose other columns say what the file holds
            value = {"audio" if self.heard else "image": value["file_name"], **value}
        for line in self.lines:
            if all(value.get(name) not in (None, "", []) for name in line):
                found = _READERS[self.key](value, line, folder)
                return found._replace(line=record.line, layout="+".join(line))
        named = ", ".join(f"'{str(name)[:30]}'" for name in list(value)[:6]) or "none"
        raise UnusableError(f"no columns of this task; found {named}")


METADATA = ("metadata.jsonl", "metadata.csv", "metadata.parquet")
IMAGES = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff")


def labelled_images(folder: Path) -> Iterator[Record]:
    """Yield the images of a folder that holds a folder for each label."""
    found = (path for path in sorted(folder.rglob("*")) if path.suffix.lower() in IMAGES)
    for number, path in enumerate(found, 1):
        yield Record(number, {"image": str(path), "label": path.parent.name})


def kind_of(task: str, sample: str) -> Kind:
    """Return the kind of a task's samples, by its key and its kind of sample."""
    return Kind(task if task in COLUMNS else sample, joined=sample == "text")


def tasks_of(columns: Collection[str]) -> list[str]:
    """Return the tasks whose samples have such columns."""
    kinds = {key: kind_of(key, row.sample) for key, row in TASKS.items() if key != "sft"}
    return [key for key, kind in kinds.items() if any({*columns} >= {*line} for line in kind.lines)]


def _texts(value: object, name: str) -> Text:
    """Return a column's texts and the tokens around them: of a text, a message or a list of messages."""
    found = parsed(value)
    found = [found] if isinstance(found, dict) else found
    if isinstance(found, list) and found and isinstance(found[0], dict):
        texts = messages_of(found)
        return Text(texts, CHAT_TOKENS * len(texts))
    return Text([text_of({name: value}, name)], 0)


def _whole(value: dict[str, Any], line: tuple[str, ...], _: Path | None) -> Example:
    return Example(texts=[text_of(value, line[0])], tokens=END)


def _labelled(value: dict[str, Any], line: tuple[str, ...], _: Path | None) -> Example:
    *texts, label = line
    return Example(texts=[text_of(value, name) for name in texts], tokens=len(texts) - 1, labels=(str(value[label]),))


def _tagged(value: dict[str, Any], line: tuple[str, ...], _: Path | None) -> Example:
    words, tags = parsed(value[line[0]]), parsed(value[line[1]])
    if not (isinstance(words, list) and isinstance(tags, list) and len(words) == len(tags)):
        raise UnusableError(f"{line[0]} and {line[1]} are not two lists of one length")
    return Example(texts=[" ".join(map(str, words))], labels=tuple(map(str, tags)))


def _written(value: dict[str, Any], line: tuple[str, ...], _: Path | None) -> Example:
    return Example(texts=[text_of(value, line[0])], target=Text([text_of(value, line[1])], END))


def _pair(value: dict[str, Any], line: tuple[str, ...], _: Path | None) -> Example:
    answers = tuple(_texts(value[name], name) for name in line[-2:])
    asked = _texts(value[line[0]], line[0]) if len(line) > len(answers) else Text([], 0)
    return Example(texts=asked.texts, tokens=asked.tokens + END, answers=answers)


def _judged(value: dict[str, Any], line: tuple[str, ...], _: Path | None) -> Example:
    asked, answer = (_texts(value[name], name) for name in line[:2])
    return Example(texts=[*asked.texts, *answer.texts], tokens=asked.tokens + answer.tokens + END)


def _asked(value: dict[str, Any], line: tuple[str, ...], _: Path | None) -> Example:
    prompt = _texts(value[line[0]], line[0])
    return Example(prompt=Text(prompt.texts, prompt.tokens + CHAT_TOKENS * bool(prompt.tokens)))


def _alike(value: dict[str, Any], line: tuple[str, ...], _: Path | None) -> Example:
    return Example(answers=tuple(Text([text_of(value, name)], 0) for name in line))


def _pictured(value: dict[str, Any], line: tuple[str, ...], folder: Path | None) -> Example:
    images, *said = line
    found = [_texts(value[name], name) for name in said]
    given = value[images] if isinstance(value[images], list) else [value[images]]
    texts = [text for one in found for text in one.texts]
    return Example(
        texts=texts, tokens=END + sum(one.tokens for one in found), images=tuple(pixels(one, folder) for one in given)
    )


def _image(value: dict[str, Any], line: tuple[str, ...], folder: Path | None) -> Example:
    return Example(labels=(str(value[line[1]]),))  # the model's processor brings each image to one size


def _heard(value: dict[str, Any], line: tuple[str, ...], folder: Path | None) -> Example:
    return Example(seconds=seconds(value[line[0]], folder), target=Text([text_of(value, line[1])], END))


def _drawn(value: dict[str, Any], line: tuple[str, ...], folder: Path | None) -> Example:
    return Example()  # images are brought to the resolution, captions to the encoders' lengths


_READERS: dict[str, Callable[[dict[str, Any], tuple[str, ...], Path | None], Example]] = {
    "text": _whole, "label": _labelled, "token-labels": _tagged, "text-to-text": _written, "pair": _pair,
    "choice": _pair, "kto": _judged, "prompt": _asked, "anchor": _alike, "pictures": _pictured, "image": _image,
    "features": _heard, "waveform": _heard, "noise": _drawn,
}  # fmt: skip


def first_of(path: str, kind: Kind) -> dict[str, Any]:
    """Return the first record of a file by its columns; empty where there is none that can be read."""
    source = Path(path)
    with suppress(MemfitError, OSError), source.open("rb") as file:
        with closing(reader_for(source)(file, kind.fields)) as records:
            first = next(records, None)
        return first.value if isinstance(first, Record) and isinstance(first.value, dict) else {}
    return {}


def pictured(path: str) -> bool:
    """Return whether the first sample of a file has images beside its text; a folder holds images."""
    kind = Kind("pictures")
    first = first_of(path, kind)
    return Path(path).is_dir() or any(first.get(line[0]) not in (None, "", []) for line in kind.lines)


def holds_chats(path: str, kind: Kind) -> bool:
    """Return whether the first sample of a file has messages in place of text."""
    return any(isinstance(value, list) and value and isinstance(value[0], dict) for value in
               map(parsed, first_of(path, kind).values()))  # fmt: skip
