"""The parts of a log that are evidence: frames of tracebacks, and printed lines about memory or the failure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

MOST_FRAMES = 4000
INNERMOST = (
    2  # frames outside of PyTorch in which a library's code shows what was done; further out it passes values on
)

# a line that is no frame, after the prefixes that torchrun and Ray print
_NEXT = r'\n(?:\[\w+\]:|\([^()\n]{1,80}\))?(?![ \t]*File ")'
# a frame of Python's own traceback; of IPython's and Colab's ("File x.py:12, in f(...)", "[x.py](link) in f(...)"); of
# rich's
_FRAME = re.compile(
    r'File "(?P<path>[^"\n]{1,400})", line (?P<line>\d{1,7}), in (?P<name>[^\n]{1,200})'
    rf"(?:{_NEXT}[ \t]{{2,}}(?P<code>\S[^\n]{{0,399}}))?"
    r"|(?<![^\s\"\[│])(?P<path2>[^\s\"\[\]│:]{1,400}\.py)(?:\](?:\([^)\n]{0,200}\))?)?"
    r"(?::(?P<line2>\d{1,7}))?,? in (?P<name2>\w[\w.<>]{0,200})"
)
# the further lines of a statement, as Python 3.13 prints it, and its carets
_REST = re.compile(rf"(?:{_NEXT}[ \t]{{4,}}[^\n]*)*")
_ENDS = re.compile(r"Traceback \(most recent|\w(?:Error|Exception)\b")  # between the frames of two tracebacks
INSTALLED = ("site-packages", "dist-packages", "/lib/python", "<frozen")  # folders without the user's own code
# the same in paths whose beginning a report has cut, or of packages that lie in a folder of their own
CUT = (
    "/torch/", "/transformers/", "/accelerate/utils/", "/peft/tuners/", "/trl/trainer/", "/deepspeed/runtime/",
    "/runpy.py", "memfit/virtual/", "memfit/live/", "memfit/train/",
)  # fmt: skip
_TORCH = re.compile(r"[/\\]torch[/\\]")
# code of image models, which have no tokens
CONVOLUTIONS = r"\bresnet|torchvision/models|batch_?norm\(|\bconv[123]d\b|densenet|mobilenet|efficientnet|\bvgg"

_LOSS = re.compile(
    r"cross_?entropy|nll_loss|log_?softmax|logsumexp|kl_?div|convert_(?:outputs_)?to_fp32", re.IGNORECASE
)
# what is done with the output of a model after it returned
_AFTER = re.compile(r"softmax|argmax|\blogits = (?!.*lm_?head)", re.IGNORECASE)


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
        """Is it not the user's own code?"""
        return library(self.path) or any(part in self.path for part in CUT)

    @property
    def short(self) -> str:
        """train.py:41; train.py where the line is not printed."""
        name = self.path.replace("\\", "/").rsplit("/", 1)[-1]
        return f"{name}:{self.line}" if self.line else name


@dataclass(frozen=True, slots=True)
class Traced:
    """A text with its tracebacks read.

    `frames` are outermost first, without code that names a loss and failed elsewhere (see _elsewhere). `innermost` are
    the same without the code of a library's outer frames. `with_code` is the text with the code of `innermost` alone,
    `without_code` the text without any code of frames; neither has the names of the scripts that were started.
    """

    frames: tuple[Frame, ...]
    innermost: tuple[Frame, ...]
    with_code: str
    without_code: str


def frames_of(text: str) -> tuple[Frame, ...]:
    """Return the last frames in a text, outermost first."""
    return tuple(map(_frame, _matches(text)))


def read_tracebacks(text: str) -> Traced:
    """Read the tracebacks of a text and drop the lines of code that do not show what failed.

    A library's line of code shows what was done where it is one of the innermost; further out it only names what it
    passes on, as every model's `attn_output, attn_weights = attention_interface(`.
    """
    found = _matches(text)
    frames = tuple(map(_frame, found))
    misleading = _elsewhere(frames)
    outer = _outer(text, found)
    dropped = [frame.code in misleading or (frame.library and far) for frame, far in zip(frames, outer, strict=True)]
    innermost = tuple(replace(frame, code="") if drop else frame for frame, drop in zip(frames, dropped, strict=True))
    kept = tuple(replace(frame, code="") if frame.code in misleading else frame for frame in frames)
    return Traced(kept, innermost, _without(text, found, dropped), _without(text, found, [True] * len(found)))


def scripts(frames: Sequence[Frame]) -> frozenset[str]:
    """Return the files that were started: their names do not show why one of their lines failed."""
    return frozenset(frame.path for frame in frames if frame.function == "<module>" and not frame.library)


