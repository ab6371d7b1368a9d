"""axolotl's YAML (keys and defaults of 0.19), read and written, with ds_config.json for DeepSpeed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import memfit.frameworks.accelerate as accelerate
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
    at,
    module_names,
    saved_modules,
    word,
    words,
)
from memfit.frameworks.schemas import AXOLOTL
from memfit.frameworks.script import learning_rate
from memfit.frameworks.text import head, savings_at, with_environment, yaml_text
from memfit.frameworks.training_keys import whole
from memfit.nouns.job import Job, Recipe
from memfit.nouns.plan import Plan
from memfit.tables.quantization import quantization
from memfit.tables.trainers import trainer

NAME, FILE, VERSION = "axolotl", "axolotl.yaml", "axolotl 0.19"
KEYS = KeyTable(
    Key("sequence_length", "sequence_len", 512),
    Key("padding", "sample_packing", False, {"packing": True, "longest": False}),
    Key("micro_batch", "micro_batch_size", 1),
    Key("accumulation", "gradient_accumulation_steps", 1),
    Key("lora_rank", "lora_r", 8),
    Key("lora_alpha", "lora_alpha", 8),
    Key("lora_dropout", "lora_dropout", 0.0),
)
DATASETS = "datasets"
MODEL, ADAPTER, FOUR_BIT, EIGHT_BIT, BNB = "base_model", "adapter", "load_in_4bit", "load_in_8bit", "bnb_config_kwargs"
QUANT_TYPE, DOUBLE = "bnb_4bit_quant_type", "bnb_4bit_use_double_quant"  # of BNB; the defaults are nf4 and True
LINEAR, MODULES, SAVED = "lora_target_linear", "lora_target_modules", "lora_modules_to_save"
ATTENTION, CHECKPOINTING, SELECTIVE, OFFLOADING = (
    "attn_implementation", "gradient_checkpointing", "selective_checkpointing", "activation_offloading",
)  # fmt: skip
PLUGINS, LIGER_LOSS, CHUNKED = "plugins", "liger_fused_linear_cross_entropy", "chunked_cross_entropy"
LOSS_ALONE = "axolotl-loss"  # the trainer whose fused loss comes without Liger's layers
LIGER_PLUGIN = "axolotl.integrations.liger.LigerPlugin"
LIGER_LAYERS = ("liger_rms_norm", "liger_glu_activation", "liger_rope")  # what `use_liger_kernel` brings with its loss
FSDP, FSDP_VERSION, DEEPSPEED = "fsdp_config", "fsdp_version", "deepspeed"
# how many cards have a part of each sequence or layer, or of the weights and not all; 1 is none
_MESH = words(
    "context_parallel_size sequence_parallel_degree tensor_parallel_size expert_parallel_size dp_shard_size"
    " dp_replicate_size"
)
# fused layers for LoRA, which are on by default (utils/schemas/config.py, check_auto_enable_lora_kernels)
_LORA_KERNELS = words("lora_mlp_kernel lora_qkv_kernel lora_o_kernel lora_embedding_kernel")
_NOT_FUSED = "axolotl fuses LoRA's layers unless lora_*_kernel are false; counted as PEFT's, which keep more"
# plugins that are read by their keys, or that change no memory
_PLUGINS = words("liger cut_cross_entropy kernels swanlab lm_eval")
_LEGACY_ATTENTION = {"flash_attention": "flash", "sdp_attention": "sdpa", "eager_attention": "eager"}
# (recipe field, the key whose comment states what it saves)
_SAVING_AT = (
    ("quantization", FOUR_BIT), ("method", ADAPTER), ("checkpointing", CHECKPOINTING), ("optimizer", "optimizer"),
    ("micro_batch", KEYS["micro_batch"].name), ("loss", PLUGINS), ("attention", ATTENTION), ("offload", DEEPSPEED),
    ("precision", "bf16"), ("shard", FSDP), ("shard", DEEPSPEED),
)  # fmt: skip


# ---- reading


def matches(data: dict[str, Any]) -> bool:
    return MODEL in data


def adopt(data: dict[str, Any], path: Path) -> Adopted:
    """Return model, recipe and data of an axolotl run."""
    keys = Keys(data, path.name)
    micro, total = KEYS["micro_batch"].read(keys), keys.number("batch_size", default=0)
    changes: dict[str, Any] = {
        **KEYS.read(keys, "sequence_length", "padding"),
        "micro_batch": micro,
        "accumulation": KEYS["accumulation"].read(keys, default=max(1, total // max(1, micro))),
        **names.read_optim(keys, NAME, "adamw_torch_fused"),
        **_read_attention(keys),
        **names.read_compile(keys),
        **_read_loss(keys),
        **_read_adapter(keys),
    }
    sharding = _read_sharding(keys, path)
    changes |= sharding.without_precision
    changes["precision"] = _read_precision(keys, sharding, changes["method"])
    checkpointing = _read_checkpointing(keys)
    changes["checkpointing"] = sharding.checkpointing or checkpointing
    names.read_reduction(keys, changes, sharding.kind)
    for name, trained in (("eval_batch_size", micro), ("eval_sequence_len", changes["sequence_length"])):
        if keys.number(name, default=trained) > trained:
            keys.not_expressed(name)
    keys.not_expressed(*(name for name in _MESH if keys.number(name, default=1) > 1))
    sharding.assumed += [_NOT_FUSED] if _fuses_lora(data) else []
    dataset = at(data, (DATASETS, 0, "path"))
    model = keys.text(MODEL)
    return adopted_from(
        NAME, keys, AXOLOTL.harmless, changes, sharding, model, dataset if isinstance(dataset, str) else None
    )


def _read_attention(keys: Keys) -> dict[str, str]:
    for flag, kernel in _LEGACY_ATTENTION.items():
        if keys.flag(flag):
            return {"attention": kernel}
    return names.read_attention(keys, keys.take(ATTENTION), ATTENTION)


def _read_loss(keys: Keys) -> dict[str, str]:
    """Return the loss and the trainer, which differs where the loss is fused and not all of Liger's layers are on."""
    given = keys.take(PLUGINS, default=[])
    plugins = [word(plugin) for plugin in given] if isinstance(given, list) else [word(given)]
    if not all(plugin.removeprefix("axolotl.integrations.").startswith(_PLUGINS) for plugin in plugins):
        keys.not_expressed(PLUGINS)
    cut = any("cut_cross_entropy" in plugin for plugin in plugins)
    norm, activation, rope = LIGER_LAYERS
    layers = [keys.flag(norm), keys.flag(activation, "liger_swiglu"), keys.flag(rope)]
    if keys.flag(LIGER_LOSS):
        return {"trainer": NAME if all(layers) else LOSS_ALONE, "loss": "fused"}
    if keys.flag("cut_cross_entropy", default=cut):
        return {"trainer": LOSS_ALONE, "loss": "fused"}
    return {"trainer": NAME, "loss": "chunked" if keys.flag(CHUNKED) else "full"}


