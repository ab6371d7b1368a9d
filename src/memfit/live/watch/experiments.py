"""Memory that one experiment of a process leaves to the next: caches, kept models, results with their graphs.

Every watch that begins notes what is alive besides its own model. Where that grew twice in a row, tensors that came
with the last watch and are still alive leak.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable
from itertools import pairwise

from torch import Tensor

from memfit.live.holders.live_tensors import live_tensors
from memfit.live.holders.names import Roots
from memfit.live.watch.leak_search import alive, named, without
from memfit.live.watch.leak_test import FLOOR
from memfit.nouns.sample import Leak

RISES = 2  # in a row: one may be a data set or a model that is shared on purpose


class Experiments:
    """The watches of one process, one after the other."""

    def __init__(self) -> None:
        self.starts: list[int] = []  # bytes alive when each began, its own model and optimizer left out
        self._told: set[tuple[str, str]] = set()  # (name, place) of holders
        self._last: list[weakref.ref[Tensor]] = []  # alive when the last watch ended
        self._before: list[weakref.ref[Tensor]] = []  # when the one before it ended

    def begin(self, live: Callable[[], int], own: Iterable[Tensor], floor: int = FLOOR) -> Leak | None:
        """A watch begins; `live` counts bytes besides `own`. The leak between experiments, if there is one."""
        self.starts.append(live())
        if not self._rising(floor):
            return None
        gc.collect()  # what only reference cycles keep is no leak
        self.starts[-1] = live()
        if not self._rising(floor):
            return None
        holders = named(without(alive(self._last), [*own, *alive(self._before)]), Roots(), 1)
        fresh = {(h.name, h.place) for h in holders} - self._told
        self._told |= fresh
        if not fresh:
            return None
        gained = self.starts[-1] - self.starts[-1 - RISES]
        number = len(self.starts)
        return Leak(gained // RISES, number - RISES, number, gained, holders, "run")

    def end(self) -> None:
        """A watch ends."""
        self._before, self._last = self._last, [weakref.ref(t) for t in live_tensors()]

    def _rising(self, floor: int) -> bool:
        last = self.starts[-1 - RISES :]
        return len(last) > RISES and all(b - a >= floor for a, b in pairwise(last))


THIS_PROCESS = Experiments()
