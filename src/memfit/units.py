"""Convert sizes and lengths to text and back, only here: GiB is 2^30, GB is 10^9 and always labelled.

Lengths count tokens; their k is 1024 and their M is 1024 k, as in the names of models: 128k is 131,072 positions.
"""

from __future__ import annotations

import re

from memfit.errors import BadInput

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
GB = 10**9
LARGEST = 1 << 61  # bytes: two exbibytes, more than any machine has

_FACTOR = {
    "b": 1, "": 1,
    "k": 1000, "kb": 1000, "kib": KIB,
    "m": 10**6, "mb": 10**6, "mib": MIB,
    "g": GB, "gb": GB, "gib": GIB,
    "t": 10**12, "tb": 10**12, "tib": 1 << 40,
}  # fmt: skip
_SIZE = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*$")
_LENGTH = re.compile(r"(-?\d+(?:\.\d+)?) *([km]?)", re.IGNORECASE)
_TOKENS = {"": 1, "k": 1024, "m": 1024**2}


def gib(size: int, digits: int = 1) -> str:
    """Return bytes as a bare number of GiB (2^30), for table columns whose head names the unit."""
    return f"{size / GIB:.{digits}f}"


def rough(size: int) -> str:
    """Return bytes for running text: '4.5 GiB', or a smaller unit where GiB would round to 0.0: '12.3 MiB'."""
    return human(size) if 0 < abs(size) < GIB // 10 else f"{gib(size)} GiB"


def cell(size: int, unit: str, digits: int = 1) -> str:
    """Return bytes as a bare number for a table: GiB with `digits`, smaller units with 2; '<0.1' where it is not 0."""
    digits, shown = (digits, gib(size, digits)) if unit == "GiB" else (2, in_unit(size, unit))
    return f"<{10**-digits:.{digits}f}" if size > 0 and not float(shown.replace(",", "")) else shown


def shared_unit(largest: int) -> str:
    """Return the unit of a table whose largest number is `largest` bytes: GiB, or MiB for small runs."""
    return "GiB" if largest >= GIB else "MiB"


def in_unit(size: int, unit: str) -> str:
    """Return bytes as a bare number of `unit`, for table columns whose head names it."""
    value = size / _FACTOR[unit.lower()]
    return f"{value:,.{1 if abs(value) >= 100 else 2}f}"


def several(count: int, noun: str) -> str:
    """Return a count with its noun: "1 step", "2,048 steps"."""
    return f"{count:,} {noun}{'s' * (count != 1)}"


def human(size: int) -> str:
    """Return bytes in the largest binary unit not above them, with three figures: 1536 -> '1.50 KiB'."""
    sign, size = ("-", -size) if size < 0 else ("", size)
    for unit, factor in (("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if size >= factor:
            value = size / factor
            return f"{sign}{value:.{2 if value < 10 else 1 if value < 100 else 0}f} {unit}"
    return f"{sign}{size} B"


def parse_size(text: str) -> int:
    """Parse '40GiB', '24 GB', '512MiB' or plain bytes into bytes. GB is 10^9, GiB is 2^30."""
    found = _SIZE.match(text)
    factor = _FACTOR.get(found.group(2).lower()) if found else None
    if found is None or factor is None:
        raise BadInput(f"'{text[:40]}' is not a size", hint="write it as 40GiB, 24GB or 512MiB")
    size = float(found.group(1)) * factor
    if size > LARGEST:
        raise BadInput(f"'{text[:40]}' is more than any machine has", hint="write it as 40GiB, 24GB or 512MiB")
    return round(size)


def parse_length(text: str) -> int:
    """Parse '2048', '2,048', '8k', '128K' or '1M' into tokens. k is 1024, M is 1024 k."""
    found = _LENGTH.fullmatch(text.strip().replace(",", "").replace("_", ""))
    tokens = float(found[1]) * _TOKENS[found[2].lower()] if found else 0.5
    if tokens % 1:
        raise BadInput(f"'{text[:40]}' is not a length in tokens", hint="write it as 2048, 8k (8192) or 1M (1048576)")
    return int(tokens)


def short_length(tokens: int) -> str:
    """Return a length as `parse_length` reads it, short where it is a round one: 8192 -> '8k', 3000 -> '3,000'."""
    for unit, factor in (("M", _TOKENS["m"]), ("k", _TOKENS["k"])):
        if tokens and tokens % factor == 0:
            return f"{tokens // factor}{unit}"
    return f"{tokens:,}"


def billions(count: int) -> str:
    """Return a parameter count with a unit: 6738415616 -> '6.74 B'."""
    for unit, factor in (("T", 10**12), ("B", 10**9), ("M", 10**6), ("k", 10**3)):
        if count >= factor:
            return f"{count / factor:.{2 if count < 100 * factor else 1}f} {unit}"
    return str(count)


def share_of_samples(truncated: float) -> str:
    """Return a share of the samples in words: "none", "less than 0.1%", "3.2%"."""
    return "none" if not truncated else "less than 0.1%" if truncated < 0.001 else f"{truncated:.1%}"
