"""A watched run as JSON lines and back: one line per sample, written as it happens; versioned, and checked when read.

The first line of a run is its header. A file may hold several runs one after the other (a run that was resumed) or at
once (a script that watches itself, started by `memfit watch`): the `run_id` of each line distinguishes them. A line cut
short by a crash or a full disk is left out, and so are lines of a run whose header is gone where another run has one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from memfit.errors import BadInput, Unsupported
from memfit.nouns.sample import Alarm, Header, Leak, Sample, Watched
from memfit.nouns.tape import Role

SCHEMA = "memfit.watch/1"  # raised when a key changes its meaning or goes, not when one is added
HINT = "give a file written by memfit watch or memfit.watch(...)"
Shares = tuple[tuple[Role, int], ...]
KINDS: dict[str, Any] = {"run": Header, "sample": Sample, "alarm": Alarm, "leak": Leak, "shares": Shares}
_NAME_OF = {Header: "run", Sample: "sample", Alarm: "alarm", Leak: "leak"}
MOST = 8 << 30  # bytes of the largest log that is read; a sample takes some hundred
BEGINS = (b'{"type":"', b'{"schema":"')  # every line that `line` and `shares_line` return
USUAL = {"counted": True, "every": 1, "whole_card": False}  # left out of samples
UNCOUNTED = {"requested": 0, "allocated": 0, "reserved": 0}  # what a sample without counted tensors leaves out
_ENCODE = msgspec.json.Encoder().encode


def line(noun: Header | Sample | Alarm | Leak, run_id: str = "") -> bytes:
    """Return one noun as one line, with its end. run_id: the same in every line of a run."""
    kind = _NAME_OF[type(noun)]
    head = ({"schema": SCHEMA} if kind == "run" else {}) | _kind(kind, run_id)
    plain = msgspec.to_builtins(noun)
    if isinstance(noun, Sample):
        plain = {key: value for key, value in plain.items() if value != USUAL.get(key)}
        if not noun.counted:
            plain |= {when: {"device": plain[when]["device"]} for when in ("now", "peak")}
    return _ENCODE(head | plain) + b"\n"


def shares_line(shares: Shares, run_id: str = "") -> bytes:
    """Return the bytes by role that lie on the card between steps, as one line."""
    return _ENCODE(_kind("shares", run_id) | {"roles": dict(shares)}) + b"\n"


def _kind(kind: str, run_id: str) -> dict[str, str]:
    return {"type": kind} | ({"run_id": run_id} if run_id else {})


def known(content: bytes) -> bool:
    """Does this content begin like such a file?"""
    return content.startswith(b'{"schema":"memfit.watch/')


def loads(content: bytes) -> Watched:
    """Return the run that began last. Raises BadInput for another kind of file, Unsupported for another version."""
    runs = list(runs_of(content))
    if not runs:
        raise BadInput("no watched run in the file", hint=HINT)
    return runs[-1]


def runs_of(content: bytes, damaged: list[int] | None = None) -> Iterator[Watched]:
    """Yield every run in a file, in the order of their headers.

    damaged: takes the numbers of unreadable lines, instead of an error. Samples whose header is damaged are left out
    then.
    """
    runs: list[list[Any]] = []
    written: dict[str, list[Any]] = {}  # the run that lines of each run_id belong to
    lines = content.split(b"\n")
    for number, text in enumerate(lines, 1):
        if not text.strip():
            continue
        try:
            run_id, noun = _noun(text, number, number == len(lines) or (damaged is None and _cut_short(text)))
        except BadInput:
            if damaged is None:
                raise
            damaged.append(number)
            continue
        if noun is None or not (isinstance(noun, Header) or run_id in written or damaged is None):
            continue
        if isinstance(noun, Header) or run_id not in written:
            runs.append([])
            written[run_id] = runs[-1]
        written[run_id].append(noun)
    begun = [run for run in runs if isinstance(run[0], Header)]
    if runs and not begun:
        hint = "a rotated or truncated log: its header is in the earlier part, and the next run writes another"
        raise BadInput("the file does not begin with a header", hint=hint)
    yield from map(_watched, begun)


def _cut_short(text: bytes) -> bool:
    """Return whether a line begins as lines of a log do."""
    return any(text.startswith(begin) or begin.startswith(text) for begin in BEGINS)


def _noun(text: bytes, number: int, cut: bool) -> tuple[str, Any]:
    """Return (run_id, noun) of a line; no noun for a line of a kind that a later version adds.

    cut: whether the line may have been cut short; then it has no noun either where it is no JSON.
    """
    try:
        data = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError, UnicodeError) as error:
        if cut:
            return "", None
        raise BadInput(f"line {number} is not valid JSON: {error}", hint=HINT) from None
    kind = data.pop("type", None) if isinstance(data, dict) else None
    if not isinstance(kind, str):
        raise BadInput(f"line {number} has no type", hint=HINT)
    if kind not in KINDS:
        return "", None
    run_id = str(data.pop("run_id", ""))
    if kind == "run" and data.pop("schema", None) != SCHEMA:
        raise Unsupported(f"line {number} is not of schema {SCHEMA}", hint="pip install --upgrade memfit")
    if kind == "sample" and data.get("counted") is False:
        data |= {when: UNCOUNTED | data[when] for when in ("now", "peak") if isinstance(data.get(when), dict)}
    try:
        plain = list(data.get("roles", {}).items()) if kind == "shares" else data
        return run_id, msgspec.convert(plain, KINDS[kind], strict=True)
    except (msgspec.ValidationError, AttributeError, RecursionError, OverflowError) as error:
        raise BadInput(f"line {number} is wrong: {error}", hint=HINT) from None


def _watched(run: list[Any]) -> Watched:
    shares: Shares = ()
    for noun in run:
        if isinstance(noun, tuple):
            shares = noun
    return Watched(
        run[0],
        tuple(noun for noun in run if isinstance(noun, Sample)),
        tuple(noun for noun in run if isinstance(noun, Alarm)),
        tuple(noun for noun in run if isinstance(noun, Leak)),
        shares,
    )
