"""The table of runs on several cards: the closed form and the traces of two stacks beside the measurement."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from statistics import mean

from memfit.units import GIB
from published.rows import Row
from published.traced_table import Traced

TEXT = """\
Of the runs above, those on several cards. TRL's benchmark of long contexts (April 2026, H100, `nvidia-smi`) ran under
accelerate 1.13, whose FSDP2 leaves embedding and head in the root's group: gathered through forward and backward, and
reduced at the end. Releases from 1.14 on give them groups of their own, which takes 4 to 9 GiB off Qwen3-32B ("today").
Liger 0.7 replaces no norm of queries and keys, and makes a chunk's gradient of the head as a tensor of its own.
What nvidia-smi shows besides PyTorch is the CUDA context, what the driver reserves (0.46 GiB on an H100) and NCCL's
buffers, taken as 0.75 GiB a group. Rows with CP=4 lie 1.1 GiB too low at every length, which would be larger buffers;
those under ZeRO-3 with Ulysses (SP) 2.9 to 7 GiB: not explained.
"""


def lines(closed: Iterable[tuple[Row, int]], traced: Mapping[str, Traced]) -> list[str]:
    """Markdown: a summary by quality, then every row on several cards. closed: rows and predictions in bytes."""
    several = [(row, size) for row, size in closed if row.number("n_gpus", 1) > 1]
    if not several:
        return []
    summary = [
        "| source | quality | rows | mean abs. error | worst under | worst over |",
        "|---|---|---:|---:|---:|---:|",
    ]
    for group, quality in sorted({(row.group, row.quality) for row, _ in several}, key=lambda k: (k[1], k[0])):
        errors = [size / row.measured - 1 for row, size in several if (row.group, row.quality) == (group, quality)]
        summary.append(
            f"| {group} | {quality} | {len(errors)} | {mean(map(abs, errors)):.1%} "
            f"| {min(0.0, *errors):+.1%} | {max(0.0, *errors):+.1%} |"
        )
    listing = [
        "| row | quality | model | cards | sharding | closed form | traced | today | measured | error |",
        "|---|---|---|---:|---|---:|---:|---:|---:|---:|",
    ]
    for row, size in several:
        found = traced.get(row.id)
        own, today = (f"{x / GIB:.2f}" if x else "-" for x in ((found.own, found.today) if found else (0, 0)))
        listing.append(
            f"| {row.id} | {row.quality} | {row.model} | {row.n_gpus} | {row.sharding} | {size / GIB:.2f} | {own} "
            f"| {today} | {row.measured / GIB:.2f} | {size / row.measured - 1:+.1%} |"
        )
    return ["## Several cards", "", TEXT, *summary, "", *listing, ""]
