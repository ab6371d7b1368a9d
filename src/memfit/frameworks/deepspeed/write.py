"""ds_config.json: the ZeRO stage, buckets, offload and precision of a recipe."""

from __future__ import annotations

import json
from typing import Any

import memfit.frameworks.process_layout as launch
from memfit.closed_form.parallel.zero import BUCKET
from memfit.nouns.job import Recipe
from memfit.tables.precisions import meaning


def to_json(settings: dict[str, Any]) -> str:
    """The settings as JSON."""
    return json.dumps(settings, indent=2, ensure_ascii=False) + "\n"


def config(recipe: Recipe) -> dict[str, Any]:
    """DeepSpeed's settings; batch sizes and clipping are left to the Trainer, which knows them and refuses a mismatch."""
    auto = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
    return dict.fromkeys(auto, "auto") | _precision(recipe) | {"zero_optimization": _zero(recipe)}


def _precision(recipe: Recipe) -> dict[str, Any]:
    meant = meaning(recipe, "deepspeed")
    if meant.computed == "fp32":
        return {}
    if meant.computed == "fp16":
        return {"fp16": {"enabled": True}}
    settings = {"enabled": True}
    if not meant.master:  # else bf16 weights get an fp32 master copy
        settings |= {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
    return {"bf16": settings}


def _zero(recipe: Recipe) -> dict[str, Any]:
    stage = launch.zero_stage(recipe)
    settings: dict[str, Any] = {"stage": stage}
    if stage:
        settings |= {"reduce_bucket_size": BUCKET, "contiguous_gradients": True, "overlap_comm": True}
    if stage in (1, 2):
        settings["allgather_bucket_size"] = BUCKET
    if stage == 3:
        settings |= {"stage3_prefetch_bucket_size": BUCKET, "stage3_gather_16bit_weights_on_model_save": True}
    if recipe.offload != "none":
        settings["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    if recipe.offload == "parameters":
        settings["offload_param"] = {"device": "cpu", "pin_memory": True}
    return settings
