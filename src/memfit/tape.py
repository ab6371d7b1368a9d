"""The noun Tape: what happened to a card's memory, event by event, whoever recorded it."""

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


@dataclass(frozen=True, slots=True)
class Alloc:
    """A tensor's storage was born: `size` requested bytes; `id` is unique among the live ones."""

    id: int
    size: int
    role: Role = "temporaries"
    label: str = ""  # what it is and whose: "layers.3.mlp.gate_proj output"
    stream: int = 0


@dataclass(frozen=True, slots=True)
class Free:
    """The storage `id` died."""

    id: int


@dataclass(frozen=True, slots=True)
class Mark:
    """A named instant: the start of a phase or of a part of one."""

    phase: Phase
    instant: str


@dataclass(frozen=True, slots=True)
class SegmentAlloc:
    """The allocator took `size` bytes at `address` from the driver."""

    address: int
    size: int


@dataclass(frozen=True, slots=True)
class SegmentFree:
    """The allocator gave `size` bytes at `address` back to the driver."""

    address: int
    size: int


@dataclass(frozen=True, slots=True)
class Oom:
    """A request of `size` bytes could not be served."""

    size: int
    free: int = 0  # bytes the driver still had


Event = Alloc | Free | Mark | SegmentAlloc | SegmentFree | Oom


@dataclass(frozen=True, slots=True)
class Tape:
    """A run's events in order, with what is known of the card and the stack that made them."""

    events: tuple[Event, ...]
    source: Literal["formula", "traced", "measured"]
    about: dict[str, str] = field(default_factory=dict)
