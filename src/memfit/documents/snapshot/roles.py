"""Roles and passes of a recorded history: what each tensor is for, and which parts of it train, evaluate or load.

A stack shows where a tensor was made: under torch/optim, in the autograd engine, in Module.to, or elsewhere. Its role
follows from what it outlives: made in the forward and alive in the backward, it was saved for that (activations);
made in the backward and alive after it, it is a gradient. A tensor older than the history has no stack of its
allocation: the stack of its release decides, or a gradient of its size. Where nothing decides, the role is
temporaries.

Passes are found by the user's lines. A stretch of forwards without a backward is one pass or many: a loop goes back
to an earlier line of the same function. A pass that no backward follows, from lines where no trained pass began,
evaluates.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, field
from itertools import pairwise

from memfit.documents.snapshot.frames import (
    CALLED,
    DEEPEST,
    MAX_LABEL,
    Place,
    Reader,
    line_of,
    of_library,
    written_role,
)
from memfit.documents.snapshot.shape import text_of
from memfit.nouns.tape import (
    BACKWARD,
    FORWARD,
    GRADIENTS_ON,
    NEXT_PART,
    OPTIMIZER_STEP,
    Alloc,
    Event,
    Free,
    Mark,
    Oom,
    Phase,
    Role,
)

Call = tuple[str, str, int]  # (file, function, line)
Lines = tuple[Call, ...]  # outermost first
INSIDE: Call = ("", "", 0)  # stands for the call of a module, which ends a site
# loops of a Trainer, which count as the user's: the program itself has only one line for all of them
LOOPS = frozenset(["_inner_training_loop", "evaluation_loop", "prediction_loop"])
LOAD = "move"  # the place of a part in which weights come to the card, or found no room there
MANY = 6  # allocations that a pass must make to show whether it keeps them
KEEPS = 0.5  # share alive at the end of a pass with gradients on; without them a layer's tensors die in the next layer
INSTANTS: dict[str, str] = {"forward": FORWARD, "backward": BACKWARD, "optimizer": OPTIMIZER_STEP, LOAD: "load"}
LASTING: dict[Place, Role] = {"optimizer": "optimizer_states", "move": "parameters", "cublas": "workspace"}
# role of what outlives the part it was made in; of a forward only where a backward follows, which saved it
LEFT: dict[Place, Role] = {"backward": "gradients", "optimizer": "optimizer_states"}
# role of a tensor older than the history, by where it died: saved for that backward, cleared, or replaced in the step
DEATHS: dict[Place, Role] = {"backward": "activations", "zero_grad": "gradients", "optimizer": "optimizer_states"}


@dataclass(eq=False, slots=True)
class Site:
    """Where the program was: the user's `lines`. Equal sites are one object, known by its identity.

    `calls`: a module is called there; what follows is the model's own code, whose loops are within a pass.
    """

    lines: Lines
    calls: bool


# where an allocation was made: place, label, written role, where the program was (None outside of a forward), and the
# stack, which is kept so that its id stays unique
Made = tuple[Place, str, Role | None, Site | None, object]

# --- roles ---


class Allocations:
    """Every allocation of a history, with the place it was made at. `named` decides the roles at the end."""

    def __init__(self) -> None:
        self.allocs: list[Alloc] = []
        self.made: list[Made] = []  # how each of them was
        self.old = 0  # as many of the first were alive at the start
        self.written: dict[int, Role] = {}  # roles that the recording itself names
        self.ends: dict[int, Place] = {}  # where those of `old` died that did
        self.turns: list[Turn] = []  # the parts of the steps; known after `named`
        self.failures: dict[int, tuple[Place, Site | None]] = {}  # of requests that failed, by their event's index
        self._seen: dict[tuple[Lines, bool], Site] = {}
        self._stacks: dict[int, Made] = {}  # by id of the stack
        self._calls: dict[int, Call | None] = {}  # by id of the frame, which its stack keeps
        self._reader = Reader()

    def add(self, size: int, stream: int, frames: object, metadata: object = "") -> Alloc:
        """Add one more, and return it."""
        made = self._stacks.get(id(frames)) or self._stack(frames)
        _, label, written, _, _ = made
        if written:
            self.written[len(self.allocs)] = written
        if metadata and isinstance(metadata, str):
            metadata = text_of(metadata)
            label = (f"{metadata}, {label}" if label else metadata)[:MAX_LABEL]
        alloc = Alloc(len(self.allocs), size, "temporaries", label, stream)
        self.made.append(made)
        self.allocs.append(alloc)
        return alloc

    def died(self, number: int, frames: object) -> None:
        """Note that one that was alive at the start was released, under the stack `frames`."""
        self.ends[number] = self._stack(frames)[0]

    def failed(self, index: int, frames: object) -> str:
        """Note that the `index`-th event is a request that failed; return its label."""
        place, label, _, here, _ = self._stack(frames)
        self.failures[index] = (place, here)
        return label

    def _stack(self, frames: object) -> Made:
        known = self._stacks.get(id(frames))
        if known is None:
            place, label = self._reader.read(frames)
            role, label = written_role(frames) or (None, label)
            here = self._site(frames) if place == "forward" else None
            known = self._stacks[id(frames)] = place, label[:MAX_LABEL], role, here, frames
        return known

    def _site(self, frames: object) -> Site | None:
        """Return the user's lines of a stack down to the first module that is called; None where there are none."""
        found: list[Call] = []
        calls = False
        for frame in reversed(frames) if isinstance(frames, list | tuple) else ():
            if (key := id(frame)) not in self._calls:
                self._calls[key] = call_of(frame)
            call = self._calls[key]
            if call is INSIDE and found:
                calls = True
                break
            if call is None or call is INSIDE:
                continue
            found.append(call)
            if len(found) == DEEPEST:
                break
        lines = tuple(found)
        return self._seen.setdefault((lines, calls), Site(lines, calls)) if lines else None

    def named(self, events: Iterable[Event]) -> list[Alloc]:
        """Write its role into every allocation, and return them by id."""
        role: dict[int, Role] = {}
        before: Place = ""
        last: Site | None = None
        made, stackless, failures = self.made, self._reader.without, self.failures
        places = [one[0] for one in made[: self.old]] + [one[0] or stackless for one in made[self.old :]]
        dead = bytearray(len(places))
        waiting = _Waiting(dead)
        for number in range(self.old):
            waiting[places[number]].append(number)
        seen: set[Site] = set()  # this part's
        between: set[Site] = set()  # where the program was since a module was called
        for index, event in enumerate(events):
            if type(event) is Free:
                dead[event.id] = True
                if places[event.id] == "optimizer":
                    role.setdefault(event.id, "temporaries")
                continue
            if type(event) is Alloc:
                place, here = places[event.id], made[event.id][3]
            elif index in failures:
                place, here = failures[index]
                place = place or stackless
            else:
                continue
            if here is not last or place != before:
                new = here if here is not last else None
                again = new is not None and (goes_back(last, new) or (new in seen and comes_back(new, between)))
                begins = place != before or (place == "forward" and again)
                moved = place == LOAD and type(event) is Alloc  # this happens between two passes, too
                if begins and place in INSTANTS and not moved:
                    waiting.outlived(before, place, role)
                    self.turns.append(Turn(index, place))
                    before, last, seen, new = place, None, set(), here
                if new is not None:
                    last = new
                    if new not in seen:
                        seen.add(new)
                        self.turns[-1].sites.add(new)
                    if not new.calls:
                        between.add(new)
                    else:
                        between.clear()
                        if self.turns[-1].called < 0:
                            self.turns[-1].called = index
            if type(event) is Alloc:
                waiting[place].append(event.id)
        alive = {number: place for number, place in enumerate(places) if not dead[number]}
        for number, place in alive.items():
            if place in LASTING:
                role.setdefault(number, LASTING[place])
        if before == "backward":
            self._gradients_so_far(alive, role)
        elif before == "forward" and failures and self._trains():
            waiting.outlived("forward", "backward", role)
        for number, place in enumerate(places):
            if place in ("move", "cublas"):
                role[number] = LASTING[place]
        self._name_old(role)
        role |= self.written
        for number, what in role.items():
            self.allocs[number].role = what
        if stackless:
            for one in self.allocs:
                one.label = one.label or (stackless if one.id >= self.old else "")
        return self.allocs

    def _gradients_so_far(self, alive: dict[int, Place], role: dict[int, Role]) -> None:
        """Give the role to what an unfinished backward made as large as a weight."""
        weights = Counter(self.allocs[number].size for number, place in alive.items() if place == LOAD)
        for number in [number for number, place in alive.items() if place == "backward" and number not in role]:
            size = self.allocs[number].size
            if weights[size]:
                weights[size] -= 1
                role[number] = "gradients"

    def _trains(self) -> bool:
        """Does the unfinished forward come from lines whose results waited for a backward before?"""
        pairs = pairwise(self.turns)
        trained = set().union(*(one.sites for one, after in pairs if after.place == "backward"))
        return bool(self.turns[-1].sites & trained)

    def _name_old(self, role: dict[int, Role]) -> None:
        """Give roles to what is older than the history: by its release, or parameters by a gradient of the size."""
        unknown = [number for number in range(self.old) if number not in role]
        for number in unknown:
            if found := DEATHS.get(self.ends.get(number, "")):
                role[number] = found
        gradients = Counter(self.allocs[number].size for number, what in role.items() if what == "gradients")
        for number in unknown:
            size = self.allocs[number].size
            if number not in self.ends and number not in role and gradients[size]:
                gradients[size] -= 1
                role[number] = "parameters"