def _fuses_lora(data: Mapping[str, Any]) -> bool:
    """Return whether axolotl fuses LoRA's layers: by a key, or by itself (check_auto_enable_lora_kernels)."""
    said = [data[name] for name in _LORA_KERNELS if data.get(name) is not None]
    not_by_itself = (
        data.get("rl") or data.get("trust_remote_code") or (data.get(ADAPTER) == "lora" and data.get(EIGHT_BIT))
    )
    return True in said if said else data.get(ADAPTER) in ("lora", "qlora") and not not_by_itself


def _read_adapter(keys: Keys) -> dict[str, Any]:
    kind = keys.text(ADAPTER)
    four, eight = keys.flag(FOUR_BIT), keys.flag(EIGHT_BIT)
    keys.take(*_LORA_KERNELS)
    if not kind:
        keys.take(
            *(KEYS[name].name for name in ("lora_rank", "lora_alpha", "lora_dropout")), LINEAR, MODULES, SAVED, BNB
        )
        return {"method": "full"}
    if kind not in ("lora", "qlora"):
        keys.not_expressed(ADAPTER)
    bnb = keys.table(BNB)
    quantized = "int8" if eight else "none"
    if four:
        quantized = names.read_four_bit(bnb.text(QUANT_TYPE) or "nf4", bnb.flag(DOUBLE, default=True), keys.where)
    linear, modules = keys.flag(LINEAR), keys.take(MODULES)
    return {
        "method": "qlora" if four or eight else "lora",
        "quantization": quantized,
        **KEYS.read(keys, "lora_rank", "lora_alpha", "lora_dropout"),
        "lora_targets": ("all-linear",) if linear or modules is None else module_names(modules, keys.where),
        "modules_to_save": saved_modules(keys.take(SAVED), keys.where),
    }


