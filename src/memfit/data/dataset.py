"""Count the tokens of a training file.

Only a batch of samples and a table of lengths are kept, so a file of any size is read in bounded memory. Lines that
cannot be used are counted and reported.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

from memfit.data.files import Broken, Record, reader_for
from memfit.data.lengths import Lengths
from memfit.data.samples import KNOWN_FIELDS, Example, Text, UnusableError, sample_of
from memfit.data.task_samples import METADATA, Kind, labelled_images, tasks_of
from memfit.data.tokens import Tokens, find_tokenizer
from memfit.errors import BadInput
from memfit.units import MIB, several

BATCH_SAMPLES, BATCH_CHARS = 256, 1 * MIB  # tokenised at once
REASONS = 100  # at most so many reasons of broken lines are kept, each with its first line
MOST_LABELS = 1 << 16  # different labels that are counted
KEPT = 5  # broken lines and longest samples kept as examples
Progress = Callable[[int, int], None]  # (bytes read, bytes of the file)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """What samples of other tasks have beside the tokens of a text."""

    targets: Lengths | None = None  # tokens of what the model writes
    prompts: Lengths | None = None  # tokens of what answers are sampled for
    labels: int = 0  # different ones
    seconds: float = 0.0  # of the longest recording
    images: int = 0  # most of one sample
    image: tuple[int, int] = (0, 0)  # width and height of the largest
    elsewhere: int = 0  # samples whose images or recordings are not in files here, so that their size is not known

    def summary(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {
            "targets": self.targets.summary() if self.targets else None,
            "prompts": self.prompts.summary() if self.prompts else None,
            "labels": self.labels, "seconds": self.seconds, "images": self.images, "image": list(self.image),
            "elsewhere": self.elsewhere,
        }  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Dataset:
    """The contents of a training file, in tokens."""

    path: str
    lengths: Lengths
    layouts: tuple[tuple[str, int], ...]  # (fields read, samples), most frequent first
    tokenizer: str  # as shown to the user
    estimate: bool  # True: not counted by the model's tokenizer
    longest: tuple[tuple[int, int], ...]  # (tokens, line) of the longest samples, longest first
    broken: int
    examples: tuple[Broken, ...]  # the first few broken lines
    complete: bool  # False if reading stopped at the limit
    notes: tuple[str, ...]
    highest: tuple[int, int] = (-1, 0)  # (largest token id of a tokenised file, its line); -1: the file holds text
    empty: int = 0  # samples without a token to learn, which training leaves out
    reasons: tuple[Broken, ...] = ()  # the first broken line of each reason
    numbers: tuple[int, int] = (0, 0)  # (samples whose text is written as a number, line of the first)
    sizes: Sizes = Sizes()
    joined: bool = False  # sequences are cut from all texts end to end, so that each is as long as it may be

    def summary(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {
            "path": self.path,
            "tokenizer": self.tokenizer,
            "estimate": self.estimate,
            "complete": self.complete,
            "layouts": dict(self.layouts),
            "lengths": self.lengths.summary(),
            "longest": [{"tokens": tokens, "line": line} for tokens, line in self.longest],
            "broken": self.broken,
            "broken_examples": [{"line": b.line, "reason": b.reason} for b in self.examples],
            "notes": list(self.notes),
            "sizes": self.sizes.summary(),
        }


def read_dataset(
    path: str | Path,
    tokenizer: str | Path | None = None,
    *,
    text_field: str = "",
    limit: int | None = None,
    progress: Progress | None = None,
    kind: Kind | None = None,
    alone: bool = False,
) -> Dataset:
    """Count the tokens of every sample of a .jsonl, .json, .txt, .csv, .tsv or .parquet file.

    tokenizer: a tokenizer.json or its folder, "bytes", or None for an estimate. text_field: the field to read instead
    of the known ones. limit: the number of samples after which to stop. progress is called between batches.
    kind: of the samples, where they are not those of a language model. alone: no other file is read, so that images and
    recordings which the samples name by a path have no known size.
    Raises BadInput if the file or the tokenizer cannot be used at all; single broken lines are only counted.
    """
    named = source = Path(path)
    if kind and kind.filed and source.is_dir():
        source = next((source / name for name in METADATA if (source / name).is_file()), source)
    tally = _Tally(kind, None if alone else source.parent)
    if limit is not None and limit < 1:
        raise BadInput(f"the limit must be at least 1 sample, not {limit}", hint="leave it out to read the whole file")
    tokens = find_tokenizer(tokenizer)
    if kind and kind.key == "image" and source.is_dir():
        for batch in _batches(tally.usable(labelled_images(source), text_field, limit)):
            tally.add(batch, tokens)
        return tally.dataset(named, tokens)
    try:
        read = reader_for(source)
        size = source.stat().st_size
        fields = kind.fields if kind else {*KNOWN_FIELDS, text_field} if text_field else KNOWN_FIELDS
        with source.open("rb") as file, closing(read(file, fields)) as records:
            for batch in _batches(tally.usable(records, text_field, limit)):
                tally.add(batch, tokens)
                if progress:
                    progress(file.tell(), size)
    except OSError as error:
        reason = f"{source} cannot be read: {error.strerror or error}"
        raise BadInput(reason, hint="check the path and its rights") from None
    return tally.dataset(named, tokens)


def _batches(samples: Iterable[Example]) -> Iterator[list[Example]]:
    """Group samples into lists that are large enough for the tokenizer and small enough for memory."""
    batch: list[Example] = []
    chars = 0
    for sample in samples:
        batch.append(sample)
        chars += sum(len(text) for part in _parts(sample) for text in part.texts)
        if len(batch) >= BATCH_SAMPLES or chars >= BATCH_CHARS:
            yield batch
            batch, chars = [], 0
    if batch:
        yield batch


def _parts(sample: Example) -> tuple[Text, ...]:
    """Return all texts of a sample: its own, then what stands beside them."""
    return (Text(sample.texts, sample.tokens), *sample.answers, sample.target, sample.prompt)


@dataclass(slots=True)
class _Tally:
    """The counts so far while a file is read."""

    kind: Kind | None
    folder: Path | None  # of the file; None: no file beside it is read
    targets: Counter[int] = field(default_factory=Counter)
    prompts: Counter[int] = field(default_factory=Counter)
    labels: set[int] = field(default_factory=set)  # hashes: a label may be of any length
    seconds: float = 0.0
    images: int = 0
    image: tuple[int, int] = (0, 0)
    elsewhere: int = 0
    unread: frozenset[str] = frozenset()  # columns of the first record that could not be used
    counts: Counter[int] = field(default_factory=Counter)
    layouts: Counter[str] = field(default_factory=Counter)
    longest: list[tuple[int, int]] = field(default_factory=list)  # a heap of (tokens, -line)
    broken: int = 0
    examples: list[Broken] = field(default_factory=list)
    notes: set[str] = field(default_factory=set)
    complete: bool = True
    empty: int = 0
    reasons: dict[str, Broken] = field(default_factory=dict)
    numbers: tuple[int, int] = (0, 0)
    highest: tuple[int, int] = (-1, 0)

    def usable(self, records: Iterable[Record | Broken], text_field: str, limit: int | None) -> Iterator[Example]:
        """Yield the samples among the records, at most `limit`; count the other records as broken."""
        yielded = 0
        for record in records:
            if yielded == limit:
                self.complete = False
                return
            try:
                if isinstance(record, Broken):
                    raise UnusableError(record.reason)
                yield self.kind.read(record, self.folder) if self.kind else sample_of(record, text_field)
                yielded += 1
            except UnusableError as error:
                self.broken += 1
                if not self.unread and isinstance(record, Record) and isinstance(record.value, dict):
                    self.unread = frozenset(record.value)
                broken = Broken(record.line, str(error))
                if len(self.examples) < KEPT:
                    self.examples.append(broken)
                if len(self.reasons) < REASONS:
                    self.reasons.setdefault(broken.reason, broken)

    def add(self, batch: list[Example], tokens: Tokens) -> None:
        """Count the tokens of one batch."""
        counted = iter(tokens.count([text for sample in batch for part in _parts(sample) for text in part.texts]))

        def length(part: Text) -> int:
            return part.tokens + sum(next(counted) for _ in part.texts)

        for sample in batch:
            own, *others = map(length, _parts(sample))
            *answers, target, prompt = others
            total = own + max(answers, default=0)
            total += tokens.special if total > sample.tokens else 0
            self.counts[total] += 1
            self._beside(sample, target, prompt, tokens.special)
            self.layouts[sample.layout] += 1
            self.empty += sample.empty
            if sample.number:
                self.numbers = (self.numbers[0] + 1, self.numbers[1] or sample.line)
            self.highest = max(self.highest, (sample.highest, sample.line))
            heapq.heappush(self.longest, (total, -sample.line))
            if len(self.longest) > KEPT:
                heapq.heappop(self.longest)
            self.notes.update(sample.notes)

    def _beside(self, sample: Example, target: int, prompt: int, special: int) -> None:
        """Count what the samples of tasks have beside their tokens."""
        if target:
            self.targets[target + special] += 1
        if prompt:
            self.prompts[prompt + special] += 1
        if len(self.labels) < MOST_LABELS:
            self.labels.update(map(hash, sample.labels))
        self.seconds = max(self.seconds, sample.seconds)
        self.images = max(self.images, len(sample.images))
        self.image = max(self.image, *sample.images, key=prod) if sample.images else self.image
        self.elsewhere += (0, 0) in sample.images or (bool(self.kind and self.kind.heard) and not sample.seconds)

    def dataset(self, source: Path, tokens: Tokens) -> Dataset:
        """Return the result. Raises BadInput if no sample could be used."""
        if not self.counts and not self.broken:
            raise BadInput(f"{source} holds no samples", hint="give a file with at least one sample")
        if not self.counts:
            first, has = self.examples[0], "text, messages, prompt and completion, instruction and output, or input_ids"
            hint = f"a sample has {has}: rename its fields ('memfit data FILE --text-field NAME' counts any field)"
            if not self.kind and (others := tasks_of(self.unread)):
                hint = f"--task {', '.join(others)} reads such columns: memfit plan MODEL --task {others[0]} --data ..."
            raise BadInput(
                f"none of the {several(self.broken, 'record')} of {source} could be used "
                f"(line {first.line}: {first.reason})",
                hint=f"a sample has {self.kind.words}" if self.kind else hint,
            )
        return Dataset(
            path=str(source),
            lengths=Lengths.counted(self.counts),
            layouts=tuple(self.layouts.most_common()),
            tokenizer=tokens.label,
            estimate=tokens.estimate,
            longest=tuple((total, -line) for total, line in sorted(self.longest, reverse=True)),
            broken=self.broken,
            examples=tuple(self.examples),
            complete=self.complete,
            notes=tuple(sorted(self.notes)),
            highest=self.highest,
            empty=self.empty,
            reasons=tuple(self.reasons.values()),
            numbers=self.numbers,
            sizes=Sizes(
                targets=Lengths.counted(self.targets) if self.targets else None,
                prompts=Lengths.counted(self.prompts) if self.prompts else None,
                labels=len(self.labels), seconds=self.seconds, images=self.images, image=self.image,
                elsewhere=self.elsewhere,
            ),
            joined=bool(self.kind and self.kind.joined),
        )  # fmt: skip
