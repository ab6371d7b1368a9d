"""Trace a command line in the interpreter that owns it: a child with memfit's package beside its own libraries.

Only the answer comes back, pickled: the tape, and how the script ended. This module imports no torch, which this
interpreter may not have; `serve` runs in the other one.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
import traceback
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from memfit.closed_form.parallel.sharding import nccl_bytes
from memfit.errors import BadInput, MemfitError
from memfit.nouns.alloc_settings import alloc_conf_in
from memfit.nouns.gpu import Gpu
from memfit.nouns.tape import STEPS, Tape
from memfit.virtual.ranks.traced import ScriptOutcome
from memfit.virtual.scripts.command_line import CommandLine
from memfit.virtual.scripts.interpreters import interpreter, memfit_in
from memfit.virtual.supported import check_python

STARTS = 6  # programs that start one another; more is a circle
_STDERR = 2


@dataclass(frozen=True, slots=True)
class Asked:
    """How a command line is traced.

    cards: their number, if it was given. alloc_conf: PYTORCH_ALLOC_CONF; None: that of the command's environment, which
    a program that starts another may have changed. reserve: bytes to leave free on each card. alone: trace rank 0 of
    several processes by itself.
    """

    gpu: Gpu
    cards: int | None = None
    steps: int = STEPS
    alloc_conf: str | None = None
    answers: tuple[str, ...] = ()
    reserve: int = 0
    debug: bool = False
    alone: bool = False


@dataclass(frozen=True, slots=True)
class TracedCommand:
    """The tape of a command line, and how the script ended."""

    tape: Tape
    outcome: ScriptOutcome


def settled_by(run: CommandLine, asked: Asked) -> tuple[CommandLine, TracedCommand | None]:
    """Trace a command line that starts one process, in its own interpreter, to its end or to what it launches.

    A console script that would start a launcher (`trl sft`) ends there, and what the launcher starts is the command
    line that is returned. Its trace is None where that is several processes. Raises BadInput where the interpreter
    cannot trace, or the script fails.
    """
    for _ in range(STARTS):
        if run.world_size > 1 and not asked.alone:
            return run, None
        answer = _in_child(run, asked)
        if isinstance(answer, TracedCommand):
            return run, answer
        answer = replace(answer, notes=(*run.notes, f"{run.name} starts: {answer.shown}", *answer.notes))
        run = owned(answer.on(asked.cards, asked.gpu.short))
    raise BadInput(f"{run.name} starts itself again and again", hint="trace what it starts: -- torchrun ... train.py")


def owned(run: CommandLine) -> CommandLine:
    """Check the interpreter; in place of a `python` on the PATH that has no PyTorch take memfit's own."""
    found = interpreter(run.python, run.environment)
    if run.bare and "torch" not in found.packages and run.python != sys.executable:
        own = interpreter(sys.executable, run.environment)
        if "torch" in own.packages:
            note = f"{run.python} has no PyTorch: traced with {own.path}"
            return replace(run, python=own.path, notes=(*run.notes, note))
    check_python(found.path, found.version, found.packages)
    return replace(run, python=found.path)


def this_process() -> CommandLine:
    """Return the command line of a script that this interpreter runs here."""
    return CommandLine(sys.executable, "file", "", environment=dict(os.environ), folder=str(Path.cwd()))


def process_of(run: CommandLine, call: str, *arguments: str) -> dict[str, Any]:
    """Return how `subprocess` starts a function of memfit ("module:function") as the process of a command line."""
    options = [word for word in run.options if word != "-i"]
    words = memfit_in(run.python, call, *arguments, options=options)
    return {"args": words, "env": run.environment, "cwd": run.folder}


def _in_child(run: CommandLine, asked: Asked) -> TracedCommand | CommandLine:
    with tempfile.TemporaryDirectory(prefix="memfit-") as name:
        folder = Path(name)
        (folder / "asked").write_bytes(pickle.dumps((run, asked)))
        # what the script prints is no answer: it goes to stderr
        done = subprocess.run(**process_of(run, f"{__name__}:serve", name), stdout=_STDERR)
        if not (folder / "answer").is_file():
            code = done.returncode
            how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
            raise BadInput(f"{run.name} {how} before it was traced", hint="see what it printed")
        answer: Any = pickle.loads((folder / "answer").read_bytes())
    if isinstance(answer, Exception):
        raise answer
    return cast("TracedCommand | CommandLine", answer)


# --- in the interpreter of the command ---


def serve() -> None:
    """Trace what the file in the folder of sys.argv asks, and write the answer beside it."""
    folder = sys.argv[1]
    run, asked = pickle.loads(Path(folder, "asked").read_bytes())
    sys.argv[:] = [run.entry]
    answer: Any
    try:
        answer = _traced(run, asked)
    except Exception as error:  # one that is not memfit's is a bug there, and will be one here
        if asked.debug:
            traceback.print_exc()
        answer = error if isinstance(error, MemfitError) else RuntimeError(f"{type(error).__name__}: {error}")
    Path(folder, "answer").write_bytes(pickle.dumps(answer))


def _traced(run: CommandLine, asked: Asked) -> TracedCommand | CommandLine:
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    from memfit.virtual.device.values import Answers
    from memfit.virtual.ranks.place import Place
    from memfit.virtual.scripts.relaunch import Relaunch
    from memfit.virtual.scripts.script import trace_script

    conf = alloc_conf_in(run.environment) if asked.alloc_conf is None else asked.alloc_conf
    try:
        tape, outcome = trace_script(
            Path(run.entry), run.args, asked.gpu, steps=asked.steps, alloc_conf=conf,
            answers=Answers.of(asked.answers), capacity=asked.gpu.usable_bytes(asked.reserve),
            nccl=nccl_bytes(max(run.world_size, run.devices)), command=run,
            place=Place(0, run.world_size, run.processes) if run.launcher else None,
        )  # fmt: skip
    except Relaunch as other:
        return other.run
    return TracedCommand(tape, outcome)
