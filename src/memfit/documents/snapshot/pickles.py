"""Read the plain data of a pickle that nobody vouches for, by a parser of its own: no code of the file can run.

The parser knows the opcodes that plain data needs, and refuses every other one. It keeps no class, no function and no
bytes, and keys are text, so that equal hashes cannot make a dict slow.

A snapshot is hundreds of thousands of events, each a dict with the same keys and a list of frames that many events
have in common. So an event becomes a TraceEntry when its dict is finished, and equal stacks, known by their bytes, are
one list. `_native.cpp` is the compiled twin of the parser, used where it could be built; in Python all events that
follow in the same form are read with one pattern each (`_Events`).
"""

from __future__ import annotations

import importlib
import io
import re
import struct
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, BinaryIO, NamedTuple

import msgspec

from memfit.documents.snapshot.shape import FREE_REQUESTED, TraceEntry
from memfit.errors import BadInput
from memfit.reading import bounds

HINT = "a snapshot holds plain data only; record it again with torch.cuda.memory._dump_snapshot"
AGAIN = "copy or record it again"
PROTOCOLS = (2, 3, 4, 5)
CHUNK = 1 << 20  # bytes read at a time
AHEAD = 1 << 16  # bytes that lie ahead of an opcode, before the end of the file
STOP, FRAME, MEMOIZE, LIST, LONG, STACK_GLOBAL = b".", b"\x95", b"\x94", b"]\x94", b"\x8a", b"\x93"
LONGEST_LONG = 9  # bytes of an integer: 64 bits and a sign
SHORT = 32  # bytes of a text that a pattern knows; many more make the pattern slow to compile

engine: Any = None
with suppress(ImportError):  # without a compiler, and where MEMFIT_PURE_PYTHON is set
    engine = importlib.import_module("memfit.documents.snapshot._native")

# --- patterns ---

_GET = rb"(?:h[\s\S]|j[\s\S]{4})"
_LONG = b"|".join(rb"\x8a" + re.escape(bytes([n])) + rb"[\s\S]{%d}" % n for n in range(1, LONGEST_LONG + 1))
_INT = rb"(?:K[\s\S]|M[\s\S]{2}|J[\s\S]{4}|" + _LONG + rb")"
_TEXT = b"|".join(rb"\x8c" + re.escape(bytes([n])) + rb"[\s\S]{%d}\x94" % n for n in range(SHORT))
_POOL = rb"K[\s\S]K[\s\S]\x86\x94"  # a tuple of two small integers, remembered
_VALUE = rb"(?:" + _GET + rb"|" + _POOL + rb"|" + _INT + rb"|[N\x88\x89]|" + _TEXT + rb")"
# a whole list of items from the memo alone; pickles write one of more than 1,000 items in parts
_KNOWN = re.compile(rb"\](\x94|q[\s\S]|r[\s\S]{4})((?:\(" + _GET + rb"++e(?!\())?+)")
_GETS = re.compile(_GET)
NUMBERS = ("addr", "size", "time_us")  # of an event; what else it has is mostly the same from one to the next
LONGEST_STACK = 1 << 12  # bytes in which the end of a stack is looked for without a pattern
MOST_KNOWN = 1 << 16  # numbers, and heads of events, that are remembered
MOST_FORMS = 16  # of events; a file has three
STACK = "frames"  # the key of an event's stack


def loads(content: bytes) -> Any:
    """Return the plain data in a pickle that is in memory; see `load`."""
    return load(io.BytesIO(content), len(content))


def load(file: BinaryIO, size: int) -> Any:
    """Return the plain data in a pickle of `size` bytes on disk, read piece by piece, with lists in place of tuples.

    Every event but the first is a TraceEntry; the keys of the first show the version. Raises BadInput for a damaged
    pickle and for one that holds or does anything else.
    """
    try:
        with bounds.memory(size, "the pickle", HINT):
            start = file.read(2)
            if start[:1] != b"\x80" or start[1:] not in map(bytes, zip(PROTOCOLS, strict=True)):
                raise BadInput("this is no pickle of a snapshot", hint=HINT)
            pieces = Pieces(file)
            return engine.data(pieces, sys.modules[__name__]) if engine else Parser(pieces).data()
    except msgspec.ValidationError as error:
        what = f"this is no snapshot of torch.cuda.memory: {error}"
        raise BadInput(what, hint="torch.cuda.memory._dump_snapshot writes one") from None
    except (IndexError, ValueError, TypeError, OverflowError) as error:
        what = f"{type(error).__name__}: {error}"[:200]
        raise BadInput(f"the pickle is damaged ({what})", hint=AGAIN) from None


