"""The program `memfit`, also as `python -m memfit`: Ctrl-C ends it with 130 from the first import to the last line."""

from __future__ import annotations

import os
import sys
import weakref
from contextlib import suppress
from signal import SIG_IGN, SIGINT, default_int_handler, getsignal, signal
from types import FrameType
from typing import NoReturn

INTERRUPTED, BUG = 130, 1  # 128 + the number of SIGINT, as shells report it
_SHOW_CURSOR = b"\x1b[?25h"


def program() -> int:
    """Run the command line of this process and return its exit code."""
    if getsignal(SIGINT) is not default_int_handler:  # started with Ctrl-C ignored, as by nohup
        from memfit.cli import main

        return main()
    pressed = []

    def interrupt(number: int, frame: FrameType | None) -> NoReturn:
        pressed.append(number)
        if _importing(frame):
            _leave()
        raise KeyboardInterrupt

    signal(SIGINT, interrupt)
    try:
        from memfit.cli import main

        code = main()
    except KeyboardInterrupt:
        code = INTERRUPTED
    signal(SIGINT, SIG_IGN)  # the command is done, and its exit code stands
    return INTERRUPTED if pressed and code == BUG else code  # some library made another error of it


def _importing(frame: FrameType | None) -> bool:
    """Return whether a module is being imported.

    An exception does not end that: C++ that starts up aborts the process, and libraries take what fails to import as
    not installed.
    """
    while frame is not None and not frame.f_code.co_filename.startswith("<frozen importlib"):
        frame = frame.f_back
    return frame is not None


def _leave() -> NoReturn:
    """End the process at once, without temporary folders and with the terminal's cursor."""
    with suppress(BaseException):
        if os.isatty(2):
            os.write(2, _SHOW_CURSOR)
        weakref.finalize._exitfunc()  # type: ignore[attr-defined]
    os._exit(INTERRUPTED)


if __name__ == "__main__":
    sys.exit(program())
