"""A pickle's bytes with a hook after every dict: each is handed over when it is complete, and can be made small.

A snapshot is some hundred thousand dicts of events with lists of frames: as Python objects five to ten times the file. The
unpickler cannot be told of a finished dict, but it calls `persistent_load` for the opcode BINPERSID with what lies on its stack;
so that opcode is put behind every SETITEMS. Opcodes that plain data does not need are not known here: `hooked` gives up
at the first, and the pickle is read as it is.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

CHUNK = 1 << 18  # bytes of a frame written
_BYTES = {1: b"Kh", 2: b"M", 4: b"Jj", 8: b"G"}  # opcodes by the length of their argument
_TEXT = b"|".join(rb"\x8c" + re.escape(bytes([n])) + rb"[\s\S]{%d}" % n for n in range(256))
_LONG = b"|".join(rb"\x8a" + re.escape(bytes([n])) + rb"[\s\S]{%d}" % n for n in range(1, 10))
_PLAIN = b"|".join(
    (
        rb"[\x94(}\])eat\x85\x86\x87\x88\x89Ns]",
        *(rb"[" + re.escape(codes) + rb"][\s\S]{%d}" % length for length, codes in _BYTES.items()),
        _LONG,
        _TEXT,
    )
)
_RUN = re.compile(rb"((?:" + _PLAIN + rb")*+)(u|\x95[\s\S]{8}|\.|X[\s\S]{4})")
SETITEMS, STOP, BINPERSID, FRAME, LONG_TEXT, PROTO = b"u", b".", b"Q", b"\x95", b"X", b"\x80\x04"


class NotPlain(ValueError):
    """An opcode that is not known here."""


def hooked(content: bytes) -> Iterator[bytes] | None:
    """The same pickle in pieces, BINPERSID behind every SETITEMS; None for what is no plain protocol 4."""
    return _pieces(content) if content.startswith(PROTO) else None


def _pieces(content: bytes) -> Iterator[bytes]:
    """Raises NotPlain."""
    yield PROTO
    place, made, size = len(PROTO), [], 0
    while True:
        found = _RUN.match(content, place)
        if found is None:
            raise NotPlain(f"opcode {content[place : place + 1]!r} at or after byte {place}")
        place = found.end()
        made.append(found[1])
        size += len(found[1])
        ends = found[2]
        if ends == SETITEMS:
            made.append(SETITEMS + BINPERSID)
            size += 2
        elif ends == STOP:
            made.append(STOP)
        elif ends.startswith(LONG_TEXT):  # its length stands before it
            text = content[place : place + int.from_bytes(ends[1:], "little")]
            place += len(text)
            made += (ends, text)
            size += len(ends) + len(text)
        if size >= CHUNK or ends == STOP:
            body = b"".join(made)
            yield FRAME + len(body).to_bytes(8, "little") + body
            made, size = [], 0
        if ends == STOP:
            return


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
