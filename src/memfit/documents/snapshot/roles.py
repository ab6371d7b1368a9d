"""Names and roles of recorded tensors: from the stack each was born under, and from how long it lived.

A stack tells where a tensor was born: under torch/optim, in the autograd engine, in Module.to, or elsewhere. What it is
follows from what it outlives: born in the forward and alive in the backward, it was saved for it (activations); born in
the backward and alive after it, it is a gradient. What was there before the first event has no birth: the stack it died
under tells, or a gradient of its size. Where nothing tells, everything is temporaries.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

from memfit.documents.snapshot.frames import MAX_LABEL, Place, Reader, told
from memfit.documents.snapshot.passes import INSIDE, LOAD, Site, Turn, comes_back, goes_back, site
from memfit.documents.snapshot.shape import text_of
from memfit.nouns.tape import Alloc, Event, Free, Role

INSTANTS: dict[str, str] = {"forward": "forward", "backward": "backward", "optimizer": "optimizer step", LOAD: "load"}
LASTING: dict[Place, Role] = {"optimizer": "optimizer_states", "move": "parameters", "cublas": "workspace"}
# what an older tensor was, by where it died: saved for that backward, cleared, or replaced by the step's new one
DEATHS: dict[Place, Role] = {"backward": "activations", "zero_grad": "gradients", "optimizer": "optimizer_states"}


class Births:
    """Every allocation of a history, with the place it was born at; roles are known once all have died or not."""

    def __init__(self) -> None:
        self.allocs: list[Alloc] = []
        self.places: list[Place] = []
        self.old: set[int] = set()  # alive at the start
        self.told: dict[int, Role] = {}  # said by the recording itself
        self.ends: dict[int, Place] = {}  # where those of them died that did
        self.turns: list[Turn] = []  # the parts of the steps; known after `named`
        self.sites: list[Site] = []  # of those born in a forward: where the program was
        self.failures: dict[int, tuple[Place, Site]] = {}  # the same of requests that failed, by their event's index
        self._seen: dict[Site, Site] = {}  # many are born at one
        self._reader = Reader()

    @property
    def count(self) -> int:
        return len(self.allocs)

    def add(
        self, number: int, size: int, stream: int, frames: object, metadata: object = "", *, at_start: bool = False
    ) -> None:
        """One more, in order of `number`."""
        place, label = self._reader.read(frames)
        if known := told(frames):
            self.told[number], label = known
        if metadata and isinstance(metadata, str):
            metadata = text_of(metadata)
            label = f"{metadata}, {label}" if label else metadata
        if at_start:
            self.old.add(number)
        self.places.append(place)
        here = site(frames) if place == "forward" and not at_start else ()
        self.sites.append(self._seen.setdefault(here, here))
        self.allocs.append(Alloc(number, size, "temporaries", label[:MAX_LABEL], stream))

    def died(self, number: int, frames: object) -> None:
        """`frames` is the stack of its death."""
        if number in self.old:
            self.ends[number] = self._reader.read(frames)[0]

    def failed(self, index: int, frames: object) -> str:
        """The `index`-th event is a request that failed; returns who asked."""
        place, label = self._reader.read(frames)
        if known := told(frames):
            label = known[1]
        self.failures[index] = (place, site(frames) if place == "forward" else ())
        return label[:MAX_LABEL]

    def named(self, events: Iterable[Event]) -> dict[int, Alloc]:
        """Id -> the allocation with its role."""
        role: dict[int, Role] = {}
        alive: dict[int, Place] = {number: self.places[number] for number in self.old}
        before: Place = ""
        last: Site = ()
        between: set[Site] = set()  # where it was since a module was called
        for index, event in enumerate(events):
            if type(event) is Free:
                place = alive.pop(event.id)
                if event.id not in role and place == "optimizer":
                    role[event.id] = "temporaries"
                continue
            place, here = self._asked(index, event)
            seen = self.turns[-1].sites if self.turns else set()
            again = goes_back(last, here) or comes_back(here, seen, between)
            begins = place != before or (place == "forward" and again)
            moved = place == LOAD and type(event) is Alloc  # between two passes, too
            if begins and place in INSTANTS and not moved:
                _turn(before, place, alive, role)
                self.turns.append(Turn(index, place))
                before, last = place, ()
            if here:
                self.turns[-1].sites.add(here)
                if here[-1] == INSIDE and self.turns[-1].called < 0:
                    self.turns[-1].called = index
                last = here
                between = set() if here[-1] == INSIDE else between | {here}
            if type(event) is Alloc:
                alive[event.id] = place
        for number, place in alive.items():
            if place in LASTING:
                role.setdefault(number, LASTING[place])
        if before == "backward":
            self._gradients_so_far(alive, role)
        for number, place in enumerate(self.places):
            if place in ("move", "cublas"):
                role[number] = LASTING[place]
        self._name_old(role)
        role |= self.told
        stackless = self._reader.without
        return {
            a.id: replace(a, role=role.get(a.id, a.role), label=a.label or (stackless if a.id not in self.old else ""))
            for a in self.allocs
        }

    def _gradients_so_far(self, alive: dict[int, Place], role: dict[int, Role]) -> None:
        """Of a backward that did not come to its end: what is as large as a weight."""
        weights = Counter(self.allocs[number].size for number, place in alive.items() if place == LOAD)
        for number in [number for number, place in alive.items() if place == "backward" and number not in role]:
            size = self.allocs[number].size
            if weights[size]:
                weights[size] -= 1
                role[number] = "gradients"

    def _asked(self, index: int, event: Event) -> tuple[Place, Site]:
        """Where the program was as it asked for memory, whether it got some or not."""
        if type(event) is Alloc:
            place, here = self.places[event.id], self.sites[event.id]
        elif index in self.failures:
            place, here = self.failures[index]
        else:
            return "", ()
        return place or self._reader.without, here

    def _name_old(self, role: dict[int, Role]) -> None:
        """What was there before the first event: by its death, else a parameter where a gradient has its size."""
        untold = [number for number in sorted(self.old) if number not in role]
        for number in untold:
            if found := DEATHS.get(self.ends.get(number, "")):
                role[number] = found
        gradients = Counter(self.allocs[number].size for number, what in role.items() if what == "gradients")
        for number in untold:
            size = self.allocs[number].size
            if number not in self.ends and number not in role and gradients[size]:
                gradients[size] -= 1
                role[number] = "parameters"


def _turn(before: Place, now: Place, alive: dict[int, Place], role: dict[int, Role]) -> None:
    """The run goes from one part to the next: what outlives it shows what it is."""
    if now == "backward":
        for number, place in alive.items():
            if place == "forward":
                role.setdefault(number, "activations")
    elif before == "backward":
        for number, place in alive.items():
            if place == "backward":
                role.setdefault(number, "gradients")
    elif before == "optimizer":
        for number, place in alive.items():
            if place == "optimizer":
                role.setdefault(number, "optimizer_states")
