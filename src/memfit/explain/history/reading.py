"""Read a Tape as the noun Memory: play it to its out-of-memory, or to the instant at which most was alive."""

from __future__ import annotations

from memfit.allocator import Allocator
from memfit.allocator.levels import Levels, levels_of
from memfit.allocator.player import alive_at_start
from memfit.allocator.replay import made_with, room_of
from memfit.explain.memory import Group, Memory, unnumbered
from memfit.nouns.finding import Part
from memfit.nouns.tape import Alloc, Event, Free, Mark, Oom, Piece, Segment, Tape

STEPPED = "after the step"  # the pass is over: what is made now is the next one's batch
NUMBER = (2, 4)  # bytes of a loss in 16 or 32 bits; random seeds of attention kernels have 8
BEFORE, NOWHERE = "before the recording began", "no stack recorded"  # in place of a label


def memory_of(tape: Tape) -> Memory:
    """Return what the card held when memory ran out, or when most was alive."""
    return memory_and_segments_of(tape)[0]


def memory_and_segments_of(tape: Tape, drawn: bool = False) -> tuple[Memory, tuple[Segment, ...], Levels]:
    """Return the same, the segments at that instant, each with what lay in it, and the levels of the run up to there.

    drawn: those of the whole run, which is played to its end for them.
    """
    torch, settings = made_with(tape)
    last = _instant(tape)
    event = tape.events[last] if last >= 0 else None
    failure = event if isinstance(event, Oom) else None
    allocator = Allocator(room_of(tape) if failure else None, settings, torch)
    events = tape.events if drawn else tape.events[: last + 1]
    levels = levels_of(allocator, tape.start, events, until=last, go_on=True)
    history = _History(tape, levels)
    asked = history.through(tape.events[: last + 1], levels)
    label = failure.label if failure else ""
    memory = Memory(
        history.requested, *levels.held, room_of(tape), asked, history.mark.phase, history.mark.instant,
        history.groups(), tuple(history.floors), tuple(history.peaks), tuple(history.evals),
        settings.expandable_segments, label, tuple(history.trained), history.batch, tuple(sorted(history.caught)),
        history.makes_losses, barred=failure.free if failure and failure.limited else 0,
        scale=history.growth(label, asked),
    )  # fmt: skip
    owner = history.owner
    segments = tuple(
        Segment(
            one.address, one.stream, one.small, settings.expandable_segments,
            tuple(
                Piece(size, None if number is None else owner[number][0], mapped) for size, number, mapped in one.pieces
            ),
        )
        for one in levels.segments
    )  # fmt: skip
    return memory, segments, levels


def _instant(tape: Tape) -> int:
    """Return the index of the last out-of-memory, else of the event after which most bytes were alive; -1: none."""
    live = {alloc.id: alloc.size for alloc in alive_at_start(tape.start)}
    total = most = sum(live.values())
    oom = -1
    best = next((index for index, event in enumerate(tape.events) if type(event) is not Mark), len(tape.events)) - 1
    for index, event in enumerate(tape.events):
        if type(event) is Alloc:
            live[event.id] = event.size
            total += event.size
            if total > most:
                most, best = total, index
        elif type(event) is Free:
            total -= live.pop(event.id, 0)
        elif type(event) is Oom:
            oom = index
    return oom if oom >= 0 else best


