"""memfit gpus: list the catalogue of cards with the largest model that each trains."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from memfit.cli import terminal
from memfit.cli.flags import COMMON, Argument, takes
from memfit.errors import MemfitError

if TYPE_CHECKING:
    from memfit.catalogue import Entry
    from memfit.nouns.architecture import Architecture

EXAMPLES = ("memfit gpus", "memfit gpus 4090")


@takes(*COMMON, argument=Argument("name", "one card to show in full", "NAME"))
def run(name: str | None = None, **flags: Any) -> int:
    """List GPUs and the largest model each trains."""
    from memfit.catalogue import entries
    from memfit.catalogue.cards import find_gpu, list_gpus
    from memfit.planner.good_for import SETTING, good_for
    from memfit.report.reference import gpu_view, gpus_view

    chosen = (find_gpu(name),) if name else list_gpus()
    rows = good_for(chosen, entries(), loader())
    if flags["json"]:
        from memfit.documents import codec

        terminal.show_json(codec.gpus_doc(rows, SETTING))
    else:
        terminal.show(gpu_view(rows[0], SETTING) if name else gpus_view(rows, SETTING))
    return 0


def loader() -> Callable[[Entry], Architecture | None]:
    """Return a function that reads each model of the catalogue once; None for models without a formula."""
    from memfit.catalogue import config
    from memfit.models.families import architecture

    known: dict[str, Architecture | None] = {}

    def load(entry: Entry) -> Architecture | None:
        if entry.stem not in known:
            try:
                known[entry.stem] = architecture(config(entry), entry.id)
            except MemfitError:
                known[entry.stem] = None
        return known[entry.stem]

    return load
