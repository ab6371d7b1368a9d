"""What a program printed, and what of it is heard: a log's sentences that are not about memory tell nothing of why it ran out.

Libraries warn of much in every run ("`use_cache=True` is incompatible with gradient checkpointing"). What people write they
write because of the failure, so of a text that nobody printed all is heard.
"""

from __future__ import annotations

import re

# what programs print, and people do not write
_PRINTED = re.compile(
    r"traceback \(most recent call last\)|file \"[^\"]{1,200}\", line \d|\d{4}-\d\d-\d\d[ t]\d\d:\d\d:\d\d|\d\d:\d\d<|%\||\{'(?:loss|train_|eval_)"
    r"|\b(?:step|epoch) \d+:? loss|slurmstepd: |srun: error|keyboardinterrupt|\[(?:info|warning|error)\]|\b[a-z]+_[a-z_]+: (?:error|allocating|failed)\b"
)
_FENCE = re.compile(r"^\s*(?:```|~~~)")  # around what people quote
_CODE = re.compile(
    r"(?:\[\w+\]:|\([^()\n]{1,80}\))?[ \t]{2,}"
)  # of a frame, behind what torchrun and Ray put before it
_MEMORY = re.compile(r"memory|\bv?ram\b|\boom|alloc|\bkill|out of|leak|spill|fragment|\d ?[gmt]i?b\b", re.IGNORECASE)
_FAILURE = re.compile(
    r'\bfile "|\.py\b|error\b|exception\b|^\s*[~^]+\s*$'
    r"|\b(?:python3?|torchrun|accelerate launch|deepspeed|srun|mpirun|horovodrun)\b|(?:^|\s)--\w"  # commands
    r"|^\s*['\"]?[\w.-]+['\"]?\s*[=:]\s*\S+(?: \S+)?\s*,?\s*$|\w=\S+,"  # settings
    r"|^[\w ]{1,24}: ",  # fields of a form
    re.IGNORECASE,
)
# warnings, the lines of a printed model, and settings as they come
_NOTHING = re.compile(
    r"\w*Warning: |^\s*\(\w+\): (?:\d+ x )?\w+\(|^\s*\(\d+(?:-\d+)?\): "
    r"|[\"']use_cache[\"']: true|vocab_size[\"']?[:=]|use_reentrant[\"']?[:=] ?false|\bnccl version "
    r"|quant_storage[\"']?[:=] ?[\"']?(?:torch\.)?uint8",
    re.IGNORECASE,
)


def is_printed(text: str) -> bool:
    """Did a program print some of it? `text` is in small letters."""
    return _PRINTED.search(text) is not None


def heard_of(text: str) -> str:
    """A text without the printed lines that tell nothing of memory; as it is where nothing in it was printed."""
    if not is_printed(text.lower()):
        return text
    lines, kept = text.splitlines(keepends=True), []
    fenced = any(_FENCE.match(line) for line in lines)
    quoted, frame = not fenced, False
    for line in lines:
        if _FENCE.match(line):
            quoted = not quoted
        elif not quoted or _tells(line) or (frame and _CODE.match(line)):
            kept.append(line)
        frame = 'File "' in line or (frame and _CODE.match(line) is not None)
    return "".join(kept)


def _tells(line: str) -> bool:
    """Is a printed line about memory, the failure, or a setting that is not always there?"""
    return bool(_MEMORY.search(line) or (_FAILURE.search(line) and not _NOTHING.search(line)))
