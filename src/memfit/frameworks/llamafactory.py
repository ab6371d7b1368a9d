"""LLaMA-Factory's YAML, read and written with its dataset_info.json. Keys, defaults and chat templates of 0.9.5."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import memfit.frameworks.deepspeed as deepspeed
import memfit.frameworks.names as names
from memfit.errors import Unsupported
from memfit.frameworks import process_layout, training_keys
from memfit.frameworks.data_keys import Layout, layout_for
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
from memfit.frameworks.schemas import LLAMAFACTORY
from memfit.frameworks.script import learning_rate
from memfit.frameworks.text import head, savings_at, with_environment, yaml_text
from memfit.nouns.job import Recipe
from memfit.nouns.plan import Plan
from memfit.tables.optimizers import OPTIMIZERS, optimizer
from memfit.tables.quantization import quantization

SUPERVISED = ("sft", "pt")  # stages with one forward of one model: pt learns every token of packed text
NAME, FILE, VERSION = "llamafactory", "llamafactory.yaml", "LLaMA-Factory 0.9.5"
INFO_FILE, DATASET, EVAL_DATASET = "dataset_info.json", "train", "eval"  # the file, and the names in it
_DATA = {"dataset": DATASET, "dataset_dir": "."}
KEYS = KeyTable(
    Key("sequence_length", "cutoff_len", 2048),
    Key("padding", "packing", False, {"packing": True, "longest": False}),
    *names.KEYS.values(),
    Key("lora_rank", "lora_rank", 8),
    Key("lora_alpha", "lora_alpha", 16),  # twice the rank
    Key("lora_dropout", "lora_dropout", 0.0),
)
MODEL, TYPE, STAGE, NEAT, TARGET = "model_name_or_path", "finetuning_type", "stage", "neat_packing", "lora_target"
SAVED = "additional_target"
BITS, QUANT_TYPE, DOUBLE = "quantization_bit", "quantization_type", "double_quantization"
ATTENTION, LIGER, PURE, DEEPSPEED = "flash_attn", "enable_liger_kernel", "pure_bf16", "deepspeed"
NO_CHECKPOINTING, OFFLOADING, REENTRANT = "disable_gradient_checkpointing", "use_unsloth_gc", "use_reentrant_gc"
_ATTENTION = {"disabled": "eager", "sdpa": "sdpa", "fa2": "flash", "fa3": "flash"}
# settings of optimizers that are chosen by a switch (use_galore: true) beside `optim`, GaLore and APOLLO first
_SWITCHED = [
    (row.key, name, value)
    for row in sorted(OPTIMIZERS.values(), key=lambda row: -row.rank_of)
    for name, value in row.settings.get(NAME, {}).items()
]
_SWITCHES = {name: key for key, name, value in _SWITCHED if value is True}
# keys of an optimizer that a switch chooses
SWITCH_KEYS = tuple(dict.fromkeys(name for _, name, _ in _SWITCHED if name not in ("optim", "optim_args")))
# keys by which a file of LLaMA-Factory is recognised
_OWN = {
    TYPE, STAGE, KEYS["sequence_length"].name, TARGET, BITS, ATTENTION, "template", "dataset_dir", PURE, LIGER,
    NO_CHECKPOINTING, NEAT,
}  # fmt: skip
# keys of its commands that train nothing
_OTHER_COMMANDS = {"infer_backend", "export_dir", "do_predict"}
# (recipe field, the key whose comment states what it saves)
_SAVING_AT = (
    ("quantization", BITS), ("method", TYPE), ("checkpointing", NO_CHECKPOINTING), ("optimizer", "optim"),
    ("micro_batch", KEYS["micro_batch"].name), ("loss", LIGER), ("attention", ATTENTION), ("offload", DEEPSPEED),
    ("shard", DEEPSPEED),
)  # fmt: skip


# ---- reading


def matches(data: dict[str, Any]) -> bool:
    return MODEL in data and bool(_OWN & set(data))


def adopt(data: dict[str, Any], path: Path) -> Adopted:
    """Return model, recipe and data of a LLaMA-Factory run."""
    if not data.get("do_train") and _OTHER_COMMANDS & set(data):
        raise Unsupported(
            f"{path} is for LLaMA-Factory's chat, export or prediction, and trains nothing",
            hint="add do_train: true if it is a training run",
        )
    keys = Keys(data, path.name)
    packed = KEYS["padding"].read(keys, default=keys.take(STAGE) == "pt")
    neat = keys.flag(NEAT)
    sharding = deepspeed.read_setting(keys.take(DEEPSPEED), path)
    changes: dict[str, Any] = {
        "trainer": NAME,
        **KEYS.read(keys, "sequence_length"),
        "padding": "packing" if neat else packed,
        **KEYS.read(keys, "micro_batch", "accumulation"),
        **_read_optimizer(keys),
        "attention": _read_attention(keys),
        **names.read_compile(keys),
        "loss": "fused" if keys.flag(LIGER) else "full",
        "checkpointing": _read_checkpointing(keys),
        **_read_method(keys),
    }
    changes |= sharding.without_precision
    changes["precision"] = _read_precision(keys, sharding, changes["method"])
    model, dataset = keys.text(MODEL), keys.take("dataset")
    if word(keys.take(STAGE, default="sft")) not in SUPERVISED:
        keys.not_expressed(STAGE)
    names.read_evaluation(keys, changes["micro_batch"])
    data_name = dataset if isinstance(dataset, str) else None
    return adopted_from(NAME, keys, LLAMAFACTORY.harmless, changes, sharding, model, data_name)


def _read_attention(keys: Keys) -> str:
    kernel = word(keys.take(ATTENTION, default="auto"))
    if kernel not in (*_ATTENTION, "auto"):
        keys.not_expressed(ATTENTION)
    return _ATTENTION.get(kernel, "sdpa")


def _read_optimizer(keys: Keys) -> dict[str, str]:
    """Return the optimizer; a rank or modules other than those of the optimizer table are reported as unknown."""
    for switch, key in _SWITCHES.items():
        if keys.flag(switch):
            modelled = optimizer(key).settings[NAME]
            keys.take("optim", *modelled)
            keys.not_expressed(*(name for name, value in modelled.items() if keys.data.get(name, value) != value))
            return {"optimizer": key}
    return names.read_optim(keys, NAME, "adamw_torch_fused")


def _read_checkpointing(keys: Keys) -> str:
    keys.take(REENTRANT, "gradient_checkpointing")
    settings = keys.table("gradient_checkpointing_kwargs")
    settings.take("use_reentrant")
    if settings.rest(())[1]:
        keys.not_expressed("gradient_checkpointing_kwargs")
    if keys.flag(NO_CHECKPOINTING):
        return "none"
    return "offload" if keys.flag(OFFLOADING) else "full"


def _read_method(keys: Keys) -> dict[str, Any]:
    kind = word(keys.take(TYPE, default="lora"))
    bits = keys.number(BITS, default=0)
    if kind == "full":
        keys.take(
            *(KEYS[name].name for name in ("lora_rank", "lora_alpha", "lora_dropout")),
            TARGET,
            SAVED,
            QUANT_TYPE,
            DOUBLE,
        )
        return {"method": "full"}
    if kind != "lora":
        keys.not_expressed(TYPE)
    if bits not in (0, 4, 8):
        keys.not_expressed(BITS)
    if bits and word(keys.take("quantization_method", default="bnb")).lower() not in ("bnb", "bitsandbytes"):
        keys.not_expressed("quantization_method")
    four_bit = names.read_four_bit(keys.text(QUANT_TYPE) or "nf4", keys.flag(DOUBLE, default=True), keys.where)
    rank = KEYS["lora_rank"].read(keys)
    return {
        "method": "qlora" if bits in (4, 8) else "lora",
        "quantization": {4: four_bit, 8: "int8"}.get(bits, "none"),
        "lora_rank": rank,
        "lora_alpha": KEYS["lora_alpha"].read(keys, default=2 * rank),
        **KEYS.read(keys, "lora_dropout"),
        "lora_targets": module_names(keys.take(TARGET, default="all"), keys.where),
        "modules_to_save": saved_modules(keys.take(SAVED), keys.where),
    }


def _read_precision(keys: Keys, sharding: Sharding, method: str) -> str:
    """Return the precision: the base is loaded in the compute dtype; trained weights are fp32, except for pure_bf16."""
    pure, bf16, fp16 = keys.flag(PURE), keys.flag("bf16"), keys.flag("fp16")
    if method != "full":
        keys.half_open = not (bf16 or fp16)
        return "fp16-mixed" if fp16 and not bf16 else "bf16"
    if pure:
        return "bf16"
    if bf16:
        return "bf16-master" if sharding.kind == "deepspeed" else "bf16-mixed"
    return "fp16-mixed" if fp16 else "fp32"


# ---- writing


def command(plan: Plan) -> str:
    """Return the line that starts training."""
    line = f"llamafactory-cli train {FILE}"
    if _sharding(plan.recipe) or plan.recipe.num_gpus > 1:
        line = f"FORCE_TORCHRUN=1 NPROC_PER_NODE={plan.recipe.num_gpus} {line}"
    return with_environment(plan.recipe, line)


def export(plan: Plan) -> dict[str, str]:
    """Return llamafactory.yaml, dataset_info.json, and ds_config.json for sharding. Raises Unsupported."""
    settings = yaml_text(config(plan), savings_at(plan, _SAVING_AT), head(plan, VERSION, command(plan)))
    files = {FILE: settings} | data(plan)[1]
    return files | ({process_layout.DEEPSPEED_FILE: deepspeed.text(plan.recipe)} if _sharding(plan.recipe) else {})


def config(plan: Plan) -> dict[str, Any]:
    """Return the settings in the order of LLaMA-Factory's own examples. Raises Unsupported.

    It documents only DeepSpeed for sharding.
    """
    r, training = plan.recipe, plan.job.training
    process_layout.check(r, NAME, *(["deepspeed"] if _sharding(r) else []))
    layout = layout_for(plan.job, "LLaMA-Factory")
    stage = "pt" if layout.fields == ("text",) else "sft"  # plain text is learned whole, without a template
    chats = template(plan.job.architecture.name)
    return {
        MODEL: plan.job.architecture.name,
        **_quantization(r.quantization),
        ATTENTION: next(theirs for theirs, ours in _ATTENTION.items() if ours == r.attention),
        **names.compiled(r),
        **({LIGER: True} if r.loss == "fused" else {}),
        **_checkpointing(r),
        STAGE: stage,
        "do_train": True,
        **_method(plan),
        **_DATA,
        **({"eval_dataset": EVAL_DATASET} if training.eval_data else {}),
        **({"template": chats} if chats else {}),  # if unset, it is parsed from the tokenizer
        **KEYS.write(r, "sequence_length", "padding"),
        **({NEAT: True} if r.padding == "packing" and stage == "sft" else {}),
        "output_dir": "output",
        **KEYS.write(r, "micro_batch", "accumulation"),
        **process_layout.reduction(r),
        "num_train_epochs": float(training.epochs),
        **({"max_steps": training.max_steps} if training.max_steps > 0 else {}),
        "learning_rate": float(learning_rate(plan)),
        **training_keys.write(training, NAME),
        **names.optim(r, NAME),
        **_precision(r),
        **_sharding(r),
    }


def _quantization(key: str) -> dict[str, Any]:
    if key == "none":
        return {}
    row = quantization(key)
    return {BITS: row.bits, **({QUANT_TYPE: row.kind, DOUBLE: row.double} if row.kind else {})}


def _checkpointing(recipe: Recipe) -> dict[str, Any]:
    if recipe.checkpointing == "none":
        return {NO_CHECKPOINTING: True}
    return {
        NO_CHECKPOINTING: False,
        **({OFFLOADING: True} if recipe.checkpointing == "offload" else {REENTRANT: False}),
    }


def _method(plan: Plan) -> dict[str, Any]:
    r = plan.recipe
    if r.method == "full":
        return {TYPE: "full"}
    targets = names.targets(r, plan.job.architecture)
    modules = "all" if isinstance(targets, str) else ",".join(targets)
    saved = {SAVED: ",".join(r.modules_to_save)} if r.modules_to_save else {}
    return {TYPE: "lora", **KEYS.write(r, "lora_rank", "lora_alpha", "lora_dropout"), TARGET: modules, **saved}


def _precision(recipe: Recipe) -> dict[str, Any]:
    """Return the precision keys; the base is loaded in the compute dtype, trained weights in fp32 unless pure_bf16."""
    trains_all = recipe.method == "full"
    if recipe.precision == "fp32" and trains_all:
        return {"bf16": False, "fp16": False}
    if recipe.precision == "fp16-mixed":
        return {"fp16": True}
    if recipe.precision == "bf16" and trains_all:
        return {PURE: True, **({"bf16": True} if _sharding(recipe) else {})}
    return {"bf16": True}


def _sharding(recipe: Recipe) -> dict[str, Any]:
    return {DEEPSPEED: process_layout.DEEPSPEED_FILE} if process_layout.backend(recipe) in ("fsdp", "deepspeed") else {}


def data(plan: Plan) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the settings of the data to train on, and dataset_info.json. Raises Unsupported for unknown formats."""
    found = {DATASET: _entry(layout_for(plan.job, "LLaMA-Factory"))}
    if held_out := plan.job.training.eval_data:
        found[EVAL_DATASET] = _entry(layout_for(replace(plan.job, dataset=held_out), "LLaMA-Factory"))
    return dict(_DATA), {INFO_FILE: json.dumps(found, indent=2, ensure_ascii=False) + "\n"}


