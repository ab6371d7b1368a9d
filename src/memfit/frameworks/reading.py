"""The way back: another tool's configuration file as a memfit recipe. A new format is one module and one row here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from memfit.errors import BadInput, Unsupported
from memfit.frameworks import recipe_toml as recipe
from memfit.frameworks.accelerate import read as accelerate
from memfit.frameworks.adopted import Adopted
from memfit.frameworks.axolotl import read as axolotl
from memfit.frameworks.deepspeed import read as deepspeed
from memfit.frameworks.llamafactory import read as llamafactory
from memfit.frameworks.parsing import parse
from memfit.frameworks.transformers import read as transformers

__all__ = ["FORMATS", "Adopted", "adopt"]


@dataclass(frozen=True, slots=True)
class Format:
    """One row: how a format is recognised and read."""

    name: str
    matches: Callable[[dict[str, Any]], bool]
    adopt: Callable[[dict[str, Any], Path], Adopted]


# in the order they are tried: the ones with telling keys first
FORMATS: tuple[Format, ...] = tuple(
    Format(module.NAME, module.matches, module.adopt)
    for module in (recipe, axolotl, llamafactory, accelerate, deepspeed, transformers)
)

# keys by which a format is told
TELLING = ("base_model", "model_name_or_path", "per_device_train_batch_size", "zero_optimization", "distributed_type")


def adopt(path: Path) -> Adopted:
    """What the file at `path` says, its format told by content. Raises BadInput, or Unsupported for other formats."""
    data = parse(path)
    if isinstance(data, dict):
        named = {str(key): value for key, value in data.items()}
        for row in FORMATS:
            if row.matches(named):
                return row.adopt(named, path)
        for key in named.keys() - set(TELLING):
            if meant := get_close_matches(key, TELLING, n=1, cutoff=0.8):
                raise BadInput(f"{path} says {key}, which nothing reads", hint=f"did you mean {meant[0]}?")
    known = "recipe.toml, axolotl or LLaMA-Factory YAML, TrainingArguments JSON, ds_config.json, accelerate YAML"
    raise Unsupported(f"{path} is no training configuration memfit knows", hint=f"known: {known}")