class _History:
    """A tape that was played: every live tensor with the pass it was made in, and the passes so far."""

    def __init__(self, tape: Tape, levels: Levels) -> None:
        self.owner = {alloc.id: (alloc, -1, 0) for alloc in alive_at_start(tape.start)}
        self.requested = levels.requested
        self.first = set(self.owner)  # there before the first event
        self.mark, self.marks = Mark("load", "load"), 0
        self.floors: list[int] = []
        self.peaks: list[int] = []
        self.evals: list[bool] = []
        self.trained: list[bool] = []
        self.batch = 0  # bytes made for the pass under way before it began
        self.numbers: set[int] = set()  # passes in which a tensor of one number was made
        self.caught: set[int] = set()  # passes in which a request failed, and the run went on
        self.sizes: dict[str, int] = {}  # label -> largest tensor made there in the pass under way
        self.before: dict[str, int] = {}  # label -> largest tensor of all passes before it
        self.low = -1  # the fewest bytes since the last step ended; -1: no step ended since the last pass began

    def through(self, events: tuple[Event, ...], levels: Levels) -> int:
        """Follow the events that were played; return the bytes of the request that failed at the end, 0 for none."""
        owner, sizes, turn, highest = self.owner, self.sizes, -1, -1  # of the pass under way; -1: it has no peak now
        requested, low, marks = self.requested, self.low, self.marks
        played = events[: len(levels.allocated)]
        for index, event in enumerate(played):
            if type(event) is Alloc:
                size, label = event.size, event.label
                owner[event.id] = (event, turn, marks)
                requested += size
                if size in NUMBER:
                    self.numbers.add(turn)
                if size > sizes.get(label, 0):
                    sizes[label] = size
                if -1 < highest < requested:
                    self.peaks[-1] = highest = requested
            elif type(event) is Free:
                requested -= owner.pop(event.id)[0].size
                if requested < low:
                    low = requested
            elif type(event) is Mark:
                self.requested, self.low = requested, low
                self._begin(event)
                sizes, low, marks, turn = self.sizes, self.low, self.marks, len(self.floors) - 1
                highest = self.peaks[-1] if self.peaks and event.instant != STEPPED else -1
            elif type(event) is Oom and index + 1 < len(events):
                self.caught.add(turn)
        self.requested = requested
        if len(played) < len(events):  # the card had no room for the next one, or for the start
            asker = events[len(played)] if levels.begins else None
        else:
            asker = events[-1] if events and type(events[-1]) is Oom else None
        return asker.size if isinstance(asker, Alloc | Oom) else 0

    def _begin(self, mark: Mark) -> None:
        self.mark, self.marks = mark, self.marks + 1
        if mark.instant == STEPPED:
            self.low = self.requested
        if mark.instant.startswith("forward"):
            self.batch, self.low = self.requested - self.low if self.low >= 0 else 0, -1
            if self.floors:
                self._end_pass()
            self.floors.append(self.requested)
            self.peaks.append(self.requested)
            self.evals.append(mark.phase == "eval")
            self.trained.append(False)
        if mark.instant == "backward" and self.trained:
            self.trained[-1] = True

    def _end_pass(self) -> None:
        """End a pass: add its largest tensors to those with which later passes are compared."""
        for label, size in self.sizes.items():
            self.before[label] = max(self.before.get(label, 0), size)
        self.sizes = {}

    @property
    def makes_losses(self) -> bool:
        """Whether most earlier passes made a tensor of one number."""
        before = range(len(self.floors) - 1)
        return 2 * len(self.numbers.intersection(before)) >= len(before)

    def growth(self, asker: str, asked: int) -> float:
        """Return the size of this pass's tensors relative to the largest of earlier passes, where both have any."""
        now = self.sizes | {asker: max(asked, self.sizes.get(asker, 0))}
        both = [label for label in now if label and self.before.get(label)]
        before = sum(self.before[label] for label in both)
        return sum(now[label] for label in both) / before if before else 1.0

    def groups(self) -> tuple[Group, ...]:
        """Return what is alive by role and label, the largest first."""
        turn = len(self.floors) - 1
        found: dict[tuple[Part, str], list[tuple[int, int, int]]] = {}
        for alloc, born, part in self.owner.values():
            old = alloc.id in self.first and part == 0
            role: Part = "unknown" if alloc.role == "temporaries" and not alloc.label else alloc.role
            label = unnumbered(alloc.label) or (BEFORE if old else NOWHERE)
            found.setdefault((role, label), []).append((alloc.size, born, part))
        made = [
            Group(
                role, label, sum(row[0] for row in rows), len(rows), max(row[0] for row in rows),
                tuple(sorted({row[1] for row in rows})), sum(row[0] for row in rows if row[1] == turn),
                sum(row[0] for row in rows if row[2] == self.marks),
            )
            for (role, label), rows in found.items()
        ]  # fmt: skip
        return tuple(sorted(made, key=lambda group: -group.bytes))
