"""The traced column: peaks kept in traced.json, of the rows' own stacks and of today's, beside the closed form's."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from memfit.units import GIB
from published.rows import Row

DATA = Path(__file__).parent / "traced.json"
LEVELS = {"smi": "device", "unknown": "allocated"}

TEXT = """\
The same runs by their frameworks' own code on the virtual GPU (`benchmarks/published/traced/`): \
litgpt's finetune scripts,
torchtune's recipes, transformers' Trainer, PEFT's loops. \
"Own" is the earliest release that can be installed and knows the
model, under PyTorch 2.13; "today" is the current release. \
The figures are kept in `benchmarks/published/traced.json` with
versions and date; `python -m published.traced.main` in `benchmarks` makes them again. What differs between the two, and
from the measurement:

- litgpt: RMSNorm keeps its normed input in 32 bits in 0.5.13 and in 16 bits in 0.3.0 (2.6 % of a full fine-tune); with
  bitsandbytes 0.42 most 4-bit rows need 2 to 24 % more than with 0.50, which saves no input of a frozen 4-bit layer. \
Why a
  few quantised rows need more today (Gemma: 10 %) was not looked into. One row (thunder) runs a loop written by hand,
  because no release holds the file it was measured with.
- torchtune: compiled as the rows were, by Inductor itself (docs/trace.md). \
Its blocks on packed data keep what the published
  run kept to 0.1 %, with and without checkpointing. \
AdamW 8-bit of torchao (row 008) is 9 % too low: Inductor of PyTorch 2.13
  plans two fp32 temporaries for the step of the embedding, and the missing 1.5 GiB are as large as a third.
  Rows 010, 011 and 013 lie 6 to 9 % too high, as they did uncompiled: not explained.
- PEFT: samples are at most 768 tokens long, and that is what is traced: a bound. A row names its experiment, whose
  configuration its result states (`peft_experiments.json`); where the model does not train the number of weights that
  the row states, it is not traced. The loop holds the model's outputs through the backward, logits and keys among them:
  without that a trace of row 050 takes the closed form's 22.08 GiB. Runs from July 2026 on measure a text's loss with
  adapters disabled before they train. Enabling them again makes all of them trainable, so LoRA-FA and MiCA then keep
  what LoRA does (rows 047, 048; 046 is older). OSF before PEFT 0.21 rebuilds every weight and keeps it (062). PSOFT's
  slices of V^H keep all of it, because cuSOLVER returns it row by row (071).
- PEFT on images: FLUX.2 klein at 512 pixels, beside the DINOv2 that judges images and lies on the card in fp32. The
  peak is that of training steps alone, as the script takes it. The script empties its cache before the first step and
  after each evaluation, every hundred steps; where gradients and states then lie decides what later steps reserve.
  Ten steps are traced, with the cache emptied after the eighth. GLoRA (011) reserves what each step is published to
  have reserved: 10,856 MiB, 11,018, and 11,564 after the evaluation. WaveFT (032) rebuilds its weights by transposed
  convolutions in fp32. It took 12,380 to 12,384 MiB up to the first evaluation and 11,530 after it. The first is what
  the trace has (12,384 and 12,388) if cuDNN's backward pass copies the gradient with its one channel padded to four,
  1.3 GiB for the widest layer: an assumption, as its workspaces were measured on an H100, and not for one channel.
  After the evaluation a step of the trace takes 11,570, and the next 12,436: not explained.
- TRL and torchtitan ran on several cards: see above. Two steps of TRL's are traced; a third would add 1.6 GiB of cache
  to rows 044 and 045 (78.40).
- Liger's and Apple's loss operators: their own benchmarks, which put a second head on the card or count what rises
  above the inputs. Backward passes compiled by PyTorch 2.4, and the kernels of cut cross entropy, are not traced.
- fsdp_qlora's notebook reads what is allocated after the forward of a Llama of 1B. It does not name its releases; with
  transformers 4.38, whose causal mask copies queries, keys and values, rows without checkpointing lie 2 to 3 % too low,
  and with 4.37 6 to 12 %.
