"""Where forward passes begin in a history, and which of them train: from the lines that the program was at, outside of any library.

A stretch of forwards without a backward is one pass or many: a loop goes back to an earlier line of the same function. A
pass that no backward follows, from lines that no trained pass was at, evaluates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from memfit.documents.snapshot.frames import CALLED, of_library
from memfit.nouns.tape import GRADIENTS_ON, Alloc, Event, Free, Mark, Oom, Phase

Site = tuple[tuple[str, str, int], ...]  # (file, function, line), outermost first
INSIDE = ("", "", 0)  # ends the site of what a library made, a module that was called
LOOPS = frozenset(
    ["_inner_training_loop", "evaluation_loop", "prediction_loop"]
)  # a Trainer's, of which a program has one line
LOAD = "move"  # the place of a part in which weights come to the card, and for which there was no room
MANY = 6  # allocations from which a pass shows whether it keeps what it makes
KEEPS = 0.5  # share of them that is alive at the end of a pass with gradients on; without, a layer's die with the next


@dataclass(slots=True)
class Turn:
    """One part of a step: it begins at the `index`-th event. `sites`: where the program was; `trains`: a backward followed.

    `called`: the event at which a module was called first, -1 where none was.
    """

    index: int
    place: str
    called: int = -1
    sites: set[Site] = field(default_factory=set)
    trains: bool = False
    made: int = 0
    kept: int = 0


def site(frames: object) -> Site:
    """The program's own lines of a stack, from the outermost to the first module that is called, which INSIDE stands for."""
    found: list[tuple[str, str, int]] = []
    for frame in reversed(frames) if isinstance(frames, list | tuple) else ():
        path, line = (str(frame.get("filename", "")), frame.get("line")) if isinstance(frame, dict) else ("", 0)
        if not path.endswith((".py", ">")) or not isinstance(line, int):
            continue  # C++: of the interpreter, later of an operator
        if path.endswith(CALLED) and found:
            return (*found, INSIDE)  # from here on it is the model's own code, whose loops are within a pass
        if of_library(path) and frame.get("name") not in LOOPS:
            continue  # a launcher
        found.append((path, str(frame.get("name", "")), line))
    return tuple(found)


def loops(turns: Sequence[Turn]) -> bool:
    """Parts that only go forward are passes where modules are called in them; else they may be anything."""
    return any(INSIDE in seen for turn in turns for seen in turn.sites)


def goes_back(before: Site, now: Site) -> bool:
    """A loop around both begins anew: at the first line that differs the function is the same and the line an earlier one."""
    for one, other in zip(before, now, strict=False):
        if one != other:
            return one[:2] == other[:2] and other[2] < one[2]
    return False


def comes_back(now: Site, seen: set[Site], between: set[Site]) -> bool:
    """A module is called again from where the pass called it, after something else was done. `between`: since any was called."""
    return now[-1:] == (INSIDE,) and now in seen and any(other != now[: len(other)] for other in between)


def marks(turns: Sequence[Turn], events: Sequence[Event], names: dict[str, str]) -> list[tuple[int, Mark]]:
    """(index, mark) of each part of a step; `names`: of places."""
    first = next((turn for turn in turns if turn.place == "forward"), None)
    if first is not None and first.called > first.index:  # what was made before the first module is called is data
        first.index = first.called
    for turn, after in pairwise(turns):
        turn.trains = turn.place == "forward" and after.place == "backward"
    _count(turns, events)
    modules, graph = loops(turns), False
    trained = {s for turn in turns if turn.trains for s in _calls(turn, modules)}
    found: list[tuple[int, Mark]] = []
    for turn in turns:
        if modules and found and turn.place == "forward" and not loops([turn]):
            continue  # no module is called in it: it belongs to the part before
        called = loops([turn]) if modules else bool(turn.sites)  # where there are modules, to copy weights is no pass
        evaluates = turn.place == "forward" and trained and called and not _calls(turn, modules) & trained
        if evaluates and (turn.made >= MANY or turn is not turns[-1]):  # one that failed early is as the one before it
            graph = turn.made >= MANY and turn.kept > KEEPS * turn.made
        instant = GRADIENTS_ON if evaluates and graph else names[turn.place]
        phase: Phase = "load" if turn.place == LOAD else "eval" if evaluates else "step"
        found.append((turn.index, Mark(phase, instant)))
    return found


def _calls(turn: Turn, modules: bool) -> set[Site]:
    """From where modules are called in it; what else a loop does is the same in any pass: it logs, it looks for infinities."""
    return {s for s in turn.sites if s[-1:] == (INSIDE,)} if modules else turn.sites


def _count(turns: Sequence[Turn], events: Sequence[Event]) -> None:
    """How many allocations each part made, and how many of them were alive at its end."""
    failed = max((i for i, event in enumerate(events) if type(event) is Oom), default=len(events))
    ends = [turn.index for turn in turns[1:]] + [failed]  # what dies later died of the error
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
