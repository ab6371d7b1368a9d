"""The table of runs on several cards: the closed form and the traces of two stacks beside the measurement."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from statistics import mean

from memfit.units import GIB
from published.rows import Row
from published.traced_table import Traced

TEXT = """\
The runs on several cards, by the closed form and, where a driver runs them, traced on their own stack and on today's.

TRL's benchmark of long contexts (April 2026, H100, `nvidia-smi`) ran under accelerate 1.13, whose FSDP2 leaves
embedding and head in the root's group: gathered through forward and backward, and reduced at the end. Releases from
1.14 on give them groups of their own, which with Liger 0.8 takes 4 to 9 GiB off Qwen3-32B ("today"). It ran under the
default settings of the allocator: its launch script has set expandable segments only since 4 May 2026. `nvidia-smi`
also shows the CUDA context, what the driver reserves (0.46 GiB on an H100), and NCCL's buffers, taken as 0.75 GiB a
group. Rows with CP=4 lie 1.1 GiB too low at every length, which would be larger buffers; those under ZeRO-3 with
Ulysses (SP) 3 to 7 GiB, and its mixture of experts a third too high: not explained.

torchtitan's eager runs of December 2024 to March 2025 have embedding and head in the root too (until pull request 1094,
July 2025). PyTorch then ran flash attention, whose output selective checkpointing keeps; cuDNN's, which PyTorch 2.13
prefers on Hopper, is made again: 4.1 GiB less at 16,384 tokens. Until March 2025 it compiled the blocks alone, which
today's Inductor does in the traces, in 8 bits too where the source states the scaling (030 to 032). Later releases
compile the loss with them, which is not traced.

The runs behind the Ultra-Scale Playbook (winter 2024/25) are traced with nanotron's own trainer: rank 0, which wrote
the figures, and of a pipeline one rank of every stage beside it. PyTorch of that time kept what NCCL had used until
the card caught up, which may be 1,024 commands behind: the traces delay reuse by as many. Reused at once, as in
PyTorch since 2.8, eight runs on four and more tensor-parallel ranks reserved 10 to 47 % less. How far a card was
behind depends on its host as well. Of the twelve runs of the 1.34B model with 2 or 4 stages nine lie 4 to 36 % too
high: the cost of its layers falls exactly on the bound between stages, where nanotron's rule gives the first stage
one layer more. Whether those runs had it is not known. 8.86B's run 029 is 13 % too low.

fsdp_qlora's rows are FSDP1 with every adapter as a unit, which the closed form does not play. They are traced with
today's transformers, PEFT and bitsandbytes instead of those of March 2024. Row 001 is 10 % too low, all of it from
before the first step: after wrapping the script reports 3.72 GiB reserved and the trace has 3.23. Why is not known.
"""


def lines(rows: Iterable[Row], closed: Mapping[str, int], traced: Mapping[str, Traced]) -> list[str]:
    """Return Markdown: a summary by source and quality, then every row. closed: row id -> prediction in bytes."""
    several = [r for r in rows if r.number("n_gpus", 1) > 1 and (r.id in closed or r.id in traced)]
    if not several:
        return []
    head = "| source | quality | rows | closed form | worst under | worst over | traced | worst under | worst over |"
    summary = [head, "|---|---|---:|---:|---:|---:|---:|---:|---:|"]
    for group, quality in sorted({(r.group, r.quality) for r in several}, key=lambda k: (k[1], k[0])):
        some = [r for r in several if (r.group, r.quality) == (group, quality)]
        formula = [closed[r.id] / r.measured - 1 for r in some if r.id in closed]
        traces = [traced[r.id].own / r.measured - 1 for r in some if r.id in traced]
        summary.append(f"| {group} | {quality} | {len(some)} | {_errors(formula)} | {_errors(traces)} |")
    listing = [
        "| row | quality | model | cards | sharding | closed form | traced | today | measured | closed form | traced |",
        "|---|---|---|---:|---|---:|---:|---:|---:|---:|---:|",
    ]
    for row in several:
        found = traced.get(row.id)
        sizes = (closed.get(row.id, 0), found.own if found else 0, found.today if found else 0, row.measured)
        errors = (f"{size / row.measured - 1:+.1%}" if size else "-" for size in sizes[:2])
        listing.append(
            f"| {row.id} | {row.quality} | {row.model} | {row.n_gpus} | {row.sharding} | "
            f"{' | '.join(f'{size / GIB:.2f}' if size else '-' for size in sizes)} | {' | '.join(errors)} |"
        )
    return ["## Several cards", "", TEXT, *summary, "", *listing, ""]


def _errors(errors: list[float]) -> str:
    if not errors:
        return "- | - | -"
    return f"{mean(map(abs, errors)):.1%} | {min(0.0, *errors):+.1%} | {max(0.0, *errors):+.1%}"
