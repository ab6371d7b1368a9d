"""memfit compare: show a prediction and a measurement, or any two runs, side by side."""

from __future__ import annotations

import gzip
import shlex
import zlib
from contextlib import suppress
from pathlib import Path
from typing import Any

from memfit.catalogue import cards
from memfit.cli import terminal
from memfit.cli.flags import COMMON, DEVICE, Argument, Flag, takes
from memfit.cli.html_answer import comparison_page
from memfit.documents import footprint_file
from memfit.documents.watch_doc import compare_doc
from memfit.errors import EXIT_FITS, EXIT_MISFIT, EXIT_TIGHT, BadInput
from memfit.footprints.compare import compare
from memfit.footprints.footprint_of_watch import cardless
from memfit.nouns.footprint import Footprint
from memfit.report.compare import compare_view

EXAMPLES = ("memfit compare run/recipe.toml memfit-watch.jsonl", "memfit compare predicted.tape.gz measured.pickle")
TWO = Argument(
    "files", "two of: a tape, a snapshot, a log of memfit watch, a recipe.toml, JSON of estimate, plan or trace",
    "EXPECTED MEASURED", required=True, many=True,
)  # fmt: skip
GPU = Flag("gpu", str, "The card of a recipe.toml, tape or snapshot that names none, or another one.", "NAME")


HTML = Flag("html", str, "Write the comparison as a page to open in a browser, without a network.", "FILE")
FORCE = Flag("force", bool, "Overwrite the file of --html.", default=False)


@takes(GPU, DEVICE, HTML, FORCE, *COMMON, argument=TWO)
def run(files: tuple[str, ...], **flags: Any) -> int:
    """Compare two runs: what differs, by role and phase.

    Exit code: 0 when the second needs as much as the first, within its band; 3 when more; 4 when less.
    """
    terminal.check_files(flags, "html")
    if len(files) != 2:
        raise BadInput(f"two files are compared, not {len(files)}", hint=EXAMPLES[0])
    if flags["gpu"]:
        cards.parse_gpu(flags["gpu"])  # refuses an unknown name even where the files need no card
    of_card = [_is_snapshot(file) and flags["device"] is not None for file in files]
    if flags["device"] is not None and not any(of_card):
        raise BadInput("only a snapshot has several devices", hint="leave --device out")
    left, right = (
        footprint_file.read(Path(file), flags["gpu"] or "", flags["device"] if takes_device else None)
        for file, takes_device in zip(files, of_card, strict=True)
    )
    _check_cards(files, left, right)
    found = compare(left, right)
    if flags["json"]:
        terminal.show_json(compare_doc(files[0], files[1], found))
    else:
        terminal.show(compare_view(files[0], files[1], found, _next(files)))
    names = Path(files[0]).name, Path(files[1]).name
    terminal.write_file(flags, "html", lambda: comparison_page(*names, (left, right), found))
    return {"agrees": EXIT_FITS, "more": EXIT_MISFIT, "less": EXIT_TIGHT}[found.agreement]


def _check_cards(files: tuple[str, ...], left: Footprint, right: Footprint) -> None:
    """Refuse pairs without a common level.

    Resident memory cannot be compared with memory of a card, nor a run measured with its CUDA context with one whose
    card is unknown.
    """
    without = [cardless(side) for side in (left, right)]
    if without[0] != without[1]:
        file = files[without.index(True)]
        raise BadInput(
            f"{file} was measured on no card, the other file is about one", hint="watch the run where the card is"
        )
    for file, side, other in zip(files, (left, right), (right, left), strict=True):
        if footprint_file.NO_CONTEXT in side.unknowns and not other.peak.levels.reserved:
            raise BadInput(
                f"{file} names no card, and the other file was measured from outside, with the CUDA context in it",
                hint="--gpu CARD gives the size of the context to add",
            )


def _is_snapshot(file: str) -> bool:
    """Return whether a file is a pickle, gzipped or not; errors in reading it are reported later."""
    path = Path(file)
    with suppress(OSError, EOFError, zlib.error):
        if not path.is_file():
            return False
    with suppress(OSError, EOFError, zlib.error), path.open("rb") as stream:
        packed = stream.read(1) == b"\x1f"
        stream.seek(0)
        return (gzip.GzipFile(fileobj=stream) if packed else stream).read(1) == b"\x80"
    return False


def _next(files: tuple[str, ...]) -> list[str]:
    """Return the next command: tapes and snapshots can be replayed."""
    opened = [file for file in files if not file.endswith((".toml", ".json", ".jsonl"))]
    return [shlex.join(["memfit", "replay", file, "--html", "timeline.html"]) for file in opened[-1:]]
