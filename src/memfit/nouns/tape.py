"""The noun Tape: the memory events of a run in order, predicted, traced or recorded.

`memfit.allocator.compact` converts the events to and from integers, for speed. A history has millions of events, so
their classes alone are not frozen: a frozen one takes two and a half times as long to make. Nothing changes an event.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Role = Literal[
    "parameters", "gradients", "optimizer_states", "activations", "temporaries", "workspace", "context", "fragmentation"
]
ROLES: tuple[Role, ...] = (
    "parameters", "gradients", "optimizer_states", "activations", "temporaries", "workspace", "context", "fragmentation"
)  # fmt: skip
Phase = Literal["load", "first_step", "step", "eval", "save", "resume", "merge"]
PHASES: tuple[Phase, ...] = ("load", "first_step", "step", "eval", "save", "resume", "merge")

# Optimizer steps that a run is predicted from. Optimizer states are there from the second on, and cut the free blocks
# differently; the third cuts what the second reserved. A fourth reserved no more in any of 98 runs that were played.
STEPS = 3


@dataclass(slots=True, unsafe_hash=True)
class Alloc:
    """A tensor's storage was allocated: `size` requested bytes; `id` is unique among the live ones."""

    id: int
    size: int
    role: Role = "temporaries"
    label: str = ""  # what it is and whose: "layers.3.mlp.gate_proj output"
    stream: int = 0


@dataclass(slots=True, unsafe_hash=True)
class Free:
    """The storage `id` was freed."""

    id: int


@dataclass(slots=True, unsafe_hash=True)
class Mark:
    """A named instant: the start of a phase or of a part of one."""

    phase: Phase
    instant: str


FORWARD = "forward"
BACKWARD, AFTER_BACKWARD = "backward", "after backward"
OPTIMIZER_STEP, AFTER_STEP = "optimizer step", "after the step"
# a forward pass outside of training that keeps activations for a backward pass
GRADIENTS_ON = "forward, gradients on"
NEXT_PART = "next part of the forward"  # a second module in the same pass: a head after a body
# passes of a training step that no backward follows: a reference, a teacher, a reward model; tokens that are sampled
WITHOUT_GRADIENTS, GENERATION = "forward without gradients", "generation"


@dataclass(slots=True, unsafe_hash=True)
class SegmentAlloc:
    """The allocator took `size` bytes at `address` from the driver (or mapped them into an expandable segment)."""

    address: int
    size: int


@dataclass(slots=True, unsafe_hash=True)
class SegmentFree:
    """The allocator gave `size` bytes at `address` back to the driver (or unmapped them)."""

    address: int
    size: int


LARGE_SEGMENT = 20 << 20  # bytes asked of the driver for a request below 10 MiB (kLargeBuffer); others are as large


@dataclass(slots=True, unsafe_hash=True)
class Oom:
    """A request of `size` bytes could not be served."""

    size: int
    free: int = 0  # bytes the driver still had
    label: str = ""  # what requested them

    @property
    def limited(self) -> bool:
        """Return whether the driver had more than twice the segment of the request: the process has a limit below it.

        What the driver had is read after the failure, so another process may have freed a little in between.
        """
        return self.free > 2 * max(self.size, LARGE_SEGMENT)


@dataclass(slots=True, unsafe_hash=True)
class EmptyCache:
    """The program called torch.cuda.empty_cache(): every segment that is wholly free goes back to the driver."""


@dataclass(slots=True, unsafe_hash=True)
class RecordStream:
    """The program called Tensor.record_stream: once freed, the storage `id` waits for `stream` before its reuse."""

    id: int
    stream: int


Event = Alloc | Free | Mark | SegmentAlloc | SegmentFree | Oom | EmptyCache | RecordStream


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a segment at the start of a tape: `size` bytes held by `alloc`, free (None), or not mapped."""

    size: int
    alloc: Alloc | None = None
    mapped: bool = True


@dataclass(frozen=True, slots=True)
class Segment:
    """What the allocator held when the recording began: `pieces` lie one after the other from `address` on."""

    address: int
    stream: int
    small: bool  # of the small pool: for requests of up to 1 MiB
    expandable: bool
    pieces: tuple[Piece, ...]


WRITTEN = "when the file was written"  # the one instant of a snapshot without a history


@dataclass(frozen=True, slots=True)
class Tape:
    """A run's events in order, with the known facts about the card and the software.

    `start` is empty if the recording began with an empty allocator. `about` may hold `torch` ("2.13"), `alloc_conf`
    (the run's PYTORCH_ALLOC_CONF), `capacity` (bytes available to the allocator), `total_memory` (bytes of the card),
    `gpu` (its name), `device` (its number), `chosen` (why that one of several), `model` and other recorded facts; a
    missing key is unknown.
    """

    events: tuple[Event, ...]
    source: Literal["formula", "traced", "measured"]
    about: dict[str, str] = field(default_factory=dict)
    start: tuple[Segment, ...] = ()

    @property
    def device(self) -> int | None:
        """Return the number of the recorded card, None if unknown."""
        number = self.about.get("device", "")
        return int(number) if number.isdecimal() else None

    @property
    def is_instant(self) -> bool:
        """Return whether only one instant was recorded; it need not be the peak."""
        return not any(isinstance(event, Alloc | Free | Oom) for event in self.events)

    @property
    def ends_in_oom(self) -> bool:
        """Return whether an out-of-memory ended the run, so that its later needs are not on the tape."""
        last = next((event for event in reversed(self.events) if isinstance(event, Oom | Alloc)), None)
        return isinstance(last, Oom)