def _read_sharding(keys: Keys, path: Path) -> Sharding:
    version = keys.take(FSDP_VERSION, default=1)
    keys.take("fsdp")  # the old list of options, which fsdp_config repeats
    if not keys.take(FSDP):
        return deepspeed.read_setting(keys.take(DEEPSPEED), path)
    return accelerate.read_fsdp(keys.table(FSDP), version)


def _read_precision(keys: Keys, sharding: Sharding, method: str) -> str:
    """Return the precision: weights are loaded in the compute dtype; FSDP2 trains in fp32, DeepSpeed keeps a master."""
    half = keys.flag("fp16", "float16")
    keys.half_open = not half and keys.take("bf16", "bfloat16", default="auto") == "auto"
    bf16 = keys.flag("bf16", "bfloat16", default=not half)
    if bf16 and method == "full" and sharding.kind == "fsdp":
        return "bf16-mixed"
    if bf16 and method == "full" and sharding.kind == "deepspeed":
        return "bf16" if sharding.pure else "bf16-master"
    if bf16:
        return "bf16"
    return "fp16-mixed" if half else "fp32"


def _read_checkpointing(keys: Keys) -> str:
    mode = keys.take(CHECKPOINTING, default=False)
    keys.take(f"{CHECKPOINTING}_kwargs")
    offloads, selective = keys.flag(OFFLOADING), keys.take(SELECTIVE)
    if not mode or mode == "no":
        return "none"
    if offloads or (isinstance(mode, str) and mode.startswith("offload")):
        return "offload"
    return "selective" if selective else "full"


# ---- writing


def command(plan: Plan) -> str:
    """Return the line that starts training; axolotl starts one process per visible GPU."""
    return with_environment(plan.recipe, f"axolotl train {FILE}")


def export(plan: Plan) -> dict[str, str]:
    """Return axolotl.yaml, and ds_config.json for DeepSpeed. Raises Unsupported if axolotl lacks a setting."""
    kind = process_layout.backend(plan.recipe)
    files = {FILE: yaml_text(config(plan), savings_at(plan, _SAVING_AT), head(plan, VERSION, command(plan)))}
    return files | ({process_layout.DEEPSPEED_FILE: deepspeed.text(plan.recipe)} if kind == "deepspeed" else {})


def config(plan: Plan) -> dict[str, Any]:
    """Return the settings in the order of axolotl's own examples. Raises Unsupported."""
    process_layout.check(plan.recipe, NAME, process_layout.backend(plan.recipe))
    r, training = plan.recipe, plan.job.training
    optimizer = names.optim(r, NAME)
    return {
        MODEL: plan.job.architecture.name,
        **_loss(r),
        **_adapter(plan),
        **data(plan),
        **_held_out(plan.job),
        **KEYS.write(r, "sequence_length"),
        "excess_length_strategy": "truncate",
        **KEYS.write(r, "padding"),
        "pad_to_sequence_len": r.padding == "packing",
        **KEYS.write(r, "micro_batch", "accumulation"),
        **process_layout.reduction(r),
        "num_epochs": whole(training.epochs),
        **({"max_steps": training.max_steps} if training.max_steps > 0 else {}),
        "learning_rate": float(learning_rate(plan)),
        **training_keys.write(training, NAME),
        **optimizer,
        **_precision(r),
        **_checkpointing(r),
        ATTENTION: names.ATTENTION[r.attention],
        **names.compiled(r),
        "output_dir": "output",
        **_sharding(r, plan.job.architecture.model_type),
    }


def _held_out(job: Job) -> dict[str, Any]:
    """Return the data to evaluate on, which has the columns of the training data."""
    if not job.training.eval_data:
        return {}
    return {"test_datasets": [dataset(layout_for(replace(job, dataset=job.training.eval_data), "axolotl"))]}


