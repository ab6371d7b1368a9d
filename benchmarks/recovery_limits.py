"""Train runs whose memory runs out at random, and print how each ended.

usage: python benchmarks/recovery_limits.py [N] [SEED]   (N runs)

Each is a real training run on the CPU (a model of two layers), in this process, under one of four injected limits:
  small    the whole run has less memory than its recipe needs
  shrunk   from a random allocation in a random stage and step on, less memory is left, to the end
  spike    the same for one attempt
  save     memory runs out while a checkpoint is written, between two of its files
The first three fail allocations of PyTorch's operators (see memfit.train.memory_limit); saving allocates nothing on a
CPU, so `save` raises the same error from torch.save. A run passes when it is done, or stopped and then done when
resumed with all memory, and every optimizer step trained exactly the samples of an undisturbed run.
"""

from __future__ import annotations

import contextlib
import gc
import io
import logging
import random
import sys
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

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


@dataclass(frozen=True, slots=True)
class Result:
    """How one run ended. `exact`: every step trained the samples it should."""

    fault: Fault
    recipe: str
    status: str
    falls: int
    stages: tuple[str, ...]
    step: int
    exact: bool


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


class Bench:
    """The model and data that all runs share, and what an undisturbed run of each recipe trains."""

    def __init__(self, place: Path) -> None:
        import runs

        self.place, self.made = place, runs.assets(place / "assets")
        self._whole: dict[Any, tuple[list[Any], int]] = {}

    def recipe(self, dice: random.Random) -> Any:
        """A random recipe."""
        import runs

        batch, parts = dice.choice(((4, 1), (4, 2), (2, 2), (8, 1)))
        method = dice.choice(("full", "lora"))
        return runs.RECIPE.but(
            micro_batch=batch, accumulation=parts, method=method, lora_rank=4,
            optimizer=dice.choice(("adamw", "adamw-foreach")), checkpointing=dice.choice(("none", "none", "full")),
        )  # fmt: skip

    def whole(self, recipe: Any) -> tuple[list[Any], int]:
        """(what each step trains, the peak in bytes) of a run that nothing disturbs."""
        if recipe not in self._whole:
            from memfit.train.supervise import supervise

            run = self._new(recipe, f"whole-{len(self._whole)}", falls=0)
            outcome = supervise(run, Injected(Fault("none", "", 0, 1.0, 0), 1 << 40), lambda event: None)
            assert outcome.status == "done"
            self._whole[recipe] = lines(run), max(outcome.peaks.values())
        return self._whole[recipe]

    def _new(self, recipe: Any, name: str, **settings: Any) -> Any:
        import runs

        return runs.make_run(
            self.place / name, self.made, recipe, max_steps=STEPS, save_steps=2, eval_data=str(self.made[1]), **settings
        )

    def one(self, seed: int) -> Result:
        """One run under a random fault."""
        from memfit.train.attempt import attempt
        from memfit.train.supervise import supervise

        dice = random.Random(seed)
        recipe, fault = self.recipe(dice), fault_of(dice)
        truth, peak = self.whole(recipe)
        run = self._new(recipe, f"run-{seed}", falls=dice.randint(0, 6))
        outcome = supervise(run, Injected(fault, peak), lambda event: None)
        good = whole_until(run, truth)
        if outcome.status == "oom":  # with all memory back it must go on to the same end
            run.keep(replace(run.settings, memory_limit=0), run.falls)
            good = good and supervise(run, attempt, lambda event: None).status == "done"
        exact = good and lines(run) == truth
        stages = tuple(fall.shortage.stage for fall in run.falls)
        name = f"{recipe.method} {recipe.micro_batch}x{recipe.accumulation}"
        return Result(fault, name, outcome.status, len(run.falls), stages, outcome.step, exact)


def lines(run: Any) -> list[Any]:
    """What each step trained."""
    from memfit.train.sample_counts import SampleLedger

    return SampleLedger(run.path / "samples.jsonl").lines()


def whole_until(run: Any, truth: list[Any]) -> bool:
    """Every whole checkpoint counts the samples of the steps before it."""
    return all(c.samples == sum(line["samples"] for line in truth[: c.step]) for c in run.checkpoints())


@contextlib.contextmanager
def silence() -> Iterator[None]:
    """The libraries' own words are not ours."""
    import torch

    torch.set_num_threads(1)
    logging.disable(logging.ERROR)
    with (
        warnings.catch_warnings(),
        contextlib.redirect_stderr(io.StringIO()),
        contextlib.redirect_stdout(io.StringIO()),
    ):
        warnings.simplefilter("ignore")
        yield
    logging.disable(logging.NOTSET)


def main(count: int, first: int) -> int:
    """Print a table and the sum; 0 when every run passed."""
    found: list[Result] = []
    import trl.trainer.sft_trainer  # noqa: F401

    gc.freeze()  # what the libraries made at import is not looked through at every fall
    with tempfile.TemporaryDirectory() as folder:
        with silence():
            bench = Bench(Path(folder))
        print(
            f"{'seed':>4}  {'limit':<7}{'injected in':<22}{'step':>4}  "
            f"{'recipe':<10}{'ended':<8}{'falls':>5}  exact  fell in"
        )
        for seed in range(first, first + count):
            with silence():
                found.append(bench.one(seed))
            r = found[-1]
            where = "whole run" if r.fault.kind == "small" else r.fault.stage
            print(
                f"{seed:>4}  {r.fault.kind:<7}{where:<22}{r.fault.step:>4}  {r.recipe:<10}{r.status:<8}{r.falls:>5}  "
                f"{'yes' if r.exact else 'NO':<5}  {', '.join(r.stages)}", flush=True,
            )  # fmt: skip
    done = sum(r.status == "done" for r in found)
    exact = sum(r.exact for r in found)
    falls = sum(r.falls for r in found)
    print(f"{count} runs: {done} done, {count - done} stopped resumable, {falls} falls; sample counts exact in {exact}")
    return 0 if exact == count else 1


if __name__ == "__main__":
    numbers = [int(word) for word in sys.argv[1:]]
    sys.exit(main(*(numbers + [100, 0][len(numbers) :])))
