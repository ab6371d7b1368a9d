"""Adopts a DeepSpeed ds_config.json."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import memfit.frameworks.harmless_keys as harmless
import memfit.frameworks.shared_keys as spread
from memfit.frameworks.adopted import Adopted, Keys, build

NAME = "deepspeed"


def matches(data: dict[str, Any]) -> bool:
    return "zero_optimization" in data or "train_micro_batch_size_per_gpu" in data


def adopt(data: dict[str, Any], path: Path) -> Adopted:
    """The ZeRO stage, offload, precision and batch sizes; nothing is said about the model."""
    keys = Keys(data, path.name)
    found = spread.zero(keys)
    return Adopted(
        format=NAME,
        recipe=build(path.name, found.changes),
        effective_batch=found.batch,
        stated=tuple(found.changes),
        ignored=keys.rest(harmless.DEEPSPEED)[0],
        unknown=tuple(found.unknown),
    )
