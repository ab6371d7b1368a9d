"""A Tape as a snapshot of torch.cuda.memory, for pytorch.org/memory_viz and torch/cuda/_memory_viz.py.

Addresses, segments and blocks are those of the allocator model. A tensor's label stands where a stack's innermost frame
would. The viewer colours by `category`, and breaks when categories are used and none of them is "unknown", so segments
have that one.
"""

from __future__ import annotations

import pickle
from bisect import bisect_right, insort
from collections.abc import Iterable, Mapping
from typing import Any

from memfit.allocator import UNLIMITED, Allocator, Block, OutOfMemory
from memfit.allocator.blocks import ALLOCATED, FREE, PENDING, UNMAPPED
from memfit.allocator.player import alive_at_start, begun, play
from memfit.nouns.alloc_settings import AllocSettings, Torch
from memfit.nouns.tape import Alloc, EmptyCache, Event, Free, Mark, Oom, SegmentAlloc, Tape

Stack = list[dict[str, Any]]
BASE = 0x7F00_0000_0000  # the model counts addresses from 0; the viewer takes 0 for none
STATES = {ALLOCATED: "active_allocated", PENDING: "active_pending_free", FREE: "inactive"}
PROTOCOL = 4  # what torch writes


def snapshot_pickle(tape: Tape, settings: AllocSettings, torch: Torch, capacity: int | None = None) -> bytes:
    """Return the pickle of a `snapshot`."""
    return pickle.dumps(snapshot(tape, settings, torch, capacity), protocol=PROTOCOL)


def snapshot(
    tape: Tape, settings: AllocSettings, torch: Torch, capacity: int | None = None,
    stacks: Mapping[int, Stack] | None = None, failed: Iterable[Stack] = (),
) -> dict[str, Any]:  # fmt: skip
    """Return a snapshot as plain data; it ends where memory runs out on a card with `capacity` bytes (None: never).

    stacks: of allocations by id; the history then begins at the first of these.
    failed: stacks of the requests that failed, in order.
    """
    writer = _SnapshotWriter(Allocator(capacity, settings, torch), settings.expandable_segments, stacks or {}, failed)
    writer.play(tape)
    return {
        "segments": writer.segments(),
        "device_traces": [writer.trace],
        "allocator_settings": _settings(settings, tape.about.get("alloc_conf", "")),
        "external_annotations": writer.annotations,
    }


