"""What a trace of a script and of its ranks is asked for and returns; without PyTorch, so that any process reads it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from memfit.errors import BadInput
from memfit.nouns.sample import Leak
from memfit.nouns.tape import Alloc, Free, Tape

DISTINCT, ALL, LAST = "distinct", "all", "last"


@dataclass(frozen=True, slots=True)
class ScriptOutcome:
    """How a script's run ended, and what was assumed.

    ending: "enough" steps were done, the script "finished" by itself, or it ran out of memory ("oom"): then `where` is
    its line, `message` PyTorch's message and `trace` what Python would have printed. survived: how often the script
    caught an out-of-memory error and went on. answered: how often each kind of unknown value was read. untrained: why
    there can be no verdict, for a script that did not train on the card. leaks: what grows from step to step.
    communicators: process groups of several ranks over which NCCL passed
    tensors. processes: ranks of the largest one. routed: the most times their even share of tokens that experts got.
    """

    ending: Literal["enough", "finished", "oom"]
    steps: int
    where: str = ""
    message: str = ""
    trace: str = ""
    survived: int = 0
    assumed: tuple[str, ...] = ()
    answered: dict[str, int] = field(default_factory=dict)
    untrained: str = ""
    leaks: tuple[Leak, ...] = ()
    communicators: int = 0
    processes: int = 1
    routed: float = 1.0


@dataclass(frozen=True, slots=True)
class RanksTask:
    """A script to trace on some ranks of a cluster. words: arguments of `trace_script` beside place and peers."""

    words: Mapping[str, Any]
    answers: Sequence[str]
    world_size: int
    per_node: int
    ranks: tuple[int, ...] = ()  # () for the distinct ones


@dataclass(frozen=True, slots=True)
class Communicator:
    """A process group that sent tensors of the card, for which NCCL keeps buffers. calls: by operator."""

    name: str
    size: int
    calls: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class WorldFacts:
    """What a rank knows of the groups of its job.

    groups: (description, ranks) of all that the script made. messages: (lower, higher) ranks between which this one
    sends or receives. shards: ranks of a group -> the class of what each of them holds, where shards are uneven.
    """

    groups: tuple[tuple[str, tuple[int, ...]], ...] = ()
    own: tuple[Communicator, ...] = ()
    messages: frozenset[tuple[int, ...]] = frozenset()
    shards: Mapping[tuple[int, ...], tuple[int, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TracedRank:
    """One rank's trace. silent: ranks whose messages nobody sent."""

    rank: int
    tape: Tape
    outcome: ScriptOutcome
    facts: WorldFacts
    silent: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class RankClass:
    """Ranks that do the same: `rank` is traced for all of them. what: their position in the groups of the job."""

    rank: int
    members: tuple[int, ...]
    what: str = ""


@dataclass(frozen=True, slots=True)
class RanksTrace:
    """The traces of a job. twins: (rank, rank of the same class, whether their tapes are equal), as checked."""

    traces: tuple[TracedRank, ...]
    classes: tuple[RankClass, ...] = ()
    twins: tuple[tuple[int, int, bool], ...] = ()


def parse_ranks(text: str, world_size: int) -> tuple[int, ...]:
    """Read `--ranks`: distinct (returned as ()), all, last, or numbers like 0,3,8-11. Raises BadInput."""
    if text == DISTINCT:
        return ()
    if text == ALL:
        return tuple(range(world_size))
    if text == LAST:
        return (world_size - 1,)
    hint = "--ranks distinct, all, last, or numbers: 0,3,8-11"
    found: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        try:
            found.update(range(int(first), int(last if dash else first) + 1))
        except ValueError:
            raise BadInput(f"--ranks {text} means nothing", hint=hint) from None
    if not found or not 0 <= min(found) <= max(found) < world_size:
        raise BadInput(f"--ranks {text}: the job has ranks 0 to {world_size - 1}", hint=hint)
    return tuple(sorted(found))


def same_tapes(one: Tape, other: Tape) -> bool:
    """Return whether two ranks allocated and freed the same bytes in the same order."""
    return _bytes(one) == _bytes(other)


def _bytes(tape: Tape) -> list[int]:
    sizes: dict[int, int] = {}
    found = []
    for event in tape.events:
        if isinstance(event, Alloc):
            sizes[event.id] = event.size
            found.append(event.size)
        elif isinstance(event, Free):
            found.append(-sizes[event.id])
    return found
