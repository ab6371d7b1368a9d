"""Which ranks of a job do the same, read from the process groups that it makes.

Groups that divide all ranks evenly, such as the tensor groups, are an axis: each rank has a position on it. On the
axis of a pipeline, whose ranks send to each other, each position does work of its own. On other axes the first rank
may do more than the others; where shards are uneven, ranks with shards of different sizes differ too.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

from memfit.virtual.ranks.traced import RankClass, WorldFacts

Ranks = tuple[int, ...]

# words in the description of a group -> what the axis divides; the first that fits (Megatron's names, meshes' names)
_NAMES = (
    ("embedding", r"embedding"),
    ("data", r"data|\bdp\b|_dp|replicate|shard|fsdp|hsdp"),
    ("expert", r"expert|\bep\b|_ep\b|moe"),
    ("stage", r"pipeline|\bpp\b|_pp\b|pipe\b"),
    ("context", r"context|\bcp\b|_cp\b"),
    ("tensor", r"tensor|\btp\b|_tp\b|model"),
)
_FIRST_DIFFERS = ("tensor", "context", "expert")  # axes whose first rank may do more than the others


@dataclass(frozen=True, slots=True)
class RankAxis:
    """Groups of one size that hold each rank once. kind: what it divides, "" if unknown. position: of each rank."""

    kind: str
    groups: tuple[Ranks, ...]
    position: Mapping[int, int]

    @property
    def size(self) -> int:
        return len(self.groups[0])


def axes(facts: WorldFacts, world_size: int) -> list[RankAxis]:
    """Return the axes of a job, each once; the world itself and groups that overlap are none."""
    described: dict[str, list[Ranks]] = {}
    for text, ranks in facts.groups:
        if 1 < len(ranks) < world_size or (len(ranks) == world_size and _kind(text)):
            described.setdefault(text, []).append(ranks)
    found: dict[frozenset[Ranks], RankAxis] = {}
    for text, groups in described.items():
        for division in _divisions(groups, world_size):
            key = frozenset(division)
            position = {rank: i for group in division for i, rank in enumerate(group)}
            # with a tensor group of one rank, Megatron's model group and pipeline group are the same ranks
            if key not in found or _rank_of(_kind(text)) < _rank_of(found[key].kind):
                found[key] = RankAxis(_kind(text), tuple(division), position)
    made, unexplained = list(found.values()), _unexplained(found.values(), facts.messages)
    return [replace(axis, kind="stage") if not axis.kind and _sends(axis, unexplained) else axis for axis in made]


def _unexplained(made: Iterable[RankAxis], messages: Iterable[Ranks]) -> list[Ranks]:
    """Return the pairs that send to each other, except along an axis that is known by its name."""
    named = [axis for axis in made if axis.kind not in ("", "data")]
    return [pair for pair in messages if not any(_together(axis, pair) for axis in named)]


def _together(axis: RankAxis, pair: Ranks) -> bool:
    return any(pair[0] in group and pair[-1] in group for group in axis.groups)


def _kind(text: str) -> str:
    low = text.lower()
    return next((kind for kind, pattern in _NAMES if re.search(pattern, low)), "")


@cache
def spreads_experts(text: str) -> bool:
    """Return whether a group of this description holds the experts of a layer, and divides none of them."""
    return _kind(text) == "expert" and not re.search(r"tensor|pipe|weight|\btp\b|_tp\b", text.lower())


def _rank_of(kind: str) -> int:
    """Return how much a kind tells apart, 0 the most."""
    return next((i for i, kinds in enumerate((("stage",), _FIRST_DIFFERS, ("data",))) if kind in kinds), 3)


def _divisions(groups: Sequence[Ranks], world_size: int) -> Iterable[list[Ranks]]:
    """Yield the ways in which groups of one description divide the ranks: consecutive ones that do not overlap."""
    current: list[Ranks] = []
    seen: set[int] = set()
    for group in dict.fromkeys(groups):
        if seen & set(group) or (current and len(group) != len(current[0])):
            current, seen = [], set()
        current.append(group)
        seen |= set(group)
        if len(seen) == world_size:
            yield current
            current, seen = [], set()


def _sends(axis: RankAxis, messages: Sequence[Ranks]) -> bool:
    """Return whether ranks send to others of their group, and to no others."""
    return bool(messages) and all(_together(axis, pair) for pair in messages)


def classes(facts: WorldFacts, world_size: int) -> tuple[RankClass, ...]:
    """Return the classes of ranks, the one of rank 0 first."""
    found = axes(facts, world_size)
    if any(not any(_together(axis, p) for axis in found) for p in facts.messages):  # ranks of the world send
        everyone = tuple(range(world_size))
        found.append(RankAxis("stage", (everyone,), {rank: rank for rank in everyone}))
    members: dict[tuple[str, ...], list[int]] = {}
    for rank in range(world_size):
        members.setdefault(_label(rank, found, facts), []).append(rank)
    return tuple(
        RankClass(ranks[0], tuple(ranks), ", ".join(word for word in label if word)) for label, ranks in members.items()
    )


def _label(rank: int, found: Sequence[RankAxis], facts: WorldFacts) -> tuple[str, ...]:
    words = []
    for axis in found:
        at = axis.position.get(rank, -1)
        if axis.kind == "stage":
            words.append(f"stage {at}" if at >= 0 else "")
        elif axis.kind in _FIRST_DIFFERS:
            words.append(f"first {axis.kind} rank" if at == 0 else "")
    for ranks, held in facts.shards.items():
        at = _position_in_alike(rank, ranks, found)
        words.append(f"shard {held[at]}" if 0 <= at < len(held) and held[at] else "")
    return tuple(words)


def _position_in_alike(rank: int, ranks: Ranks, found: Sequence[RankAxis]) -> int:
    """Return the position of a rank in its own group of the axis that the group `ranks` belongs to."""
    if rank in ranks:
        return ranks.index(rank)
    return next((axis.position.get(rank, -1) for axis in found if ranks in axis.groups), -1)