def data(plan: Plan) -> dict[str, Any]:
    """Return the settings of the data to train on."""
    return {DATASETS: [dataset(layout_for(plan.job, "axolotl"))]}


def dataset(layout: Layout) -> dict[str, Any]:
    """Return one entry of `datasets`. Raises Unsupported for samples axolotl has no type for."""
    source: dict[str, Any] = {"path": layout.path} | ({"ds_type": layout.kind} if layout.kind else {})
    if layout.chat and len(layout.fields) == 1:  # the fallback is for base models, which have no template
        source |= {"type": "chat_template", "chat_template": "tokenizer_default_fallback_chatml"}
        source |= {"field_messages": layout.fields[0]}
        return source | {"message_property_mappings": {"role": layout.role, "content": layout.content}}
    if len(layout.fields) == 1 and layout.fields != ("input_ids",):
        return source | {"type": "completion"} | ({"field": layout.fields[0]} if layout.fields != ("text",) else {})
    if layout.fields[0] == "instruction":
        return source | {"type": "alpaca"}
    if layout.chat or len(layout.fields) != 2:
        raise Unsupported(
            f"axolotl has no type for {'messages in ' * layout.chat}{' and '.join(layout.fields)}", hint="--target trl"
        )
    prompt, completion = layout.fields
    plain = {"format": "{instruction}", "no_input_format": "{instruction}"}
    return source | {"type": {"field_instruction": prompt, "field_output": completion, **plain}}


def _loss(r: Recipe) -> dict[str, Any]:
    if r.loss == "full":
        return {}
    if r.loss == "chunked":
        return {CHUNKED: True}
    layers = LIGER_LAYERS if trainer(r.trainer).liger_layers else ()
    return {PLUGINS: [LIGER_PLUGIN], LIGER_LOSS: True, **dict.fromkeys(layers, True)}


def _adapter(plan: Plan) -> dict[str, Any]:
    r = plan.recipe
    if r.method == "full":
        return {}
    targets = names.targets(r, plan.job.architecture)
    return {
        **_quantization(r.quantization),
        **KEYS.write(r, "lora_rank", "lora_alpha", "lora_dropout"),
        **({LINEAR: True} if targets == "all-linear" else {MODULES: targets}),
        **({SAVED: list(r.modules_to_save)} if r.modules_to_save else {}),
    }


def _quantization(key: str) -> dict[str, Any]:
    if key == "none":
        return {ADAPTER: "lora"}
    row = quantization(key)
    if row.bits == 8:
        return {ADAPTER: "lora", EIGHT_BIT: True}
    bnb: dict[str, Any] = {} if row.kind == "nf4" else {QUANT_TYPE: row.kind}
    bnb |= {} if row.double else {DOUBLE: False}
    return {ADAPTER: "qlora", FOUR_BIT: True, **({BNB: bnb} if bnb else {})}


def _precision(recipe: Recipe) -> dict[str, Any]:
    """Return the precision keys; axolotl loads weights in the compute dtype, so `bf16: true` gives bf16 weights."""
    if recipe.precision == "fp32":
        return {"bf16": False, "fp16": False}
    return {"bf16": False, "fp16": True} if recipe.precision == "fp16-mixed" else {"bf16": True}


def _checkpointing(r: Recipe) -> dict[str, Any]:
    if r.checkpointing == "none":
        return {CHECKPOINTING: False}
    more: dict[str, dict[str, Any]] = {"selective": {SELECTIVE: True}, "offload": {OFFLOADING: "hidden_states"}}
    return {CHECKPOINTING: True, f"{CHECKPOINTING}_kwargs": {"use_reentrant": False}, **more.get(r.checkpointing, {})}


def _sharding(recipe: Recipe, model_type: str) -> dict[str, Any]:
    kind = process_layout.backend(recipe)
    if kind == "deepspeed":
        return {DEEPSPEED: process_layout.DEEPSPEED_FILE}
    if kind != "fsdp":
        return {}
    block = accelerate.fsdp(recipe) | accelerate.wrapped(model_type)
    del block["activation_checkpointing"]  # axolotl has its own key
    return {FSDP_VERSION: recipe.fsdp_version, FSDP: block}
