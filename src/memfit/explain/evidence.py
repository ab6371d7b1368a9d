"""The noun Evidence: what a text, a traceback or a recorded history says, before anything is concluded from it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from memfit.explain.clue import Clue
from memfit.explain.frames import Frame, heard, scripts
from memfit.explain.memory import Memory
from memfit.explain.oom_message import Message, messages
from memfit.explain.phases import When, when_it_failed
from memfit.explain.printed import heard_of

MOST_TEXT = 8 << 20  # characters read of a log: its end, where it failed
HEAD, TAIL = 16 << 10, 48 << 10  # characters whose words are read: the command and its settings, and where it failed

_ERROR = re.compile(r"^(?:\S{1,40}: )?[\w.]{0,100}(?:Error|Exception|Warning): [^\n]{1,400}", re.MULTILINE)
_BLOB = re.compile(r"\S{300,}")  # no word: data, a progress bar
# settings that are not set, and defaults: a run that prints all of its arguments names every mechanism there is
_NOTHING = r"(?:none|null|false|\[\]|\{\}|''|\"\")"
_UNSET = re.compile(
    rf"^[ \t]*[\w.\"'-]+[ \t]*[:=][ \t]*{_NOTHING}?,?[ \t]*$|(?<![\w.])\w+={_NOTHING},|(?<![\w.])--?[\w-]+[= ](?:none|null|false)\b"
    r"|(?<![\w.])(?:accelerator|fsdp)_config=\{[^{}\n]{0,400}\},|(?<![\w.])local_rank=(?:0|-1),",
    re.IGNORECASE | re.MULTILINE,
)
_FIELD = re.compile(r"\n(?=[\w ]{1,24}: )")  # "framework: x full", "model: y" are two things
# what PyTorch adds to every message says nothing of this one
_HINT = re.compile(  # what PyTorch and CUDA write behind every such error
    r"(?:if reserved [^.,]{0,40},? )?try setting \S{1,60} to avoid fragmentation\.?"
    r"|see documentation for memory management(?: and pytorch_\w+)?(?: \([^)]{0,120}\))?\.?"
    r"|cuda kernel errors might be asynchronously reported at some other api call[^.]{0,80}\.?",
    re.IGNORECASE,
)

_ASKED = {
    "when": "when it failed (loading, which step, evaluation, saving)",
    "sizes": "the whole message with its sizes",
    "frames": "the traceback",
}


# how people name the models that lie beside the one they train
OTHER_MODEL = re.compile(r"(?:\b|_|model)(?:ref|teacher|ema|old|best|frozen|backup|copy)", re.IGNORECASE)
REFERENCE = re.compile(r"^ref|reference|teacher", re.IGNORECASE)
SAVED = "modules_to_save"  # in the names of weights that PEFT trains whole
KEEPERS = ("collection", "graph", "state", "hook")  # `what` of variables that keep what passes made


@dataclass(frozen=True, slots=True)
class Root:
    """A variable of a failing program that keeps memory of the card: `what` says how.

    A "graph" is that of a single number, as losses are; a "state" has one, too, and more numbers.
    """

    name: str
    line: str  # "train.py:12": the line that puts the tensors there
    what: Literal["collection", "graph", "state", "model", "models", "part", "exception", "hook"]
    bytes: int
    count: int = 1
    wide: int = 0  # of a model: bytes of it in 32 bits
    double: int = 0  # of a model: bytes of it in 64 bits
    trained: int = 0  # of a model: bytes of its weights that are trained
    waiting: int = 0  # of a model: bytes of its weights that are not on the card yet
    copies: int = 0  # of a collection: how many tensors it has for every weight of a model, where that is all of it
    of: str = ""  # of a collection: the classes of a library's objects in it, as "DynamicCache"

    @property
    def is_double(self) -> bool:
        """Most of a model is in 64 bits; a few numbers in a buffer are no mistake."""
        return self.what == "model" and self.double > 0.5 * self.bytes


@dataclass(frozen=True, slots=True)
class Evidence:
    """All that is known of one out-of-memory. `text` is in small letters with single spaces, `told` what of it is heard of the
    cause, `prose` that without the code of tracebacks; `memory` is what a recorded history ends with, `roots` who holds
    tensors in a live process."""

    text: str = ""
    messages: tuple[Message, ...] = ()
    told: str = ""
    prose: str = ""
    traced: str = ""  # of the text, what the program itself printed when it failed: frames, and the lines of its errors
    frames: tuple[Frame, ...] = ()  # outermost first
    when: When = ""
    words: int = 0  # of the model's vocabulary, where the model is known
    memory: Memory | None = None
    roots: tuple[Root, ...] = ()
    seen: tuple[Clue, ...] = ()  # what a watch of the run found already

    def root(self, *whats: str) -> Root | None:
        """The variable of these kinds that keeps most."""
        return max((root for root in self.roots if root.what in whats), key=lambda root: root.bytes, default=None)

    @property
    def models(self) -> tuple[Root, ...]:
        """The largest first."""
        return tuple(sorted((root for root in self.roots if root.what == "model"), key=lambda root: -root.bytes))

    @property
    def message(self) -> Message | None:
        """The one that says most."""
        return self.messages[0] if self.messages else None

    @property
    def shortfall(self) -> int | None:
        """Bytes that were missing, at least."""
        m, memory = self.message, self.memory
        if memory is not None and memory.asked and memory.capacity is not None:
            return max(memory.asked - (memory.capacity - memory.allocated), 0)
        return max(m.tried - m.free, 0) if m and m.tried is not None and m.free is not None else None

    @property
    def lacks(self) -> tuple[str, ...]:
        """What a text does not say, and a better answer could be read from; () beside a history, which says all of it."""
        if self.memory is not None:
            return ()
        killed = self.message is not None and self.message.kind == "host"  # leaves neither sizes of a card nor frames
        sizes = killed or (self.message is not None and self.message.facts > 1)
        said = ((self.when, "when"), (sizes, "sizes"), (killed or self.frames, "frames"))
        return tuple(_ASKED[name] for known, name in said if not known)

    @property
    def line(self) -> str:
        """The innermost line of the user's own code; without a traceback, of the request that failed."""
        asked = self.memory.line if self.memory is not None else ""
        return next((frame.short for frame in reversed(self.frames) if not frame.library), asked)


def read_text(text: str, memory: Memory | None = None, roots: tuple[Root, ...] = ()) -> Evidence:
    """What a log, a traceback or a report says."""
    frames, quiet, said, prose = heard(text[-MOST_TEXT:])
    words, flat = _flat(text, said)
    started = scripts(frames)

    def shown(frame: Frame) -> str:
        return f"{'' if frame.path in started else frame.path} {frame.function} {frame.code}"

    traced = " ".join([*map(shown, quiet), *_ERROR.findall(words)]).lower()
    when = when_it_failed(list(map(shown, frames)), words, flat)
    told, spoken = (_flat(text, heard_of(part))[1] for part in (said, prose))
    return Evidence(flat, messages(said), told, spoken, traced, frames, when, 0, memory, roots)


def _flat(text: str, said: str) -> tuple[str, str]:
    """Head and tail of what is heard of a text; and these in small letters on one line, without what says nothing."""
    head = text[:HEAD] if len(text) > MOST_TEXT else said[:HEAD]
    words = said if len(said) <= HEAD + TAIL else f"{head}\n{said[-TAIL:]}"
    flat = " ".join(_FIELD.sub(" | ", _UNSET.sub(" ", _BLOB.sub(" ", words))).split()).lower()
    return words, _HINT.sub("", flat)
