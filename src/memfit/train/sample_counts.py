"""Count the samples of every optimizer step and sum their digests, to detect skipped or repeated samples.

The record is one line per step, each with a checksum of its own, so that damage to one line costs that line alone.
What a checkpoint says was trained, and the record lacks, is counted as missing.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path
from typing import Any
from zlib import crc32

from memfit.train.folder import SAMPLES_FILE
from memfit.train.run_file import write_text

KEY = "memfit_samples"
MODULUS = 1 << 64


class Marked:
    """A collator that adds the digests of its samples to the batch, one integer each."""

    def __init__(self, collate: Callable[[list[Any]], Any]) -> None:
        self.collate = collate

    def __getattr__(self, name: str) -> Any:
        return getattr(self.collate, name)

    def __call__(self, rows: list[Any]) -> Any:
        """Return the batch with KEY in it."""
        marks = [digest(tokens_of(row)) for row in rows]
        batch = self.collate(rows)
        batch[KEY] = Marks(marks)
        return batch


class Marks(tuple[int, ...]):
    """Digests of a batch's samples, in a type that no library moves to a device or pads."""

    __slots__ = ()

    def __new__(cls, values: Any) -> Marks:
        return super().__new__(cls, values)


def tokens_of(row: dict[str, Any]) -> list[Any]:
    """Return the tokens of a sample; of preferences those of the prompt and of both answers, of texts the texts."""
    if "input_ids" in row:
        return list(row["input_ids"])
    found = [token for name in sorted(row) if name.endswith("_ids") for token in row[name]]
    return found or [row[name] for name in sorted(row)]


def digest(tokens: Any) -> int:
    """Return a 64-bit digest of a sample's tokens."""
    text = ",".join(map(str, (tokens.tolist() if hasattr(tokens, "tolist") else tokens)))
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")


class SampleLedger:
    """One line per optimizer step in samples.jsonl: how many samples, and the sum of their digests modulo 2**64.

    `total`: samples this process trained. `missing`: those of them in steps whose lines are lost or damaged.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.total = self.missing = 0
        self._count = self._sum = 0

    def begin(self, step: int, trained: int | None = None) -> None:
        """Continue after `step`; later lines are removed, because their steps are trained again.

        trained: the samples of the steps so far, as the checkpoint counts them; None: as the lines do.
        """
        kept = [line for line in self.lines() if line["step"] <= step]
        recorded = sum(line["samples"] for line in kept)
        self.total = recorded if trained is None else trained
        self.missing = self.total - recorded
        self._count = self._sum = 0
        write_text(self.path, "".join(json.dumps(line) + "\n" for line in kept))

    def saw(self, marks: Marks) -> None:
        """Count the samples of one micro-batch."""
        self._count += len(marks)
        self._sum = (self._sum + sum(marks)) % MODULUS

    def drop(self) -> None:
        """Drop the micro-batches of a step that was not taken."""
        self._count = self._sum = 0

    def step(self, step: int) -> None:
        """Write the line of a step with the counts since the last one."""
        line = {"step": step, "samples": self._count, "digest": f"{self._sum:016x}"}
        with self.path.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(line | {"check": check(line)}) + "\n")
        self.total += self._count
        self.drop()

    def flush(self) -> None:
        """Wait until the lines are on the disk."""
        with self.path.open("a", encoding="utf-8") as stream:
            os.fsync(stream.fileno())

    def lines(self) -> list[dict[str, Any]]:
        """Return the lines that are as they were written, one a step, in the order of the steps."""
        text = self.path.read_bytes() if self.path.is_file() else b""
        found = {line["step"]: line for line in map(_line, text.splitlines()) if line is not None}
        return [found[step] for step in sorted(found)]


def check(line: dict[str, Any]) -> str:
    """Return the checksum of a step's line."""
    text = " ".join(str(line[name]) for name in ("step", "samples", "digest"))
    return f"{crc32(text.encode(errors='replace')):08x}"


def _line(text: bytes) -> dict[str, Any] | None:
    """Return a line of the record, or None if it is damaged."""
    try:
        line = json.loads(text)
        known = line.keys() == {"step", "samples", "digest", "check"}
        numbers = known and all(type(line[name]) is int and line[name] >= 0 for name in ("step", "samples"))
    except (ValueError, AttributeError, RecursionError):
        return None
    return line if numbers and line["check"] == check(line) else None


def recorded(folder: Path, step: int) -> int:
    """Return the samples of the steps up to `step` in the records of all processes of a run."""
    start, _, end = SAMPLES_FILE.partition(".")
    ledgers = (SampleLedger(path) for path in sorted(folder.glob(f"{start}.*{end}")))
    return sum(line["samples"] for ledger in ledgers for line in ledger.lines() if line["step"] <= step)


@contextmanager
def counted(trainer: Any, ledger: SampleLedger) -> Iterator[None]:
    """Count the trainer's training batches in the ledger during the block."""
    collate, train = trainer.data_collator, trainer.training_step

    def training_step(model: Any, inputs: Any, *rest: Any, **named: Any) -> Any:
        marks = inputs.pop(KEY)
        loss = train(model, inputs, *rest, **named)
        ledger.saw(marks)
        return loss

    trainer.data_collator, trainer.training_step = Marked(collate), training_step
    evaluate = trainer.get_eval_dataloader

    def get_eval_dataloader(*args: Any, **named: Any) -> Any:
        trainer.data_collator = collate
        try:
            return evaluate(*args, **named)
        finally:
            trainer.data_collator = Marked(collate)

    trainer.get_eval_dataloader = get_eval_dataloader
    try:
        yield
    finally:
        trainer.data_collator = collate
        del trainer.training_step, trainer.get_eval_dataloader