class Pieces:
    """Returns the next bytes of a file, without the heads of frames as long as one frame follows the other."""

    def __init__(self, file: BinaryIO) -> None:
        self.file = file
        self.framed = True  # what comes next in the file is the head of a frame

    def __call__(self) -> bytes:
        head = b""
        if self.framed:
            head = self.file.read(9)
            self.framed = head.startswith(FRAME) and len(head) == 9
        if self.framed:
            left = int.from_bytes(head[1:], "little")
            body = self.file.read(min(left, CHUNK))
            self.framed = len(body) == left  # the rest of a long one is no head
            return body
        return head + self.file.read(CHUNK)


class Parser:
    """The opcodes of plain data, carried out on lists: `items` above the last mark, `outer` below it, the memo."""

    def __init__(self, pieces: Callable[[], bytes], memo: list[Any] | None = None) -> None:
        self.pieces, self.content, self.place, self.last = pieces, b"", 0, -1
        self.memo: list[Any] = [] if memo is None else memo
        self.items: list[Any] = []
        self.outer: list[list[Any]] = []
        self.places: dict[int, int] = {}  # id of a dict -> where the memo has it
        self.events = _Events(self)
        self.keeps_event = memo is None  # the first event stays a dict: its keys show the version

    def data(self) -> Any:
        """Carry out every opcode up to the end, and return what is left. Raises BadInput, or what damage causes."""
        while True:
            if self.place > self.last:
                self.read_more(1)
            code = self.content[self.place : self.place + 1]
            if code == STOP:
                return self.items.pop()
            self.place += 1
            act = _ACTS.get(code)
            if act is None:
                raise refused(code, self.items)
            act(self)

    # --- the file ---

    def read_more(self, needed: int) -> None:
        """Read on, so that at least `needed` bytes and those of the next opcode lie ahead. Raises BadInput."""
        pieces = [piece := self.content[self.place :]]
        have = len(piece)
        while (piece and have < needed + CHUNK) or len(pieces) == 1:
            pieces.append(piece := self.pieces())
            have += len(piece)
        if have < needed:
            raise too_early()
        self.content, self.place = b"".join(pieces), 0
        self.last = have - AHEAD if piece else have - 1

    def take(self, number: int) -> bytes:
        """Return the next bytes, an opcode's argument. Raises BadInput where the file ends before."""
        end = self.place + number
        if end > len(self.content):
            self.read_more(number)
            end = number
        begin, self.place = self.place, end
        return self.content[begin:end]

    def number(self, size: int, signed: bool = False) -> int:
        """Return an argument of so many bytes."""
        return int.from_bytes(self.take(size), "little", signed=signed)

    # --- what opcodes do ---

    def skip_head(self) -> None:
        """Skip the head of a frame, where one comes behind an object that is in no frame."""
        self.take(8)

    def integer(self, size: int) -> None:
        """Push an integer of 1, 2 or 4 bytes; only the last has a sign."""
        self.items.append(self.number(size, signed=size == 4))

    def long(self) -> None:
        """Push an integer with its size in front of it."""
        size = self.number(1)
        if not 0 < size <= LONGEST_LONG:
            raise long_integer(size)
        self.items.append(self.number(size, signed=True))

    def real(self) -> None:
        """Push a float."""
        self.items.append(struct.unpack(">d", self.take(8))[0])

    def text(self, size: int) -> None:
        """Push a text with its length, an integer of `size` bytes, in front of it."""
        self.items.append(self.take(self.number(size)).decode("utf-8", "surrogatepass"))

    def get(self, size: int) -> None:
        """Push what the memo has at a place."""
        self.items.append(self.memo[self.number(size)])

    def put(self, place: int) -> None:
        """Remember the last item. Pickles number what they remember without gaps."""
        if place != len(self.memo):
            raise out_of_order()
        self.memo.append(item := self.items[-1])
        if type(item) is dict:
            self.places[id(item)] = place

    def mark(self) -> None:
        """Begin the items of a list, a dict or a tuple."""
        self.outer.append(self.items)
        self.items = []

    def marked(self) -> list[Any]:
        """Return the items since the last mark."""
        items, self.items = self.items, self.outer.pop()
        return items

    def end_tuple(self) -> None:
        """Push a list of the items since the last mark, in place of a tuple."""
        items = self.marked()
        self.items.append(items)

    def gather(self, number: int) -> None:
        """Push a list of the last items in place of a tuple."""
        if len(self.items) < number:
            raise IndexError("a tuple of fewer items")
        self.items[len(self.items) - number :] = [self.items[len(self.items) - number :]]

    def begin_list(self) -> None:
        """Push a list: an empty one, or one of known items as a whole."""
        found = _KNOWN.match(self.content, self.place - 1)
        if found is None or not (found[2] or self.content.startswith(b"u", found.end())):
            self.items.append([])
            return
        self.items.append(self.events.stack(found[2]))
        self.place = found.end()
        self.put(int.from_bytes(found[1][1:], "little") if found[1] != MEMOIZE else len(self.memo))

    def begin_dict(self) -> None:
        """Push an empty dict, or as many events as follow in the known form."""
        if not self.events.follow():
            self.items.append({})

    def extend(self, items: list[Any]) -> None:
        """Add items to the list below them."""
        if type(self.items[-1]) is not list or id(self.items[-1]) in self.events.shared:
            raise TypeError("items of no list")
        self.items[-1] += items

    def set_items(self, items: list[Any]) -> None:
        """Add keys and values to the dict below them, and replace it by a TraceEntry where it is an event."""
        data, keys = self.items[-1], items[::2]
        if type(data) is not dict or not all(type(key) is str for key in keys):
            raise TypeError("keys that are no text, or of no dict")
        data.update(zip(keys, items[1::2], strict=True))
        if "action" not in data:
            return
        entry = entry_of(data)
        self.events.learn(tuple(data))
        if self.keeps_event:
            self.keeps_event = False
            return
        self.items[-1] = entry
        data.clear()  # an event that holds itself keeps it
        if (place := self.places.pop(id(data), None)) is not None:
            self.memo[place] = entry


