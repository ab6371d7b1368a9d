"""The settings of a recipe as TrainingArguments, or as the file of `trl sft --config`, for a file that is revised."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import memfit.frameworks.accelerate as accelerate
import memfit.frameworks.names as names
from memfit.frameworks import process_layout, refusals
from memfit.frameworks.transformers import ATTENTION, CHECKPOINTINGS, KEYS, MODEL, STORAGE, settings
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
    refusals.check(recipe, kind, *(["trl"] if by_trl else []))
    return {
        **settings(recipe, kind, by_trl, next((name for name in CHECKPOINTINGS if name in data), CHECKPOINTINGS[1])),
        **_loading(recipe, kind, data, by_trl),
        **(_adapter(plan, kind) if COMMAND_LINE in data or "use_peft" in data else {}),
        **_sharding(recipe, kind, plan.job.architecture.model_type),
    }


def _loading(
    recipe: Recipe, kind: process_layout.Backend, data: Mapping[str, Any], by_trl: bool
) -> dict[str, Any]:  # fmt: skip
    """Return how the model is loaded, where the file says it."""
    loading = {"dtype": process_layout.numbers(recipe, kind).weights, ATTENTION: names.ATTENTION[recipe.attention]}
    flat = any(name in data for name in _FLAT)
    return {MODEL: loading} if MODEL in data or (by_trl and not flat) else loading if flat else {}


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
        "fsdp_config": {"version": 2, **accelerate.fsdp(recipe), **accelerate.wrapped(model_type)},
    }
