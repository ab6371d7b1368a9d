"""What a traced script does to its own process: exits, forks, threads, signals, exit functions, the current folder."""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

import torch

from memfit.virtual.observer import EnoughSteps
from memfit.virtual.patching import patched

PATIENCE = 60.0  # seconds to wait for a thread
_LEFT_ALONE = {signal.SIGKILL, signal.SIGSTOP}
_HOOKS = ("excepthook", "displayhook", "unraisablehook", "stdout", "stderr", "stdin")  # of sys, that scripts replace


class Threads:
    """What ended the script's other threads: `oom` is the first out-of-memory error that none of them caught.

    left: the names of those that still ran PATIENCE seconds after the script.
    """

    def __init__(self) -> None:
        self.oom: torch.OutOfMemoryError | None = None
        self.enough = False
        self.left: list[str] = []

    def ended(self, real: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Return a threading.excepthook that remembers what ends the trace and passes on the rest."""

        def hook(about: Any) -> None:
            if isinstance(about.exc_value, EnoughSteps):
                self.enough = True
            else:
                if isinstance(about.exc_value, torch.OutOfMemoryError):
                    self.oom = self.oom or about.exc_value
                real(about)

        return hook


@contextmanager
def contained(own: Callable[[str], bool]) -> Iterator[Threads]:
    """Let a script do to its process what it wants, and undo it afterwards. `own`: whether a file is the script's.

    `os._exit` becomes `sys.exit`. A forked child that comes to the end of the script ends there. Exit functions that
    the script registers run when it ends, while the card still exists.
    """
    pid, leave, threads = os.getpid(), os._exit, Threads()

    def exit_now(code: int) -> NoReturn:
        if os.getpid() != pid:
            leave(code)
        raise SystemExit(code)

    with ExitStack() as stack:
        stack.enter_context(_hooks_restored())
        stack.enter_context(_signals_restored())
        stack.enter_context(_folder_restored())
        stack.enter_context(patched(os, {"_exit": exit_now}))
        stack.enter_context(patched(threading, {"excepthook": threads.ended(threading.excepthook)}))
        stack.enter_context(_exit_functions_run(own, pid))
        try:
            yield threads
        except BaseException as error:
            if os.getpid() != pid:
                leave(_child_code(error))
            raise
        if os.getpid() != pid:
            _flush()
            leave(0)
        threads.left = _wait_for_threads(own)


def _wait_for_threads(own: Callable[[str], bool]) -> list[str]:
    """Wait for the threads of the script's own code, as Python does; a pool's workers would wait for work.

    Return the names of those that did not end.
    """
    left: list[str] = []
    for thread in threading.enumerate():
        run: Any = getattr(thread, "_target", None) or type(thread).run
        code = getattr(run, "__code__", None)
        if thread is not threading.current_thread() and not thread.daemon and code and own(code.co_filename):
            thread.join(PATIENCE)
            left += [f"{thread.name} of {Path(code.co_filename).name}"] if thread.is_alive() else []
    return left


def _child_code(error: BaseException) -> int:
    """Print what ended a forked child, and return the exit code that Python would give it."""
    if isinstance(error, SystemExit) and (error.code is None or isinstance(error.code, int)):
        code = error.code or 0
    else:
        code = 1
        if not isinstance(error, SystemExit | EnoughSteps):
            traceback.print_exception(error)
    _flush()
    return code


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()


@contextmanager
def _hooks_restored() -> Iterator[None]:
    before = {name: getattr(sys, name) for name in _HOOKS}
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(sys, name, value)


@contextmanager
def _signals_restored() -> Iterator[None]:
    """Restore signal handlers and timers, which only the main thread may change."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in signal.valid_signals() - _LEFT_ALONE}
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in before.items():
            if handler is not None and signal.getsignal(number) is not handler:
                signal.signal(number, handler)


@contextmanager
def _folder_restored() -> Iterator[None]:
    before = Path.cwd()
    try:
        yield
    finally:
        os.chdir(before)


@contextmanager
def _exit_functions_run(own: Callable[[str], bool], pid: int) -> Iterator[None]:
    """Run what the script's own code registers with atexit, the last first; their errors do not matter to a trace."""
    real, registered = atexit.register, list[tuple[Callable[..., Any], Any, Any]]()

    def register(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Callable[..., Any]:
        if not own(sys._getframe(1).f_code.co_filename):
            return real(function, *args, **kwargs)
        registered.append((function, args, kwargs))
        return function

    try:
        with patched(atexit, {"register": register}):
            yield
    finally:
        while registered and os.getpid() == pid:
            function, args, kwargs = registered.pop()
            with suppress(Exception, SystemExit, EnoughSteps):
                function(*args, **kwargs)
