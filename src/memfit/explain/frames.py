"""The frames of tracebacks in a text, and which of their lines of code tell of the failure rather than of the way to it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

MOST_FRAMES = 4000
INNERMOST = 2  # frames outside of PyTorch in which a library's code tells what was done; further out it hands things on

_NEXT = r'\n(?:\[\w+\]:|\([^()\n]{1,80}\))?(?![ \t]*File ")'  # a line that is no frame, behind what torchrun and Ray put before it
# a frame of Python's own traceback; of IPython's and Colab's ("File x.py:12, in f(...)", "[x.py](link) in f(...)"); of rich's
_FRAME = re.compile(
    r'File "(?P<path>[^"\n]{1,400})", line (?P<line>\d{1,7}), in (?P<name>[^\n]{1,200})'
    rf"(?:{_NEXT}[ \t]{{2,}}(?P<code>\S[^\n]{{0,399}}))?"
    r"|(?<![^\s\"\[│])(?P<path2>[^\s\"\[\]│:]{1,400}\.py)(?:\](?:\([^)\n]{0,200}\))?)?(?::(?P<line2>\d{1,7}))?,? in (?P<name2>\w[\w.<>]{0,200})"
)
_REST = re.compile(
    rf"(?:{_NEXT}[ \t]{{4,}}[^\n]*)*"
)  # of a statement of several lines, as Python 3.13 prints it; and its carets
_ENDS = re.compile(r"Traceback \(most recent|\w(?:Error|Exception)\b")  # between the frames of two tracebacks
INSTALLED = ("site-packages", "dist-packages", "/lib/python", "<frozen")  # where no user's own code lies
CUT = (
    "/torch/",
    "/transformers/",
    "/runpy.py",
    "memfit/virtual/",
    "memfit/live/",
    "memfit/run/",
)  # the same in paths that a report has cut

_TORCH = re.compile(r"[/\\]torch[/\\]")

_LOSS = re.compile(
    r"cross_?entropy|nll_loss|log_?softmax|logsumexp|kl_?div|convert_(?:outputs_)?to_fp32", re.IGNORECASE
)
_AFTER = re.compile(
    r"softmax|argmax|\blogits = (?!.*lm_?head)", re.IGNORECASE
)  # done with what a model gives, once it does


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


def frames_of(text: str) -> tuple[Frame, ...]:
    """The last frames in a text, outermost first."""
    return tuple(map(_frame, _matches(text)))


def heard(text: str) -> tuple[tuple[Frame, ...], tuple[Frame, ...], str, str]:
    """(frames, the same without the code that tells nothing, the text without that, the text without any code).

    A library's line of code tells what was done where it is one of the innermost; further out it names what it hands on,
    as every model's `attn_output, attn_weights = attention_interface(`. A user's line tells nothing of what is done with
    the result of a call that failed; nor does the name of the script that was started.
    """
    found = _matches(text)
    frames = tuple(map(_frame, found))
    passed = _on_the_way(frames)
    mute = [
        frame.code in passed or (frame.library and far)
        for frame, far in zip(frames, _far(text, found), strict=True)
    ]  # fmt: skip
    quiet = tuple(replace(frame, code="") if silent else frame for frame, silent in zip(frames, mute, strict=True))
    said = _without(text, found, mute)
    frames = tuple(replace(frame, code="") if frame.code in passed else frame for frame in frames)
    return frames, quiet, said, _without(text, found, [True] * len(found))


def scripts(frames: Sequence[Frame]) -> frozenset[str]:
    """The files that were started: what they are called says nothing of why one of their lines failed."""
    return frozenset(frame.path for frame in frames if frame.function == "<module>" and not frame.library)


def _without(text: str, found: Sequence[re.Match[str]], mute: Sequence[bool]) -> str:
    """The text without the code of the frames that are mute, and without the names of scripts in any."""
    started = scripts(tuple(map(_frame, found)))
    parts, end = [], 0
    for match, silent in zip(found, mute, strict=True):
        path = "path" if match["path"] else "path2"
        if match[path] in started:
            parts.append(text[end : match.start(path)])
            end = match.end(path)
        if silent and match["code"]:
            parts.append(text[end : match.start("code")])
            rest = _REST.match(text, match.end("code"))
            end = rest.end() if rest else match.end("code")
    return "".join([*parts, text[end:]])


def _matches(text: str) -> list[re.Match[str]]:
    return list(_FRAME.finditer(text))[-MOST_FRAMES:]


def _frame(m: re.Match[str]) -> Frame:
    code = (m["code"] or "").strip()
    return Frame(m["path"] or m["path2"], int(m["line"] or m["line2"] or 0), (m["name"] or m["name2"]).strip(), code)


def _far(text: str, found: Sequence[re.Match[str]]) -> list[bool]:
    """Of each frame: are there INNERMOST or more of its traceback further in? PyTorch's own are not counted."""
    further, far = 0, []
    ends = [_ENDS.search(text, this.end(), after.start()) is not None for this, after in pairwise(found)]
    for match, end in zip(reversed(found), reversed([*ends, True]), strict=False):
        further = 0 if end else further
        far.append(further >= INNERMOST)
        further += not _TORCH.search(match["path"] or match["path2"])
    return far[::-1]


def _on_the_way(frames: tuple[Frame, ...]) -> frozenset[str]:
    """Lines that name a loss, or another use of what a model gives, and failed inside of the model or of what they give it:
    `cross_entropy(model(x), y)`, `cross_entropy(out, y).backward()`, `model(x).argmax(-1)`, and accelerate's around every pass,
    `convert_to_fp32(self.model_forward(*args, **kwargs))`."""
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
        inside |= frame.function == "forward" and not _TORCH.search(frame.path)
    return frozenset(passed)
