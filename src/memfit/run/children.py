"""Attempts as child processes: one on its own, or one per GPU under torchrun with the environment accelerate reads."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import IO

from memfit.job import Recipe
from memfit.run.environment import environment
from memfit.run.folder import LOG_FILE, OUTCOME_FILE, Run
from memfit.run.nouns import EVENT, Event, Outcome


def in_child(run: Run, tell: Callable[[Event], None]) -> Outcome:
    """Run one attempt in a process of its own; its other output goes to log.txt."""
    recipe = run.plan.recipe
    (run.path / OUTCOME_FILE).unlink(missing_ok=True)
    with (run.path / LOG_FILE).open("a", encoding="utf-8") as log:
        child = subprocess.Popen(
            command(run, recipe), stdout=subprocess.PIPE, stderr=log, text=True, errors="replace",
            env={**os.environ, **quiet(), **environment(recipe, run.path)},
        )  # fmt: skip
        assert child.stdout is not None
        stopped = _listen(child, child.stdout, log, tell)
    return run.outcome or _without_word(child.returncode, stopped, run)


def command(run: Run, recipe: Recipe) -> list[str]:
    """The line that starts an attempt."""
    worker = ["-m", "memfit.run.worker", str(run.path)]
    if recipe.num_gpus == 1:
        return [sys.executable, *worker]
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(recipe.num_gpus)]
    return [sys.executable, *torchrun, *worker]


def quiet() -> dict[str, str]:
    """Libraries that speak of themselves are asked not to."""
    return {"TOKENIZERS_PARALLELISM": "false", "TRANSFORMERS_VERBOSITY": "error", "PYTHONUNBUFFERED": "1"}


def _listen(child: subprocess.Popen[str], lines: IO[str], log: IO[str], tell: Callable[[Event], None]) -> bool:
    """Hand on events until the child ends. Ctrl-C reaches the child as well: the first is waited for, the second ends it."""
    stopped = False
    while True:
        try:
            for line in lines:
                if line.startswith(EVENT):
                    tell(json.loads(line.removeprefix(EVENT)))
                else:
                    log.write(line)
            child.wait()
            return stopped
        except KeyboardInterrupt:
            if stopped:
                child.kill()
                child.wait()
                raise
            stopped = True
            tell({"event": "stopping"})
        except BaseException:
            child.kill()
            child.wait()
            raise


def _without_word(code: int, stopped: bool, run: Run) -> Outcome:
    """A child that ended without saying how."""
    last = run.last_good()
    reached = {"step": last.step, "samples": last.samples} if last else {}
    if stopped:
        return Outcome(status="stopped", **reached)  # type: ignore[arg-type]
    killed = " (signal 9: the host may have run out of memory)" if code in (-9, 137) else ""
    return Outcome(status="failed", error=f"the training process ended with code {code}{killed}", **reached)  # type: ignore[arg-type]
