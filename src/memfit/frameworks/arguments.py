"""The settings of a recipe as TrainingArguments, or as the file of `trl sft --config`, for a file that is revised."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import memfit.frameworks.accelerate as accelerate
import memfit.frameworks.names as names
from memfit.frameworks import process_layout, trl
from memfit.frameworks.transformers import ATTENTION, CHECKPOINTINGS, KEYS, LIGER, MODEL, NAME, STORAGE
from memfit.nouns.job import Recipe
from memfit.nouns.plan import Plan

COMMAND_LINE = "model_name_or_path"  # a key of TRL's command line, whose file holds how the model is loaded as well
_FLAT = ("dtype", "torch_dtype", ATTENTION, COMMAND_LINE)


def config(plan: Plan, data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a recipe in the keys that the file `data` can have. Raises Unsupported.

    What is no key of such a file, as adapters in TrainingArguments, is left out.
    """
    recipe = plan.recipe
    kind = process_layout.backend(recipe)
    by_trl = recipe.trainer.startswith("trl")
    names.check_method(recipe)
    process_layout.check(recipe, kind)
    if by_trl:
        trl.check(recipe, kind)
    length = KEYS.write(recipe, "sequence_length", "padding") if by_trl else {}
    liger = recipe.loss == "fused" and not by_trl
    return {
        **KEYS.write(recipe, "micro_batch", "accumulation"),
        **process_layout.reduction(recipe),
        **length,
        **names.optim(recipe, NAME),
        **_checkpointing(recipe, data),
        **names.compiled(recipe),
        **({LIGER: True} if liger else {}),
        **_numbers(recipe, kind, data, by_trl),
        **(_adapter(plan, kind) if COMMAND_LINE in data or "use_peft" in data else {}),
        **_sharding(recipe, kind, plan.job.architecture.model_type),
    }


def _checkpointing(recipe: Recipe, data: Mapping[str, Any]) -> dict[str, Any]:
    key = next((name for name in CHECKPOINTINGS if name in data), CHECKPOINTINGS[1])
    if recipe.checkpointing == "none":
        return {key: False}
    how = {} if recipe.checkpointing == "full" else {f"{key}_kwargs": {recipe.checkpointing: True}}
    return {key: True, **how}


def _numbers(
    recipe: Recipe, kind: process_layout.Backend, data: Mapping[str, Any], by_trl: bool
) -> dict[str, Any]:  # fmt: skip
    """Return the keys of autocast, and of loading the model where the file has them."""
    numbers = process_layout.numbers(recipe, kind)
    autocast = {"bf16": numbers.mixed == "bf16", **({"fp16": True} if numbers.mixed == "fp16" else {})}
    loading = {"dtype": numbers.weights, ATTENTION: names.ATTENTION[recipe.attention]}
    if MODEL in data or (by_trl and not any(name in data for name in _FLAT)):
        return autocast | {MODEL: loading}
    return autocast | loading if any(name in data for name in _FLAT) else autocast


def _adapter(plan: Plan, kind: process_layout.Backend) -> dict[str, Any]:
    recipe = plan.recipe
    if recipe.method == "full":
        return {}
    bits = names.bitsandbytes(recipe)
    nested = {"use_bnb_nested_quant": True} if bits.pop("bnb_4bit_use_double_quant", False) else {}
    bits.pop("bnb_4bit_compute_dtype", None)
    if kind == "fsdp" and "load_in_4bit" in bits:  # uint8 storage, the default, is not sharded
        bits[STORAGE] = process_layout.numbers(recipe, kind).weights
    return {
        "use_peft": True,
        **KEYS.write(recipe, "lora_rank", "lora_alpha", "lora_dropout"),
        "lora_target_modules": names.targets(recipe, plan.job.architecture),
        **bits,
        **nested,
    }


def _sharding(recipe: Recipe, kind: process_layout.Backend, model_type: str) -> dict[str, Any]:
    if kind == "deepspeed":
        return {"deepspeed": process_layout.DEEPSPEED_FILE}
    if kind != "fsdp":
        return {}
    # transformers 5.23 takes true as well, older versions only these words
    return {
        "fsdp": "full_shard auto_wrap",
        "fsdp_config": {"version": recipe.fsdp_version, **accelerate.fsdp(recipe), **accelerate.wrapped(model_type)},
    }
