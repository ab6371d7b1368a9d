"""The environment of a training process: the allocator's settings, and what `accelerate launch` would set for the backend."""

from __future__ import annotations

from pathlib import Path

import memfit.frameworks.accelerate.write as accelerate
from memfit.frameworks import process_layout as launch
from memfit.nouns.job import Recipe

# torch reads PYTORCH_ALLOC_CONF from 2.10 on, older ones PYTORCH_CUDA_ALLOC_CONF: both are set, to the same
ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def environment(recipe: Recipe, model_type: str, folder: Path | None = None) -> dict[str, str]:
    """Variables for `torchrun train.py`, the same as of `accelerate launch --config_file accelerate.yaml train.py`."""
    return allocator(recipe) | _accelerate(recipe, model_type, folder)


def allocator(recipe: Recipe) -> dict[str, str]:
    """PYTORCH_ALLOC_CONF under both of its names, where the recipe sets it."""
    return dict.fromkeys(ALLOCATOR, recipe.alloc_conf) if recipe.alloc_conf else {}


def _accelerate(recipe: Recipe, model_type: str, folder: Path | None) -> dict[str, str]:
    kind = launch.backend(recipe)
    if kind == "plain":
        return {}
    settings = accelerate.config(recipe, kind, model_type)
    if kind == "deepspeed":
        deepspeed = settings["deepspeed_config"]
        path = (folder or Path()) / deepspeed["deepspeed_config_file"]
        return {
            "ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_CONFIG_FILE": str(path),
            "ACCELERATE_DEEPSPEED_ZERO3_INIT": str(deepspeed["zero3_init_flag"]).lower(),
        }  # fmt: skip
    found = {"ACCELERATE_MIXED_PRECISION": str(settings["mixed_precision"])}
    if kind == "fsdp":
        found["ACCELERATE_USE_FSDP"] = "true"
        for name, value in settings["fsdp_config"].items():
            variable = name.upper().replace("_LAYER_CLS_", "_CLS_")  # accelerate has two names for the blocks
            found[variable] = str(value).lower() if isinstance(value, bool) else str(value)
        found["FSDP_SYNC_MODULE_STATES"] = "true"  # what cpu_ram_efficient_loading needs
    return found
