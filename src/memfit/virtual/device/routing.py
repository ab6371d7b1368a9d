"""How tokens are spread over experts where a router's scores are unknown: evenly, by chance, or as the user says."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, arange, full, zeros

from memfit.errors import BadInput

SHARES = "balanced, uneven, first, or how many times their even share this rank's experts get, such as 1.2"
MOST_EXPERTS = 1024  # an index into more is no expert's; the largest published routers have 512
_NAMED = re.compile(r"rout|gat(e|ing)|moe|expert|switch", re.IGNORECASE)  # in the path of a module that routes
_WORDS = {"balanced": 1.0, "first": 0.0, "uneven": math.nan}
# How likely two tokens choose alike in a new router, by the number of experts that a token takes: attention has mixed
# the tokens of a sequence, so that their hidden states are alike. Measured at width 1024 (benchmarks/new_routers.py,
# docs/decisions.md); equal tokens alone give 0.0125.
_ALIKE, _ALIKE_OF_MORE = {1: 0.06, 2: 0.2}, 0.35
_ALIKE_BALANCED = 0.0005  # where Sinkhorn's iterations balance the scores of a micro-batch
_DEVIATIONS = 3  # of what one rank gets: it is the largest of all ranks and steps


@dataclass(frozen=True, slots=True)
class _Choice:
    """What a module chose: k of so many, of which some got `share` times their even share."""

    k: int
    experts: int
    share: float = 1.0
    note: str = ""


@dataclass(slots=True)
class Routing:
    """Answers which experts each token takes.

    share: how many times their even share of tokens the favoured experts get; 0 sends all tokens to expert 0, nan is
    `uneven_share`. The favoured experts are those of one rank of an expert group, each rank holding as many in their
    order; without such a group, the first expert. group: returns that rank's position and the size of the group.
    where: returns the module that runs. layers: returns how many like it keep what they make until one backward pass.
    assumed: what is told to the user. balanced: the router that runs balances its choices. routers: module -> its
    choice of experts, which is the one among the most: a router that limits a token to some groups chooses those first.
    """

    share: float = 1.0
    group: Callable[[], tuple[int, int]] = lambda: (0, 1)
    where: Callable[[], str] = str
    layers: Callable[[], int] = lambda: 1
    assumed: dict[str, None] = field(default_factory=dict)
    balanced: bool = False
    routers: dict[str, _Choice] = field(default_factory=dict)
    _last: tuple[str, _Choice] = ("", _Choice(0, 0))  # the module that chose last

    @classmethod
    def of(cls, text: str) -> Routing:
        """Read a setting of --answer. Raises KeyError or ValueError for one that means nothing."""
        share = _WORDS[text] if text in _WORDS else float(text)
        if text not in _WORDS and not 0 < share < MOST_EXPERTS:
            raise ValueError(text)
        return cls(share)

    @property
    def given(self) -> float:
        """Return the largest share that experts were given."""
        return max((choice.share for choice in self.routers.values()), default=1.0)

    def routes(self, name: str, dimensions: int, choices: int) -> bool:
        """Return whether an operator's indices along the last dimension choose experts.

        They do if it is the `topk` of a matrix in a module, or any choice of the largest in one that is named for it.
        """
        place = self.where()
        if not 1 < choices <= MOST_EXPERTS or dimensions < 2 or not place or place.startswith("backward of"):
            return False
        named = _NAMED.search(place) is not None
        return (name == "topk" and (dimensions == 2 or named)) or (name in ("argmax", "max") and named)

    def experts_of(self, tokens: int, k: int, experts: int, groups: tuple[int, int] | None = None) -> Tensor:
        """Return the k experts of each token. Raises BadInput for a share that is not possible.

        groups: how many groups the experts form, and how many of these a token takes experts from; None: what the
        module chose from just before.
        """
        if self.share == 0:
            return zeros((tokens, k), dtype=torch.int64)
        place, (where, before) = self.where(), self._last
        if groups is None:
            grouped = where == place and 0 < before.experts < experts and experts % before.experts == 0
            groups = (before.experts, before.k) if grouped else (1, 1)
        position, ranks = self.group()
        own = max(experts // ranks, 1) if ranks > 1 else 1
        first = position * own if ranks > 1 else 0
        even = k >= experts or own == experts
        share = 1.0 if even else self._share_of(tokens, k, experts, own, groups)
        whose = f"{own} of {experts} experts on a rank" if ranks > 1 else f"the first of {experts} experts"
        note = "" if even else f"tokens were routed with {share:.3g} times the even share to {whose}"
        if not even and self.share == 1:
            how = "this router balances them in training" if self.balanced else "a router is uneven"
            note = (
                f"tokens were routed evenly, each to {k} of {experts} experts; {how}:"
                f" --answer routing=1.1 gives {'those of a rank' if ranks > 1 else 'one'} 10% more"
            )
        self._chose(place, _Choice(k, experts, share, note))
        if share == 1:
            return arange(tokens * k).reshape(tokens, k) % experts
        return _spread(tokens, k, experts, slice(first, first + own), share)

    def _share_of(self, tokens: int, k: int, experts: int, own: int, groups: tuple[int, int]) -> float:
        """Return the share that a rank's `own` experts get. Raises BadInput for one that is not possible."""
        least, most = max(0.0, (k - experts + own) / own * experts / k), min(experts / k, experts / own)
        if math.isnan(self.share):
            return min(uneven_share(tokens, k, experts, own, self.layers(), self.balanced, groups), most)
        if not least <= self.share <= most:
            raise BadInput(
                f"--answer routing={self.share:g}: {own} of {experts} experts, {k} for each token, can get "
                f"{least:.3g} to {most:.3g} times their even share",
                hint=f"--answer routing={most:.3g}",
            )
        return self.share

    def _chose(self, place: str, made: _Choice) -> None:
        """Take the choice of a module. What was told of an earlier one, of groups, is withdrawn."""
        self._last, known = (place, made), self.routers.get(place, made)
        if known.experts < made.experts:
            self.assumed.pop(known.note, None)
        if (made.experts, made.share) >= (known.experts, known.share):
            self.routers[place] = made
        if made.note and made.experts >= known.experts:
            self.assumed.setdefault(made.note)


