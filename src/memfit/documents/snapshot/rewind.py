"""The state at the first event of a history, found by undoing the events: segments, live blocks and their sizes.

A history is a ring: when it is full, its oldest events are lost. The final segments are always complete, so undoing
every event that is left gives the segments and blocks at the start. One thing is not recorded: how large the block of
a tensor was that was made before the first event and released before the last. In the large pool up to 1 MiB may lie
between its bytes and the next block; `_slack` finds how much where a neighbour shows it.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from dataclasses import dataclass, field

from memfit.allocator.blocks import K_SMALL_BUFFER, K_SMALL_SIZE, round_size
from memfit.documents.snapshot.shape import Pool, SegmentRecord, TraceEntry
from memfit.errors import BadInput
from memfit.nouns.alloc_settings import AllocSettings
from memfit.nouns.tape import Alloc, Piece, Segment

LOST = "the history does not lead to its final segments"
HINT = "one device's events may be missing; record it again"


@dataclass(slots=True)
class Held:
    """A block in use; `size` is None where only the requested bytes are known. `key` is stream and private pool."""

    requested: int
    key: tuple[int, Pool]
    size: int | None = None
    frames: object = ()


@dataclass(slots=True)
class MappedRange:
    """Addresses backed by memory: a segment, or a mapped part of an expandable one."""

    size: int
    key: tuple[int, Pool]
    small: bool


@dataclass(slots=True)
class State:
    """Segments and blocks in use by address."""

    expandable: bool
    spans: dict[int, MappedRange] = field(default_factory=dict)
    held: dict[int, Held] = field(default_factory=dict)
    begins: list[int] = field(default_factory=list)  # the addresses of `spans`, in order

    @property
    def reserved(self) -> int:
        return sum(span.size for span in self.spans.values())

    def add(self, address: int, span: MappedRange) -> None:
        """Add a range, or replace the one that begins there."""
        if address not in self.spans:
            insort(self.begins, address)
        self.spans[address] = span

    def remove(self, address: int) -> MappedRange:
        """Remove the range that begins there, and return it."""
        del self.begins[bisect_left(self.begins, address)]
        return self.spans.pop(address)

    def before(self, address: int) -> int | None:
        """Return where the last range begins that begins at or before an address."""
        place = bisect_right(self.begins, address)
        return self.begins[place - 1] if place else None


def final_state(segments: list[SegmentRecord], expandable: bool) -> State:
    """Return the state at the end, from the segments of the snapshot."""
    state = State(expandable)
    for segment in segments:
        key = (segment.stream, segment.segment_pool_id)
        state.add(segment.address, MappedRange(segment.total_size, key, segment.segment_type == "small"))
        address = segment.address
        for block in segment.blocks:
            if block.state != "inactive":
                state.held[address] = Held(block.requested, key, block.size, block.frames)
            address += block.size
    return state


def start_state(state: State, entries: list[TraceEntry], settings: AllocSettings) -> State:
    """Undo `entries`, last first. Changes and returns `state`."""
    moves = entries if state.expandable else ()  # only of unmapped ranges it is asked what lay there
    tensors = sorted((e.addr, e.size) for e in moves if e.action in ("alloc", "free_completed"))
    held: dict[int, Held | TraceEntry] = dict(state.held)  # an entry: its release, of which few are left at the end
    for entry in reversed(entries):
        action, address = entry.action, entry.addr
        if action == "alloc":
            if held.pop(address, None) is None:
                raise BadInput(f"{LOST}: nothing is alive at {address:#x}", hint=HINT)
        elif action == "free_completed":
            if address in held:
                raise BadInput(f"{LOST}: {address:#x} dies twice", hint=HINT)
            held[address] = entry
        elif action in ("segment_alloc", "segment_map"):
            _take_away(state, address, entry.size)
        elif action in ("segment_free", "segment_unmap"):
            span = MappedRange(entry.size, (entry.stream, entry.pool_id), _is_small(entry, tensors, settings))
            _give_back(state, address, span)
    state.held = {address: one if isinstance(one, Held) else _held(one) for address, one in held.items()}
    return state


def _held(release: TraceEntry) -> Held:
    return Held(release.size, (release.stream, release.pool_id))  # the recorded stack is that of its release


def _is_small(entry: TraceEntry, tensors: list[tuple[int, int]], settings: AllocSettings) -> bool:
    """Did memory that the driver took back belong to the small pool?

    The pools grow by granules of 2 MiB and 20 MiB (large_segment_size). Where the size fits both, a tensor that lay
    there decides. `tensors` are the sorted (address, requested bytes) of all allocations and releases.
    """
    if entry.action == "segment_free":
        return entry.size == K_SMALL_BUFFER
    if entry.size % settings.large_segment_size:
        return True
    position = bisect_left(tensors, (entry.addr, 0))
    inside = position < len(tensors) and tensors[position][0] < entry.addr + entry.size
    return inside and tensors[position][1] <= K_SMALL_SIZE


def _take_away(state: State, address: int, size: int) -> None:
    """Undo that the driver gave memory: remove a whole segment, or a part of a mapped range."""
    begin = state.before(address) if state.expandable else address
    span = None if begin is None else state.spans.get(begin)
    if begin is None or span is None or address + size > begin + span.size:
        raise BadInput(f"{LOST}: no segment of {size} bytes at {address:#x}", hint=HINT)
    state.remove(begin)
    if address > begin:
        state.add(begin, MappedRange(address - begin, span.key, span.small))
    if rest := begin + span.size - address - size:
        state.add(address + size, MappedRange(rest, span.key, span.small))


def _give_back(state: State, address: int, span: MappedRange) -> None:
    """Undo that the driver took memory: add it, and merge mapped ranges that touch."""
    if state.expandable:
        after = state.spans.get(address + span.size)
        if after is not None and after.small == span.small and after.key == span.key:
            span.size += state.remove(address + span.size).size
        begin = state.before(address - 1)
        if begin is not None:
            before = state.spans[begin]
            if begin + before.size == address and before.small == span.small and before.key == span.key:
                before.size += span.size
                return
    state.add(address, span)


# ---- from the state to the tape's noun -------------------------------------------------------------------------------


def segments_of(
    state: State, entries: list[TraceEntry], settings: AllocSettings, born: dict[int, Alloc],
    streams: dict[tuple[int, Pool], int],
) -> tuple[Segment, ...]:  # fmt: skip
    """Return the start as Segments. `born`: the allocation at each address; `streams`: numbers of streams and pools."""
    sizes = _sizes(state, entries, settings)
    groups: dict[object, list[int]] = {}
    for address in sorted(state.spans):
        span = state.spans[address]
        groups.setdefault((span.small, span.key) if state.expandable else address, []).append(address)
    found = []
    moved = _moved(entries, settings.large_segment_size) if state.expandable else {}
    room = state.reserved * 9 // 8  # at least: an expandable segment has addresses for 9/8 of the card
    addresses = sorted(state.held)
    for members in groups.values():
        pieces: list[Piece] = []
        base = place = _base(members[0], moved.get(state.spans[members[0]].small, []), room)
        for address in members:
            if address > place:
                pieces.append(Piece(address - place, mapped=False))
            place = address + state.spans[address].size
            pieces += _pieces(address, place, addresses, sizes, born)
        span = state.spans[members[0]]
        found.append(Segment(base, streams[span.key], span.small, state.expandable, tuple(pieces)))
    if sum(piece.alloc is not None for segment in found for piece in segment.pieces) != len(state.held):
        raise BadInput(f"{LOST}: a tensor lies in no segment", hint=HINT)
    return tuple(found)


def _moved(entries: list[TraceEntry], granule: int) -> dict[bool, list[int]]:
    """Return the addresses that the history maps or unmaps, in order, by whether they are of the small pool."""
    found: dict[bool, list[int]] = {True: [], False: []}
    for entry in entries:
        if entry.action.endswith("map"):
            found[entry.size % granule > 0].append(entry.addr)
    return {small: sorted(addresses) for small, addresses in found.items()}


def _base(lowest: int, moved: list[int], room: int) -> int:
    """Return where an expandable segment begins: the lowest address in it that the history maps or unmaps.

    `moved`: the addresses of its pool that are mapped or unmapped, in order; none where segments are not expandable.
    """
    place = bisect_right(moved, lowest - room)
    return moved[place] if place < len(moved) and moved[place] <= lowest else lowest


def _pieces(begin: int, end: int, addresses: list[int], sizes: dict[int, int], born: dict[int, Alloc]) -> list[Piece]:
    """Return the pieces of one mapped range, from address `begin` to `end`."""
    pieces, place = [], begin
    for address in addresses[bisect_left(addresses, begin) : bisect_left(addresses, end)]:
        if address > place:
            pieces.append(Piece(address - place))
        if address < place or address + sizes[address] > end:
            raise BadInput(f"{LOST}: blocks overlap at {address:#x}", hint=HINT)
        pieces.append(Piece(sizes[address], born[address]))
        place = address + sizes[address]
    return [*pieces, Piece(end - place)] if place < end else pieces


def _sizes(state: State, entries: list[TraceEntry], settings: AllocSettings) -> dict[int, int]:
    """Return address -> size of the block there."""
    starts = sorted(state.held)
    if all(held.size is not None for held in state.held.values()):
        return {address: held.size or 0 for address, held in state.held.items()}
    edges = sorted({*starts, *state.spans, *(a + s.size for a, s in state.spans.items())})
    made: dict[int, int] = {}  # address -> index of the first allocation there
    released: dict[int, int] = {}
    for index, entry in enumerate(entries):
        if entry.action == "alloc":
            made.setdefault(entry.addr, index)
        elif entry.action == "free_completed":
            released.setdefault(entry.addr, index)
    later = sorted(made)
    sizes = {}
    for address in starts:
        held = state.held[address]
        rounded = round_size(held.requested, settings.roundup_power2_divisions)
        if held.size is None and rounded > K_SMALL_SIZE and not state.expandable:
            end = address + rounded
            edge = edges[bisect_left(edges, end)] if edges and edges[-1] >= end else end
            fresh = later[bisect_right(later, end) : bisect_right(later, end + K_SMALL_SIZE)]
            seen = next((a for a in fresh if made[a] < released.get(address, len(entries))), None)
            span, limit = state.spans.get(address), settings.max_split_size
            if span is not None and limit is not None and span.size >= limit:  # such segments are never split
                rounded = span.size
            else:
                rounded += _slack(edge - end, None if seen is None else seen - end)
        sizes[address] = held.size or rounded
    return sizes


def _slack(gap: int, seen: int | None) -> int:
    """Return the bytes between a tensor and its block's end.

    `gap` is the distance to the next edge: a free block of the large pool has more than 1 MiB, so a smaller gap is
    slack. `seen` is the distance to a block that was made behind the tensor while it was alive.
    """
    if gap <= K_SMALL_SIZE:
        return gap
    return seen or 0