def _entry(layout: Layout) -> dict[str, Any]:
    entry: dict[str, Any] = {"file_name" if layout.kind else "hf_hub_url": layout.path}
    if layout.chat and len(layout.fields) == 1:
        tags = {
            "role_tag": layout.role, "content_tag": layout.content, "user_tag": layout.user,
            "assistant_tag": layout.assistant, "system_tag": "system",
        }  # fmt: skip
        entry |= {"formatting": "sharegpt", "columns": {"messages": layout.fields[0]}, "tags": tags}
    elif layout.chat or layout.fields == ("input_ids",):
        raise Unsupported(
            f"LLaMA-Factory has no format for {'messages in ' * layout.chat}{' and '.join(layout.fields)}",
            hint="--target trl",
        )
    else:
        columns = ("prompt", "response") if len(layout.fields) == 2 else ("prompt", "query", "response")
        entry |= {"formatting": "alpaca", "columns": dict(zip(columns, layout.fields, strict=False))}
    return entry


# ---- chat templates. Source: LLaMA-Factory's constants.py

# names of chat models, and of families whose plain name is the chat model
_CHATS = re.compile(
    r"instruct|chat|thinking|distill|[-_]it\b|gpt-oss|phi-[34]|qwen3(?!.*base)|deepseek-(r1|v3)(?!.*base)", re.I
)
_TEMPLATES: tuple[tuple[str, str], ...] = (
    (r"deepseek-r1", "deepseekr1"),
    (r"deepseek-v[23]", "deepseek3"),
    (r"llama-?4", "llama4"),
    (r"llama-?3", "llama3"),
    (r"llama-?2", "llama2"),
    (r"qwen3\.5", "qwen3_5"),
    (r"qwen3-.*instruct-2507", "qwen3_nothink"),
    (r"qwen3-(?!vl|omni|next|coder)", "qwen3"),
    (r"qwen(1\.5|2|2\.5)-(?!vl|audio|omni)", "qwen"),
    (r"gemma-3n", "gemma3n"),
    (r"gemma-3", "gemma3"),
    (r"gemma-2-", "gemma2"),
    (r"gemma-(1\.1-)?\d", "gemma"),
    (r"mistral-small|devstral", "mistral_small"),
    (r"mistral-nemo|ministral-8b", "ministral"),
    (r"mistral-7b|mixtral", "mistral"),
    (r"phi-4-mini", "phi4_mini"),
    (r"phi-4", "phi4"),
    (r"phi-3", "phi"),
    (r"smollm2", "smollm2"),
    (r"gpt-oss", "gpt_oss"),
    (r"glm-4-9b", "glm4"),
    (r"falcon-\d", "falcon"),
    (r"yi-(1\.5-)?\d", "yi"),
)


def template(model: str) -> str | None:
    """Return the template a model was trained with; "default" for a base model, None for the tokenizer's own."""
    name = model.rsplit("/", 1)[-1]
    if not _CHATS.search(name):
        return "default"
    return next((found for pattern, found in _TEMPLATES if re.search(pattern, name, re.I)), None)
