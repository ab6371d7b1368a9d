"""A recorded run played on the model, on the card it was recorded on: does the model do what PyTorch's allocator did?"""

from __future__ import annotations

import re
from contextlib import suppress
from itertools import zip_longest

from memfit.allocator import UNLIMITED, Allocator, OutOfMemory
from memfit.allocator.replay import DEFAULTS, Timeline, Walk, begun
from memfit.errors import BadInput
from memfit.nouns.alloc_settings import LATEST_TORCH, AllocSettings, Torch, parse_alloc_conf
from memfit.nouns.tape import SegmentAlloc, SegmentFree, Tape

BY_ADDRESS: Torch = (2, 11)  # up to this version the driver's addresses decide between blocks of equal size


def retrace(tape: Tape, settings: AllocSettings = DEFAULTS, torch: Torch = LATEST_TORCH) -> tuple[str, Allocator]:
    """Do to the allocator what a recorded run did to PyTorch's own, on a card of the recorded capacity.

    Returns what differs first ("" when every segment was taken and given back as recorded) and the allocator at the
    end. Raises BadInput as `replay` does.
    """
    allocator = allocator_of(tape, settings, torch)
    recorded = [event for event in tape.events if isinstance(event, SegmentAlloc | SegmentFree)]
    oom, last = Walk(allocator, 0, begun(allocator, tape.start)).through(tape.events, go_on=True)
    if oom is not None:
        return f"event {last} runs out of memory, the recorded run did not", allocator
    for number, (there, here) in enumerate(zip_longest(recorded, allocator.driver_calls)):
        if there is None or here is None or (type(there), there.size) != (type(here), here.size):
            return f"segment call {number}: recorded {there}, here {here}", allocator
    return "", allocator


def made_with(tape: Tape) -> tuple[Torch, AllocSettings]:
    """The PyTorch a tape says it was made with, and its settings; the latest and the defaults where it says none."""
    found = re.match(r"(\d+)\.(\d+)", tape.about.get("torch", ""))
    torch = (int(found[1]), int(found[2])) if found else LATEST_TORCH
    try:
        return torch, parse_alloc_conf(tape.about.get("alloc_conf", ""), torch)
    except BadInput:
        return torch, AllocSettings()


def room_of(tape: Tape) -> int | None:
    """Bytes the allocator had at its disposal, where the tape says so."""
    capacity = tape.about.get("capacity", "")
    return int(capacity) if capacity.isdecimal() else None


def as_recorded(tape: Tape, context: int = 0) -> Timeline:
    """The run once more on the card it was recorded on: what failed there fails again, and is no part of its peaks.

    Where the model runs out of memory and the recorded run did not, on a card without a limit. Raises BadInput as
    `replay` does, and for settings that are none.
    """
    torch, _ = made_with(tape)
    settings = parse_alloc_conf(tape.about.get("alloc_conf", ""), torch)
    with suppress(OutOfMemory):  # of what was there at the start
        allocator = allocator_of(tape, settings, torch)
        walk = Walk(allocator, context, begun(allocator, tape.start))
        oom, last = walk.through(tape.events, go_on=True)
        if oom is None:
            return walk.timeline(None, last)
    allocator = Allocator(None, settings, torch)
    walk = Walk(allocator, context, begun(allocator, tape.start))
    return walk.timeline(*walk.through(tape.events, go_on=True))


def allocator_of(tape: Tape, settings: AllocSettings, torch: Torch) -> Allocator:
    """An empty allocator on the card a tape was recorded on, with the recorded addresses where they decide ties.

    What the card had in all sets the length of expandable segments; where it is not known they never end.
    """
    total = tape.about.get("total_memory", "")
    allocator = Allocator(
        room_of(tape), settings, torch,
        total_memory=int(total) if total.isdecimal() else None if settings.per_process_memory_fraction else UNLIMITED,
    )  # fmt: skip
    if torch <= BY_ADDRESS:
        held = [SegmentAlloc(s.address, sum(p.size for p in s.pieces)) for s in tape.start]
        allocator.use_addresses([*held, *(event for event in tape.events if isinstance(event, SegmentAlloc))])
    return allocator