def _acts() -> dict[bytes, Callable[[Parser], None]]:
    """Return what each opcode of plain data does."""
    acts: dict[bytes, Callable[[Parser], None]] = {
        b"K": lambda p: p.integer(1), b"M": lambda p: p.integer(2), b"J": lambda p: p.integer(4),
        b"\x8a": Parser.long, b"G": Parser.real, b"\x8c": lambda p: p.text(1), b"X": lambda p: p.text(4),
        b"N": lambda p: p.items.append(None), b"\x88": lambda p: p.items.append(True),
        b"\x89": lambda p: p.items.append(False), b"h": lambda p: p.get(1), b"j": lambda p: p.get(4),
        MEMOIZE: lambda p: p.put(len(p.memo)), b"q": lambda p: p.put(p.number(1)), b"r": lambda p: p.put(p.number(4)),
        b"(": Parser.mark, b"]": Parser.begin_list, b"}": Parser.begin_dict,
        b"e": lambda p: p.extend(p.marked()), b"a": lambda p: p.extend([p.items.pop()]),
        b"u": lambda p: p.set_items(p.marked()), b"s": lambda p: p.set_items([p.items.pop() for _ in "kv"][::-1]),
        b"t": Parser.end_tuple, b")": lambda p: p.gather(0), b"\x85": lambda p: p.gather(1),
        b"\x86": lambda p: p.gather(2), b"\x87": lambda p: p.gather(3), FRAME: Parser.skip_head,
    }  # fmt: skip
    return acts


_ACTS = _acts()


@dataclass(frozen=True, slots=True)
class _Form:
    """The patterns of an event, `before` its stack and `after` it; an event without a stack ends with the first one.

    end: the group of that end, 0 where there is none. stack_end: the bytes that end a list of known frames and begin
    what follows. heads, numbers: pick these out of the groups of both patterns. in_front: heads before the stack.
    """

    before: re.Pattern[bytes]
    after: re.Pattern[bytes] | None
    end: int
    stack_end: bytes
    heads: Callable[[Sequence[bytes]], tuple[bytes, ...]]
    numbers: Callable[[Sequence[bytes]], tuple[bytes, ...]]
    in_front: int


class _Head(NamedTuple):
    """What events with the same head share. before, after: what of it the memo keeps, around that of the stack."""

    entry: TraceEntry
    before: list[Any]
    after: list[Any]


