"""Let memory run out at random in a training run on the CPU, under one of four injected limits.

  small    the whole run has less memory than its recipe needs
  shrunk   from a random allocation in a random stage and step on, less memory is left, to the end
  spike    the same for one attempt
  save     memory runs out while a checkpoint is written, between two of its files
The first three fail allocations of PyTorch's operators (see memfit.train.memory_limit); saving allocates nothing on a
CPU, so `save` raises the same error from torch.save.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

STEPS = 6
KINDS = ("small", "shrunk", "spike", "save")
STAGES = ("load", "rehearsal", "forward and backward", "optimizer step", "eval")


@dataclass(frozen=True, slots=True)
class Fault:
    """What goes wrong in one run. `share` is of the run's own peak."""

    kind: str
    stage: str
    step: int
    share: float
    skip: int  # allocations (or files) of that stage and step that still succeed


def fault_of(dice: random.Random) -> Fault:
    """One random fault."""
    kind = dice.choice(KINDS)
    stage = "save" if kind == "save" else dice.choice(STAGES)
    step = (
        dice.randint(1, STEPS)
        if stage in ("save", "eval")
        else 0
        if stage in ("load", "rehearsal")
        else dice.randint(0, STEPS - 1)
    )
    return Fault(kind, stage, step, dice.uniform(0.2, 0.98), dice.randint(0, 3 if kind == "save" else 40))


class Injected:
    """A start for `supervise` that lets one fault happen; attempts that are processes find in `mark` that it struck."""

    def __init__(self, fault: Fault, peak: int, mark: Path | None = None) -> None:
        from memfit.train.attempt import attempt

        self.fault, self.limit, self.seen, self.mark, self.attempt = fault, int(fault.share * peak), 0, mark, attempt
        self.struck = mark is not None and mark.exists()

    def _strike(self) -> None:
        self.struck = True
        if self.mark:
            self.mark.touch()

    def __call__(self, run: Any, tell: Any, keep: Any = lambda callback: None) -> Any:
        """One attempt."""
        callbacks: list[Any] = []
        over = self.fault.kind == "spike" and self.struck

        def before(meter: Any, size: int) -> None:
            if over or self.fault.kind == "save":
                return
            if self.fault.kind == "small" or self.struck or self._here(callbacks[0]):
                self._strike()
                meter.limit = max(self.limit, 1)

        def kept(callback: Any) -> None:
            callbacks.append(callback)
            keep(callback)

        with self._saving(callbacks):
            return self.attempt(run, tell, keep=kept, before=before)

    def _here(self, callback: Any) -> bool:
        step = callback.trainer.state.global_step if callback.trainer else 0
        if (callback.stage, step) != (self.fault.stage, self.fault.step):
            return False
        self.seen += 1
        return self.seen > self.fault.skip

    @contextlib.contextmanager
    def _saving(self, callbacks: list[Any]) -> Iterator[None]:
        import torch

        real = torch.save

        def save(*args: Any, **named: Any) -> None:
            if self.fault.kind == "save" and not self.struck and self._here(callbacks[0]):
                self._strike()
                Path(args[1]).write_bytes(b"half")  # as far as it came
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB.")
            real(*args, **named)

        with mock.patch("torch.save", save):
            yield


def lines(run: Any) -> list[Any]:
    """What each step trained."""
    from memfit.train.sample_counts import SampleLedger

    return SampleLedger(run.path / "samples.jsonl").lines()
