"""Unpickling of untrusted files: plain data only, no class or function, one kind of error.

The unpickler sees nothing that `hooked` has not read before: the opcodes that plain data needs, and no others. Every
dict and tuple that is finished, and every list of items that are all known already, is given to a function of memfit.
The unpickler does not report them, but for the opcode BINPERSID it calls `persistent_load` with what lies on its stack;
so `hooked` writes that opcode behind every SETITEMS, every tuple, and every such list. For the latter MEMOIZE comes
after the hook, so that the memo, which lives until the end, keeps what the hook made of it.

A snapshot is some hundred thousand dicts of events with lists of frames, as Python objects five to ten times the file:
the hook makes them small while they are read. A tuple becomes a list, which is no key of a dict: tuples, and integers
of more than nine bytes, can be made to have equal hashes, and a dict of n such keys takes n * n steps.
"""

from __future__ import annotations

import io
import pickle
import re
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO, NoReturn

import msgspec

from memfit.errors import BadInput
from memfit.reading import bounds

HINT = "a snapshot holds plain data only; record it again with torch.cuda.memory._dump_snapshot"

CHUNK = 1 << 15  # bytes of a frame that is written, and bytes read at a time
_BYTES = {1: b"Khq", 2: b"M", 4: b"Jjr", 8: b"G"}  # opcodes by the length of their argument in bytes
_TEXT = b"|".join(rb"\x8c" + re.escape(bytes([n])) + rb"[\s\S]{%d}" % n for n in range(256))
_LONG = b"|".join(rb"\x8a" + re.escape(bytes([n])) + rb"[\s\S]{%d}" % n for n in range(1, 10))
_KNOWN = rb"\x94\((?:h[\s\S]|j[\s\S]{4})++e"  # MEMOIZE, MARK, one or more of BINGET, APPENDS: items from the memo alone
_PLAIN = b"|".join(
    (
        rb"[\x94(})ea\x88\x89Ns012]",
        *(rb"[" + re.escape(codes) + rb"][\s\S]{%d}" % length for length, codes in _BYTES.items()),
        _LONG,
        _TEXT,
        rb"\](?!" + _KNOWN + rb")",
    )
)
_RUN = re.compile(rb"((?:" + _PLAIN + rb")*+)([ut\x85\x86\x87]|\]" + _KNOWN + rb"|\x95[\s\S]{8}|\.|X[\s\S]{4})")
STOP, BINPERSID, FRAME, LONG_TEXT, STACK_GLOBAL = b".", b"Q", b"\x95", b"X", b"\x93"
FINISHED = (b"u", b"t", b"\x85", b"\x86", b"\x87")  # SETITEMS and the tuples
LIST, MEMOIZE = b"]", b"\x94"
PROTOS = tuple(bytes([0x80, number]) for number in (2, 3, 4, 5))
# opcodes whose argument may be cut off at the end
STRUCTURE = tuple(bytes([code]) for code in b"KhqMJjrG\x8a\x8cX\x95]")


class HookedUnpickler(pickle.Unpickler):
    """Replaces every finished dict and every list of known items by what `small` returns for it."""

    small: Callable[[Any], Any]

    def find_class(self, module: str, name: str) -> NoReturn:
        """Refuse every class and function; `hooked` has refused the opcodes that ask for one."""
        raise BadInput(f"the pickle asks for {module}.{name}"[:200] + ", which memfit does not load", hint=HINT)

    def persistent_load(self, pid: Any) -> Any:
        """Return what replaces a finished object. `hooked` refuses the pickle's own persistent ids."""
        return list(pid) if type(pid) is tuple else self.small(pid)


def loads(content: bytes, small: Callable[[Any], Any] | None = None) -> Any:
    """Return the plain data in a pickle that is in memory; see `load`."""
    return load(io.BytesIO(content), len(content), small)


def load(file: BinaryIO, size: int, small: Callable[[Any], Any] | None = None) -> Any:
    """Return the plain data in a pickle of `size` bytes on disk, read piece by piece, with lists in place of tuples.

    small: returns the object to keep in place of each complete dict and list. Raises BadInput for a damaged pickle and
    for one that holds or does anything else.
    """
    try:
        with bounds.memory(size, "the pickle", HINT):
            unpickler = HookedUnpickler(HookedFile(hooked(file)))
            unpickler.small = small or (lambda found: found)
            return unpickler.load()
    except (BadInput, KeyboardInterrupt):
        raise
    except msgspec.ValidationError as error:
        what = f"this is no snapshot of torch.cuda.memory: {error}"
        raise BadInput(what, hint="torch.cuda.memory._dump_snapshot writes one") from None
    except Exception as error:  # a damaged pickle raises almost anything: EOFError, KeyError, UnicodeDecodeError ...
        what = f"{type(error).__name__}: {error}"[:200]
        raise BadInput(f"the pickle is damaged ({what})", hint="copy or record it again") from None


# --- the plain opcodes, and a hook after every dict, tuple and list of known items ---


def hooked(file: BinaryIO) -> Iterator[bytes]:
    """Yield the same pickle in pieces, with the hooks in it. Raises BadInput at an opcode that is not plain data's."""
    start = file.read(2)
    if start not in PROTOS:
        raise BadInput("this is no pickle of a snapshot", hint=HINT)
    yield start
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
                plain = _plain_run(rest)
                if rest.startswith(STACK_GLOBAL, plain):  # `find_class` refuses it by name
                    yield b"".join([*made, rest[:plain], STACK_GLOBAL])
                raise _not_plain(rest[plain:])
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


def _plain_run(content: bytes) -> int:
    """Return how many bytes at the beginning are opcodes within a run."""
    found = re.match(rb"(?:" + _PLAIN + rb")*+", content)
    return found.end() if found else 0


def _not_plain(rest: bytes) -> BadInput:
    """Return the error for a pickle whose rest begins with no opcode of plain data."""
    from pickletools import opcodes

    code = rest[:1]
    if not code or code in STRUCTURE:
        return BadInput("the pickle ends too early", hint="copy or record it again")
    names = {op.code.encode("latin-1"): op.name for op in opcodes}
    name = names.get(code, f"the byte {code[0]:#04x}")
    return BadInput(f"the pickle has {name}, which plain data does not need and memfit does not load", hint=HINT)


def _hook(ends: bytes) -> bytes:
    """Return what replaces the end of a run. Heads of frames and long texts are written elsewhere."""
    if ends in FINISHED:
        return ends + BINPERSID
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
