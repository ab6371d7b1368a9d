"""ms-swift's commands and settings, read: `swift sft|pt|rlhf` in a shell script, its YAML, and the args.json of a run.

Keys, defaults and presets of 4.6: swift/arguments, swift/trainers/arguments.py, swift/config.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import memfit.frameworks.accelerate as accelerate
import memfit.frameworks.deepspeed as deepspeed
import memfit.frameworks.names as names
from memfit.errors import BadInput
from memfit.frameworks.keys import (
    Adopted,
    Key,
    Keys,
    KeyTable,
    Sharding,
    adopted_from,
    module_names,
    saved_modules,
    word,
)
from memfit.frameworks.schemas import SWIFT as SCHEMA
from memfit.reading.shell_file import Simple, read_shell
from memfit.reading.shell_words import is_unknown, plain

NAME = "ms-swift"
KEYS = KeyTable(
    Key("micro_batch", "per_device_train_batch_size", 1),
    Key("lora_rank", "lora_rank", 8),
    Key("lora_alpha", "lora_alpha", 32),
    Key("lora_dropout", "lora_dropout", 0.05),
)
TUNER = ("tuner_type", "train_type")  # the second is that of version 3
MODEL, TASK, TYPE, LENGTH = "model", "task_type", "rlhf_type", "max_length"
COMMANDS = ("sft", "pt", "rlhf")
SEQUENCES = 16  # of a step, which the accumulation makes up where none is set (TrainArgumentsMixin)
OWN = (*TUNER, "swift_version", "tuner_backend", "truncation_strategy", "attn_impl", "quant_method", "freeze_vit")
# variables of the command's environment, which are put among the settings
CARDS, VISIBLE, NODES, ALLOCATOR = "NPROC_PER_NODE", "CUDA_VISIBLE_DEVICES", "NNODES", "PYTORCH_CUDA_ALLOC_CONF"
VARIABLES = (CARDS, VISIBLE, NODES, ALLOCATOR)
_WEIGHTS = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
_ATTENTION = {"flash_attn": "flash", "flash_attention_4": "flash"}  # beside transformers' names
# loss scales that weigh tokens: the loss is then computed from all logits, whatever Liger fuses (seq2seq_trainer.py)
_WEIGHED = {"react", "hermes", "qwen", "agentflan", "alpha_umi"}
_BUCKET = 200_000_000
# swift/config: the presets of --deepspeed, as DeepSpeed's own blocks
_ZERO: dict[str, dict[str, Any]] = {
    "zero0": {"stage": 0},
    "zero1": {"stage": 1, "reduce_bucket_size": _BUCKET},
    "zero2": {"stage": 2, "reduce_bucket_size": _BUCKET},
    "zero3": {"stage": 3, **dict.fromkeys(
        ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold"), "auto")},
}  # fmt: skip
_ZERO |= {f"{name}_offload": _ZERO[name] | {"offload_optimizer": {"device": "cpu"}} for name in ("zero2", "zero3")}
_ZERO["zero3_offload"]["offload_param"] = {"device": "cpu"}
_FSDP2 = {"reshard_after_forward": True, "cpu_ram_efficient_loading": True, "activation_checkpointing": True}


# ---- commands


def from_shell(text: str, path: Path) -> dict[str, Any] | None:
    """Return the settings of the first training that a shell script starts by `swift`; None if it starts none.

    Raises BadInput for a script that memfit's reader of shell scripts does not understand.
    """
    if not re.search(rf"\bswift\s+(\\\s*)?({'|'.join(COMMANDS)})\b", text):
        return None
    for command in read_shell(text, path.name, [str(path)], {}, str(path.parent)):
        words = [plain(word) if is_unknown(word) else word for word in command.words]
        if Path(words[0]).name == "swift" and words[1:2] and words[1] in COMMANDS:
            return _settings(words[1:], command, path)
    return None


def _settings(words: Sequence[str], command: Simple, path: Path) -> dict[str, Any]:
    """Return the arguments of a command by name, its YAML below them, and the variables that choose its cards."""
    found: dict[str, list[str]] = {}
    name = ""
    for text in words[1:]:
        if text.startswith("--"):
            name, equals, value = text[2:].replace("-", "_").partition("=")
            found[name] = [value] if equals else []
        elif name:
            found[name].append(text)
        elif text.endswith((".yaml", ".yml", ".json")):
            raise BadInput(f"{path.name} starts swift with {text}", hint=f"--from {text}")
    data: dict[str, Any] = {TUNER[0]: "lora"} if found.keys().isdisjoint(TUNER) else {}
    data |= {name: _value(values) for name, values in found.items()}
    data |= {name: command.environment[name] for name in VARIABLES if name in command.environment}
    if words[0] == "rlhf":
        data.setdefault(TYPE, "dpo")
    return data


def _value(texts: list[str]) -> Any:
    """Return an argument as HfArgumentParser does: a flag alone is true, several words are a list."""
    if len(texts) != 1:
        return [_value([text]) for text in texts] or True
    text = texts[0]
    try:
        return json.loads(text.lower() if text.lower() in ("true", "false") else text)
    except ValueError:
        return text


# ---- settings


def matches(data: dict[str, Any]) -> bool:
    """Return whether these are settings of ms-swift."""
    return isinstance(data.get(MODEL), str) and any(name in data for name in OWN)


def adopt(data: dict[str, Any], path: Path) -> Adopted:
    """Return model and recipe of a run of ms-swift."""
    keys = Keys(data, path.name)
    cards = _cards(keys)
    sharding = _sharding(keys, path)
    assumed = []
    changes: dict[str, Any] = {
        "trainer": NAME,
        "num_gpus": cards,
        **KEYS.read(keys, "micro_batch"),
        **names.read_optim(keys, "transformers", "adamw_torch_fused"),
        **_attention(keys),
        **names.read_compile(keys),
        "loss": _loss(keys),
        "padding": "packing" if keys.flag("packing") else "longest",
        "checkpointing": _checkpointing(keys, sharding),
        "alloc_conf": keys.text(ALLOCATOR) or "",
        **_method(keys),
    }
    keys.take("padding_free")  # the same tokens or fewer, in one row: flash attention makes no more of them
    full = math.ceil(SEQUENCES / changes["micro_batch"] / cards)
    changes["accumulation"] = keys.number("gradient_accumulation_steps", default=max(full, 1))
    if (length := keys.take("packing_length", LENGTH)) is None:
        assumed.append(f"{LENGTH} is not set, and no sample is too long: --sequence-length says how long they are")
    else:
        changes["sequence_length"] = keys.number("packing_length", LENGTH, default=length)
    if changes["padding"] != "packing":
        assumed.append("every sample as long as the sequence, and all of it answer: shorter ones take less")
    changes |= sharding.without_precision
    changes["precision"] = _precision(keys, sharding, changes["method"], assumed)
    if word(keys.take(TASK, default="causal_lm")) not in ("causal_lm", "seq_cls", "embedding"):
        keys.not_expressed(TASK)
    if keys.number(names.EVALUATION, default=1) > changes["micro_batch"]:
        keys.not_expressed(names.EVALUATION)
    if keys.take(TYPE) is not None:
        keys.not_expressed(TYPE)
    sharding.assumed += assumed
    return adopted_from(NAME, keys, SCHEMA.harmless, changes, sharding, keys.text(MODEL))


def _cards(keys: Keys) -> int:
    """Return the cards that train; one process that sees several spreads the model, which is unknown."""
    visible = [one for one in word(keys.take(VISIBLE, default="0")).split(",") if one.strip()]
    each = keys.take(CARDS)
    if each is None:
        if len(visible) > 1:
            keys.inexpressible.append(VISIBLE)
        return 1
    count, nodes = word(each), word(keys.take(NODES, default="1"))
    if not (count.isdigit() and nodes.isdigit() and int(count) * int(nodes) > 0):
        keys.inexpressible.append(CARDS)
        return 1
    return int(count) * int(nodes)


def _sharding(keys: Keys, path: Path) -> Sharding:
    """Return the sharding of --deepspeed or --fsdp: a preset by name, a file, or a block."""
    zero, fsdp = keys.take("deepspeed"), keys.take("fsdp")
    if fsdp == "fsdp2":
        return accelerate.read_fsdp(Keys(_FSDP2, "fsdp2"), 2)
    if fsdp:
        keys.not_expressed("fsdp")
    if isinstance(zero, str) and zero in _ZERO:
        return deepspeed.read(Keys({"zero_optimization": _ZERO[zero], "bf16": {"enabled": "auto"}}, zero))
    return deepspeed.read_setting(zero, path)


def _attention(keys: Keys) -> dict[str, str]:
    kernel = keys.take("attn_impl")
    return names.read_attention(keys, _ATTENTION.get(word(kernel), kernel), "attn_impl")


def _loss(keys: Keys) -> str:
    liger, scale = keys.flag("use_liger_kernel"), word(keys.take("loss_scale", default="default"))
    return "fused" if liger and _WEIGHED.isdisjoint(scale.split("+")) else "full"


def _checkpointing(keys: Keys, sharding: Sharding) -> str:
    """Return the checkpointing of the language model; towers follow it unless they have a setting of their own."""
    on = keys.flag("gradient_checkpointing", default=True)
    if keys.flag("vit_gradient_checkpointing", default=on) != on:
        keys.inexpressible.append("vit_gradient_checkpointing")
    settings = keys.table("gradient_checkpointing_kwargs")
    settings.take("use_reentrant")
    if settings.rest(())[1]:
        keys.not_expressed("gradient_checkpointing_kwargs")
    return sharding.checkpointing or ("full" if on else "none")


def _method(keys: Keys) -> dict[str, Any]:
    """Return what is trained. Adapters stay outside a frozen tower; a full training freezes it, too."""
    kind = word(keys.take(*TUNER, default="lora"))
    for name in ("freeze_vit", "freeze_aligner"):
        if keys.flag(name, default=True) and kind == "full":
            keys.inexpressible.append(name)
    if kind == "full":
        keys.take("lora_rank", "lora_alpha", "lora_dropout", "target_modules", "use_dora", "use_rslora")
        return {"method": "full"}
    if kind != "lora":
        keys.not_expressed(*TUNER)
    if keys.flag("use_rslora"):
        keys.used.add("use_rslora")
    targets = keys.take("target_modules", default="all-linear")
    return {
        **_quantization(keys),
        "adapter": "dora" if keys.flag("use_dora") else "lora",
        **KEYS.read(keys, "lora_rank", "lora_alpha", "lora_dropout"),
        "lora_targets": module_names(targets, keys.where),
        "modules_to_save": saved_modules(keys.take("modules_to_save"), keys.where),
    }


def _quantization(keys: Keys) -> dict[str, str]:
    """Return how the frozen base is loaded; bits without a method, or another than bitsandbytes, are not known."""
    bits, by = keys.take("quant_bits"), word(keys.take("quant_method")).lower()
    four = names.read_four_bit(
        keys.text("bnb_4bit_quant_type") or "nf4", keys.flag("bnb_4bit_use_double_quant", default=True), keys.where
    )
    if not bits:
        return {"method": "lora"}
    if by != "bnb" or bits not in (4, 8):
        keys.not_expressed("quant_method", "quant_bits")
    return {"method": "qlora", "quantization": "int8" if bits == 8 else four}


def _precision(keys: Keys, sharding: Sharding, method: str, assumed: list[str]) -> str:
    """Return the precision: weights in torch_dtype, which also chooses the type of autocast."""
    said = keys.text("torch_dtype")
    if said is None:
        assumed.append("torch_dtype is not set: bf16, which most models are published in")
    kept = _WEIGHTS.get(said or "bfloat16", "")
    if not kept:
        keys.not_expressed("torch_dtype")
    half = keys.flag("fp16", default=kept in ("fp16", "fp32"))
    bf16 = keys.flag("bf16", default=not half)
    keys.half_open = said is None
    if kept == "fp32":
        return "bf16-mixed" if bf16 else "fp16-mixed" if half else "fp32"
    if kept == "fp16" or half:
        return "fp16-mixed"
    if method == "full" and sharding.kind:
        return "bf16-mixed" if sharding.kind == "fsdp" else "bf16-master"
    return "bf16"