class _Waiting(defaultdict[Place, list[int]]):
    """What waits for the end of the part of a step that it was made in, by that part. `dead`: 1 for what was freed."""

    def __init__(self, dead: bytearray) -> None:
        super().__init__(list)
        self.dead = dead

    def outlived(self, before: Place, now: Place, role: dict[int, Role]) -> None:
        """Give roles to what outlives a part of a step, as the next part begins. Each tensor is visited once."""
        made: Place = "forward" if now == "backward" else before
        left: Role | None = "activations" if now == "backward" else LEFT.get(before)
        if left is not None:
            for number in self.pop(made, ()):
                if not self.dead[number]:
                    role.setdefault(number, left)


# --- passes ---


@dataclass(slots=True)
class Turn:
    """One part of a step, which begins at the `index`-th event.

    `called`: the event at which a module was called first, -1 where none was. `sites`: where the program was.
    `trains`: a backward followed. `continues`: it belongs to the pass of the turn before, as the next layer of a loop.
    `made`, `kept`: allocations, and how many of them were alive at the end.
    """

    index: int
    place: str
    called: int = -1
    sites: set[Site] = field(default_factory=set)
    trains: bool = False
    continues: bool = False
    made: int = 0
    kept: int = 0


def call_of(frame: object) -> Call | None:
    """Return the user's line of a frame, INSIDE for the call of a module, None for C++ and launchers."""
    path = text_of(frame.get("filename"), end=True) if isinstance(frame, dict) else ""
    if not isinstance(frame, dict) or not path.endswith((".py", ">")):
        return None
    if path.endswith(CALLED):
        return INSIDE
    name = text_of(frame.get("name"))
    return None if of_library(path) and name not in LOOPS else (path, name, line_of(frame))


