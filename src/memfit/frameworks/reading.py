"""Read another tool's configuration file as a recipe: the formats, one row each, and the tools that are not read."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from memfit.documents.recipe_file import in_folder, read_text
from memfit.errors import SOME_CARD, TRACE_SCRIPT, BadInput, Unsupported
from memfit.frameworks import (
    accelerate,
    axolotl,
    data_keys,
    deepspeed,
    image_trainers,
    llamafactory,
    recipe_toml,
    swift,
    training_keys,
    transformers,
)
from memfit.frameworks.keys import Adopted, Source, is_off, parsed, word
from memfit.frameworks.task_keys import task_of

__all__ = ["FORMATS", "Adopted", "adopt"]


@dataclass(frozen=True, slots=True)
class Format:
    """One row: how a format is recognised and read."""

    name: str
    matches: Callable[[dict[str, Any]], bool]
    adopt: Callable[[dict[str, Any], Path], Adopted]


# in the order in which they are tried: formats with distinctive keys first
FORMATS: tuple[Format, ...] = (
    Format(image_trainers.SIMPLETUNER, image_trainers.is_simpletuner, image_trainers.simpletuner),
    Format(image_trainers.KOHYA, image_trainers.is_kohya, image_trainers.kohya),
    *(
        Format(module.NAME, module.matches, module.adopt)
        for module in (recipe_toml, axolotl, llamafactory, swift, accelerate, deepspeed, transformers)
    ),
)

# distinctive keys of the formats, for the hint at a misspelled one
RECOGNISED_BY = (
    axolotl.MODEL, llamafactory.MODEL, llamafactory.KEYS["micro_batch"].name, "zero_optimization", accelerate.TYPE,
)  # fmt: skip


def adopt(path: Path) -> Adopted:
    """Return the content of the file at `path`, or of the recipe.toml in that folder.

    Raises BadInput, or Unsupported for an unknown format.
    """
    path = in_folder(path)
    if path.suffix.lower() in SHELL and path.is_file() and (data := swift.from_shell(read_text(path), path)):
        return adopted(read_text(path), data, path)
    _check_script(path)
    text = read_text(path)
    return adopted(text, parsed(text, path), path)


def adopted(text: str, data: Any, path: Path) -> Adopted:
    """Return the content of the text of a file, parsed into `data`."""
    if isinstance(data, dict):
        named = {str(key): value for key, value in data.items()}
        _check_tool(named, path)  # first, because several have keys of the Trainer as well
        for row in FORMATS:
            if row.matches(named):
                found = row.adopt(named, path)
                found = replace(found, values={key: word(named[key]) for key in found.unknown if key in named})
                return found if row.name == recipe_toml.NAME else _with_training(found, text, named, path)
        for key in named.keys() - set(RECOGNISED_BY):
            if meant := get_close_matches(key, RECOGNISED_BY, n=1, cutoff=0.8):
                raise BadInput(f"{path} has the key {key}, which no format has", hint=f"did you mean {meant[0]}?")
    known = "recipe.toml, axolotl or LLaMA-Factory YAML, TrainingArguments JSON, ds_config.json, accelerate YAML, "
    known += "SimpleTuner's config.json, kohya's TOML, ms-swift's YAML or its command in a shell script"
    hint = f"known: {known}; of another tool trace the script: {TRACE_SCRIPT}"
    raise Unsupported(f"{path} is no training configuration that memfit reads", hint=hint)


def _with_training(found: Adopted, text: str, data: dict[str, Any], path: Path) -> Adopted:
    """Return a file's content with what changes no memory: how it trains, on which data, and the keys left over."""
    dialect = "trl" if found.format == transformers.NAME and found.recipe.trainer == "trl" else found.format
    training, used = training_keys.read(data, dialect)
    told = data_keys.read(data, found.format, path)
    training = replace(training, columns=told.columns, eval_data=told.eval_path)
    left = (key for key in found.ignored if key not in {*used, *told.used, *_OF_THE_RUN} and not is_off(data.get(key)))
    source = Source(path=path, text=text, data=data, lost=(*told.lost, *left), unknown=found.unknown)
    workers = data.get(WORKERS)
    return replace(
        found, training=training, data=told.path or found.data, source=source,
        task=found.task if found.task != "sft" else task_of(found.format, data),
        workers=workers if isinstance(workers, int) else 0,
    )  # fmt: skip


WORKERS = "dataloader_num_workers"  # the DataLoader's processes for each card, in every framework's file
# keys on where a run writes and what it prints, which nobody misses in another framework's file
_OF_THE_RUN = {
    "output_dir", "overwrite_output_dir", "overwrite_cache", "do_train", "report_to", "plot_loss", "logging_steps",
    "logging_dir", "dataset_prepared_path", "preprocessing_num_workers", "ddp_timeout", "dataset_num_proc",
}  # fmt: skip


# ---- tools that are not read

