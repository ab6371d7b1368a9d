"""Read another tool's configuration file as a recipe: the formats, one row each, and how a file is recognised."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from memfit.documents.recipe_file import read_text
from memfit.errors import TRACE_SCRIPT, BadInput, Unsupported
from memfit.frameworks import (
    accelerate,
    axolotl,
    data_keys,
    deepspeed,
    foreign,
    llamafactory,
    recipe_toml,
    training_keys,
    transformers,
)
from memfit.frameworks.keys import Adopted, Source, is_off, parsed, word

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
    text = read_text(path)
    return adopted(text, parsed(text, path), path)


def adopted(text: str, data: Any, path: Path) -> Adopted:
    """Return the content of the text of a file, parsed into `data`."""
    if isinstance(data, dict):
        named = {str(key): value for key, value in data.items()}
        foreign.check(named, path)  # first, because several have keys of the Trainer as well
        for row in FORMATS:
            if row.matches(named):
                found = row.adopt(named, path)
                found = replace(found, values={key: word(named[key]) for key in found.unknown if key in named})
                return found if row.name == recipe_toml.NAME else _with_training(found, text, named, path)
        for key in named.keys() - set(RECOGNISED_BY):
            if meant := get_close_matches(key, RECOGNISED_BY, n=1, cutoff=0.8):
                raise BadInput(f"{path} has the key {key}, which no format has", hint=f"did you mean {meant[0]}?")
    known = "recipe.toml, axolotl or LLaMA-Factory YAML, TrainingArguments JSON, ds_config.json, accelerate YAML"
    hint = f"known: {known}; of another tool trace the script: {TRACE_SCRIPT}"
    raise Unsupported(f"{path} is no training configuration that memfit reads", hint=hint)


def _with_training(found: Adopted, text: str, data: dict[str, Any], path: Path) -> Adopted:
    """Return a file's content with what changes no memory: how it trains, on which data, and the keys left over."""
    dialect = "trl" if found.format == transformers.NAME and found.recipe.trainer == "trl" else found.format
    training, used = training_keys.read(data, dialect)
    told = data_keys.read(data, found.format, path)
    training = replace(training, columns=told.columns, eval_data=told.eval_path)
    left = (key for key in found.ignored if key not in {*used, *told.used, *_OF_THE_RUN} and not is_off(data[key]))
    source = Source(path=path, text=text, data=data, lost=(*told.lost, *left), unknown=found.unknown)
    return replace(found, training=training, data=told.path or found.data, source=source)


# keys on where a run writes and what it prints, which nobody misses in another framework's file
_OF_THE_RUN = {
    "output_dir", "overwrite_output_dir", "overwrite_cache", "do_train", "report_to", "plot_loss", "logging_steps",
    "logging_dir", "dataset_prepared_path", "preprocessing_num_workers", "ddp_timeout", "dataset_num_proc",
}  # fmt: skip
