"""The noun ZeroSettings: the sizes of a DeepSpeed configuration that change memory, parsed from `zero_conf`."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import lru_cache

from memfit.errors import BadInput, UnknownName

# DeepSpeed's own defaults where memfit's exports write other values
BUCKET_OF_DEEPSPEED, PREFETCH_OF_DEEPSPEED = 500_000_000, 50_000_000
AUTO = "auto"
FILLED = ("reduce_bucket_size", "prefetch_bucket_size", "param_persistence_threshold")  # what `auto` is possible for
LARGEST = 1 << 62


@dataclass(frozen=True, slots=True)
class ZeroSettings:
    """Sizes in elements, by DeepSpeed's names without `stage3_`; the defaults are what memfit's exports run with."""

    reduce_bucket_size: int = 50_000_000  # 5e7 elements still saturate a link
    prefetch_bucket_size: int = 50_000_000  # ZeRO-3: gathered ahead
    param_persistence_threshold: int = 100_000  # ZeRO-3: smaller weights stay whole
    max_live_parameters: int = 1_000_000_000  # ZeRO-3: nothing is gathered ahead beyond these
    max_reuse_distance: int = 1_000_000_000  # ZeRO-3: weights that run again within these stay gathered
    sub_group_size: int = 1_000_000_000  # ZeRO-3: stepped at once


NAMES = tuple(f.name for f in fields(ZeroSettings))


@lru_cache(maxsize=256)
def parse_zero_conf(text: str, width: int = 1) -> ZeroSettings:
    """Parse 'reduce_bucket_size:500000000,sub_group_size:0'. `auto` is filled in from the model's width.

    Source of `auto`: trainer_config_finalize in transformers 5.23, integrations/deepspeed.py. Raises BadInput.
    """
    filled = (width * width, int(0.9 * width * width), 10 * width)
    automatic = dict(zip(FILLED, filled, strict=True))
    return ZeroSettings(**{n: automatic[n] if v == AUTO else int(v) for n, v in given_sizes(text).items()})


def given_sizes(text: str) -> dict[str, int | str]:
    """Return the sizes in the text of `zero_conf` by name: elements, or `auto`. Raises BadInput."""
    found: dict[str, int | str] = {}
    for item in filter(None, text.replace(" ", "").split(",")):
        name, _, value = item.partition(":")
        if name not in NAMES:
            raise UnknownName("size in --zero-conf", name, NAMES, hint=f"known: {', '.join(NAMES)}")
        whole = value.isascii() and value.isdigit() and len(value) < 20 and int(value) <= LARGEST
        if not whole and not (value == AUTO and name in FILLED):
            raise BadInput(f"{item} in --zero-conf is not a whole number of elements", hint=f"for example {name}:1000")
        found[name] = int(value) if whole else AUTO
    return found
