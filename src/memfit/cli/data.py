"""memfit data: the token lengths of a training file."""

from __future__ import annotations

from typing import Any

from memfit.cli import terminal
from memfit.cli.flags import COMMON, Argument, Flag, takes
from memfit.data.dataset import read_dataset
from memfit.errors import BadInput
from memfit.report.dataset import DatasetFacts, dataset_view

EXAMPLES = ("memfit data train.jsonl --tokenizer ~/models/Llama-3.1-8B", "memfit data corpus.txt --tokenizer bytes")
OWN = (
    Flag("tokenizer", str, "A tokenizer.json or its folder, or 'bytes'. Default: an estimate.", "PATH"),
    Flag("text_field", str, "Read only this field of each sample.", "NAME"),
    Flag("limit", int, "Stop after this many samples.", "N"),
    Flag("micro_batch", int, "Sequences per batch, for the padding column. Default: 4.", "N", default=4),
)


@takes(
    *OWN,
    *COMMON,
    argument=Argument("file", "a .jsonl, .json, .txt, .csv, .tsv or .parquet file", "FILE", required=True),
)
def run(file: str, **flags: Any) -> int:
    """Count the tokens of a training file.

    Shows the sequence length that the samples need, and what padding would waste.
    """
    if flags["micro_batch"] < 1:
        raise BadInput(
            f"--micro-batch must be at least 1, not {flags['micro_batch']}", hint="for example --micro-batch 4"
        )
    with terminal.progress() as tell:
        found = read_dataset(
            file, flags["tokenizer"], text_field=flags["text_field"] or "", limit=flags["limit"],
            progress=lambda done, size: tell("reading", done / max(size, 1)),
        )  # fmt: skip
    if flags["json"]:
        terminal.show_json({"schema": "memfit.data/1", **found.summary()})
        return 0

    facts = DatasetFacts(
        path=found.path, lengths=found.lengths, layouts=found.layouts, tokenizer=found.tokenizer,
        longest=found.longest, broken=[(b.line, b.reason) for b in found.examples], broken_count=found.broken,
        complete=found.complete, notes=found.notes,
    )  # fmt: skip
    terminal.show(dataset_view(facts, flags["micro_batch"]))
    return 0
