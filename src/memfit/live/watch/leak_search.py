"""The leak search finds who holds growing memory, within a run and from one run of a process to the next.

Within a run it inspects the live tensors three times at the end of steps, once the leak test has found growth:

    1   collect cyclic garbage, remember the live tensors and how large the graph behind every variable is
    2   APART steps later: new tensors are suspects
    3   APART steps later: suspects that are still alive leak; find names for them

A batch, a loss or an output lives into the next step or two, never through both intervals.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable
from itertools import pairwise

from torch import Tensor

from memfit.holders.keepers import CYCLES, alive, graphs_of, grown, named, without
from memfit.holders.live_tensors import live_bytes, live_tensors
from memfit.holders.names import Roots
from memfit.live.watch.leak_test import FLOOR
from memfit.nouns.sample import Leak, LeakHolder

APART = 4  # steps between two inspections: more than loaders prefetch (2) and a loop's variables live (1)
RISES = 2  # rises in a row from run to run: a single one may be a data set or a model that is shared on purpose


class LeakSearch:
    """One search within a run. Call `look` at the end of every step until it returns the holders."""

    def __init__(self) -> None:
        self._steps = 0
        before = live_bytes()
        gc.collect()
        self.garbage = before - live_bytes()  # bytes that only reference cycles kept
        self._old = {id(t): weakref.ref(t) for t in live_tensors()}
        self._graphs = graphs_of(Roots())
        self._suspects: list[weakref.ref[Tensor]] = []

    def look(self) -> tuple[LeakHolder, ...] | None:
        """Count one more step; return the holders once the third inspection is done."""
        self._steps += 1
        if self._steps == APART:
            old = self._old  # a new tensor may have the id of one that is gone
            self._suspects = [weakref.ref(t) for t in live_tensors() if id(t) not in old or old[id(t)]() is not t]
        if self._steps < 2 * APART:
            return None
        gc.collect()
        kept = without(alive(self._suspects), alive(self._old.values()))
        roots = Roots()
        graphs = grown(self._graphs, graphs_of(roots), 2 * APART)
        if not (kept or graphs) and self.garbage > 0:
            return (LeakHolder("cycle", CYCLES, "", "", 0, 0),)
        return named(kept, roots, APART, graphs)


# --- from one run of a process to the next ---


class Experiments:
    """Finds what the watched runs of a process leave behind: caches, kept models, results with their graphs.

    Every watch that begins counts what is alive besides its own model. If that grew RISES times in a row, tensors
    that came with the last run and are still alive leak.
    """

    def __init__(self) -> None:
        self.starts: list[int] = []  # bytes alive when each run began, without its own model and optimizer
        self._reported: set[tuple[str, str]] = set()  # (name, place) of holders
        self._last: list[weakref.ref[Tensor]] = []  # alive when the last run ended
        self._before: list[weakref.ref[Tensor]] = []  # alive when the run before it ended

    def begin(self, live: Callable[[], int], own: Iterable[Tensor], floor: int = FLOOR) -> Leak | None:
        """Note that a run begins; return the leak between runs, if any. `live` counts bytes besides `own`."""
        self.starts.append(live())
        if not self._rising(floor):
            return None
        gc.collect()  # what only reference cycles keep does not count as a leak
        self.starts[-1] = live()
        if not self._rising(floor):
            return None
        holders = named(without(alive(self._last), [*own, *alive(self._before)]), Roots(), 1)
        fresh = {(h.name, h.place) for h in holders} - self._reported
        self._reported |= fresh
        if not fresh:
            return None
        gained = self.starts[-1] - self.starts[-1 - RISES]
        number = len(self.starts)
        return Leak(gained // RISES, number - RISES, number, gained, holders, "run")

    def end(self) -> None:
        """Note that a run ends."""
        self._before, self._last = self._last, [weakref.ref(t) for t in live_tensors()]

    def _rising(self, floor: int) -> bool:
        last = self.starts[-1 - RISES :]
        return len(last) > RISES and all(b - a >= floor for a, b in pairwise(last))


THIS_PROCESS = Experiments()
