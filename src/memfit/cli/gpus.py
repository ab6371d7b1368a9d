"""memfit gpus: list the catalogue of cards with the largest model that each trains."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from memfit.catalogue import Entry, config, entries
from memfit.catalogue.cards import described, list_gpus, prices_read
from memfit.cli import terminal
from memfit.cli.flags import COMMON, Argument, takes
from memfit.documents import codec
from memfit.errors import MemfitError
from memfit.models.families import architecture
from memfit.nouns.architecture import Architecture
from memfit.planner.good_for import SETTING, good_for
from memfit.report.reference import gpu_view, gpus_view

EXAMPLES = ("memfit gpus", "memfit gpus 4090", "memfit gpus ada 24gb")


@takes(*COMMON, argument=Argument("text", "words of a name, vendor, architecture or memory size", "TEXT", many=True))
def run(text: Sequence[str] = (), **flags: Any) -> int:
    """List GPUs and the largest model each trains.

    A single card is shown in full.
    """
    words = " ".join(text)
    rows = good_for(described(words) if words else list_gpus(), entries(), loader())
    if flags["json"]:
        terminal.show_json(codec.gpus_doc(rows, SETTING, prices_read()))
    else:
        found = gpu_view(rows[0], SETTING, prices_read()) if len(rows) == 1 else gpus_view(rows, SETTING, prices_read())
        terminal.show(found)
    return 0


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