def uneven_share(
    tokens: int, k: int, experts: int, own: int, layers: int, balanced: bool = False, groups: tuple[int, int] = (1, 1)
) -> float:
    """Return how many times their even share `own` of the experts may get before a router has learned to balance.

    Exact: the variance of an independent token's choice. Measured: how likely two tokens choose alike, and that layers
    route independently: what all of them keep deviates less than what one makes.
    """
    alike = _ALIKE_BALANCED if balanced else _ALIKE.get(k, _ALIKE_OF_MORE)
    variance = variance_of_token(k, experts, own, groups)
    return 1 + _DEVIATIONS * math.sqrt(variance / layers * (alike + (1 - alike) / max(tokens, 1)))


def variance_of_token(k: int, experts: int, own: int, groups: tuple[int, int] = (1, 1)) -> float:
    """Return the variance of how many of its k experts a token has among `own`, by the square of the mean.

    groups: how many there are, and how many a token takes its experts from. Both are drawn without replacement.
    """
    count, taken = groups
    size = experts // count
    offered, whole, part = taken * size, max(own / size, 1), min(own, size)
    varied = taken * (whole / count) * (1 - whole / count) * (count - taken) / max(count - 1, 1) * (part / offered) ** 2
    mean = own / experts  # part of the offered experts that is own; `varied` is its variance
    inner = (offered - k) / (max(offered - 1, 1) * k) * (mean - mean**2 - varied)
    return (varied + inner) / mean**2


def _spread(tokens: int, k: int, experts: int, favoured: slice, share: float) -> Tensor:
    """Return k different experts for each token, of which the favoured ones get `share` times k/experts of all tokens.

    Each expert has an interval as long as its part of the tokens, and a token takes the k experts whose intervals hold
    k points that lie one apart: no interval is longer than 1.
    """
    part = full((experts,), 0.0, dtype=torch.float64)
    part[favoured] = share * k / experts
    others = torch.ones(experts, dtype=torch.bool)
    others[favoured] = False
    part[others] = (k - part.sum()) / others.sum()
    points = ((arange(tokens, dtype=torch.float64) + 0.5) / max(tokens, 1))[:, None] + arange(k)
    return torch.searchsorted(part.cumsum(0), points, right=True).clamp_(max=experts - 1)
