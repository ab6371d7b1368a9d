"""What SimpleTuner's examples took with each way of checkpointing, and what traces of the same jobs say.

Its documentation (documentation/experimental/SEGMENTED_CHECKPOINTING.md) gives peak GiB on an H100 and an L40S, or that
the run ran out of memory. The peak is of what PyTorch allocated: its documentation/experimental/CONVROT.md calls it so,
and its trainer reads torch.cuda.max_memory_allocated.
"""

from __future__ import annotations

import csv
import json
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

from memfit.units import GIB

DATA = Path(__file__).with_name("simpletuner.json")
CARDS = {"H100": "h100", "L40S": "l40s"}


@dataclass(frozen=True, slots=True)
class Cell:
    """One run. measured: GiB; 0 where it ran out of memory."""

    family: str
    example: str
    precision: str
    mode: str
    card: str
    measured: float

    @property
    def key(self) -> str:
        """What tells it apart from the others."""
        return f"{self.example}, {self.precision}, {self.mode}, {self.card}"


def cells(path: Path) -> list[Cell]:
    """The cells of the CSV."""
    return [
        Cell(*(row[name] for name in ("family", "example", "precision", "mode", "card")), float(row["peak_gib"] or 0))
        for row in csv.DictReader(path.open(newline="", encoding="utf-8"))
    ]


def known() -> dict[str, tuple[int, int, str]]:
    """Key of a cell -> most allocated and most reserved bytes of its trace, and the verdict."""
    return {key: (most, held, said) for key, (most, held, said, *_) in _kept().items()}


def _kept() -> dict[str, list[Any]]:
    """What the file holds of each cell; a fourth word tells that diffusers' loop was traced (`memfit trace MODEL`)."""
    return dict(json.loads(DATA.read_text("utf-8"))) if DATA.exists() else {}


def keep(cell: Cell, allocated: int, reserved: int, verdict: str) -> None:
    """Keep a cell's peaks and verdict."""
    made = sorted((_kept() | {cell.key: [allocated, reserved, verdict]}).items())
    lines = ",\n".join(f"{json.dumps(key)}: {json.dumps(values)}" for key, values in made)
    DATA.write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")


NOTES = (
    "Denoisers of many equal blocks are traced at two shallow depths, and one tape is played on both cards. The "
    "verdict is by what is reserved. Not blind: videos of 16:9 and norms as PyTorch 2.11 runs them were chosen after "
    "seeing figures, and Boogu Image and Anima are traced with the versions of SimpleTuner that they were "
    "measured with. SanaVideo is traced without checkpointing for all its cells, as the table has one figure for both. "
    "OmniGen is traced with square images, and its data set has others too. How long texts are is read in its source: "
    "Kandinsky's are filled up to 256 tokens where the cache is read, SD3's are 77 tokens of CLIP and 154 of T5, "
    "Kolors's 77 (looked for after their cells in 16 bits were seen); 5 Video in int8 and fp8 was traced with 100. "
    "LoKr makes gradients and states in a first step, which was found by Kandinsky's cells; Cosmos 2 and OmniGen are "
    "not traced again so. What is reserved does not lie on a line after such a step, so Kandinsky 5 Image in int8 and "
    "in 16 bits is traced with all its blocks. With seg2-stride4 in int8, and with seg2-stride4-offload in 16 bits, it "
    "reserves 78.53 and 78.51 GiB of an H100, 0.09 and 0.07 more than the card has: that makes it a misfit here, and "
    "not by much. Played on that card, the model of the allocator releases its cache once in the first and runs on in "
    "78.3 GiB; the run did not. Z-Image Turbo is traced "
    "without its second, frozen adapter: by its own trainer each cell is 0.15 to 0.17 GiB under. HunyuanVideo is left "
    "out: which version of its code, and videos of which shape, give what it took is not known."
)


def lines(path: Path) -> list[str]:
    """Markdown: the traced cells by family and way of checkpointing; none where the CSV is not there."""
    if not path.exists():
        return []
    made = known()
    told = [(cell, *made[cell.key]) for cell in cells(path) if cell.key in made]
    if not told:
        return []
    loop = sum(len(values) > 3 for values in _kept().values())
    errors = [size / GIB / cell.measured - 1 for cell, size, _, _ in told if cell.measured]
    fitted = [said for cell, _, _, said in told if cell.measured]
    missed = [said for cell, _, _, said in told if not cell.measured]
    share = f"{fitted.count('fits')} of {len(fitted)} that fitted are said to fit"
    groups: dict[tuple[str, str], list[tuple[Cell, int, str]]] = {}
    for cell, size, _, said in told:
        groups.setdefault((cell.family, cell.mode), []).append((cell, size, said))
    return [
        "## SimpleTuner",
        "",
        f"{len(told)} cells of SimpleTuner's table of checkpointing, {loop} of them traced as diffusers' loop runs "
        f"them, the others by its own trainer: mean "
        f"absolute error {mean(map(abs, errors)):.1%}, median {median(map(abs, errors)):.1%}, worst "
        f"{min(errors):+.1%} under and {max(errors):+.1%} over. {share}, and {missed.count('fits')} of "
        f"{len(missed)} that ran out of memory. {NOTES}",
        "",
        "| family, checkpointing | cells | mean error | worst | fitting cells said to fit | others said to fit |",
        "|---|---:|---:|---:|---:|---:|",
        *(_line(f"{family}, {mode}", some) for (family, mode), some in groups.items()),
        "",
    ]


def _line(name: str, some: list[tuple[Cell, int, str]]) -> str:
    errors = [size / GIB / cell.measured - 1 for cell, size, _ in some if cell.measured]
    said = f"{mean(map(abs, errors)):.1%} | {max(errors, key=abs):+.1%}" if errors else "- | -"
    fits = [sum(said == "fits" for cell, _, said in some if bool(cell.measured) is ran) for ran in (True, False)]
    return f"| {name} | {len(some)} | {said} | {fits[0]} of {len(errors)} | {fits[1]} of {len(some) - len(errors)} |"


def covered(path: Path) -> int:
    """Return how many cells of the CSV have a trace."""
    made = known()
    return sum(cell.key in made for cell in cells(path))