def _without(text: str, found: Sequence[re.Match[str]], dropped: Sequence[bool]) -> str:
    """Return the text without the code of the dropped frames, and without the names of scripts in any frame."""
    started = scripts(tuple(map(_frame, found)))
    parts, end = [], 0
    for match, drop in zip(found, dropped, strict=True):
        path = "path" if match["path"] else "path2"
        if match[path] in started:
            parts.append(text[end : match.start(path)])
            end = match.end(path)
        if drop and match["code"]:
            parts.append(text[end : match.start("code")])
            rest = _REST.match(text, match.end("code"))
            end = rest.end() if rest else match.end("code")
    return "".join([*parts, text[end:]])


def _matches(text: str) -> list[re.Match[str]]:
    return list(_FRAME.finditer(text))[-MOST_FRAMES:]


def _frame(m: re.Match[str]) -> Frame:
    code = (m["code"] or "").strip()
    return Frame(m["path"] or m["path2"], int(m["line"] or m["line2"] or 0), (m["name"] or m["name2"]).strip(), code)


def _outer(text: str, found: Sequence[re.Match[str]]) -> list[bool]:
    """Return for each frame whether INNERMOST or more frames outside of PyTorch lie further in."""
    further, outer = 0, []
    ends = [_ENDS.search(text, this.end(), after.start()) is not None for this, after in pairwise(found)]
    for match, end in zip(reversed(found), reversed([*ends, True]), strict=False):
        further = 0 if end else further
        outer.append(further >= INNERMOST)
        further += not _TORCH.search(match["path"] or match["path2"])
    return outer[::-1]


def _elsewhere(frames: tuple[Frame, ...]) -> frozenset[str]:
    """Return lines of code that name a loss, or another use of a model's output, but failed inside the model or its
    backward.

    Examples: `cross_entropy(model(x), y)`, `cross_entropy(out, y).backward()`, `model(x).argmax(-1)`, and the wrapper
    that accelerate puts around every pass, `convert_to_fp32(self.model_forward(*args, **kwargs))`.
    """
    passed, inside = set(), False
    for frame in reversed(frames):
        if _LOSS.search(f"{frame.path} {frame.function}"):  # the loss itself failed: its callers name it rightly
            break
        if _LOSS.search(frame.code):
            if not (inside or ".backward(" in frame.code):
                break
            passed.add(frame.code)
        elif inside and _AFTER.search(frame.code):
            passed.add(frame.code)
        inside |= frame.function == "forward" and not _TORCH.search(frame.path)
    return frozenset(passed)


# ---- printed lines ---------------------------------------------------------------------------------------------------

# patterns that programs print and people do not write
_PRINTED = re.compile(
    r"traceback \(most recent call last\)|file \"[^\"]{1,200}\", line \d|\d{4}-\d\d-\d\d[ t]\d\d:\d\d:\d\d|"
    r"\d\d:\d\d<|%\||\{'(?:loss|train_|eval_)"
    r"|\b(?:step|epoch) \d+:? loss|slurmstepd: |srun: error|keyboardinterrupt|\[(?:info|warning|error)\]|"
    r"\b[a-z]+_[a-z_]+: (?:error|allocating|failed)\b"
)
_CODE = re.compile(r"(?:\[\w+\]:|\([^()\n]{1,80}\))?[ \t]{2,}")  # of a frame, after torchrun's and Ray's prefixes
_MEMORY = re.compile(r"memory|\bv?ram\b|\boom|alloc|\bkill|out of|leak|spill|fragment|\d ?[gmt]i?b\b", re.IGNORECASE)
_FAILURE = re.compile(
    r'\bfile "|\.py\b|error\b|exception\b|^\s*[~^]+\s*$'
    r"|\b(?:python3?|torchrun|accelerate launch|deepspeed|srun|mpirun|horovodrun)\b|(?:^|\s)--\w"  # commands
    r"|^\s*['\"]?[\w.-]+['\"]?\s*[=:]\s*\S+(?: \S+)?\s*,?\s*$|\w=[^\s,]{1,400},"  # settings
    r"|^[\w ]{1,24}: ",  # fields of a form
    re.IGNORECASE,
)
# warnings, the lines of a printed model, and settings that are at their defaults
_ORDINARY = re.compile(
    r"Warning: |^\s*\(\w+\): (?:\d+ x )?\w+\(|^\s*\(\d+(?:-\d+)?\): "
    r"|[\"']use_cache[\"']: true|vocab_size[\"']?[:=]|use_reentrant[\"']?[:=] ?false|\bnccl version "
    r"|quant_storage[\"']?[:=] ?[\"']?(?:torch\.)?uint8",
    re.IGNORECASE,
)


def is_printed(text: str) -> bool:
    """Did a program print some of this text? It must be in lower case."""
    return _PRINTED.search(text) is not None


def relevant_lines(text: str) -> str:
    """Return a log without the lines that libraries print in every run, and any other text unchanged."""
    if not is_printed(text.lower()):
        return text
    kept, in_frame = [], False
    for line in text.splitlines(keepends=True):
        code = in_frame and _CODE.match(line) is not None
        if code or _MEMORY.search(line) or (_FAILURE.search(line) and not _ORDINARY.search(line)):
            kept.append(line)
        in_frame = code or 'File "' in line
    return "".join(kept)
