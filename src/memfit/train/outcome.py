"""The nouns of a run: Settings (options beside the recipe), Outcome (how an attempt ended), Fall (memory ran out)."""

from __future__ import annotations

import errno
from dataclasses import dataclass, field
from typing import Any, Literal

from memfit.errors import EXIT_MISFIT

Status = Literal["done", "stopped", "oom", "failed"]
Stage = Literal["load", "rehearsal", "resume", "forward and backward", "optimizer step", "eval", "save", "merge"]
FALLS = 5
FULL_ERRNO = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)  # of a full disk, a limit on files, a quota
# exit codes of an attempt and of `memfit train`; 75: EX_TEMPFAIL, worth trying again
EXIT_OF: dict[Status, int] = {"done": 0, "failed": 1, "oom": EXIT_MISFIT, "stopped": 75}


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The options of `memfit train` beside the recipe. Learning rate and epochs are in [training] of the recipe."""

    gpu: str = ""  # the card's short name; "" for one that is not in the table
    gpu_memory: int = 0  # bytes it has
    cpu: bool = False  # train on the CPU; the card is only what is planned for
    memory_limit: int = 0  # bytes of the device that may be used; 0: all
    falls: int = FALLS  # how often the run may change its recipe after running out of memory
    rehearse: bool = True  # try the worst batch before the first step
    merge: bool = False  # write the adapters merged into their base as well
    eval_batch: int = 0  # samples at a time in evaluation; 0: a micro-batch
    lean_save: bool = False  # free gradients and cached blocks before anything is written
    inputs: dict[str, str] = field(default_factory=dict)  # path -> digest of the data and the model as the run began


@dataclass(frozen=True, slots=True, kw_only=True)
class Shortage:
    """One allocation that failed. Sizes are bytes; zero: not known."""

    stage: Stage
    step: int  # optimizer steps that were complete
    text: str  # the error, as PyTorch words it
    trace: str = ""  # the end of its traceback
    asked: int = 0  # bytes of the allocation that failed
    held: int = 0  # bytes of tensors at that moment
    began: int = 0  # bytes of tensors at the beginning of the stage
    limit: int = 0  # bytes that were available
    frame: str = ""  # file:line of the innermost frame outside the libraries' core
    snapshot: str = ""  # the memory snapshot beside it

    @property
    def short(self) -> int:
        """Return the bytes that were missing; at least 1."""
        return max(self.held + self.asked - self.limit, 1) if self.limit else max(self.asked, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The end of one attempt and its measurements. Sizes are bytes."""

    status: Status
    step: int = 0  # optimizer steps in the saved weights
    steps: int = 0  # of the whole run
    samples: int = 0  # samples trained in these steps
    loss: float | None = None  # of training, as last logged
    first_loss: float | None = None
    eval_loss: float | None = None
    peaks: dict[str, int] = field(default_factory=dict)  # phase (on a limited CPU: stage) -> most bytes of tensors
    reserved: int = 0  # most bytes held by the allocator; 0 on a CPU
    host: int = 0  # peak resident memory of the process
    seconds: float = 0.0
    shortage: Shortage | None = None
    error: str = ""
    saved: tuple[str, ...] = ()  # folders: the model, the merged model
    files: dict[str, tuple[int, str]] = field(default_factory=dict)  # saved weights: name -> size, digest
    versions: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fall:
    """One time that memory ran out, and the changes for the next attempt."""

    shortage: Shortage
    cause: tuple[str, str]  # two lines: what failed, and what held the memory
    changed: tuple[str, ...]  # "micro-batch 8 -> 4"
    resumed_at: int  # the last good step
    moments_lost: bool = False  # the optimizer changed, so its states were reset


Event = dict[str, Any]
EVENT = "memfit-event "  # starts the lines of a worker's output that hold an Event as JSON
WARNING = "warning: "  # starts lines of train.py's output that are shown to the user
