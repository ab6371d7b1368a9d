"""Export target accelerate: accelerate.yaml, which starts one process per card under DDP, FSDP2 or DeepSpeed."""

from __future__ import annotations

from typing import Any

import memfit.export.deepspeed as deepspeed
import memfit.export.launch as launch
import memfit.framework_names as names
from memfit.export.text import savings, yaml_text
from memfit.job import Recipe
from memfit.plan import Plan


def export(plan: Plan) -> dict[str, str]:
    """accelerate.yaml, with ds_config.json where the recipe needs DeepSpeed. Raises Unsupported."""
    names.check_method(plan.recipe)
    launch.check(plan.recipe)
    return files(plan)


def files(plan: Plan) -> dict[str, str]:
    """The launcher files of a plan."""
    recipe, saved = plan.recipe, savings(plan)
    told = saved.get("shard", "") or saved.get("offload", "")
    head = ["# accelerate launch --config_file accelerate.yaml train.py"]
    found = {launch.ACCELERATE_FILE: yaml_text(config(recipe), {"fsdp_config": told, "deepspeed_config": told}, head)}
    if launch.backend(recipe) == "deepspeed":
        found[launch.DEEPSPEED_FILE] = deepspeed.to_json(deepspeed.config(recipe, auto=True))
    return found


def config(recipe: Recipe) -> dict[str, Any]:
    """accelerate's ClusterConfig as a dictionary."""
    kind = launch.backend(recipe)
    settings: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": {"plain": "NO", "ddp": "MULTI_GPU", "fsdp": "FSDP", "deepspeed": "DEEPSPEED"}[kind],
        "num_machines": 1,
        "num_processes": recipe.num_gpus,
    }
    if kind == "deepspeed":  # its own file says the precision; accelerate refuses to hear it twice
        stage3 = launch.zero_stage(recipe) == 3
        return settings | {
            "deepspeed_config": {"deepspeed_config_file": launch.DEEPSPEED_FILE, "zero3_init_flag": stage3}
        }
    settings["mixed_precision"] = launch.numbers(recipe).mixed
    return settings | ({"fsdp_config": _fsdp(recipe)} if kind == "fsdp" else {})


def _fsdp(recipe: Recipe) -> dict[str, Any]:
    return {
        "fsdp_version": 2,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_reshard_after_forward": True,
        "fsdp_offload_params": False,
        # the training script checkpoints: FSDP's own wrapper makes PEFT save an adapter without weights
        "fsdp_activation_checkpointing": False,
        # 4-bit weights are packed on rank 0 only, which deadlocks the broadcast
        "fsdp_cpu_ram_efficient_loading": recipe.quantization == "none",
        "fsdp_state_dict_type": "FULL_STATE_DICT",  # with SHARDED_STATE_DICT save_model() writes nothing
    }