def loops(turns: Sequence[Turn]) -> bool:
    """Are modules called in these parts? Only then are parts without a backward known to be passes."""
    return any(site.calls for turn in turns for site in turn.sites)


def goes_back(before: Site | None, now: Site) -> bool:
    """Has a loop begun anew? At the first line that differs the function is the same, and the line an earlier one."""
    for one, other in zip(before.lines if before else (), now.lines, strict=False):
        if one != other:
            return one[:2] == other[:2] and other[2] < one[2]
    return False


def comes_back(now: Site, between: Iterable[Site]) -> bool:
    """Is a module called again, after other sites (`between`)?"""
    return now.calls and any(other.lines != now.lines[: len(other.lines)] for other in between)


def untrained(lines: Set[object], trained: Set[object]) -> bool:
    """Does a pass evaluate? It does if others train, and it began at none of the lines where those began."""
    return bool(trained) and not lines & trained


def marks(turns: Sequence[Turn], events: Sequence[Event]) -> list[tuple[int, Mark]]:
    """Return (index, mark) of each part of a step."""
    first = next((turn for turn in turns if turn.place == "forward"), None)
    if first is not None and first.called > first.index:  # what came before the first module was called is data
        first.index = first.called
    for turn, after in pairwise(turns):
        turn.trains = turn.place == "forward" and after.place == "backward"
    _count(turns, events)
    _join(turns, events)
    modules, graph = loops(turns), False
    trained = {s for turn in turns if turn.trains for s in _calls(turn, modules)}
    found: list[tuple[int, Mark]] = []
    for turn in turns:
        if modules and found and turn.place == "forward" and not loops([turn]):
            continue  # it calls no module, so it belongs to the part before
        called = loops([turn]) if modules else bool(turn.sites)  # copying weights is no pass
        evaluates = turn.place == "forward" and called and untrained(_calls(turn, modules), trained)
        if evaluates and (turn.made >= MANY or turn is not turns[-1]):  # a failed, short one counts as the one before
            graph = turn.made >= MANY and turn.kept > KEEPS * turn.made
        instant = NEXT_PART if turn.continues else GRADIENTS_ON if evaluates and graph else INSTANTS[turn.place]
        phase: Phase = "load" if turn.place == LOAD else "eval" if evaluates else "step"
        found.append((turn.index, Mark(phase, instant)))
    return found


