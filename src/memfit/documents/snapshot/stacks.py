"""Whole stacks of a snapshot: what was alive at the end of the recording, by the calls it was born under."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from memfit.documents.snapshot import pickled
from memfit.documents.snapshot.shape import shaped, text_of

Stacks = dict[tuple[str, ...], int]
DEEPEST = 60  # calls kept of a stack, from the outermost
UNKNOWN: tuple[str, ...] = ("no stack recorded",)


def stacks_of(path: Path, device: int) -> Stacks:
    """Bytes by stack, outermost call first, of one card; {} for what is no snapshot. What no tensor has is left out."""
    data = pickled(path)
    if data is None:
        return {}
    segments = shaped(data).segments
    del data
    found: Stacks = {}
    names: dict[int, tuple[str, ...]] = {}  # by identity of the frames' list: blocks share them
    for segment in segments:
        for block in segment.blocks if segment.device == device else ():
            if block.state == "inactive":
                continue
            known = names.get(id(block.frames))
            stack = names.setdefault(id(block.frames), _names(block.frames)) if known is None else known
            found[stack] = found.get(stack, 0) + block.size
    return found


def _names(frames: Any) -> tuple[str, ...]:
    if not isinstance(frames, list | tuple):
        return UNKNOWN
    named = [_name(frame) for frame in reversed(frames) if isinstance(frame, dict)]
    return tuple(name for name in named if name)[:DEEPEST] or UNKNOWN


def _name(frame: dict[str, Any]) -> str:
    """'forward (model.py:7)'; '' for frames of C++."""
    path = text_of(frame.get("filename", "")).replace("\\", "/")
    return (
        f"{text_of(frame.get('name', ''))} ({path.rsplit('/', 1)[-1]}:{frame.get('line', 0)})"[:200]
        if path.endswith(".py")
        else ""
    )
