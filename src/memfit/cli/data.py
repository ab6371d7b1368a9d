"""memfit data: the token lengths of a training file."""

from __future__ import annotations

from typing import Any

from memfit.cli import terminal
from memfit.cli.flags import COMMON, Argument, Flag, takes
from memfit.data.dataset import Sizes, read_dataset
from memfit.data.task_samples import kind_of
from memfit.errors import BadInput
from memfit.report.dataset import DatasetFacts, dataset_view
from memfit.tables.tasks import task

EXAMPLES = (
    "memfit data pairs.jsonl --task dpo",
    "memfit data train.jsonl --tokenizer ~/models/Llama-3.1-8B",
    "memfit data corpus.txt --tokenizer bytes",
)
OWN = (
    Flag("tokenizer", str, "A tokenizer.json or its folder, or 'bytes'. Default: an estimate.", "PATH"),
    Flag("task", str, "What is trained on it, for the columns of its samples. Default: sft.", "NAME"),
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
    row = task(flags["task"] or "sft")
    if row.key != "sft" and flags["text_field"]:
        raise BadInput("--text-field reads text alone", hint="leave --task or --text-field out")
    with terminal.progress() as tell:
        found = read_dataset(
            file, flags["tokenizer"], text_field=flags["text_field"] or "", limit=flags["limit"],
            progress=lambda done, size: tell("reading", done / max(size, 1)),
            kind=None if row.key == "sft" else kind_of(row.key, row.sample),
        )  # fmt: skip
    if flags["json"]:
        terminal.show_json({"schema": "memfit.data/1", **found.summary()})
        return 0

    facts = DatasetFacts(
        path=found.path, lengths=found.lengths, layouts=found.layouts, tokenizer=found.tokenizer,
        longest=found.longest, broken=[(b.line, b.reason) for b in found.examples], broken_count=found.broken,
        complete=found.complete, notes=found.notes, beside=_beside(found.sizes),
    )  # fmt: skip
    terminal.show(dataset_view(facts, flags["micro_batch"]))
    return 0


def _beside(sizes: Sizes) -> list[str]:
    """Return what samples have beside their tokens, in words."""
    lengths = (("targets", sizes.targets), ("prompts", sizes.prompts))
    said = [f"{what} of at most {found.longest:,} tokens" for what, found in lengths if found]
    if sizes.labels:
        said.append(f"{sizes.labels:,} label{'s' if sizes.labels > 1 else ''}")
    if sizes.seconds:
        said.append(f"recordings of at most {sizes.seconds:.1f} s")
    if sizes.images:
        said.append(f"at most {sizes.images} images, the largest of {sizes.image[0]} x {sizes.image[1]} pixels")
    if sizes.elsewhere:
        said.append(f"{sizes.elsewhere:,} samples whose files are not on this machine")
    return said
