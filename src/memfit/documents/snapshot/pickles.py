"""Unpickling of untrusted files: plain data only, no class or function, bounded memory, one kind of error.

A snapshot is some hundred thousand dicts of events with lists of frames, as Python objects five to ten times the
file. The second half of this module makes them small while they are read. The unpickler does not report a finished
dict, but for the opcode BINPERSID it calls `persistent_load` with what lies on its stack; so `hooked` writes that
opcode behind every SETITEMS, and behind every list of items that are all known already. For such a list MEMOIZE comes
after the hook, so that the memo, which lives until the end, keeps what the hook made of it. `hooked` gives up at the
first opcode that plain data does not need, and the pickle is then read as it is.
"""

from __future__ import annotations

import io
import pickle
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO, NoReturn

import msgspec

from memfit.errors import BadInput

# Objects take this many times the bytes of their pickle. Source: 3 to 5 for four recorded snapshots; an empty dict,
# one byte in the file, takes 64 bytes.
BYTES_PER_BYTE = 64
FLOOR = 256 << 20  # bytes any file may take
HINT = "a snapshot holds plain data only; record it again with torch.cuda.memory._dump_snapshot"

CHUNK = 1 << 15  # bytes of a frame that is written, and bytes read at a time
_BYTES = {1: b"Kh", 2: b"M", 4: b"Jj", 8: b"G"}  # opcodes by the length of their argument in bytes
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


class PlainUnpickler(pickle.Unpickler):
    """Loads lists, tuples, dicts, text, numbers and None, and refuses anything else."""

    def find_class(self, module: str, name: str) -> NoReturn:
        """Refuse every class and function."""
        raise BadInput(f"the pickle asks for {module}.{name}"[:200] + ", which memfit does not load", hint=HINT)

    def persistent_load(self, pid: Any) -> Any:
        """Refuse references to objects outside of the pickle."""
        raise BadInput("the pickle refers to objects outside of it", hint=HINT)


class HookedUnpickler(PlainUnpickler):
    """Replaces every finished dict and every list of known items by what `small` returns for it."""

    small: Callable[[Any], Any]

    def persistent_load(self, pid: Any) -> Any:
        """Return what `small` makes of it. `hooked` gives up at a persistent id of the pickle's own."""
        return self.small(pid)


def loads(content: bytes, small: Callable[[Any], Any] | None = None) -> Any:
    """Return the plain data in a pickle that is in memory; see `load`."""
    return load(io.BytesIO(content), len(content), small)


def load(file: BinaryIO, size: int, small: Callable[[Any], Any] | None = None) -> Any:
    """Return the plain data in a pickle of `size` bytes, read piece by piece.

    small: returns the object to keep in place of each complete dict and list; it is not called for an unusual pickle.
    Raises BadInput for a damaged pickle and for one that holds or does anything else.
    """
    try:
        with _bounded(FLOOR + BYTES_PER_BYTE * size):
            return _hooked(file, small) if small else PlainUnpickler(file).load()
    except BadInput:
        raise
    except MemoryError:
        raise BadInput("the pickle would take far more memory than its size explains", hint=HINT) from None
    except Exception as error:  # a damaged pickle raises almost anything: EOFError, KeyError, UnicodeDecodeError ...
        what = f"{type(error).__name__}: {error}"[:200]
        raise BadInput(f"the pickle is damaged ({what})", hint="copy or record it again") from None


def _hooked(file: BinaryIO, small: Callable[[Any], Any]) -> Any:
    pieces = hooked(file)
    if pieces is not None:
        unpickler = HookedUnpickler(HookedFile(pieces))
        unpickler.small = small
        try:
            return unpickler.load()
        except (NotPlain, msgspec.ValidationError, pickle.UnpicklingError):
            pass  # the plain unpickler reports what is wrong
    file.seek(0)
    return PlainUnpickler(file).load()


@contextmanager
def _bounded(extra: int) -> Iterator[None]:
    """Allow no more than `extra` bytes of address space on top of those in use, where it can be limited (Linux).

    A pickle of a few bytes can ask for a table of 2^32 entries, which the unpickler would fill.
    """
    try:
        import resource

        with open("/proc/self/statm", "rb") as file:  # noqa: PTH123  (no Path for a file of one line)
            pages = int(file.read().split()[0])
        soft, hard = resource.getrlimit(resource.RLIMIT_AS)
        limit = pages * resource.getpagesize() + extra
        if soft != resource.RLIM_INFINITY:
            limit = min(limit, soft)
        resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    except (ImportError, OSError, ValueError):
        yield
        return
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


# --- a hook after every dict and every list of known items ---


class NotPlain(ValueError):
    """The pickle has an opcode that plain data does not need."""


def hooked(file: BinaryIO) -> Iterator[bytes] | None:
    """Return the same pickle in pieces, with the hooks in it; None for what is no pickle of protocol 4."""
    return _pieces(file) if file.read(len(PROTO)) == PROTO else None


def _pieces(file: BinaryIO) -> Iterator[bytes]:
    """Yield the pieces. Raises NotPlain."""
    yield PROTO
    content, place, size = b"", 0, 0
    made: list[bytes] = []
    while True:
        found = _RUN.match(content, place)
        ends = found[2] if found else b""
        text = int.from_bytes(ends[1:], "little") if ends.startswith(LONG_TEXT) else 0  # the length in front of it
        if found is None or len(content) - found.end() < text:
            rest = content[place:]
            # twice as much each time: no run is matched more than a few times
            more = file.read(max(CHUNK, len(rest), text))
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
    """Return what replaces the end of a run. Heads of frames and long texts are written elsewhere."""
    if ends == SETITEMS:
        return SETITEMS + BINPERSID
    if ends.startswith(LIST):
        return LIST + ends[2:] + BINPERSID + MEMOIZE
    return STOP if ends == STOP else b""


class HookedFile:
    """The pieces of a hooked pickle as a file that an Unpickler reads."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self.pieces, self.rest, self.place = pieces, b"", 0

    def read(self, size: int = -1) -> bytes:
        """Return `size` bytes, fewer at the end."""
        while len(self.rest) - self.place < size:
            piece = next(self.pieces, None)
            if piece is None:
                break
            self.rest, self.place = self.rest[self.place :] + piece, 0
        found = self.rest[self.place : self.place + size]
        self.place += len(found)
        return found

    def readline(self) -> bytes:
        """Return nothing: no opcode of plain data reads lines."""
        return b""
