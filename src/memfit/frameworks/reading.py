"""Read another tool's configuration file as a recipe: the formats, one row each, and how a file is recognised."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from memfit.errors import BadInput, Unsupported
from memfit.frameworks import accelerate, axolotl, deepspeed, foreign, llamafactory, recipe_toml, transformers
from memfit.frameworks.keys import Adopted, parse, word

__all__ = ["FORMATS", "Adopted", "adopt"]


@dataclass(frozen=True, slots=True)
class Format:
    """One row: how a format is recognised and read."""

    name: str
    matches: Callable[[dict[str, Any]], bool]
    adopt: Callable[[dict[str, Any], Path], Adopted]


# in the order in which they are tried: formats with distinctive keys first
FORMATS: tuple[Format, ...] = tuple(
    Format(module.NAME, module.matches, module.adopt)
    for module in (recipe_toml, axolotl, llamafactory, accelerate, deepspeed, transformers)
)

# distinctive keys of the formats, for the hint at a misspelled one
RECOGNISED_BY = (
    axolotl.MODEL, llamafactory.MODEL, llamafactory.KEYS["micro_batch"].name, "zero_optimization", accelerate.TYPE,
)  # fmt: skip


def adopt(path: Path) -> Adopted:
    """Return the content of the file at `path`. Raises BadInput, or Unsupported for an unknown format."""
    foreign.check_script(path)
    data = parse(path)
    if isinstance(data, dict):
        named = {str(key): value for key, value in data.items()}
        foreign.check(named, path)  # first, because several have keys of the Trainer as well
        for row in FORMATS:
            if row.matches(named):
                found = row.adopt(named, path)
                return replace(found, values={key: word(named[key]) for key in found.unknown if key in named})
        for key in named.keys() - set(RECOGNISED_BY):
            if meant := get_close_matches(key, RECOGNISED_BY, n=1, cutoff=0.8):
                raise BadInput(f"{path} has the key {key}, which no format has", hint=f"did you mean {meant[0]}?")
    known = "recipe.toml, axolotl or LLaMA-Factory YAML, TrainingArguments JSON, ds_config.json, accelerate YAML"
    hint = f"known: {known}; of another tool trace the script: memfit trace SCRIPT.py --gpu rtx-4090"
    raise Unsupported(f"{path} is no training configuration that memfit reads", hint=hint)
