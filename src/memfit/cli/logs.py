"""Read logs of any length in bounded memory: whole, or their head, their end and the surroundings of each message.

Standard input is always read to its end, because closing the pipe would end a program that is still writing.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import BinaryIO

from memfit.documents import recipe_file, watch_log
from memfit.errors import BadInput
from memfit.explain.oom_message import BEGINS, LONGEST, WORDS
from memfit.nouns.sample import Watched
from memfit.reading import bounds
from memfit.units import human

WHOLE = 8 << 20  # bytes up to which a log is kept whole
PACKED_WHOLE = 1 << 20  # the same where it is packed, since what it takes is to grow with its bytes on disk
UNPACKS, LEAST_UNPACKED = 200, 256 << 20  # times, and bytes, that a packed log may unpack to; progress bars: 50 times
CHUNK = 1 << 20
HEAD, TAIL = 64 << 10, 1 << 20  # bytes kept of a longer log: its command and settings, and its end
BEFORE, AFTER = 128 << 10, 32 << 10  # bytes kept around a message: the tracebacks of all ranks, and what followed
FIRST, MOST = 4, 32  # messages whose surroundings are kept: the first FIRST and the last, MOST in all
NEAR = 300  # bytes around a word of WORDS in which the beginning of a message must match

_BEGIN = tuple(re.compile(words.encode()) for _, words in BEGINS)
_UTF_16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)  # as PowerShell's > writes


@dataclass(frozen=True, slots=True)
class LogText:
    """The part of a log that was kept, and the number of bytes that were not."""

    content: bytes
    left_out: int = 0


@dataclass(slots=True)
class _Piece:
    begin: int
    content: bytes

    @property
    def end(self) -> int:
        return self.begin + len(self.content)


def read_log(file: BinaryIO, head: bytes = b"", packed: int = 0) -> LogText:
    """Read all of `file`, or the parts listed above; `head` holds the bytes that were already read from it.

    packed: its bytes on disk where it is unpacked while it is read. Raises BadInput where it unpacks to far more.
    """
    whole = PACKED_WHOLE if packed else WHOLE
    content = head + file.read(whole + 1 - len(head))
    wide = content.startswith(_UTF_16)
    if len(content) <= whole:
        return LogText(content.decode("utf-16", "replace").encode() if wide else content)
    most = max(LEAST_UNPACKED, UNPACKS * packed) if packed else 0
    return _sifted(_narrow(content, file, most) if wide else _chunks(content, file, most))


def _chunks(content: bytes, file: BinaryIO, most: int) -> Iterator[bytes]:
    for begin in range(0, len(content), CHUNK):
        yield content[begin : begin + CHUNK]
    size = len(content)
    while content := file.read(CHUNK):
        size += len(content)
        if most and size > most:
            raise BadInput(f"the log unpacks to more than {human(most)}", hint="unpack it first: gunzip FILE")
        yield content


def _narrow(content: bytes, file: BinaryIO, most: int) -> Iterator[bytes]:
    decoder = codecs.getincrementaldecoder("utf-16")("replace")
    for chunk in _chunks(content, file, most):
        yield decoder.decode(chunk).encode()


def _sifted(chunks: Iterator[bytes]) -> LogText:
    """Return head, surroundings of messages and end. The buffer keeps bytes that a later message may need."""
    head, places, buffer, base, done, size = b"", list[_Piece](), b"", 0, 0, 0
    for chunk in chain(chunks, (b"",)):
        size += len(chunk)
        head += chunk[: HEAD - len(head)]
        buffer += chunk
        until = size if not chunk else max(size - AFTER, done)
        for hit in _hits(buffer.lower(), done - base, until - base):
            begin, end = max(base + hit - BEFORE, base, places[-1].end if places else 0), base + hit + AFTER
            if not places or base + hit + LONGEST > places[-1].end:
                places.append(_Piece(begin, buffer[begin - base : end - base]))
        del places[FIRST : FIRST + max(len(places) - MOST, 0)]
        done = until
        spare = max(len(buffer) - TAIL - BEFORE, 0)
        buffer, base = buffer[spare:], base + spare
    tail = buffer[-TAIL:]
    return _joined([_Piece(0, head), *places, _Piece(size - len(tail), tail)], size)


def _hits(text: bytes, begin: int, end: int) -> Iterator[int]:
    """Yield where messages begin in [begin, end) of a lower-case text."""
    found = set[int]()
    for word in WORDS:
        at = text.find(word, begin, end + len(word))
        while 0 <= at < end:
            found.add(at)
            at = text.find(word, at + 1, end + len(word))
    for at in sorted(found):
        around = text[max(at - NEAR, 0) : at + NEAR]
        if any(words.search(around) for words in _BEGIN):
            yield at


def _joined(pieces: list[_Piece], size: int) -> LogText:
    """Join the pieces in order, each byte once, with a newline where something was left out."""
    kept, end, left_out = list[bytes](), 0, 0
    for piece in pieces:
        if piece.end <= end:
            continue
        if piece.begin > end:
            left_out += piece.begin - end
            kept.append(b"\n")
        kept.append(piece.content[max(end - piece.begin, 0) :])
        end = piece.end
    return LogText(b"".join(kept), left_out + size - end)


def read_watched(path: Path) -> Watched:
    """Return the last run in a log."""
    try:
        content = bounds.content_of(path, watch_log.MOST, "give a log of memfit watch")
        with bounds.memory(len(content), str(path), "give a log of memfit watch"):
            return watch_log.loads(content)
    except BadInput as error:
        raise error if str(path) in error.message else recipe_file.in_file(error, path) from None
