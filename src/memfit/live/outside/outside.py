"""A command run as a child and watched from outside: its memory by the clock, its signals and exit code passed on."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from memfit.errors import BadInput
from memfit.live.outside.interrupts import passed_on
from memfit.live.outside.processes import NvmlMeter, RssMeter
from memfit.live.watch.recorder import Recorder
from memfit.nouns.sample import Alarm, Sample, Watched

STDERR = 2  # its file, whatever sys.stderr is
FIRST = 0.05  # seconds to the first look; then every look waits twice as long, up to what was asked for


def run(
    command: Sequence[str], recorder: Recorder, meter: RssMeter | NvmlMeter, every: float, relay: Callable[[str], None] | None = None,
    aside: bool = False,
) -> tuple[int, Watched]:  # fmt: skip
    """Run the command to its end; (its exit code as shells report it, what was seen).

    relay: takes the command's output line by line, for a live view it would overwrite; None: it writes for itself,
    to stderr alone where it is put `aside`.
    Raises BadInput for a command that cannot be started. Once it runs it is waited for, whatever fails beside it.
    """
    if relay:  # a live view's alone: Windows has nothing that tells what is in a pipe
        from memfit.live.outside.tee_output import Relay
    began = time.monotonic()
    child = _start(command, subprocess.PIPE if relay is not None else STDERR if aside else None)
    with passed_on(child):
        reader = Relay(child.stdout, relay) if relay and child.stdout else None
        try:
            _look(child, recorder, meter, every, began)
        except Exception as error:  # a card that is lost, a sink: the command is not
            _failed(recorder, "nothing is measured from here on", error)
        child.wait()
        if isinstance(meter, RssMeter) and (most := meter.ended()) is not None:
            recorder.add(Sample(time.monotonic() - began, 0, "step", most, most))
        if reader is not None:
            reader.finish()
    watched = recorder.watched()
    try:
        recorder.close()
    except Exception as error:
        _failed(recorder, "the watch could not be ended in order", error)
    return child.returncode if child.returncode >= 0 else 128 - child.returncode, watched


def _look(
    child: subprocess.Popen[bytes], recorder: Recorder, meter: RssMeter | NvmlMeter, every: float, began: float
) -> None:
    """Look at the command until it has ended."""
    wait = min(FIRST, every)
    while True:
        now = meter.read(child.pid)
        recorder.add(Sample(time.monotonic() - began, 0, "step", now, now, whole_card=meter.whole_card))
        try:
            child.wait(wait)
            return
        except subprocess.TimeoutExpired:
            wait = min(2 * wait, every)


def _failed(recorder: Recorder, what: str, error: Exception) -> None:
    """Say everywhere what is missing of the watch."""
    with suppress(Exception):
        recorder.alarm(Alarm("unsure", 0, "step", 0, 0, f"{what}: {type(error).__name__}: {error}"))


def program_of(command: Sequence[str]) -> str:
    """The path of what is started. Raises BadInput where there is none."""
    program = shutil.which(command[0])
    if program is None:
        said = (
            f"{command[0]} cannot be run as it is"
            if Path(command[0]).is_file()
            else f"there is no command '{command[0]}'"
        )
        script = command[0] if command[0].endswith(".py") else "train.py"
        raise BadInput(said, hint=f"memfit watch -- python {script}")
    return program


def _start(command: Sequence[str], output: int | None) -> subprocess.Popen[bytes]:
    program = program_of(command)
    piped = output == subprocess.PIPE
    options: dict[str, Any] = {"stdout": output, "stderr": subprocess.STDOUT if piped else None}
    try:
        return subprocess.Popen([program, *command[1:]], **options)
    except OSError as error:
        raise BadInput(f"cannot start '{command[0]}': {error.strerror or error}", hint="is it executable?") from None
