"""Files of tools that memfit does not read: each is recognised by name, and refused with the way that works."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memfit.errors import SOME_CARD, Unsupported

SCRIPTS = (".py", ".sh", ".bash", ".ipynb")  # endings of files that are run, not read
_HEAD = 1 << 16  # characters of a script in which its tool is looked for
_MEGATRON = re.compile(
    r"--(tensor-model-parallel-size|num-layers|micro-batch-size)\b.*--(global-batch-size|seq-length|hidden-size)\b"
    r"|pretrain_(gpt|llama|t5|bert|mamba)\.py",
    re.DOTALL,
)


_ARGUMENTS = re.compile(r"\s*--[a-z]")  # a file of command-line arguments


@dataclass(frozen=True, slots=True)
class Tool:
    """One tool: how its file is recognised, and its script that `memfit trace` runs with that file."""

    name: str
    matches: Callable[[Mapping[str, Any]], bool]
    script: str  # "" where the file itself is the script
    argument: str = "{file}"  # how the script takes the file


def _has(*names: str, least: int = 1) -> Callable[[Mapping[str, Any]], bool]:
    """Return a test for at least so many of these keys, with or without dashes in front and in between."""

    def matches(data: Mapping[str, Any]) -> bool:
        plain = {str(key).lstrip("-").replace("-", "_") for key in data}
        return len(plain & set(names)) >= least

    return matches


def _calls(key: str, prefix: str) -> Callable[[Mapping[str, Any]], bool]:
    """Return a test for a nested key that names an object of a package."""

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
    Tool("SimpleTuner", _has("model_family", "data_backend_config", "instance_prompt", "lora_type", "caption_dropout_"
         "probability", "minimum_image_size", "validation_prompt", least=2), "simpletuner/train.py", "ARGUMENTS"),
    Tool("torchtitan", lambda data: _has("job", "parallelism", "metrics", "training", "model", least=3)(data)
         and isinstance(data.get("training"), Mapping) and isinstance(data.get("model"), Mapping),
         "torchtitan/train.py", "--job.config_file {file}"),
    Tool("LLaMA-Factory's version 1", _has("model_class", "dist_config", "train_dataset", "sample_backend", least=2),
         "SCRIPT.py", "{file}"),
    Tool("PEFT (a saved adapter)", _has("peft_type", "base_model_name_or_path", least=2), "SCRIPT.py", "ARGUMENTS"),
    Tool("LitGPT", _has("checkpoint_dir", "devices", "train", "precision", least=3), "SCRIPT.py", "--config {file}"),
    Tool("ms-swift", _has("tuner_type", "train_type", "swift_version"),
         "SCRIPT.py", "ARGUMENTS"),
    Tool("kohya's sd-scripts", _has("network_module", "train_data_dir", "network_dim", least=2), "train_network.py",
         "--config_file {file}"),
    Tool("OpenRLHF", _has("pretrain", "micro_train_batch_size", "zero_stage", least=2), "SCRIPT.py", "ARGUMENTS"),
)  # fmt: skip


def check_script(path: Path) -> None:
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


def check(data: Mapping[str, Any], path: Path) -> None:
    """Refuse a file of a tool that memfit does not read, with the command that traces it. Raises Unsupported."""
    tool = next((row for row in TOOLS if row.matches(data)), None)
    if tool:
        arguments = tool.argument.format(file=shlex.quote(str(path)))
        raise Unsupported(
            f"{path} is a file of {tool.name}, which memfit does not read",
            hint=f"memfit trace {tool.script} {SOME_CARD} -- {arguments}",
        )
