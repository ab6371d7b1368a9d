"""The noun Evidence: what a text, a traceback or a recorded history says, before anything is concluded from it."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Literal

from memfit.explain.clue import Clue
from memfit.explain.memory import Memory
from memfit.explain.oom_text import Message, messages
from memfit.explain.phases import When, when_it_failed

MOST_TEXT = 8 << 20  # characters read of a log: its end, where it failed
MOST_FRAMES = 4000
HEAD, TAIL = 16 << 10, 48 << 10  # characters whose words are read: the command and its settings, and where it failed

# a frame of Python's own traceback; of IPython's and Colab's ("File x.py:12, in f(...)", "[x.py](link) in f(...)"); of rich's
_FRAME = re.compile(
    r'File "(?P<path>[^"\n]{1,400})", line (?P<line>\d{1,7}), in (?P<name>[^\n]{1,200})'
    r'(?:\n\s{2,}(?!File ")(?P<code>[^\n]{1,400}))?'
    r"|(?<![^\s\"\[│])(?P<path2>[^\s\"\[\]│:]{1,400}\.py)(?:\](?:\([^)\n]{0,200}\))?)?(?::(?P<line2>\d{1,7}))?,? in (?P<name2>\w[\w.<>]{0,200})"
)
INSTALLED = ("site-packages", "dist-packages", "/lib/python", "<frozen")  # where no user's own code lies
CUT = (
    "/torch/",
    "/transformers/",
    "/runpy.py",
    "memfit/virtual/",
    "memfit/live/",
)  # the same in paths that a report has cut

_LOSS = re.compile(r"cross_?entropy|nll_loss|log_?softmax|logsumexp|kl_?div", re.IGNORECASE)
_AFTER = re.compile(
    r"softmax|argmax|\blogits = (?!.*lm_?head)", re.IGNORECASE
)  # done with what a model gives, once it does
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
    r"|cuda kernel errors might be asynchronously reported at some other api call[^.]{0,80}\.?",
    re.IGNORECASE,
)

_ASKED = {
    "when": "when it failed (loading, which step, evaluation, saving)",
    "sizes": "the whole message with its sizes",
    "frames": "the traceback",
}


def library(path: str) -> bool:
    """Is this file installed, rather than the user's own?"""
    return any(part in path.replace("\\", "/") for part in INSTALLED)


@dataclass(frozen=True, slots=True)
class Frame:
    """One line of a traceback."""

    path: str
    line: int
    function: str
    code: str = ""

    @property
    def library(self) -> bool:
        """It is not the user's own code."""
        return library(self.path) or any(part in self.path for part in CUT)

    @property
    def short(self) -> str:
        """train.py:41; train.py where the line is not said."""
        name = self.path.replace("\\", "/").rsplit("/", 1)[-1]
        return f"{name}:{self.line}" if self.line else name


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
    copies: int = 0  # of a collection: how many tensors it has for every weight of a model, where that is all of it
    of: str = ""  # of a collection: the classes of a library's objects in it, as "DynamicCache"

    @property
    def is_double(self) -> bool:
        """Most of a model is in 64 bits; a few numbers in a buffer are no mistake."""
        return self.what == "model" and self.double > 0.5 * self.bytes


@dataclass(frozen=True, slots=True)
class Evidence:
    """All that is known of one out-of-memory. `text` is in small letters with single spaces; `memory` is what a recorded
    history ends with, `roots` who holds tensors in a live process."""

    text: str = ""
    messages: tuple[Message, ...] = ()
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


def frames_of(text: str) -> tuple[Frame, ...]:
    """The last frames in a text, outermost first."""
    return tuple(
        Frame(
            m["path"] or m["path2"],
            int(m["line"] or m["line2"] or 0),
            (m["name"] or m["name2"]).strip(),
            (m["code"] or "").strip(),
        )
        for m in list(_FRAME.finditer(text))[-MOST_FRAMES:]
    )


def _on_the_way(frames: tuple[Frame, ...]) -> frozenset[str]:
    """Lines that name a loss, or another use of what a model gives, and failed inside of the model or of what they give it:
    `cross_entropy(model(x), y)`, `cross_entropy(out, y).backward()`, `model(x).argmax(-1)`."""
    passed, inside = set(), False
    for frame in reversed(frames):
        if _LOSS.search(f"{frame.path} {frame.function}"):  # the loss itself, and all that called it
            break
        if _LOSS.search(frame.code):
            if not (inside or ".backward(" in frame.code):
                break
            passed.add(frame.code)
        elif inside and _AFTER.search(frame.code):
            passed.add(frame.code)
        inside |= frame.function == "forward" and "/torch/" not in frame.path.replace("\\", "/")
    return frozenset(passed)


def read_text(text: str, memory: Memory | None = None, roots: tuple[Root, ...] = ()) -> Evidence:
    """What a log, a traceback or a report says."""
    words = text if len(text) <= HEAD + TAIL else f"{text[:HEAD]}\n{text[-TAIL:]}"
    text = text[-MOST_TEXT:]
    found = messages(text)
    frames = frames_of(text)
    passed = _on_the_way(frames)
    for code in passed:
        words = words.replace(code, "")
    frames = tuple(replace(f, code="") if f.code in passed else f for f in frames)
    flat = _HINT.sub("", " ".join(_FIELD.sub(" | ", _UNSET.sub(" ", _BLOB.sub(" ", words))).split()).lower())
    lines = [f"{f.path} {f.function} {f.code}" for f in frames]
    traced = " ".join([*lines, *_ERROR.findall(words)]).lower()
    when = when_it_failed(lines, words, flat)
    return Evidence(flat, found, traced, frames, when, 0, memory, roots)
