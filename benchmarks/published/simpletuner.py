"""What SimpleTuner's examples took with each way of checkpointing, and what traces of the same jobs say.

Its documentation (documentation/experimental/SEGMENTED_CHECKPOINTING.md) gives peak GiB on an H100 and an L40S, or that
the run ran out of memory. Compared are the cells that diffusers' own loop runs, too: adapters of PEFT beside a base in
16 bits or quantised, and all or none of the blocks checkpointed. The peak is of what PyTorch allocated: its
documentation/experimental/CONVROT.md calls it so, its trainer reads torch.cuda.max_memory_allocated, and where nothing
is unknown (Kolors, AuraFlow) the traced one agrees to 0.06 GiB.
"""

from __future__ import annotations

import csv
import json
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median

from memfit.units import GIB

DATA = Path(__file__).with_name("simpletuner.json")
CARDS = {"H100": "h100", "L40S": "l40s"}
MODES = {"none": "none", "layer": "full"}  # as the table has it -> checkpointing
SEGMENTS = ("interval2", "seg2-stride4")
# as the table has it -> of the base
PRECISIONS = {
    "bf16": ("--method", "lora"),
    "int8-sdnq-hadamard": ("--method", "qlora", "--quantization", "int8-sdnq"),
    "fp8-torchao": ("--method", "qlora", "--quantization", "fp8-torchao"),
    "fp8wo-torchao": ("--method", "qlora", "--quantization", "fp8w-torchao"),
}


@dataclass(frozen=True, slots=True)
class Example:
    """What the config.json of an example says. side: of its images, as its datasets have them.

    words: tokens of its texts, where they vary: to what SimpleTuner pads them, or those of its one caption, an emoji.
    whole: segments of blocks were not told apart when it was measured: their cells equal those of `layer`.
    """

    model: str
    rank: int
    batch: int
    side: int
    optimizer: str = "adamw"
    words: int = 0
    whole: bool = False


EXAMPLES = {
    "auraflow.peft-lora": Example("auraflow-v0.3", 8, 1, 512, "lion", words=120),
    "kolors.peft-lora": Example("kolors", 16, 1, 512, whole=True),
    "qwen_image.peft-lora": Example("qwen-image", 8, 1, 1024, "lion", words=1024, whole=True),
    "sd3.peft-lora": Example("stable-diffusion-3.5-medium", 128, 3, 1024),
    "z-image-turbo.peft-lora": Example("z-image-turbo", 64, 1, 512, "lion", words=32),
}


@dataclass(frozen=True, slots=True)
class Cell:
    """One run. measured: GiB; 0 where it ran out of memory."""

    example: str
    precision: str
    mode: str
    card: str
    measured: float

    @property
    def key(self) -> str:
        """What tells it apart from the others."""
        return f"{self.example}, {self.precision}, {self.mode}, {self.card}"

    @property
    def traced(self) -> str:
        """The key of the cell whose trace is this one's, too."""
        mode = "layer" if self.mode in SEGMENTS else self.mode
        return f"{self.example}, {self.precision}, {mode}, {self.card}"

    @property
    def command(self) -> list[str]:
        """The words after `memfit` that trace it."""
        e = EXAMPLES[self.example]
        size = ["--micro-batch", str(e.batch), "--accumulation", "1", "--resolution", f"{e.side}x{e.side}"]
        size += ["--sequence-length", str(e.words)] * bool(e.words)
        adapter = [*PRECISIONS[self.precision], "--lora-rank", str(e.rank), "--lora-dropout", "0.1",
                   "--lora-targets", "to_k,to_q,to_v,to_out.0"]  # fmt: skip
        kept = ["--checkpointing", MODES[self.mode], "--optimizer", e.optimizer, "--precision", "bf16"]
        return ["trace", e.model, "--gpu", CARDS[self.card], "--cache-latents", *adapter, *size, *kept, "--json"]


def cells(path: Path) -> list[Cell]:
    """The cells of the CSV that the loop runs, too."""
    return [
        Cell(row["example"], row["precision"], row["mode"], row["card"], float(row["peak_gib"] or 0))
        for row in csv.DictReader(path.open(newline="", encoding="utf-8"))
        if row["example"] in EXAMPLES and row["precision"] in PRECISIONS and _runs(row["example"], row["mode"])
    ]


def _runs(example: str, mode: str) -> bool:
    return mode in MODES or (mode in SEGMENTS and EXAMPLES[example].whole)


def known() -> dict[str, tuple[int, int, str]]:
    """Key of a cell -> most allocated and most reserved bytes of its trace, and the verdict."""
    if not DATA.exists():
        return {}
    return {key: (most, held, said) for key, (most, held, said) in json.loads(DATA.read_text("utf-8")).items()}


def lines(path: Path) -> list[str]:
    """Markdown: every cell that was traced; none where the CSV is not there."""
    if not path.exists():
        return []
    made = known()
    told = [(cell, *made[cell.traced]) for cell in cells(path) if cell.traced in made]
    if not told:
        return []
    errors = [size / GIB / cell.measured - 1 for cell, size, _, _ in told if cell.measured]
    fitted = [said for cell, _, _, said in told if cell.measured]
    missed = [said for cell, _, _, said in told if not cell.measured]
    share = f"{fitted.count('fits')} of {len(fitted)} that fitted are said to fit"
    return [
        "## SimpleTuner",
        "",
        f"{len(told)} cells of SimpleTuner's table of checkpointing, traced as diffusers' loop runs them: mean "
        f"absolute error {mean(map(abs, errors)):.1%}, median {median(map(abs, errors)):.1%}, worst "
        f"{min(errors):+.1%} under and {max(errors):+.1%} over. {share}, and {missed.count('fits')} of "
        f"{len(missed)} that ran out of memory. GiB, measured as allocated; the verdict is by what is reserved. Not "
        "counted: the second, frozen adapter of Z-Image Turbo (its examples take 0.3 GiB more), the correction that "
        "adamw_bf16 keeps of each adapter, and T5's 154 tokens of SD3. Not explained, and left out: Z-Image in fp8 "
        "without checkpointing, which took 37.5 GiB where 27.2 are traced (it fits either way). torchao's and SDNQ's "
        "layers are written after their source.",
        "",
        "| example, base, checkpointing, card | allocated | reserved | verdict | measured | error |",
        "|---|---:|---:|---|---:|---:|",
        *(
            f"| {cell.key} | {size / GIB:.2f} | {held / GIB:.2f} | {said} | "
            + (f"{cell.measured:.2f} | {size / GIB / cell.measured - 1:+.1%} |" if cell.measured else "OOM | - |")
            for cell, size, held, said in told
        ),
        "",
    ]


def covered(path: Path) -> int:
    """Return how many cells of the CSV have a trace."""
    made = known()
    return sum(cell.traced in made for cell in cells(path))
