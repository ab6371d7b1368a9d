"""A pickle's bytes with a hook after dicts and lists: each is handed over when it is complete, and can be made small.

A snapshot is some hundred thousand dicts of events with lists of frames: as Python objects five to ten times the file. The
unpickler cannot be told of a finished dict, but it calls `persistent_load` for the opcode BINPERSID with what lies on its stack;
so that opcode is put behind every SETITEMS. A list of things that were there before is noted in the memo only behind the hook,
so that the memo, which lives until the end, keeps what the hook made of it. Opcodes that plain data does not need are not known here: `hooked` gives up
at the first, and the pickle is read as it is.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import BinaryIO

CHUNK = 1 << 15  # bytes of a frame written, and read at a time
_BYTES = {1: b"Kh", 2: b"M", 4: b"Jj", 8: b"G"}  # opcodes by the length of their argument
_TEXT = b"|".join(rb"\x8c" + re.escape(bytes([n])) + rb"[\s\S]{%d}" % n for n in range(256))
_LONG = b"|".join(rb"\x8a" + re.escape(bytes([n])) + rb"[\s\S]{%d}" % n for n in range(1, 10))
_KNOWN = rb"\x94\((?:h[\s\S]|j[\s\S]{4})++e"  # MEMOIZE, MARK, one or more of BINGET, APPENDS: items from the memo alone
_PLAIN = b"|".join(
    (
        rb"[\x94(})eat\x85\x86\x87\x88\x89Ns]",
        *(rb"[" + re.escape(codes) + rb"][\s\S]{%d}" % length for length, codes in _BYTES.items()),
        _LONG,
        _TEXT,
        rb"\](?!" + _KNOWN + rb")",
    )
)
_RUN = re.compile(rb"((?:" + _PLAIN + rb")*+)(u|\]" + _KNOWN + rb"|\x95[\s\S]{8}|\.|X[\s\S]{4})")
SETITEMS, STOP, BINPERSID, FRAME, LONG_TEXT, PROTO = b"u", b".", b"Q", b"\x95", b"X", b"\x80\x04"
LIST, MEMOIZE = b"]", b"\x94"


class NotPlain(ValueError):
    """An opcode that is not known here."""


def hooked(file: BinaryIO) -> Iterator[bytes] | None:
    """The same pickle in pieces, BINPERSID behind every SETITEMS and every list of what is known; None for what is no plain protocol 4."""
    return _pieces(file) if file.read(len(PROTO)) == PROTO else None


def _pieces(file: BinaryIO) -> Iterator[bytes]:
    """Raises NotPlain."""
    yield PROTO
    content, place, size = b"", 0, 0
    made: list[bytes] = []
    while True:
        found = _RUN.match(content, place)
        ends = found[2] if found else b""
        text = int.from_bytes(ends[1:], "little") if ends.startswith(LONG_TEXT) else 0  # its length stands before it
        if found is None or len(content) - found.end() < text:
            rest = content[place:]
            more = file.read(max(CHUNK, len(rest), text))  # as much again: no run is matched more than a few times
            if not more:
                raise NotPlain(f"opcode {rest[:1]!r} {len(rest)} bytes before the end")
            content, place = rest + more, 0
            continue
        place = found.end() + text
        made += (found[1], _hook(ends))
        size += place - found.start() + 2
        if text:
            made += (ends, content[found.end() : place])
        if size >= CHUNK or ends == STOP:
            body = b"".join(made)
            yield FRAME + len(body).to_bytes(8, "little") + body
            made, size = [], 0
        if ends == STOP:
            return


def _hook(ends: bytes) -> bytes:
    """What stands for the end of a run; a frame's head and a long text's are written elsewhere."""
    if ends == SETITEMS:
        return SETITEMS + BINPERSID
    if ends.startswith(LIST):
        return LIST + ends[2:] + BINPERSID + MEMOIZE
    return STOP if ends == STOP else b""


class Stream:
    """The pieces as the file an Unpickler reads."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self.pieces, self.rest, self.place = pieces, b"", 0

    def read(self, size: int = -1) -> bytes:
        """`size` bytes, fewer at the end."""
        while len(self.rest) - self.place < size:
            piece = next(self.pieces, None)
            if piece is None:
                break
            self.rest, self.place = self.rest[self.place :] + piece, 0
        found = self.rest[self.place : self.place + size]
        self.place += len(found)
        return found

    def readline(self) -> bytes:
        """No opcode of plain data reads lines."""
        return b""