SHELL = (".sh", ".bash")
SCRIPTS = (".py", *SHELL, ".ipynb")  # endings of files that are run, not read
_HEAD = 1 << 16  # characters of a script in which its tool is looked for
_MEGATRON = re.compile(
    r"--(tensor-model-parallel-size|num-layers|micro-batch-size)\b.*--(global-batch-size|seq-length|hidden-size)\b"
    r"|pretrain_(gpt|llama|t5|bert|mamba)\.py|(?<![\w./-])megatron\s+(sft|pt|rlhf)\b",  # the last is of ms-swift
    re.DOTALL,
)
_ARGUMENTS = re.compile(r"\A\s*--[a-z]")  # a file of command-line arguments


@dataclass(frozen=True, slots=True)
class Tool:
    """One tool: how its file is recognised, and its script that `memfit trace` runs with that file."""

    name: str
    matches: Callable[[Mapping[str, Any]], bool]
    script: str  # "" where the file itself is the script
    argument: str = "{file}"  # how the script takes the file


def _has(*names: str, least: int = 1) -> Callable[[Mapping[str, Any]], bool]:
    """Return a test for at least `least` of these keys, written with dashes or underscores."""

    def matches(data: Mapping[str, Any]) -> bool:
        plain = {str(key).lstrip("-").replace("-", "_") for key in data}
        return len(plain & set(names)) >= least

    return matches


def _calls(key: str, prefix: str) -> Callable[[Mapping[str, Any]], bool]:
    """Return a test for a nested key whose value is an object of a package, as in `_target_: nemo.x`."""

    def matches(data: Mapping[str, Any]) -> bool:
        return any(value.startswith(prefix) for value in _values(data, key))

    return matches


def _values(data: object, key: str, depth: int = 4) -> Iterator[str]:
    if depth and isinstance(data, Mapping):
        for name, value in data.items():
            if name == key and isinstance(value, str):
                yield value
            yield from _values(value, key, depth - 1)


TOOLS = (
    Tool("torchtune", _calls("_component_", "torchtune"), "RECIPE.py", "--config {file}"),
    Tool("NeMo Automodel", _calls("_target_", "nemo_automodel"), "finetune.py", "--config {file}"),
    Tool("NeMo", _calls("_target_", "nemo"), "SCRIPT.py", "--config-name {file}"),
    Tool("NeMo", _has("exp_manager"), "SCRIPT.py", "--config-name {file}"),
    Tool("verl", _has("actor_rollout_ref"), "SCRIPT.py"),
    Tool(
        "Megatron-LM or Megatron Bridge",
        _has("tensor_model_parallel_size", "pipeline_model_parallel_size", "num_attention_heads", "num_layers",
             "micro_batch_size", "global_batch_size", "seq_length", "ffn_hidden_size", least=3),
        "pretrain_gpt.py", "ARGUMENTS",
    ),
    Tool("torchtitan", lambda data: _has("job", "parallelism", "metrics", "training", "model", least=3)(data)
         and isinstance(data.get("training"), Mapping) and isinstance(data.get("model"), Mapping),
         "torchtitan/train.py", "--job.config_file {file}"),
    Tool("LLaMA-Factory's version 1", _has("model_class", "dist_config", "train_dataset", "sample_backend", least=2),
         "SCRIPT.py", "{file}"),
    Tool("PEFT (a saved adapter)", _has("peft_type", "base_model_name_or_path", least=2), "SCRIPT.py", "ARGUMENTS"),
    Tool("LitGPT", _has("checkpoint_dir", "devices", "train", "precision", least=3), "SCRIPT.py", "--config {file}"),
    Tool("OpenRLHF", _has("pretrain", "micro_train_batch_size", "zero_stage", least=2), "SCRIPT.py", "ARGUMENTS"),
)  # fmt: skip


def _check_script(path: Path) -> None:
    """Refuse a script in place of a settings file, with the command that traces it. Raises Unsupported."""
    if not path.is_file():
        return
    with path.open(encoding="utf-8", errors="replace") as stream:
        text = stream.read(_HEAD)
    if path.suffix.lower() not in SCRIPTS and not _ARGUMENTS.match(text):
        return
    if _MEGATRON.search(text):
        what, traced = "arguments of Megatron-LM", "pretrain_gpt.py"
    elif re.search(r"^\s*(import|from)\s+unsloth\b", text, re.MULTILINE):
        what, traced = "an Unsloth script", str(path)
    else:
        what = "a script" if path.suffix.lower() in SCRIPTS else "a list of arguments"
        traced = str(path) if path.suffix == ".py" else "SCRIPT.py"
    more = "" if traced == str(path) else " -- ARGUMENTS"
    raise Unsupported(
        f"{path} is {what}, not a file that memfit reads", hint=f"memfit trace {shlex.quote(traced)} {SOME_CARD}{more}"
    )


def _check_tool(data: Mapping[str, Any], path: Path) -> None:
    """Refuse a file of a tool that memfit does not read, with the command that traces it. Raises Unsupported."""
    tool = next((row for row in TOOLS if row.matches(data)), None)
    if tool:
        arguments = tool.argument.format(file=shlex.quote(str(path)))
        raise Unsupported(
            f"{path} is a file of {tool.name}, which memfit does not read",
            hint=f"memfit trace {tool.script} {SOME_CARD} -- {arguments}",
        )
