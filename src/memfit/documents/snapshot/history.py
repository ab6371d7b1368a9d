"""A snapshot of torch.cuda.memory as a Tape: one card's history, from the state at its first event."""

from __future__ import annotations

from typing import Any

from memfit.documents.snapshot.forward import completed
from memfit.documents.snapshot.rewind import State, final_state, segments_of, start_state
from memfit.documents.snapshot.roles import LOAD, Allocations, Turn, loops, marks
from memfit.documents.snapshot.shape import (
    FREE_REQUESTED,
    Note,
    Pool,
    Snapshot,
    TraceEntry,
    conf_of,
    shaped,
    text_of,
    torch_of,
)
from memfit.errors import BadInput
from memfit.nouns.alloc_settings import AllocSettings, Torch, parse_alloc_conf
from memfit.nouns.tape import WRITTEN, Alloc, Event, Free, Mark, Oom, SegmentAlloc, SegmentFree, Tape

GIVES = ("segment_free", "segment_unmap")
TAKES = ("segment_alloc", "segment_map")
MOVES = frozenset([*GIVES, *TAKES, "oom"])  # events that show how much the card has
Key = tuple[int, Pool]
# (a request failed there, it has a history) -> why this card was chosen of several
CHOSEN = {
    (True, True): "the last that ran out of memory",
    (False, True): "the one with the longest history",
    (False, False): "the one that held most",
}  # fmt: skip


def tape_of(data: Any, device: int | None = None, torch: Torch | None = None) -> Tape:
    """Return the tape of one card, from the plain data of a snapshot.

    The card is `device`, by default the one that ran out of memory last, else the one with the longest history.
    `torch` is the version that made the snapshot; without it the keys of the snapshot decide. A tensor is freed where
    torch records `free_completed`: from then on its bytes can be used again. Raises BadInput for what is no snapshot,
    for a device without history, and for a history that contradicts its final segments.
    """
    snapshot = shaped(data)
    chosen, entries, why = _history(snapshot, device)
    torch, conf = torch or torch_of(data), conf_of(snapshot.allocator_settings)
    settings, conf = _settings(conf, torch)
    segments = [segment for segment in snapshot.segments if segment.device == chosen]
    mapped = any(action.endswith("map") for action in {entry.action for entry in entries})
    expandable = mapped or any(segment.is_expandable for segment in segments)
    state = start_state(final_state(segments, expandable), entries, settings)
    reading = _Reading(state, entries, settings)
    notes = [note for note in snapshot.external_annotations if note.device in (-1, chosen)]
    events = reading.events(notes)
    about = {"device": str(chosen), "torch": ".".join(map(str, torch)), "capacity": str(reading.capacity)}
    if reading.full:
        about["total_memory"] = about["capacity"]  # the driver's own share of the card is not recorded
    if conf:
        about["alloc_conf"] = conf
    if why:
        about["chosen"] = why
    named = reading.allocations.named(events)
    start = segments_of(state, entries, settings, reading.at_start(named), reading.streams)
    marked = _with_turns(events, reading.allocations.turns)
    tape = Tape(tuple(marked), "measured", about, start)
    return completed(tape, reading.addresses, settings, torch)


def _with_turns(events: list[Event], turns: list[Turn]) -> list[Event]:
    """Add a mark where the stacks show that a forward, a backward or an optimizer step begins."""
    places = {turn.place for turn in turns}
    if len(places) < 2 and LOAD not in places and not loops(turns):  # there is nothing to distinguish
        return events
    marked: list[Event] = []
    done = 0
    for index, mark in marks(turns, events):
        marked += events[done:index]
        marked.append(mark)
        done = index
    return marked + events[done:]


def _history(snapshot: Snapshot, device: int | None) -> tuple[int, list[TraceEntry], str]:
    """Return (device, its history, why that one of several); the history is empty where only segments were recorded.

    Requests to free are left out: nothing follows from them, and they are a third of all events.
    """
    traces = dict(enumerate(snapshot.device_traces))
    held: dict[int, int] = {}
    for segment in snapshot.segments:
        held[segment.device] = held.get(segment.device, 0) + segment.total_size
    used = sorted({number for number, trace in traces.items() if trace} | set(held))
    named, failed = device is not None, {number: _ran_out(trace) for number, trace in traces.items()}
    if device is None:

        def rank(number: int) -> tuple[tuple[int, int], int, int]:
            return failed.get(number, (0, 0)), len(traces.get(number, ())), held.get(number, 0)

        device = max(used, key=rank, default=0)
    if device not in used:
        hint = f"devices there: {', '.join(map(str, used))}"
        if not used:
            hint = "call torch.cuda.memory._record_memory_history() first"
        raise BadInput(f"the snapshot holds nothing of device {device}", hint=hint)
    others = ", ".join(str(number) for number in used if number != device)
    why = CHOSEN[any(failed.get(device, ())), bool(traces.get(device))]
    note = f"this is card {device}, {why}; the snapshot holds {others} too" if others and not named else ""
    return device, [e for e in traces.get(device, []) if e.action != FREE_REQUESTED.action], note


