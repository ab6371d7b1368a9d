"""The noun AllocSettings: a parsed PYTORCH_ALLOC_CONF. What PyTorch's parser refuses is refused here."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from memfit.errors import BadInput, UnknownName
from memfit.units import MIB

Torch = tuple[int, int]
LATEST_TORCH: Torch = (2, 13)
_VERSION = re.compile(r"(\d+)\.(\d+)(?:\..*|\+.*)?")
_FIRST_TORCH: Torch = (2, 1)
VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")  # torch reads the first one that is set

# The constants of AllocatorConfig.h and AllocatorConfig.cpp.
K_MIN_LARGE_ALLOC = 10 * MIB  # kMinLargeAlloc: large_segment_size must exceed it
K_LARGE_BUFFER = 20 * MIB  # kLargeBuffer: the default of large_segment_size_
K_ROUND_UP_POWER_OF_TWO_INTERVALS = 16  # kRoundUpPowerOfTwoIntervals: one per power of two from 1 MiB to 32 GiB
NO_ROUNDUP: tuple[int, ...] = (0,) * K_ROUND_UP_POWER_OF_TWO_INTERVALS
_FILLS_AFTER_LAST: Torch = (2, 9)  # since then `>` fills from the interval after the last key; before, from that key


def torch_version(text: str) -> Torch:
    """Parse '2.11' or '2.11.1+cu130' into (2, 11). Raises BadInput for anything else and for versions before 2.1."""
    found = _VERSION.fullmatch(text.strip())
    if found is None or (number := (int(found[1]), int(found[2]))) < _FIRST_TORCH:
        raise BadInput(f"'{text}' is not a PyTorch version from 2.1 on", hint="for example --torch 2.11")
    return number


def alloc_conf_in(environment: Mapping[str, str]) -> str:
    """Return the allocator settings that PyTorch reads from these environment variables; '' if there are none."""
    return next((environment[name] for name in VARIABLES if environment.get(name)), "")


@dataclass(frozen=True, slots=True)
class AllocSettings:
    """Settings of the caching allocator that change device memory; sizes in bytes, defaults are PyTorch's own.

    `roundup_power2_divisions` has one entry per power of two from 1 MiB up; 0 or 1 means no extra rounding.
    `per_process_memory_fraction` also stands for a call of `torch.cuda.set_per_process_memory_fraction`.
    """

    max_split_size: int | None = None  # None: every block may be split
    max_non_split_rounding: int = K_LARGE_BUFFER
    garbage_collection_threshold: float = 0.0  # 0: off; it has an effect only with a memory fraction
    roundup_power2_divisions: tuple[int, ...] = NO_ROUNDUP
    expandable_segments: bool = False
    large_segment_size: int = K_LARGE_BUFFER
    per_process_memory_fraction: float | None = None
    throw_on_cudamalloc_oom: bool = False
    backend: str = "native"


def _bad(key: str, value: str, want: str, example: str) -> BadInput:
    return BadInput(f"{key}:{value} is not valid: {want}", hint=f"for example {key}:{example}")


def _whole(key: str, value: str) -> int:
    if not (value.isascii() and value.isdigit() and len(value) < 16):
        raise _bad(key, value, "it must be a whole number", "128")
    return int(value)


def _mebibytes(key: str, value: str, torch: Torch) -> int:
    return _whole(key, value) * MIB


def _boolean(key: str, value: str, torch: Torch) -> bool:
    if value not in ("True", "False"):
        raise _bad(key, value, "it must be True or False, with a capital", "True")
    return value == "True"


def _ratio(key: str, value: str, torch: Torch) -> float:
    try:
        return float(value)
    except ValueError:
        raise _bad(key, value, "it must be a number between 0 and 1", "0.8") from None


def _threshold(key: str, value: str, torch: Torch) -> float:
    if not 0.0 < (ratio := _ratio(key, value, torch)) < 1.0:
        raise _bad(key, value, "it must be above 0 and below 1", "0.8")
    return ratio


def _fraction(key: str, value: str, torch: Torch) -> float:
    if not 0.0 <= (ratio := _ratio(key, value, torch)) <= 1.0:
        raise _bad(key, value, "it must be from 0 to 1", "0.9")
    return ratio


def _backend(key: str, value: str, torch: Torch) -> str:
    if value not in ("native", "cudaMallocAsync"):
        raise _bad(key, value, "it must be native or cudaMallocAsync", "native")
    return value


def _count(key: str, value: str, torch: Torch) -> int:
    return _whole(key, value)


def _power_of_two(key: str, text: str, *, or_zero: bool = False) -> int:
    number = _whole(key, text)
    if number & (number - 1) or (number == 0 and not or_zero):
        raise _bad(key, text, "sizes (MiB) and divisions must be powers of two", "[256:1,512:2,>:4]")
    return number


def _divisions(key: str, value: str, torch: Torch) -> tuple[int, ...]:
    """Parse `4`, or `[256:1,512:2,>:4]`: sizes below the first key take its value, gaps stay 0 (as in torch)."""
    if not value.startswith("["):
        return (_power_of_two(key, value),) * K_ROUND_UP_POWER_OF_TWO_INTERVALS
    table = list(NO_ROUNDUP)
    last, first = 0, True
    for item in filter(None, value[1:-1].split(",")):
        interval, _, text = item.partition(":")
        divisions = _power_of_two(key, text, or_zero=True)
        if interval == ">":
            start = last + (torch >= _FILLS_AFTER_LAST)
            table[start:] = [divisions] * (len(table) - start)
            continue
        last = min(_power_of_two(key, interval).bit_length(), len(table)) - 1
        if first:
            table[:last] = [divisions] * last
            first = False
        table[last] = divisions
    return tuple(table)


@dataclass(frozen=True, slots=True)
class _Key:
    """One key: its parser, the field it sets ("" if it changes no device memory), the first torch that has it."""

    read: Callable[[str, str, Torch], Any]
    field: str = ""
    since: Torch = (0, 0)


_KEYS: dict[str, _Key] = {
    "max_split_size_mb": _Key(_mebibytes, "max_split_size"),
    "max_non_split_rounding_mb": _Key(_mebibytes, "max_non_split_rounding"),
    "garbage_collection_threshold": _Key(_threshold, "garbage_collection_threshold"),
    "roundup_power2_divisions": _Key(_divisions, "roundup_power2_divisions"),
    "expandable_segments": _Key(_boolean, "expandable_segments"),
    "large_segment_size_mb": _Key(_mebibytes, "large_segment_size", (2, 11)),
    "per_process_memory_fraction": _Key(_fraction, "per_process_memory_fraction", (2, 10)),
    "throw_on_cudamalloc_oom": _Key(_boolean, "throw_on_cudamalloc_oom", (2, 12)),
    "backend": _Key(_backend, "backend"),
    "release_lock_on_cudamalloc": _Key(_boolean),
    "graph_capture_record_stream_reuse": _Key(_boolean, since=(2, 9)),
    "pinned_use_cuda_host_register": _Key(_boolean),
    "pinned_num_register_threads": _Key(_count),
    "pinned_use_background_threads": _Key(_boolean),
    "pinned_reserve_segment_size_mb": _Key(_count, since=(2, 10)),
    "pinned_max_round_threshold_mb": _Key(_count, since=(2, 13)),
    "pinned_max_cached_size_mb": _Key(_count, since=(2, 13)),
    "pinned_free_catch_all": _Key(_boolean, since=(2, 12)),
}
_ITEM = re.compile(r"([^:,\[\]]+):(\[[^\[\]]*\]|[^:,\[\]]+)(?:,|$)")


def _items(text: str) -> list[tuple[str, str]]:
    """Split `a:1,b:[2:3,>:4]` into (key, value) pairs; blanks do not matter, one comma at the end is allowed."""
    bare, pairs, position = re.sub(r"\s", "", text), [], 0
    while position < len(bare):
        found = _ITEM.match(bare, position)
        if found is None:
            raise BadInput(
                f"'{text[:80]}' is not an allocator setting: cannot parse '{bare[position:][:40]}'",
                hint="write key:value,key:value, for example expandable_segments:True,max_split_size_mb:512",
            )
        pairs.append((found[1], found[2]))
        position = found.end()
    return pairs


def _check_sizes(given: dict[str, Any]) -> None:
    """Check sizes against each other, as torch does.

    Sources: parseLargeSegmentSize, parseMaxSplitSize, parseMaxNonSplitRoundingSize in AllocatorConfig.cpp.
    """
    large = given.get("large_segment_size", K_LARGE_BUFFER)
    if large <= K_MIN_LARGE_ALLOC:
        least = K_MIN_LARGE_ALLOC // MIB
        raise BadInput(f"large_segment_size_mb must be more than {least}", hint="for example large_segment_size_mb:40")
    for field, key in (
        ("max_split_size", "max_split_size_mb"),
        ("max_non_split_rounding", "max_non_split_rounding_mb"),
    ):
        if given.get(field, large) < large:
            least = large // MIB
            raise BadInput(f"{key} must be at least {least}, the large segment size", hint=f"for example {key}:{least}")


def parse_alloc_conf(text: str, torch: Torch = LATEST_TORCH) -> AllocSettings:
    """Parse the value of PYTORCH_ALLOC_CONF (or PYTORCH_CUDA_ALLOC_CONF); the last of equal keys wins.

    Keys that only concern pinned host memory or locks are checked and dropped. Raises UnknownName for a key no torch
    knows, BadInput for a key newer than `torch` and for values torch would refuse.
    """
    given: dict[str, Any] = {}
    for name, value in _items(text):
        key = _KEYS.get(name)
        if key is None:
            raise UnknownName("allocator setting", name, _KEYS, hint="torch would raise 'Unrecognized key'")
        if torch < key.since:
            raise BadInput(
                f"torch {torch[0]}.{torch[1]} has no allocator setting '{name}'",
                hint=f"remove it or use torch {key.since[0]}.{key.since[1]} or newer",
            )
        read = key.read(name, value, torch)
        if key.field:
            given[key.field] = read
    _check_sizes(given)
    given.setdefault("max_non_split_rounding", given.get("large_segment_size", K_LARGE_BUFFER))
    return AllocSettings(**given)