class _Events:
    """Events in a form that has been seen: the same keys in the same order, three numbers that differ, and a stack.

    Such an event is read with one pattern, or with two where keys follow its stack. What it says beside the numbers,
    its head, is known by its bytes, and so is a stack: what the memo has at a place never changes.
    """

    def __init__(self, parser: Parser) -> None:
        self.parser = parser
        self.form: _Form | None = None
        self.forms: dict[tuple[str, ...], _Form | None] = {}
        self.gets: dict[str, bytes] = {}  # key -> the opcode that gets it from the memo
        self.heads: dict[tuple[bytes, ...], _Head] = {}
        self.integers: dict[bytes, int] = {}  # equal sizes and addresses are one object
        self.stacks: dict[bytes, list[Any]] = {}
        self.empty: list[Any] = []  # where there is no stack
        self.shared = {id(self.empty)}  # ids of these lists, to which nothing may be added

    def stack(self, gets: bytes) -> list[Any]:
        """Return the list of what the memo has at some places; the bytes are "(", the opcodes that get it, and "e".

        No bytes: a list that stays empty, since it ends a dict.
        """
        known = self.stacks.get(gets) if gets else self.empty
        if known is None:
            memo = self.parser.memo
            known = self.stacks[gets] = [memo[_integer(get)] for get in _GETS.findall(gets[1:-1])]
            self.shared.add(id(known))
        return known

    def learn(self, keys: tuple[str, ...]) -> None:
        """Expect events with these keys."""
        if keys not in self.forms and len(self.forms) < MOST_FORMS:
            self.forms[keys] = self._form(keys)
        self.form = self.forms.get(keys)

    def _form(self, keys: tuple[str, ...]) -> _Form | None:
        """Return the patterns of an event; None for an unusual one."""
        for key in keys:
            self.gets[key] = self.gets.get(key) or self._get_of(key)
        if not all(self.gets[key] for key in keys) or not set(keys) & set(NUMBERS):
            return None
        at = keys.index(STACK) if STACK in keys else len(keys)
        front, back = keys[:at], keys[at + 1 :]
        stack = re.escape(self.gets[STACK]) if STACK in keys else b""
        before = re.compile(self._groups(front, rb"\}\x94\(") + (stack if back else b"(?:(u)|" + stack + b")"))
        after = re.compile(self._groups(back) + b"u") if back else None
        parts = (front, back) if back else (front,)
        names = [name for part in parts for name in ("", *(n for k in part if k in NUMBERS for n in (k, "")))]
        places = [names.index(key) if key in names else -1 for key in NUMBERS]
        heads = [place for place, name in enumerate(names) if not name]
        return _Form(
            before, after, 0 if back else before.groups, b"e" + (self.gets[back[0]] if back else b"u"),
            itemgetter(*heads), itemgetter(*places), 1 + sum(key in NUMBERS for key in front),
        )  # fmt: skip

    def _groups(self, keys: Sequence[str], begin: bytes = b"") -> bytes:
        """Return the pattern of some keys with their values: a head, a number, the next head, and so on."""
        parts = [begin, b"("]
        for key in keys:
            get = re.escape(self.gets[key])
            parts.append(rb")%b(%b)(" % (get, _INT) if key in NUMBERS else get + _VALUE)
        return b"".join([*parts, b")"])

    def _get_of(self, key: str) -> bytes:
        """Return the opcode that gets a key from the memo, the latest of that text; b"" if it is not there."""
        memo = self.parser.memo
        place = next((n for n in range(len(memo) - 1, -1, -1) if memo[n] == key), -1)
        return b"" if place < 0 else b"h" + bytes([place]) if place < 256 else b"j" + place.to_bytes(4, "little")

    def follow(self) -> bool:
        """Read the events from here on that have the form; return whether there is one."""
        parser, form, heads, integers = self.parser, self.form, self.heads, self.integers
        content, memo, items = parser.content, parser.memo, parser.items
        begin = place = parser.place - 1
        while form is not None and place <= parser.last and (found := form.before.match(content, place)):
            groups, frames, end, listed = found.groups(), (), found.end(), False
            if not (form.end and found[form.end]):
                try:
                    frames, end, listed = self._stack_at(end, form.stack_end)
                except IndexError:  # of what is remembered later, such as the event itself
                    break
            if end and form.after:
                rest = form.after.match(content, end)
                groups, end = (groups + rest.groups(), rest.end()) if rest else (groups, 0)
            if not end:
                break
            groups += (b"",)  # of a number that the form has not
            head = heads.get(form.heads(groups)) or self._head(form, form.heads(groups))
            place, entry = end, head.entry
            if entry is not FREE_REQUESTED:
                addr, size, time_us = form.numbers(groups)
                entry = TraceEntry(
                    entry.action, integers.get(size) or self._number(size), integers.get(addr) or self._number(addr),
                    entry.stream, _integer(time_us), 0, entry.pool_id, entry.user_metadata, frames,
                )  # fmt: skip
            memo.append(entry)
            memo += head.before
            if listed:
                memo.append(frames)
            memo += head.after
            items.append(entry)
        if place > begin:
            parser.place = place
        return place > begin

    def _stack_at(self, place: int, follows: bytes) -> tuple[Any, int, bool]:
        """Return an event's stack, the place behind it, and whether the memo keeps the stack.

        Behind a stack that ends its event the next event begins. The place is 0 where the stack holds anything new.
        follows: the end of a list of known frames, and what has to come behind it.
        """
        content = self.parser.content
        if listed := content.startswith(LIST, place):
            end = content.find(follows, place, place + LONGEST_STACK) + 1  # of most stacks, which are known by then
            stack: Any = self.stacks.get(content[place + len(LIST) : end])
            if stack is None and (found := _KNOWN.match(content, place)):
                stack, end = self.stack(found[2]), found.end()
        elif get := _GETS.match(content, place):
            stack, end = self.parser.memo[_integer(get[0])], get.end()
        else:
            return (), 0, False
        if not content.startswith(follows[1:], end):
            return (), 0, False
        return stack, end + (follows == b"eu"), listed

    def _number(self, code: bytes) -> int:
        """Return an integer, the same object for the same bytes."""
        if len(self.integers) > MOST_KNOWN:
            self.integers.clear()
        return self.integers.setdefault(code, _integer(code))

    def _head(self, form: _Form, heads: tuple[bytes, ...]) -> _Head:
        """Return what events with these heads share. Raises ValidationError."""
        if len(self.heads) > MOST_KNOWN:
            self.heads.clear()
        memo, front = self.parser.memo, b"".join(heads[: form.in_front])
        start = len(memo)
        Parser(Pieces(io.BytesIO(b"(" + front + b"t.")), memo).data()
        middle = len(memo)
        del memo[start:]
        entry = Parser(Pieces(io.BytesIO(b"}(" + front + b"".join(heads[form.in_front :]) + b"u.")), memo).data()
        self.heads[heads] = _Head(entry, memo[start:middle], memo[middle:])
        del memo[start:]
        return self.heads[heads]


