"""Find what keeps growing from step to step of a traced script, and the line that keeps it.

The ledger knows to the byte what each step left allocated. Where the last step that was asked for left more than the
one before it, up to LONGER more steps are traced, as long as each leaves more. What grew must have grown in each of
them, by allocations of the same sizes that outlive two further steps: optimizer states, DDP's rebuilt buckets and
caches are made once, a batch or a loss lives into the next step or two. Tensors are then named as those of a running
process are (`memfit.holders`). What a container with a bound keeps is no leak: the rest of it is allocated, and one
more step is traced with it full.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from memfit.holders.bounds import Window
from memfit.holders.keepers import CYCLES, NAMELESS, Graphs, enlarged, graphs_of, grown, named
from memfit.holders.live_tensors import live_tensors
from memfit.holders.names import Roots
from memfit.nouns.sample import Leak, LeakHolder
from memfit.units import human
from memfit.virtual.device.ledger import Ledger
from memfit.virtual.device.values import base

LONGER = 3  # steps that are traced at most beyond those that were asked for
MOST = 4096  # allocations that stand for the rest of one container with a bound
LEAST = 4096  # bytes a step, 40 MiB in ten thousand: less is only told where a graph is kept, whose nodes fill the host


@dataclass(slots=True)
class Growth:
    """Compares what a script's steps, one of every optimizer, leave allocated. enough: steps that were asked for.

    anywhere: returns whether something is so on any traced rank of the job, as all or none make the further steps.
    """

    ledger: Ledger
    enough: int
    anywhere: Callable[[bool], bool] = bool
    found: Leak | None = None
    notes: list[str] = field(default_factory=list)  # on containers with a bound
    filled: list[Tensor] = field(default_factory=list)  # what they will hold once they are full
    _windows: list[Window] = field(default_factory=list)
    _ends: list[tuple[int, int]] = field(default_factory=list)  # of each step: allocations made so far, bytes alive
    _made: list[Counter[tuple[str, str]]] = field(default_factory=list)  # bytes of each that are alive, by its origin
    _graphs: Graphs = field(default_factory=dict)
    _settled: bool = False  # whether no more steps are needed

    def stepped(self) -> int:
        """Note that every optimizer has made a step; return how many more are to be traced."""
        if self._settled:
            return 0
        self._made.append(self._new(self._ends[-1][0] if self._ends else 0))
        self._ends.append((len(self.ledger.blocks), self._alive()))
        count = len(self._ends)
        if count < self.enough or self.enough < 2:
            return 0
        if count == self.enough + LONGER:
            self._settled = True
            self.found = self._leak() if self._rises() else None
            self._fill()
            return int(self.anywhere(bool(self.filled)))
        self._settled = not self.anywhere(self._rises() and (count > self.enough or self._matters()))
        if self._settled:
            return 0
        if count == self.enough:
            self._graphs = graphs_of(Roots())
        return 1

    def _matters(self) -> bool:
        """Return whether the last step left enough to be told, or tensors with a graph."""
        (start, before), (_, after) = self._ends[-2:]
        kept = (t for t in live_tensors() if (self._number(t) or 0) >= start)
        return after - before >= LEAST or any(t.grad_fn is not None for t in kept)

    def _alive(self) -> int:
        return sum(block.requested for block in map(self._block, self.ledger.number_at.values()))

    def _origin(self, number: int) -> tuple[str, str]:
        return self.ledger.places[number], self.ledger.labels[number]

    def _new(self, start: int) -> Counter[tuple[str, str]]:
        """Return the bytes of allocations from number `start` on that are alive, by their module and operator."""
        found: Counter[tuple[str, str]] = Counter()
        for number in self.ledger.number_at.values():
            if number >= start:
                found[self._origin(number)] += self._block(number).requested
        return found

    def _block(self, number: int) -> Any:
        return self.ledger.blocks[number]

    def _rises(self) -> bool:
        """Return whether each step since the one before the last that was asked for left more."""
        return all(before[1] < after[1] for before, after in pairwise(self._ends[self.enough - 2 :]))

    def _steady(self) -> dict[int, int]:
        """Return number -> bytes of what two steps in a row left alive, in allocations of the same sizes."""
        start, middle, end = (self._ends[self.enough + i][0] for i in (-2, -1, 0))
        alive = {number: self._block(number).requested for number in sorted(self.ledger.number_at.values())}
        one, other = ({n: size for n, size in alive.items() if a <= n < b} for a, b in ((start, middle), (middle, end)))
        found: dict[int, int] = {}
        for made, those in ((one, other), (other, one)):
            left = Counter(those.values())
            for number, size in made.items():
                if left[size] > 0:
                    left[size] -= 1
                    found[number] = size
        return found

    def _leak(self) -> Leak | None:
        before = sum(self._steady().values())
        gc.collect()
        steady = self._steady()
        per_step = sum(steady.values()) // 2
        if not steady:
            if before >= LEAST:
                return self._as_leak(before // 2, (LeakHolder("cycle", CYCLES, "", "", 0, 0),))
            return self._enlarged()
        kept = [t for t in live_tensors() if self._number(t) in steady]
        roots = Roots()
        holders = named(kept, roots, 2, grown(self._graphs, graphs_of(roots), LONGER), self._windows)
        if self._windows and not holders:
            return None
        graph = any(holder.kind == "graph" for holder in holders) or any(t.grad_fn is not None for t in kept)
        if per_step < LEAST and not graph:
            return None
        return self._as_leak(
            per_step, holders or (LeakHolder("unknown", NAMELESS, "", "", len(steady) // 2, per_step),)
        )

    def _enlarged(self) -> Leak | None:
        """Return what each step made anew and larger than the step before, such as a cache that torch.cat extends."""
        sizes = {origin: [made[origin] for made in self._made[-LONGER - 1 :]] for origin in self._made[-1]}
        gains = {o: (s[-1] - s[0]) // LONGER for o, s in sizes.items() if all(a < b for a, b in pairwise(s))}
        per_step, start = sum(gains.values()), self._ends[-2][0]
        numbers = {n for n in self.ledger.number_at.values() if n >= start and self._origin(n) in gains}
        holders = enlarged([t for t in live_tensors() if self._number(t) in numbers], Roots(), per_step, self._windows)
        return self._as_leak(per_step, holders) if per_step >= LEAST and holders else None

    def _fill(self) -> None:
        """Allocate what the containers with a bound will take, in at most MOST pieces each."""
        for window in self._windows:
            if not window.room:
                unknown = f"{human(window.size)} a step, what it holds later is not counted"
                self.notes.append(f"{window.name} at {window.place} grows by {unknown}: the script takes from it, too")
            elif window.room * window.size >= LEAST:
                many = -(-window.room // MOST)
                for _ in range(-(-window.room // many)):
                    self.filled.append(torch.empty(many * window.size, dtype=torch.uint8, device="cuda"))
                more = f"{window.room:,} further items of {human(window.size)} each"
                self.notes.append(f"{window.name} at {window.place} is taken as full: {more}")

    def _as_leak(self, per_step: int, holders: tuple[LeakHolder, ...]) -> Leak:
        gained = self._ends[-1][1] - self._ends[self.enough - 1][1]
        return Leak(per_step, self.enough, len(self._ends), gained, holders)

    def _number(self, t: Tensor) -> int | None:
        try:
            return self.ledger.number_at.get(base(t)) if t.is_cuda else None
        except (RuntimeError, NotImplementedError):  # a wrapper without memory of its own
            return None