class _SnapshotWriter:
    """Writes the trace while the tape is played; one microsecond per entry."""

    def __init__(
        self, allocator: Allocator, expandable: bool, stacks: Mapping[int, Stack], failed: Iterable[Stack]
    ) -> None:
        self.allocator, self.stacks, self.failed = allocator, stacks, iter(failed)
        self.first = min(stacks, default=-1)  # id of the allocation that the recording begins with
        self.trace: list[dict[str, Any]] = []
        self.annotations: list[dict[str, Any]] = []
        self.streams: list[tuple[int, int]] = []  # (address a segment began at, its stream), sorted
        self.owners: dict[int, Alloc] = {}  # address of a block -> what holds it
        self.places: dict[int, int] = {}  # id of an allocation -> address of its block
        self.takes, self.gives = ("segment_map", "segment_unmap") if expandable else ("segment_alloc", "segment_free")

    def play(self, tape: Tape) -> None:
        """Write every event."""
        allocator = self.allocator
        names = {alloc.id: alloc for alloc in alive_at_start(tape.start)}
        try:
            live = begun(allocator, tape.start)
        except OutOfMemory as error:
            self._oom(error)
            return
        self.streams = sorted((chain[0].addr, chain[0].pool.stream) for chain in allocator.blocks())
        self.places = {number: block.addr for number, block in live.items() if block is not None}
        self.owners = {address: names[number] for number, address in self.places.items()}
        for _, event, block in play(allocator, live, tape.events, go_on=allocator.capacity < UNLIMITED):
            if isinstance(event, Alloc) and event.id == self.first:
                self.trace.clear()
            if isinstance(block, OutOfMemory):
                self._oom(block, event)
            elif isinstance(event, Alloc):
                self._segments(event.stream)
                self._taken(event, block)
            elif isinstance(event, Free):
                self._freed(event.id)
            elif isinstance(event, EmptyCache):
                self._segments()
            elif isinstance(event, Mark):
                self._mark(f"{event.phase}: {event.instant}")
            elif isinstance(event, Oom):
                self._segments()
                self._taken(Alloc(-1, event.size, "temporaries", "a request that ran out of memory"), block)
                self._freed(-1)

    def segments(self) -> list[dict[str, Any]]:
        """Return every contiguous mapped range, by address, its blocks without holes between them."""
        found: list[dict[str, Any]] = []
        for chain in self.allocator.blocks():
            fresh = True
            for block in chain:
                if block.state == UNMAPPED:
                    fresh = True
                    continue
                if fresh:
                    found.append(self._segment(block))
                self._block(found[-1], block)
                fresh = False
        return sorted(found, key=lambda segment: segment["address"])

    def _segment(self, first: Block) -> dict[str, Any]:
        return {
            "device": 0, "address": BASE + first.addr, "total_size": 0, "allocated_size": 0, "active_size": 0,
            "requested_size": 0, "stream": first.pool.stream, "segment_type": "small" if first.pool.small else "large",
            "segment_pool_id": (0, 0), "is_expandable": self.allocator.settings.expandable_segments, "frames": [],
            "blocks": [],
        }  # fmt: skip

    def _block(self, segment: dict[str, Any], block: Block) -> None:
        active = block.state in (ALLOCATED, PENDING)
        owner = self.owners.get(block.addr) if active else None
        requested = block.requested if active else block.size
        segment["blocks"].append(
            {
                "address": BASE + block.addr, "size": block.size, "requested_size": requested,
                "state": STATES[block.state], "frames": self._frames(owner),
            }
        )  # fmt: skip
        segment["total_size"] += block.size
        segment["allocated_size"] += block.size * (block.state == ALLOCATED)
        segment["active_size"] += block.size * active
        segment["requested_size"] += requested * active

    def _taken(self, owner: Alloc, block: Block | None) -> None:
        if block is not None:
            self.places[owner.id] = block.addr
            self.owners[block.addr] = owner
            self._add("alloc", block.addr, owner)

    def _freed(self, number: int) -> None:
        address = self.places.pop(number, None)
        if address is not None:
            owner = self.owners.pop(address)
            self._add("free_requested", address, owner)
            self._add("free_completed", address, owner)

    def _add(self, action: str, address: int, owner: Alloc) -> None:
        self.trace.append(
            {
                "action": action, "addr": BASE + address, "size": owner.size, "stream": owner.stream,
                "time_us": len(self.trace), "frames": self._frames(owner), "category": owner.role,
            }
        )  # fmt: skip

    def _segments(self, stream: int = 0) -> None:
        """Write what the allocator gave back to the driver, and took from it for `stream`, since the last event."""
        for call in self.allocator.driver_calls:
            takes = isinstance(call, SegmentAlloc)
            action = self.takes if takes else self.gives
            owner = stream
            if takes:
                insort(self.streams, (call.address, stream))
            else:  # the stream of the last segment that began at or below
                owner = self.streams[bisect_right(self.streams, (call.address, UNLIMITED)) - 1][1]
            self.trace.append(
                {
                    "action": action, "addr": BASE + call.address, "size": call.size, "stream": owner,
                    "time_us": len(self.trace), "frames": [], "category": "unknown",
                }
            )  # fmt: skip
        self.allocator.driver_calls.clear()

    def _frames(self, owner: Alloc | None) -> Stack:
        if self.stacks:
            return self.stacks.get(owner.id, []) if owner else []
        return [{"name": owner.label or owner.role, "filename": owner.role, "line": 0}] if owner else []

    def _mark(self, name: str) -> None:
        """Begin an annotation, which lasts until the next one."""
        now = len(self.trace)
        if self.annotations:
            self.annotations.append({**self.annotations[-1], "stage": "END", "time_us": now})
        self.annotations.append({"name": name, "stage": "START", "device": 0, "time_us": now})

    def _oom(self, error: OutOfMemory, event: Event | None = None) -> None:
        self._segments()
        label = event.label if isinstance(event, Oom | Alloc) else ""
        frames: Stack = [{"name": label, "filename": "temporaries", "line": 0}] if label else []
        self.trace.append(
            {
                "action": "oom", "device_free": error.device_free, "size": error.requested, "stream": 0,
                "time_us": len(self.trace), "frames": next(self.failed, []) if self.stacks else frames,
                "category": "unknown",
            }
        )  # fmt: skip


def _settings(settings: AllocSettings, text: str) -> dict[str, Any]:
    none = settings.max_split_size is None
    return {
        "PYTORCH_CUDA_ALLOC_CONF": text,
        "max_split_size": -1 if none else settings.max_split_size,
        "garbage_collection_threshold": settings.garbage_collection_threshold,
        "expandable_segments": settings.expandable_segments,
        "roundup_power2_divisions": {str(1 << n): way for n, way in enumerate(settings.roundup_power2_divisions)},
    }
