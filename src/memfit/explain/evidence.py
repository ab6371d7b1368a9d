"""The nouns Evidence and Clue: what a text, a watched run or a recorded history shows, and what it points at.

Nothing is concluded here. A Clue is one observation with the cause it points at and a weight; the rules of `text` and
`history` make them, and `memfit.explain.explain` weighs them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from memfit.explain.frames import Frame, read_tracebacks, relevant_lines, scripts
from memfit.explain.memory import Group, Memory
from memfit.explain.oom_message import messages
from memfit.explain.phases import When, when_it_failed
from memfit.nouns.finding import Cause, Part, Proof
from memfit.nouns.message import Message
from memfit.nouns.sample import Leak, Watched
from memfit.units import human

# ---- clues -----------------------------------------------------------------------------------------------------------

# Weights of clues. SURE: code or a number of one mechanism alone. FIRM and below: several mechanisms may show the same
SURE, FIRM, STRONG, WEAK, FAINT = 90, 82, 70, 50, 30
SHOWN = 10  # added to what a history shows, so that it outweighs what a text shows of the same failure


@dataclass(frozen=True, slots=True)
class Clue:
    """One observation and the cause it points at.

    `line` is the user's own line, where it is known. `measured`: seen in a frame, an error's own line, the numbers of a
    message or a history. It is false for settings and for sums that assume what is not stated; only measured clues make
    a finding certain.
    """

    cause: Cause
    weight: int
    proof: Proof
    line: str = ""
    measured: bool = True


# ---- variables of a failing program ----------------------------------------------------------------------------------

# names that people give to models beside the one they train
OTHER_MODEL = re.compile(r"(?:\b|_|model)(?:ref|teacher|ema|old|best|frozen|backup|copy)", re.IGNORECASE)
REFERENCE = re.compile(r"^ref|reference|teacher", re.IGNORECASE)
SAVED = "modules_to_save"  # in the names of weights that PEFT trains whole
KEEPERS = ("collection", "graph", "state", "hook")  # kinds of variables that keep tensors of forward passes


@dataclass(frozen=True, slots=True)
class Root:
    """A variable of a failing program that keeps memory of the card alive.

    `what` is its kind. A "graph" is the autograd graph of a single number, as a loss has; a "state" has a graph and
    more numbers.
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
        """Is most of a model in 64 bits? A few numbers in a buffer are no mistake."""
        return self.what == "model" and self.double > 0.5 * self.bytes


# ---- evidence --------------------------------------------------------------------------------------------------------

MOST_TEXT = 8 << 20  # characters read of a log: its end, where it failed
HEAD, TAIL = 16 << 10, 48 << 10  # characters that are searched: the command and its settings, and the failure

_ERROR = re.compile(r"^(?:\S{1,40}: )?[\w.]{0,100}(?:Error|Exception|Warning): [^\n]{1,400}", re.MULTILINE)
_BLOB = re.compile(r"\S{300,}")  # data or a progress bar
# settings that are not set, and defaults: a run that prints all of its arguments names every mechanism there is
_NOTHING = r"(?:none|null|false|\[\]|\{\}|''|\"\")"
_UNSET = re.compile(
    rf"^[ \t]*[\w.\"'-]+[ \t]*[:=][ \t]*+{_NOTHING}?,?[ \t]*$|(?<![\w.])\w+={_NOTHING},|"
    rf"(?<![\w.-])--?[\w-]+[= ](?:none|null|false)\b"
    r"|(?<![\w.])(?:accelerator|fsdp)_config=\{[^{}\n]{0,400}\},|(?<![\w.])local_rank=(?:0|-1),",
    re.IGNORECASE | re.MULTILINE,
)
_FIELD = re.compile(r"\n(?=[\w ]{1,24}: )")  # a new line with a new field: words on both sides do not belong together
_HINT = re.compile(  # what PyTorch and CUDA append to every such error
    r"(?:if reserved [^.,]{0,40},? )?try setting \S{1,60} to avoid fragmentation\.?"
    r"|see documentation for memory management(?: and pytorch_\w+)?(?: \([^)]{0,120}\))?\.?"
    r"|cuda kernel errors might be asynchronously reported at some other api call[^.]{0,80}\.?",
    re.IGNORECASE,
)
_LACKING = {
    "when": "when it failed (loading, which step, evaluation, saving)",
    "sizes": "the whole message with its sizes",
    "frames": "the traceback",
}
SNAPSHOT = "a snapshot of torch.cuda.memory, which shows who held the memory"


