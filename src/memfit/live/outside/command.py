"""Run a command as a child, sample its memory from outside, and pass on signals, output and the exit code."""

from __future__ import annotations

import codecs
import io
import os
import select
import shutil
import signal
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from memfit.errors import BadInput
from memfit.live.outside.processes import NvmlMeter, RssMeter
from memfit.live.watch.recorder import Recorder
from memfit.nouns.sample import Alarm, Sample, Watched

STDERR = 2  # the file descriptor, whatever sys.stderr is
FIRST = 0.05  # seconds between the first two samples; every later wait is twice as long, up to what the user chose
PASSED = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2") if hasattr(signal, name))
TERMINAL = Path("/dev/tty")  # the controlling terminal, whatever stdin is
SENT = (
    0  # highest si_code of a signal from a process; Ctrl-C's comes from the kernel and is higher. Source: sigaction(2)
)
SIZE = 1 << 16  # bytes read at one time
POLL = 0.1  # seconds between two checks whether the command has ended


def run(
    command: Sequence[str], recorder: Recorder, meter: RssMeter | NvmlMeter, every: float,
    show_line: Callable[[str], None] | None = None, aside: bool = False,
) -> tuple[int, Watched]:  # fmt: skip
    """Run the command to its end; return (its exit code as shells report it, what was measured).

    show_line: called with each line of the command's output, for a live view that the output would overwrite. Without
    it the command inherits stdout and stderr. aside: its stdout goes to stderr.
    Raises BadInput for a command that cannot be started. Once it runs it is waited for, even if measuring fails.
    """
    began = time.monotonic()
    child = _start(command, subprocess.PIPE if show_line else STDERR if aside else None)
    with passed_on(child):
        output = OutputTee(child.stdout, show_line) if show_line and child.stdout else None
        try:
            _look(child, recorder, meter, every, began)
        except Exception as error:  # the card or a sink may fail; the command goes on
            _failed(recorder, "nothing is measured from here on", error)
        child.wait()
        if isinstance(meter, RssMeter) and (most := meter.ended()) is not None:
            recorder.add(Sample(time.monotonic() - began, 0, "step", most, most))
        if output is not None:
            output.finish()
    watched = recorder.watched()
    try:
        recorder.close()
    except Exception as error:
        _failed(recorder, "the watch could not be ended in order", error)
    return child.returncode if child.returncode >= 0 else 128 - child.returncode, watched


def _look(
    child: subprocess.Popen[bytes], recorder: Recorder, meter: RssMeter | NvmlMeter, every: float, began: float
) -> None:
    """Sample the command's memory until it has ended."""
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
    """Raise an alarm for a part of the watch that failed."""
    with suppress(Exception):
        recorder.alarm(Alarm("unsure", 0, "step", 0, 0, f"{what}: {type(error).__name__}: {error}"))


def program_of(command: Sequence[str]) -> str:
    """Return the path of the program to start. Raises BadInput where there is none."""
    program = shutil.which(command[0])
    if program is None:
        is_file = Path(command[0]).is_file()
        problem = f"{command[0]} cannot be run as it is" if is_file else f"there is no command '{command[0]}'"
        script = command[0] if command[0].endswith(".py") else "train.py"
        raise BadInput(problem, hint=f"memfit watch -- python {script}")
    return program


def _start(command: Sequence[str], output: int | None) -> subprocess.Popen[bytes]:
    program = program_of(command)
    errors = subprocess.STDOUT if output == subprocess.PIPE else None
    try:
        return subprocess.Popen([program, *command[1:]], stdout=output, stderr=errors)
    except OSError as error:
        raise BadInput(f"cannot start '{command[0]}': {error.strerror or error}", hint="is it executable?") from None


# --- signals ---


@contextmanager
def passed_on(child: subprocess.Popen[bytes]) -> Iterator[None]:
    """Pass signals on to the child; SIGINT only where Ctrl-C does not reach the child from the terminal itself."""

    def forward(number: int, _: object = None) -> None:
        if child.poll() is None:
            child.send_signal(number)

    def interrupted(number: int, _: object) -> None:
        if not _in_foreground():
            forward(number)

    before = {number: signal.signal(number, forward) for number in PASSED}
    before[signal.SIGINT] = signal.signal(signal.SIGINT, interrupted)
    try:
        with _interrupts_of_processes(forward):
            yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _in_foreground() -> bool:
    """Return whether Ctrl-C in the controlling terminal reaches this process group, which is also the child's."""
    if not hasattr(os, "tcgetpgrp"):
        return True  # Windows: Ctrl-C reaches all processes of a console
    try:
        with TERMINAL.open("rb") as terminal:
            return os.tcgetpgrp(terminal.fileno()) == os.getpgrp()
    except OSError:  # there is no terminal
        return False


@contextmanager
def _interrupts_of_processes(forward: Callable[[int], None]) -> Iterator[None]:
    """Forward each SIGINT that a process sent, from a thread that waits for them; without sigwaitinfo do nothing."""
    if not hasattr(signal, "sigwaitinfo"):
        yield
        return
    interrupt, ended = {signal.SIGINT}, threading.Event()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, interrupt)  # in this thread and in the one that it starts

    def wait() -> None:
        while True:
            sender = signal.sigwaitinfo(interrupt)
            if ended.is_set():
                return
            if sender.si_code <= SENT:
                forward(signal.SIGINT)

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        assert thread.ident is not None
        signal.pthread_kill(thread.ident, signal.SIGINT)
        thread.join()
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


# --- output ---


class OutputTee:
    """Shows a command's output line by line, read from a pipe in a thread, until the command has ended.

    The pipe may stay open for longer: a process that the command left behind may hold its other end. Windows, which
    has no `fcntl` to ask how much is left in a pipe, has no live view either.
    """

    def __init__(self, pipe: IO[Any], show_line: Callable[[str], None]) -> None:
        self.pipe, self.show_line = pipe, show_line
        self._ended = threading.Event()
        self._rest = ""
        # as in text files, the \r of a progress bar ends a line too
        self._text = io.IncrementalNewlineDecoder(codecs.getincrementaldecoder("utf-8")("replace"), translate=True)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def finish(self) -> None:
        """Show what the command had written when it ended, and nothing that comes after."""
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        number = self.pipe.fileno()
        with self.pipe:
            while not self._ended.is_set():
                if select.select([number], [], [], POLL)[0] and not self._pass(os.read(number, SIZE)):
                    break
            else:
                left = _waiting(number)
                while left > 0 and (data := os.read(number, min(left, SIZE))):
                    left -= len(data)
                    self._pass(data)
            self._pass(b"", final=True)

    def _pass(self, data: bytes, final: bool = False) -> bool:
        """Show the lines that are complete; return False at the end of the pipe."""
        *lines, self._rest = (self._rest + self._text.decode(data, final)).split("\n")
        for line in (*lines, *([self._rest] if final and self._rest else [])):
            with suppress(OSError):  # the screen is gone; the command must not wait for a reader
                self.show_line(line)
        return bool(data)


def _waiting(number: int) -> int:
    """Return how many bytes are in the pipe."""
    import fcntl
    import termios

    return int(struct.unpack("i", fcntl.ioctl(number, termios.FIONREAD, bytes(4)))[0])
