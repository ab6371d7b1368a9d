"""Signals sent to a watch, passed on to the command: SIGINT once, whether the terminal or somebody else sent it."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

PASSED = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2") if hasattr(signal, name))
TERMINAL = Path("/dev/tty")  # the controlling one, whatever stdin is
SENT = 0  # si_code of what a process sent (SI_USER, SI_TKILL) is at most this; above it is the kernel's, as Ctrl-C is (sigaction(2))


@contextmanager
def passed_on(child: subprocess.Popen[bytes]) -> Iterator[None]:
    """Signals sent to us go to the child, and we wait for it; the terminal sends Ctrl-C to both by itself."""

    def forward(number: int, _: object = None) -> None:
        if child.poll() is None:
            child.send_signal(number)

    def interrupted(number: int, _: object) -> None:
        if not _in_foreground():
            forward(number)

    before = {number: signal.signal(number, forward) for number in PASSED}
    before[signal.SIGINT] = signal.signal(signal.SIGINT, interrupted)
    try:
        with _told_apart(forward):
            yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _in_foreground() -> bool:
    """Ctrl-C of the controlling terminal goes to our group of processes, which is the child's too."""
    if not hasattr(os, "tcgetpgrp"):
        return True  # Windows: a console's reaches all of its processes
    try:
        with TERMINAL.open("rb") as terminal:
            return os.tcgetpgrp(terminal.fileno()) == os.getpgrp()
    except OSError:  # there is none
        return False


@contextmanager
def _told_apart(forward: Callable[[int], None]) -> Iterator[None]:
    """SIGINT taken by a thread that is told who sent it; where systems tell nobody (macOS) the handler decides."""
    if not hasattr(signal, "sigwaitinfo"):
        yield
        return
    only, over = {signal.SIGINT}, threading.Event()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, only)  # of this thread and of the one that it starts

    def take() -> None:
        while True:
            sender = signal.sigwaitinfo(only)
            if over.is_set():
                return
            if sender.si_code <= SENT:
                forward(signal.SIGINT)

    thread = threading.Thread(target=take, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        assert thread.ident is not None
        signal.pthread_kill(thread.ident, signal.SIGINT)
        thread.join()
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