def _join(turns: Sequence[Turn], events: Sequence[Event]) -> None:
    """Join the forwards that one backward follows into one pass: their tensors waited for it, as in a loop over layers.

    After the last backward there is none to show this: as many forwards from the same lines are one pass again.
    """
    waiting: list[Turn] = []
    longest, lines = 0, set[Site]()
    for turn in turns:
        if turn.place == "forward":
            waiting.append(turn)
            continue
        if turn.place == "backward" and len(waiting) > 1:
            joined = _kept_together(waiting, events[waiting[0].index : turn.index])
            for part in joined[1:]:
                part.continues = part.trains = True
            if len(joined) > 1:
                joined[0].trains = True
                longest = max(longest, len(joined))
                lines.update(*(part.sites for part in joined))
        waiting = []
    for number, turn in enumerate(waiting):
        turn.continues = number % longest > 0 and turn.sites <= lines if longest else False


def _kept_together(waiting: Sequence[Turn], events: Sequence[Event]) -> Sequence[Turn]:
    """Return the last of some forwards, as many as left most of what they made alive at the end of the events."""
    begins = [turn.index - waiting[0].index for turn in waiting]
    owner: dict[int, int] = {}  # id of an allocation -> the forward that made it
    made, kept = [0] * len(waiting), [0] * len(waiting)
    for number, (begin, end) in enumerate(pairwise([*begins, len(events)])):
        for event in events[begin:end]:
            if type(event) is Alloc:
                owner[event.id] = number
                made[number] += 1
            elif type(event) is Free:
                owner.pop(event.id, None)
    for one in owner.values():
        kept[one] += 1
    first = len(waiting) - 1
    while first > 0 and kept[first - 1] > KEEPS * made[first - 1]:
        first -= 1
    return waiting[first:]


def _calls(turn: Turn, modules: bool) -> set[Site]:
    """Return the sites that call modules; a loop's other sites, as for logging, are the same in any pass."""
    return {site for site in turn.sites if site.calls} if modules else turn.sites


def _count(turns: Sequence[Turn], events: Sequence[Event]) -> None:
    """Count how many allocations each part made, and how many of them were alive at its end."""
    failed = max((i for i, event in enumerate(events) if type(event) is Oom), default=len(events))
    ends = [turn.index for turn in turns[1:]] + [failed]  # what dies later was released by the error
    for turn, end in zip(turns, ends, strict=True):
        if turn.place != "forward" or turn.trains:
            continue
        alive = set[int]()
        for event in events[turn.index : end]:
            if type(event) is Alloc:
                turn.made += 1
                alive.add(event.id)
            elif type(event) is Free:
                alive.discard(event.id)
        turn.kept = len(alive)