def _ran_out(trace: list[TraceEntry]) -> tuple[int, int]:
    """Return (1, time) of the last request that failed, (0, 0) where none did; older files have no times."""
    return next(((1, e.time_us) for e in reversed(trace) if e.action == "oom"), (0, 0))


def _settings(conf: str, torch: Torch) -> tuple[AllocSettings, str]:
    """Parse the recorded settings; PyTorch accepted them, so those with an unknown key are of a newer version."""
    try:
        return parse_alloc_conf(conf, torch), conf
    except BadInput:
        return AllocSettings(), ""


class _Reading:
    """Reads the history forwards: its events, small numbers for streams, and the capacity of the card."""

    def __init__(self, state: State, entries: list[TraceEntry], settings: AllocSettings) -> None:
        self.entries, self.settings = entries, settings
        self.streams: dict[Key, int] = {(0, (0, 0)): 0}
        for span in state.spans.values():
            self.stream(span.key)
        self.reserved = state.reserved
        self.capacity, self.full = self._capacity()
        self.allocations = Allocations()
        self.alive: dict[int, int] = {}  # address -> id
        self.addresses = sorted(state.held)  # of the allocations, by id
        for number, address in enumerate(self.addresses):
            held = state.held[address]
            self.alive[address] = number
            self.allocations.add(held.requested, self.stream(held.key), held.frames)
        self.allocations.old = len(self.addresses)
        self.first = dict(self.alive)

    def stream(self, key: Key) -> int:
        """Return a small number for a stream and pool: private pools share no memory, as streams do not."""
        return self.streams.setdefault(key, len(self.streams))

    def at_start(self, named: list[Alloc]) -> dict[int, Alloc]:
        """Return address -> the allocation that was alive there at the start."""
        return {address: named[number] for address, number in self.first.items()}

    def _capacity(self) -> tuple[int, bool]:
        """Return (the bytes the allocator could have, whether an out-of-memory shows them); else the most it held.

        At that capacity the model gives back cached segments where the recorded allocator did. Where the driver still
        had more than the request, a limit of the process refused it (`set_per_process_memory_fraction`).
        """
        reserved = most = self.reserved
        for entry in [e for e in self.entries if e.action in MOVES]:
            reserved += entry.size * ((entry.action in TAKES) - (entry.action in GIVES))
            most = max(most, reserved)
            if entry.action == "oom":
                had = 0 if Oom(entry.size, entry.device_free).limited else entry.device_free
                return max(reserved + had, most), True
        return most, False

    def events(self, notes: list[Note]) -> list[Event]:
        """Return the events in order, marks of the profiler among them."""
        marks, allocations, alive = _marks(notes), self.allocations, self.alive
        old, addresses, streams = allocations.old, self.addresses, self.streams
        events: list[Event] = [Mark("step", "recording" if self.entries else WRITTEN)]
        append, add = events.append, allocations.add
        for entry in self.entries:
            if marks:
                while marks and entry.time_us and marks[-1][0] <= entry.time_us:
                    append(marks.pop()[1])
            action, address = entry.action, entry.addr
            if action == "alloc":
                alive[address] = len(addresses)
                addresses.append(address)
                stream = streams.setdefault((entry.stream, entry.pool_id), len(streams))
                append(add(entry.size, stream, entry.frames, entry.user_metadata))
            elif action == "free_completed":
                number = alive.pop(address)
                if number < old:
                    allocations.died(number, entry.frames)
                append(Free(number))
            elif action in TAKES:
                append(SegmentAlloc(address, entry.size))
            elif action in GIVES:
                append(SegmentFree(address, entry.size))
            elif action == "oom":
                append(Oom(entry.size, entry.device_free, allocations.failed(len(events), entry.frames)))
        return events


def _marks(notes: list[Note]) -> list[tuple[int, Mark]]:
    """Return (time, mark), latest first. What follows the end of an annotation is named after it."""
    named = [(n.time_us, Mark("step", "after " * (n.stage == "END") + text_of(n.name))) for n in notes]
    return sorted(named, key=lambda pair: pair[0], reverse=True)