- GPUMemNet read the memory of the whole card. Its rows lie 1.40 GiB (five encoders, equal to 2 MiB) and 1.70 GiB
  (convolutional networks, to 27 MiB) above what is reserved. That is taken as their context and driver, so these rows
  prove how reserved bytes change between models, and not their level. Xception reserves 17 % more in the trace than on
  the card: not explained.
- torchao's vision transformers are compiled by today's Inductor where the rows were, 8-bit and 4-bit optimizers too.
  Its Llama of 1B keeps all tokens of TinyStories on the card, whose number the author of the script publishes. Compiled
  with int8 weights (021) it lies 5.6 % too low: its page says that compiling saved less than it should.
- The guide's BERT ran on PyTorch 1.10 and transformers 4.16, which no current Python runs. \
Two habits of that PyTorch are
  put back: gradients are zeroed instead of freed, and softmax saves its input beside its output (1.5 GiB at batch 4).
"""


@dataclass(frozen=True, slots=True)
class Traced:
    """One row's traced peaks in bytes, at the level it measured; 0 where there is none. closed: the closed form's."""

    row: Row
    own: int
    today: int
    closed: int
    versions: str

    def error(self, value: int) -> float:
        """Against the measurement; negative is too low."""
        return value / self.row.measured - 1


def traced(rows: Iterable[Row], closed: Mapping[str, int]) -> list[Traced]:
    """The rows that traced.json knows under their own stack. closed: row id -> prediction in bytes."""
    data: dict[str, Any] = json.loads(DATA.read_text(encoding="utf-8")) if DATA.exists() else {}
    found = []
    for row in rows:
        figures = data.get(row.id, {})
        if "own" in figures and not figures["own"]["oom"]:
            level = LEVELS.get(row.quantity, row.quantity)
            versions = ", ".join(f"{k} {v}" for k, v in figures["own"]["versions"].items() if k != "torch")
            today = figures.get("current", {}).get(level, 0)
            found.append(Traced(row, figures["own"][level], today, closed.get(row.id, 0), versions))
    return found


def lines(found: list[Traced]) -> list[str]:
    """Markdown: a summary by source and quality, then every row."""
    if not found:
        return []
    told = [t for t in found if not t.row.bound]
    keys = sorted({(t.row.group, t.row.quality) for t in told}, key=lambda k: (k[1], k[0]))
    groups = [(k[0], k[1], [t for t in told if (t.row.group, t.row.quality) == k]) for k in keys]
    groups += [("**all**", q, [t for t in told if t.row.quality == q]) for q in sorted({k[1] for k in keys})]
    head = (
        "| source | quality | rows | traced, own releases | worst under | worst over | today's releases | closed form |"
    )
    table = [head, "|---|---|---:|---:|---:|---:|---:|---:|"]
    for group, quality, some in groups:
        errors = [t.error(t.own) for t in some]
        table.append(
            f"| {group} | {quality} | {len(some)} | {_mean(errors)} "
            f"| {min(0.0, *errors):+.1%} | {max(0.0, *errors):+.1%} "
            f"| {_mean([t.error(t.today) for t in some if t.today])} "
            f"| {_mean([t.error(t.closed) for t in some if t.closed])} |"
        )
    listing = [
        "| row | quality | traced | today | closed form | measured | error | own releases |",
        "|---|---|---:|---:|---:|---:|---:|---|",
    ]
    listing += [
        f"| {t.row.id} | {t.row.quality} | {_gib(t.own)} | {_gib(t.today)} | {_gib(t.closed)} | {_gib(t.row.measured)} "
        f"| {t.error(t.own):+.1%} | {t.versions} |"
        for t in found
    ]
    return ["## Traced on the virtual GPU", "", TEXT, *table, "", *listing, ""]


def _mean(errors: list[float]) -> str:
    return f"{mean(map(abs, errors)):.1%}" if errors else "-"


def _gib(size: int) -> str:
    return f"{size / GIB:.2f}" if size else "-"