@dataclass(frozen=True, slots=True)
class Estimate:
    """memfit's own estimate of the run as its file describes it, in bytes.

    `need` is the reserved peak, `largest` the role with most bytes of tensors when most are alive, `instant` that
    moment. `without` has the tensors at the worst instant where one of its settings is off, by the setting's name:
    ("sharding", 131 GiB).
    """

    need: int
    largest: tuple[Part, int] = ("unknown", 0)
    instant: str = ""
    without: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Evidence:
    """Everything known about one out-of-memory error.

    The texts are in lower case, on one line, without what libraries append to every error. `text` has the code of a
    traceback's innermost frames; `relevant` is the same without a log's ordinary lines; `outside_code` is `relevant`
    without any code of frames; `failure` is only what the program printed when it failed: frames and error lines.
    """

    text: str = ""
    messages: tuple[Message, ...] = ()
    relevant: str = ""
    outside_code: str = ""
    failure: str = ""
    frames: tuple[Frame, ...] = ()  # outermost first
    when: When = ""
    vocabulary: int = 0  # tokens of the model's vocabulary, where the model is known
    memory: Memory | None = None  # what a recorded history ends with
    roots: tuple[Root, ...] = ()  # variables of a live process that hold tensors
    clues: tuple[Clue, ...] = ()  # what a watch of the run has found already
    estimate: Estimate | None = None  # of the file that describes the run, where it is given

    def root(self, *whats: str) -> Root | None:
        """Return the variable of these kinds that keeps most bytes."""
        return max((root for root in self.roots if root.what in whats), key=lambda root: root.bytes, default=None)

    @property
    def models(self) -> tuple[Root, ...]:
        """The models among the roots, the largest first."""
        return tuple(sorted((root for root in self.roots if root.what == "model"), key=lambda root: -root.bytes))

    @property
    def message(self) -> Message | None:
        """The message with the most sizes."""
        return self.messages[0] if self.messages else None

    @property
    def shows_nothing(self) -> bool:
        """Is there neither a history, a frame nor a size of a message?"""
        sizes = any(message.facts for message in self.messages)
        return self.memory is None and not (sizes or self.frames or self.clues)

    @property
    def shortfall(self) -> int | None:
        """Bytes that were missing, at least."""
        m, memory = self.message, self.memory
        if memory is not None and memory.asked and memory.capacity is not None:
            return max(memory.asked - (memory.capacity - memory.allocated), 0)
        return max(m.tried - m.free, 0) if m and m.tried is not None and m.free is not None else None

    @property
    def held(self) -> int:
        """Bytes of tensors that were alive, with the request that failed; 0 where they are not known."""
        m, memory = self.message, self.memory
        if memory is not None:
            return memory.requested + memory.asked
        return m.allocated + (m.tried or 0) if m and m.allocated else 0

    @property
    def lacks(self) -> tuple[str, ...]:
        """What is missing in a text and would tell its possible causes apart; () where there is a history."""
        if self.memory is not None:
            return ()
        killed = self.message is not None and self.message.kind == "host"  # leaves neither sizes of a card nor frames
        sizes = killed or (self.message is not None and self.message.facts > 1)
        present = ((self.when, "when"), (sizes, "sizes"), (killed or self.frames, "frames"))
        return tuple(_LACKING[name] for shown, name in present if not shown) or (SNAPSHOT,) * (not killed)

    @property
    def line(self) -> str:
        """The innermost line of the user's own code; without a traceback, the line of the request that failed."""
        requested_at = self.memory.line if self.memory is not None else ""
        return next((frame.short for frame in reversed(self.frames) if not frame.library), requested_at)


def read_text(text: str, memory: Memory | None = None, roots: tuple[Root, ...] = ()) -> Evidence:
    """Read a log or a traceback."""
    traced = read_tracebacks(text[-MOST_TEXT:])
    words, flat = _flat(text, traced.with_code)
    started = scripts(traced.frames)

    def printed(frame: Frame) -> str:
        return f"{'' if frame.path in started else frame.path} {frame.function} {frame.code}"

    failure = " ".join([*map(printed, traced.innermost), *_ERROR.findall(words)]).lower()
    when = when_it_failed(list(map(printed, traced.frames)), flat)
    relevant, outside = (_flat(text, relevant_lines(part))[1] for part in (traced.with_code, traced.without_code))
    return Evidence(flat, messages(traced.with_code), relevant, outside, failure, traced.frames, when, 0, memory, roots)


def _flat(text: str, part: str) -> tuple[str, str]:
    """Return head and tail of a part of a text; and these in lower case, on one line, without unset settings."""
    head = text[:HEAD] if len(text) > MOST_TEXT else part[:HEAD]
    words = part if len(part) <= HEAD + TAIL else f"{head}\n{part[-TAIL:]}"
    flat = " ".join(_FIELD.sub(" | ", _UNSET.sub(" ", _BLOB.sub(" ", words))).split()).lower()
    return words, _HINT.sub("", flat)


# ---- a watched run ---------------------------------------------------------------------------------------------------

BETWEEN = "there between steps"  # in place of a line: the roles were measured between steps


def read_watch(run: Watched) -> Evidence:
    """Read a watched run: its highest sample, if it has one, the roles it measured, and its leaks."""
    leaks = tuple(map(_leak, run.leaks))
    if not run.samples:
        return Evidence(clues=leaks)
    top = max(run.samples, key=lambda sample: sample.peak.allocated)
    size = top.peak.allocated
    groups = [Group(role, BETWEEN, share, 1, share) for role, share in run.shares if share]
    rest = size - sum(group.bytes for group in groups)
    if rest > 0:
        groups.append(Group("unknown", "in a step, or of unknown role", rest, 1, rest))
    reserved = max(top.peak.reserved, size) if run.header.meter == "cuda" else size  # only CUDA's meter measures it
    failed = next((alarm.bytes for alarm in run.alarms if alarm.kind == "failed"), 0)
    memory = Memory(size, size, reserved, run.header.total or None, failed, top.phase, "", tuple(groups))
    return Evidence(memory=memory, clues=leaks)


def _leak(leak: Leak) -> Clue:
    """Return a leak as a clue, at the line of the variable that keeps most of it."""
    holder = leak.holders[0] if leak.holders else None
    kept = f", kept by '{holder.name}'" if holder else ""
    proof = Proof(f"{human(leak.per_step)} more every {leak.unit} since {leak.unit} {leak.since}{kept}", leak.bytes)
    return Clue("leak", SURE + SHOWN + 5, proof, holder.place if holder else "")
