"""The training file of a request: its samples, and the sequence length that they need."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memfit.cli import terminal
from memfit.cli.request import Request, length_for
from memfit.data.lengths import samples_of
from memfit.errors import BadInput, MemfitError
from memfit.nouns.job import Recipe
from memfit.nouns.task import Task
from memfit.tables.tasks import TASKS

if TYPE_CHECKING:
    from memfit.data.dataset import Dataset
    from memfit.data.task_samples import Kind


def longest_batch(request: Request, recipe: Recipe) -> Recipe:
    """Return the recipe with the sequence length of the longest batch in its data; unchanged without texts."""
    lengths = request.lengths
    if request.dataset is None or lengths is None:
        return recipe
    if "sequence_length" not in {*request.wanted, *(request.adopted.stated if request.adopted else ())}:
        recipe = recipe.but(sequence_length=length_for(request, lengths))
    else:
        from memfit.report.words import cut_words

        lost = cut_words(samples_of(lengths, recipe.sequence_length))
        request.notes.append(f"--sequence-length {recipe.sequence_length}: {lost}")
    if recipe.padding == "packing" or request.dataset.joined:
        return recipe
    return recipe.but(sequence_length=min(recipe.sequence_length, lengths.longest))


def with_data(request: Request, flags: Mapping[str, Any], row: Task = TASKS["sft"]) -> Request:
    """Read the training file (`--data`, or the one the `--from` file names, if it exists) as samples of a task."""
    path = flags.get("data")
    if not path:
        if flags.get("tokenizer"):
            raise BadInput("--tokenizer needs --data", hint="--data train.jsonl --tokenizer path/to/model")
        return request
    from memfit.data.dataset import read_dataset

    kind = kind_for(row)
    own = None if flags.get("tokenizer") else _own_tokenizer(request.architecture.name)
    with terminal.progress() as tell:

        def read(tokenizer: str | Path | None) -> Dataset:
            return read_dataset(
                path, tokenizer, progress=lambda done, size: tell("reading the data", done / max(size, 1)), kind=kind
            )

        try:
            dataset = read(own or flags.get("tokenizer"))
        except MemfitError:
            if own is None:
                raise
            dataset = read(None)  # the user did not request the model's own tokenizer, so an estimate replaces it
    return with_dataset(request, dataset, row)


def kind_for(row: Task) -> Kind | None:
    """Return the kind of a task's samples; None: those of a language model."""
    from memfit.data.task_samples import kind_of

    return None if row.key == "sft" else kind_of(row.key, row.sample)


def with_dataset(request: Request, dataset: Dataset, row: Task) -> Request:
    """Return the request with samples of a task, and with notes on what was read."""
    path = dataset.path
    request.notes += dataset.notes
    if dataset.sizes.elsewhere:
        request.notes.append(
            f"{path}: the sizes of {dataset.sizes.elsewhere} samples are not known, as their files are not on this "
            "machine; the largest of the others is planned"
        )
    if dataset.estimate and dataset.lengths.longest:
        request.notes.append(f"{path}: token counts are an estimate (--tokenizer PATH counts exactly)")
    if dataset.empty:
        request.notes.append(f"{path}: {dataset.empty} of its samples are empty; training skips them")
    if dataset.broken:
        records = f"{dataset.broken} record{'s' if dataset.broken > 1 else ''}"
        look = f"memfit data {path}" + ("" if row.key == "sft" else f" --task {row.key}")
        request.notes.append(f"{path}: {records} could not be used (see: {look})")
    return replace(request, dataset=dataset)


def _own_tokenizer(model: str) -> Path | None:
    """Return the folder of a local model whose tokenizer.json training will read; None if there is none."""
    return Path(model) if (Path(model) / "tokenizer.json").is_file() else None
