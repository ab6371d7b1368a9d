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
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Literal

from torch import Tensor

from memfit.live.holders.live_tensors import graph, graph_size, live_bytes, live_tensors, saved_by, storages
from memfit.live.holders.names import CACHE_OF, Name, Roots
from memfit.live.holders.referrers import WIDEST, holders_of
from memfit.live.holders.source import keeping_line
from memfit.live.watch.leak_test import FLOOR
from memfit.nouns.sample import Leak, LeakHolder

APART = 4  # steps between two inspections: more than loaders prefetch (2) and a loop's variables live (1)
MOST_HOLDERS = 5
NOBODY = ("", "")
NAMELESS = "tensors that no Python name leads to"
CYCLES = "reference cycles, freed only when Python's garbage collector runs"
RISES = 2  # rises in a row from run to run: a single one may be a data set or a model that is shared on purpose

Graphs = dict[tuple[str, str], tuple[Name, int]]


class LeakSearch:
    """One search within a run. Call `look` at the end of every step until it returns the holders."""

    def __init__(self) -> None:
        self._steps = 0
        before = live_bytes()
        gc.collect()
        self.garbage = before - live_bytes()  # bytes that only reference cycles kept
        self._old = {id(t): weakref.ref(t) for t in live_tensors()}
        self._graphs = _graphs(Roots())
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
        graphs = _grown(self._graphs, _graphs(roots), 2 * APART)
        if not (kept or graphs) and self.garbage > 0:
            return (LeakHolder("cycle", CYCLES, "", "", 0, 0),)
        return named(kept, roots, APART, graphs)


def alive(references: Iterable[weakref.ref[Tensor]]) -> list[Tensor]:
    """Return the tensors that still exist."""
    return [t for t in (ref() for ref in references) if t is not None]


def without(tensors: Iterable[Tensor], others: Iterable[Tensor]) -> list[Tensor]:
    """Return the tensors that share no memory with `others`: a view of a weight is nothing new."""
    old = storages(others).keys()
    return [t for t in tensors if not storages([t]).keys() & old]


def named(
    kept: Sequence[Tensor], roots: Roots, steps: int, graphs: Sequence[LeakHolder] = ()
) -> tuple[LeakHolder, ...]:
    """Group leaking tensors by the name that keeps them; those without a name belong to the graphs that grow."""
    picked = list(kept)[:: max(-(-len(kept) // WIDEST), 1)]  # a sample: holders_of takes at most WIDEST
    found = holders_of(picked, roots)
    groups: dict[tuple[str, str], list[Tensor]] = {}
    for number, t in enumerate(picked):
        name = found.get(number)
        groups.setdefault(_key(name) if name else NOBODY, []).append(t)
    count = len(kept) / max(len(picked), 1) / steps  # tensors per step for each picked one
    share = sum(storages(kept).values()) / max(sum(storages(picked).values()), 1) / steps
    first = {_key(name): name for name in found.values()}
    nameless = groups.pop(NOBODY, [])
    holders = []
    for key, tensors in groups.items():
        nodes, saved = _behind(tensors, nameless)
        taken = set(map(id, saved))
        nameless = [t for t in nameless if id(t) not in taken]
        many, size = _amount([*tensors, *saved], count, share)
        where = keeping_line(first[key], roots.running)
        if saved:
            holders.append(LeakHolder("graph", key[0], *where, max(round(nodes * count), 1), size))
        else:
            holders.append(LeakHolder(_kind(first[key]), key[0], *where, many, size))
    many, size = _amount(nameless, count, share)
    if graphs:
        holders += [replace(graphs[0], bytes=size), *graphs[1:]]
    elif nameless:
        holders.append(LeakHolder("unknown", NAMELESS, "", "", many, size))
    return tuple(sorted(holders, key=lambda h: -h.bytes)[:MOST_HOLDERS])


def _behind(tensors: Sequence[Tensor], nameless: Sequence[Tensor]) -> tuple[int, list[Tensor]]:
    """Return how many nodes the graphs behind these tensors have, and which of the nameless tensors they saved."""
    nodes = list(graph(tensors)) if nameless else []
    saved = storages(t for node in nodes for t in saved_by(node)).keys()
    return len(nodes), [t for t in nameless if storages([t]).keys() & saved]


def _key(name: Name) -> tuple[str, str]:
    """Return the path and the file of a name, which distinguish it from others."""
    return name.path, name.places[0][0]


def _kind(name: Name) -> Literal["container", "variable"]:
    return "container" if "[" in name.path or name.path.startswith(CACHE_OF) else "variable"


def _amount(tensors: Sequence[Tensor], count: float, share: float) -> tuple[int, int]:
    """Return (tensors, bytes) per step that a group of picked tensors stands for."""
    return max(round(len(tensors) * count), 1), int(sum(storages(tensors).values()) * share)


def _graphs(roots: Roots) -> Graphs:
    """Return the variables bound to a tensor with a graph behind it, and how many nodes that has."""
    return {
        _key(name): (name, graph_size(value))
        for name, value in roots.variables()
        if isinstance(value, Tensor) and value.grad_fn is not None
    }


def _grown(before: Graphs, after: Graphs, steps: int) -> list[LeakHolder]:
    """Return the variables whose graph has grown by a node or more per step, largest first."""
    holders = []
    for key, (found, nodes) in after.items():
        gained = nodes - before[key][1] if key in before else 0
        if gained >= steps:
            holders.append(LeakHolder("graph", found.path, *keeping_line(found), gained // steps, 0))
    return sorted(holders, key=lambda holder: -holder.count)


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
