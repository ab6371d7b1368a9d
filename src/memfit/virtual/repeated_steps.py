"""Repeat the micro-batches and steps of a loop that leave the card as they found it, in place of tracing them again.

A loop that marks its sections (`Observer.section`) may run fewer of them. With two micro-batches a step:

    traced   load | first, second, update | first,         update | end
    told     load | first, second, update | first, second, update | first, second, update | end

The second micro-batch of the first step stands for that of any step, and the second step for all later ones. What a
section does follows from what is alive when it begins, as the loop hands it the same batch every time. So each section
is played only where the same storages are alive as where it was traced, by size, label and stream; a micro-batch does
not depend on the optimizer's states. Where anything else is alive, the loop is traced whole.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise

from memfit.nouns.tape import Alloc, Event, Free, Mark, RecordStream, Role

SECTION = "a section begins"  # the instant of a mark that no finished tape has
SHOWN = 2  # steps that run: the first makes the optimizer's states
_OTHERS = 5  # sections beside the first step's micro-batches: load, update; first micro-batch, update; end
_STATES: Role = "optimizer_states"
_Alive = dict[int, Alloc]  # by id, in order of birth


class NotRepeated(Exception):
    """A section would begin with other storages than those that it was traced with."""


def repeated(events: Iterable[Event], reads: list[Counter[str]], steps: int) -> tuple[tuple[Event, ...], Counter[str]]:
    """Return the events of a run of `steps` steps, and how often it reads each unknown value.

    reads: those counted by the end of each section. Raises NotRepeated.
    """
    sections, before = _sections(events)
    micro = len(sections) - _OTHERS
    first, later = range(1, micro + 2), [micro + 2, *range(2, micro + 1), micro + 3]
    order = [0, *first, *later * (steps - 1), len(sections) - 1]
    player, none = _Player(), Counter[str]()
    for place, number in enumerate(order):
        player.play(sections[number], before[number], stateless=place > micro + 1 >= number)
    each = [now - then for then, now in pairwise([none, *reads])]
    return tuple(player.events), sum((each[number] for number in order), none)


def _sections(events: Iterable[Event]) -> tuple[list[list[Event]], list[_Alive]]:
    """Return the sections, and what is alive before each."""
    alive: _Alive = {}
    sections, before = [[]], [{}]  # type: tuple[list[list[Event]], list[_Alive]]
    for event in events:
        if isinstance(event, Mark) and event.instant == SECTION:
            sections.append([])
            before.append(dict(alive))
            continue
        sections[-1].append(event)
        if isinstance(event, Alloc):
            alive[event.id] = event
        elif isinstance(event, Free):
            del alive[event.id]
    return sections, before


@dataclass(slots=True)
class _Player:
    """Plays sections one after another, each on the storages that are alive then."""

    events: list[Event] = field(default_factory=list)
    alive: _Alive = field(default_factory=dict)
    born: int = 0

    def play(self, section: list[Event], traced: _Alive, stateless: bool) -> None:
        """Play a section, which was traced with other storages alive. Raises NotRepeated.

        stateless: it was traced in the first step, before there were states, and is played in a later one.
        """
        known = _matched(traced, self.alive, stateless)
        for event in section:
            if isinstance(event, Alloc):
                known[event.id] = self.born
                born = Alloc(self.born, event.size, event.role, event.label, event.stream)
                self.alive[self.born] = born
                self.events.append(born)
                self.born += 1
            elif isinstance(event, Free):
                number = known.pop(event.id)
                del self.alive[number]
                self.events.append(Free(number))
            elif isinstance(event, RecordStream):
                self.events.append(RecordStream(known[event.id], event.stream))
            elif isinstance(event, Mark) and stateless:
                self.events.append(Mark("step", event.instant))
            else:
                self.events.append(event)


def _matched(traced: _Alive, alive: _Alive, stateless: bool) -> dict[int, int]:
    """Return the storage that is alive for each that was alive where a section was traced. Raises NotRepeated."""
    then, now = _alike(traced), _alike(alive)
    for look in then.keys() | now.keys():
        before, after = then[look], now[look]
        if len(before) != len(after) and not (stateless and after and alive[after[0]].role == _STATES):
            raise NotRepeated(f"{look[1]}: {len(before)} when the section was traced, {len(after)} now")
    return {one: other for look, ids in then.items() for one, other in zip(ids, now[look], strict=False)}


def _alike(alive: _Alive) -> dict[tuple[int, str, int], list[int]]:
    """Return the ids of storages of the same size, label and stream. Roles differ: the first batch's is told apart."""
    found: dict[tuple[int, str, int], list[int]] = defaultdict(list)
    for number, one in alive.items():
        found[one.size, one.label, one.stream].append(number)
    return found