def _integer(code: bytes) -> int:
    """Return the integer of an opcode with its argument; b"" is 0."""
    kind = code[:1]
    return int.from_bytes(code[2 if kind == LONG else 1 :], "little", signed=kind in (LONG, b"J"))


def entry_of(data: dict[str, Any]) -> TraceEntry:
    """Return an event. Raises ValidationError."""
    entry = msgspec.convert(data, TraceEntry, strict=True)
    return FREE_REQUESTED if entry.action == FREE_REQUESTED.action else entry


# --- refusals ---


def too_early() -> BadInput:
    """Return the error for a file that ends within an opcode or between two."""
    return BadInput("the pickle ends too early", hint=AGAIN)


def out_of_order() -> BadInput:
    """Return the error for a memo with gaps."""
    return BadInput("the pickle numbers what it remembers in an order of its own", hint=HINT)


def long_integer(size: int) -> BadInput:
    """Return the error for an integer of that many bytes."""
    return BadInput(f"the pickle has an integer of {size} bytes, which no snapshot has", hint=HINT)


def refused(code: bytes, items: list[Any]) -> BadInput:
    """Return the error for an opcode that is not plain data's."""
    from pickletools import opcodes

    if code == STACK_GLOBAL and len(items) > 1:
        what = f"the pickle asks for {items[-2]}.{items[-1]}"[:200]
        return BadInput(f"{what}, which memfit does not load", hint=HINT)
    names = {op.code.encode("latin-1"): op.name for op in opcodes}
    name = names.get(code, f"the byte {code[0]:#04x}")
    return BadInput(f"the pickle has {name}, which plain data does not need and memfit does not load", hint=HINT)
