"""memfit gpus: list the catalogue of cards with the largest model that each trains."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from memfit.catalogue import Entry, config, entries
from memfit.catalogue.cards import described, list_gpus, prices_read
from memfit.cli import terminal
from memfit.cli.flags import COMMON, Argument, takes
from memfit.documents import codec, traced_answers
from memfit.errors import MemfitError
from memfit.models.families import architecture
from memfit.nouns.architecture import Architecture
from memfit.nouns.gpu import Gpu
from memfit.planner.good_for import SETTING, GpuRow, good_for
from memfit.report.reference import gpu_view, gpus_view

EXAMPLES = ("memfit gpus", "memfit gpus 4090", "memfit gpus ada 24gb")


@takes(*COMMON, argument=Argument("text", "words of a name, vendor, architecture or memory size", "TEXT", many=True))
def run(text: Sequence[str] = (), **flags: Any) -> int:
    """List GPUs and the largest model each trains.

    A single card is shown in full.
    """
    words = " ".join(text)
    rows = kept_rows(described(words) if words else list_gpus())
    if flags["json"]:
        terminal.show_json(codec.gpus_doc(rows, SETTING, prices_read()))
    else:
        found = gpu_view(rows[0], SETTING, prices_read()) if len(rows) == 1 else gpus_view(rows, SETTING, prices_read())
        terminal.show(found)
    return 0


class Rows(msgspec.Struct):
    """What the cache keeps."""

    rows: tuple[GpuRow, ...]


def kept_rows(gpus: Sequence[Gpu]) -> tuple[GpuRow, ...]:
    """Return the rows of cards, from the cache where they were asked for before: all of them take 75 replays."""
    digest = traced_answers.key(gpus=gpus, models=entries(), setting=SETTING)
    kept = traced_answers.read(digest, Rows)
    if kept is None:
        kept = Rows(good_for(gpus, entries(), loader()))
        traced_answers.write(digest, kept)
    return kept.rows


def loader() -> Callable[[Entry], Architecture | None]:
    """Return a function that reads each model of the catalogue once; None for models without a formula."""
    known: dict[str, Architecture | None] = {}

    def load(entry: Entry) -> Architecture | None:
        if entry.stem not in known:
            try:
                known[entry.stem] = architecture(config(entry), entry.id)
            except MemfitError:
                known[entry.stem] = None
        return known[entry.stem]

    return load
