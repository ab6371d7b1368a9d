"""Names and roles of recorded tensors: from the stack each was born under, and from how long it lived.

A stack tells where a tensor was born: under torch/optim, in the autograd engine, in Module.to, or elsewhere. What it is
follows from what it outlives: born in the forward and alive in the backward, it was saved for it (activations); born in
the backward and alive after it, it is a gradient. What was there before the first event has no birth: the stack it died
under tells, or a gradient of its size. Where nothing tells, everything is temporaries.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, Literal, get_args

from memfit.snapshot.passes import Site, Turn, goes_back, site
from memfit.tape import Alloc, Event, Free, Role

Place = Literal["forward", "backward", "zero_grad", "optimizer", "move", "cublas", ""]
# (place, is it said by a file's path or by a function's name, the words), the first that a frame has decides
PLACES: tuple[tuple[Place, str, tuple[str, ...]], ...] = (
    ("cublas", "name", ("getCurrentCUDABlasHandle", "getCUDABlasLtWorkspace", "parseChosenWorkspaceSize")),
    ("zero_grad", "name", ("zero_grad",)),
    ("optimizer", "filename", ("torch/optim/", "bitsandbytes/optim")),
    ("backward", "name", ("torch::autograd::Engine", "_engine_run_backward", "run_backward")),
    ("move", "name", ("_apply", "convert", "load_state_dict", "from_pretrained", "_load_from_state_dict")),
)
INSTANTS: dict[str, str] = {"forward": "forward", "backward": "backward", "optimizer": "optimizer step"}
LASTING: dict[Place, Role] = {"optimizer": "optimizer_states", "move": "parameters", "cublas": "workspace"}
# what an older tensor was, by where it died: saved for that backward, cleared, or replaced by the step's new one
DEATHS: dict[Place, Role] = {"backward": "activations", "zero_grad": "gradients", "optimizer": "optimizer_states"}
MAX_LABEL = 200
_NODE = re.compile(r"(\w+Backward\d*)::apply\(|::(AccumulateGrad)\b")  # a backward's own thread has no Python frames


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
        self._seen: dict[Site, Site] = {}  # many are born at one
        self._frames: dict[int, tuple[Place, str, object]] = {}  # what each frame says, by identity: stacks share them

    @property
    def count(self) -> int:
        return len(self.allocs)

    def add(
        self, number: int, size: int, stream: int, frames: object, metadata: object = "", *, at_start: bool = False
    ) -> None:
        """One more, in order of `number`."""
        place, label = self._read(frames)
        if told := _told(frames):
            self.told[number], label = told
        if metadata and isinstance(metadata, str):
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
            self.ends[number] = self._read(frames)[0]

    def named(self, events: Iterable[Event]) -> dict[int, Alloc]:
        """Id -> the allocation with its role."""
        role: dict[int, Role] = {}
        alive: dict[int, Place] = {number: self.places[number] for number in self.old}
        before: Place = ""
        last: Site = ()
        for index, event in enumerate(events):
            if type(event) is Free:
                place = alive.pop(event.id)
                if event.id not in role and place == "optimizer":
                    role[event.id] = "temporaries"
            elif type(event) is Alloc:
                place = self.places[event.id]
                here = self.sites[event.id]
                if place in ("forward", "backward", "optimizer") and (
                    place != before or (place == "forward" and goes_back(last, here))
                ):
                    _turn(before, place, alive, role)
                    self.turns.append(Turn(index, place))
                    before, last = place, ()
                if here:
                    self.turns[-1].sites.add(here)
                    last = here
                alive[event.id] = place
        for number, place in alive.items():
            if place in LASTING:
                role.setdefault(number, LASTING[place])
        for number, place in enumerate(self.places):
            if place in ("move", "cublas"):
                role[number] = LASTING[place]
        self._name_old(role)
        role |= self.told
        return {a.id: replace(a, role=role[a.id]) if a.id in role else a for a in self.allocs}

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

    def _read(self, frames: object) -> tuple[Place, str]:
        """(where a stack stands, its innermost line of the user's own)."""
        if not isinstance(frames, list | tuple):
            return "", ""
        place: Place = "forward" if frames else ""
        label = inner = ""
        rank = len(PLACES)
        for frame in frames:
            known = self._frames.get(id(frame))
            if known is None:
                known = self._frames[id(frame)] = (*_frame(frame), frame)
            found, line = known[0], known[1]
            if found:
                order = next(i for i, row in enumerate(PLACES) if row[0] == found)
                if order < rank:
                    place, rank = found, order
            if line and not label:
                inner = inner or line.removeprefix("~")
                label = "" if line.startswith("~") else line
        return place, label or inner


def _told(frames: object) -> tuple[Role, str] | None:
    """The role and label that this program writes in the place of a stack."""
    if not isinstance(frames, list | tuple) or len(frames) != 1 or not isinstance(frames[0], dict):
        return None
    role, line = frames[0].get("filename"), frames[0].get("line")
    known: Role | None = next((r for r in get_args(Role) if line == 0 and r == role), None)
    return (known, str(frames[0].get("name", ""))) if known else None


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


def _frame(frame: Any) -> tuple[Place, str]:
    """(the place a frame tells, its line as "name (file.py:12)"; "~" before it when it is in a library)."""
    if not isinstance(frame, dict):
        return "", ""
    name, path = str(frame.get("name", "")), str(frame.get("filename", "")).replace("\\", "/")
    texts = {"name": name, "filename": path}
    place: Place = next((row[0] for row in PLACES if any(word in texts[row[1]] for word in row[2])), "")
    if place == "move" and "/torch/" not in path and "/transformers/" not in path:
        place = ""
    if not path.endswith(".py"):
        node = _NODE.search(name)
        return place, f"~{node[1] or node[2]}" if node else ""
    library = "~" if "site-packages/" in path or "/torch/" in path else ""
    return place, f"{library}{name} ({path.rsplit('/', 1)[-1]}:{frame.get('line', 0)})"
