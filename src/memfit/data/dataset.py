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
from pathlib import Path
from typing import Any

from memfit.data.files import Broken, Record, reader_for
from memfit.data.lengths import Lengths
from memfit.data.samples import KNOWN_FIELDS, Example, UnusableError, sample_of
from memfit.data.tokens import Tokens, find_tokenizer
from memfit.errors import BadInput
from memfit.units import MIB

BATCH_SAMPLES, BATCH_CHARS = 256, 1 * MIB  # tokenised at once
REASONS = 100  # at most so many reasons of broken lines are kept, each with its first line
KEPT = 5  # broken lines and longest samples kept as examples
Progress = Callable[[int, int], None]  # (bytes read, bytes of the file)


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
        }


def read_dataset(
    path: str | Path,
    tokenizer: str | Path | None = None,
    *,
    text_field: str = "",
    limit: int | None = None,
    progress: Progress | None = None,
) -> Dataset:
    """Count the tokens of every sample of a .jsonl, .json, .txt, .csv, .tsv or .parquet file.

    tokenizer: a tokenizer.json or its folder, "bytes", or None for an estimate. text_field: the field to read instead
    of the known ones. limit: the number of samples after which to stop. progress is called between batches.
    Raises BadInput if the file or the tokenizer cannot be used at all; single broken lines are only counted.
    """
    source, tally = Path(path), _Tally()
    if limit is not None and limit < 1:
        raise BadInput(f"the limit must be at least 1 sample, not {limit}", hint="leave it out to read the whole file")
    tokens = find_tokenizer(tokenizer)
    try:
        read = reader_for(source)
        size = source.stat().st_size
        fields = {*KNOWN_FIELDS, text_field} if text_field else KNOWN_FIELDS
        with source.open("rb") as file, closing(read(file, fields)) as records:
            for batch in _batches(tally.usable(records, text_field, limit)):
                tally.add(batch, tokens)
                if progress:
                    progress(file.tell(), size)
    except OSError as error:
        reason = f"{source} cannot be read: {error.strerror or error}"
        raise BadInput(reason, hint="check the path and its rights") from None
    return tally.dataset(source, tokens)


def _batches(samples: Iterable[Example]) -> Iterator[list[Example]]:
    """Group samples into lists that are large enough for the tokenizer and small enough for memory."""
    batch: list[Example] = []
    chars = 0
    for sample in samples:
        batch.append(sample)
        chars += sum(map(len, sample.texts))
        if len(batch) >= BATCH_SAMPLES or chars >= BATCH_CHARS:
            yield batch
            batch, chars = [], 0
    if batch:
        yield batch


@dataclass(slots=True)
class _Tally:
    """The counts so far while a file is read."""

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
                yield sample_of(record, text_field)
                yielded += 1
            except UnusableError as error:
                self.broken += 1
                broken = Broken(record.line, str(error))
                if len(self.examples) < KEPT:
                    self.examples.append(broken)
                if len(self.reasons) < REASONS:
                    self.reasons.setdefault(broken.reason, broken)

    def add(self, batch: list[Example], tokens: Tokens) -> None:
        """Count the tokens of one batch."""
        counted = iter(tokens.count([text for sample in batch for text in sample.texts]))
        for sample in batch:
            total = sample.tokens + sum(next(counted) for _ in sample.texts)
            total += tokens.special if sample.texts else 0
            self.counts[total] += 1
            self.layouts[sample.layout] += 1
            self.empty += sample.empty
            if sample.number:
                self.numbers = (self.numbers[0] + 1, self.numbers[1] or sample.line)
            self.highest = max(self.highest, (sample.highest, sample.line))
            heapq.heappush(self.longest, (total, -sample.line))
            if len(self.longest) > KEPT:
                heapq.heappop(self.longest)
            self.notes.update(sample.notes)

    def dataset(self, source: Path, tokens: Tokens) -> Dataset:
        """Return the result. Raises BadInput if no sample could be used."""
        if not self.counts and not self.broken:
            raise BadInput(f"{source} holds no samples", hint="give a file with at least one sample")
        if not self.counts:
            first = self.examples[0]
            raise BadInput(
                f"none of the {self.broken} records of {source} could be used (line {first.line}: {first.reason})",
                hint="a sample has text, messages, prompt and completion, instruction and output, or input_ids: "
                "rename its fields ('memfit data FILE --text-field NAME' counts any field)",
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
        )
