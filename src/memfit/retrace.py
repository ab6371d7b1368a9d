"""A recorded run played on the model, on the card it was recorded on: does the model do what PyTorch's allocator did?"""

from __future__ import annotations

from itertools import zip_longest

from memfit.alloc_conf import LATEST_TORCH, AllocSettings, Torch
from memfit.allocator import UNLIMITED, Allocator
from memfit.replay import DEFAULTS, Walk, begun
from memfit.tape import SegmentAlloc, SegmentFree, Tape

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


def allocator_of(tape: Tape, settings: AllocSettings, torch: Torch) -> Allocator:
    """An empty allocator on the card a tape was recorded on, with the recorded addresses where they decide ties.

    What the card had in all sets the length of expandable segments; where it is not known they never end.
    """
    capacity, total = (tape.about.get(key, "") for key in ("capacity", "total_memory"))
    allocator = Allocator(
        int(capacity) if capacity.isdecimal() else None, settings, torch,
        total_memory=int(total) if total.isdecimal() else None if settings.per_process_memory_fraction else UNLIMITED,
    )  # fmt: skip
    if torch <= BY_ADDRESS:
        held = [SegmentAlloc(s.address, sum(p.size for p in s.pieces)) for s in tape.start]
        allocator.use_addresses([*held, *(event for event in tape.events if isinstance(event, SegmentAlloc))])
    return allocator
