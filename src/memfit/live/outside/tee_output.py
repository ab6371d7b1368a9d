"""The output of a watched command, passed on line by line until the command has ended, whoever else holds it open."""

from __future__ import annotations

import codecs
import fcntl
import io
import os
import select
import struct
import termios
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import IO, Any

SIZE = 1 << 16  # bytes read at one time
POLL = 0.1  # seconds between two looks whether the command has ended


class Relay:
    """Reads a pipe in a thread of its own. A process that the command left behind may hold its other end for ever."""

    def __init__(self, pipe: IO[Any], relay: Callable[[str], None]) -> None:
        self.pipe, self.relay = pipe, relay
        self._ended = threading.Event()
        self._rest = ""
        # as text files do it: \r of a progress bar ends a line, too
        self._text = io.IncrementalNewlineDecoder(codecs.getincrementaldecoder("utf-8")("replace"), translate=True)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def finish(self) -> None:
        """The command has ended: pass on what it has written, and nothing that comes after."""
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
        """Pass on the lines that are whole; False where there is nothing more."""
        *lines, self._rest = (self._rest + self._text.decode(data, final)).split("\n")
        for line in (*lines, *([self._rest] if final and self._rest else [])):
            with suppress(OSError):  # a screen that is gone; the command is not to wait for a reader
                self.relay(line)
        return bool(data)


def _waiting(number: int) -> int:
    """Bytes that are in the pipe."""
    return int(struct.unpack("i", fcntl.ioctl(number, termios.FIONREAD, bytes(4)))[0])
