"""The table of a job's ranks: what each class of them needs, the worst first, and what differs between them."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group

from memfit.footprints.rank_peaks import RankPeak, differences, worst_first
from memfit.report.layout import paragraphs, table, text
from memfit.report.words import phase_title
from memfit.units import gib, several


def ranks_view(ranks: Sequence[RankPeak], world_size: int) -> Group:
    """Show the ranks of a job."""
    ordered = worst_first(ranks)
    made = table("rank", "stands for", "position", "worst instant", ">allocated", ">reserved", ">NCCL", ">headroom")
    for rank in ordered:
        where = f"{rank.instant} ({phase_title(rank.phase)})"
        left = "out of memory" if rank.died else gib(rank.headroom, 2)
        sizes = (rank.levels.allocated, rank.levels.reserved, rank.nccl)
        style = "bold" if rank is ordered[0] else ""
        names = (str(rank.rank), spans(rank.members), rank.what, where)
        made.add_row(*(text(name, style) for name in names), *(gib(x, 2) for x in sizes), left)
    counted = len({member for rank in ranks for member in rank.members})
    head = text(
        f"shown: {len(ranks)} of {several(world_size, 'rank')}, standing for {counted}; the worst first (GiB)", "dim"
    )
    rows = [("differs", _differing(ranks)), ("NCCL", _communicators(ordered[0]))]
    return Group(head, made, "", paragraphs(rows))


def _differing(ranks: Sequence[RankPeak]) -> str:
    found = differences(ranks)
    words = ((role.replace("_", " "), gib(least, 2), gib(most, 2)) for role, (least, most) in found.items())
    return ", ".join(f"{role} {least} to {most}" for role, least, most in words if least != most)


def _communicators(rank: RankPeak) -> str:
    named = (f"{name or 'a group'} of {size} ({calls} calls)" for name, size, calls in rank.communicators)
    return f"communicators of rank {rank.rank}: {', '.join(named)}" if rank.communicators else ""


def spans(members: Sequence[int], most: int = 4) -> str:
    """Write ranks as '0-3, 8-11'; more than `most` spans as the first ones and their number."""
    found: list[list[int]] = []
    for member in sorted(members):
        if found and member == found[-1][1] + 1:
            found[-1][1] = member
        else:
            found.append([member, member])
    words = [str(a) if a == b else f"{a}-{b}" for a, b in found[:most]]
    return ", ".join(words) + (f" ... ({len(members)} ranks)" if len(found) > most else "")
