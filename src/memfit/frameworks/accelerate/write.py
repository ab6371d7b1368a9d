"""accelerate.yaml, which starts one process per card under DDP, FSDP2 or DeepSpeed."""

from __future__ import annotations

from typing import Any

import memfit.frameworks.deepspeed.write as deepspeed
import memfit.frameworks.process_layout as launch
from memfit.frameworks.text import yaml_text
from memfit.nouns.job import Recipe
from memfit.nouns.plan import Plan


def files(plan: Plan, how: launch.Launch) -> dict[str, str]:
    """accelerate.yaml where that starts the script, and ds_config.json where the backend is DeepSpeed."""
    recipe, found = plan.recipe, {}
    if how.by_accelerate:
        settings = config(recipe, how.backend, plan.job.architecture.model_type)
        found[launch.ACCELERATE_FILE] = yaml_text(settings, head=[f"# {how.command}"])
    if how.backend == "deepspeed":
        found[launch.DEEPSPEED_FILE] = deepspeed.to_json(deepspeed.config(recipe))
    return found


def config(recipe: Recipe, kind: launch.Backend, model_type: str) -> dict[str, Any]:
    """accelerate's ClusterConfig as a dictionary."""
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
    settings["mixed_precision"] = launch.numbers(recipe, kind).mixed
    return settings | ({"fsdp_config": _fsdp(recipe, model_type)} if kind == "fsdp" else {})


def _fsdp(recipe: Recipe, model_type: str) -> dict[str, Any]:
    told = {"fsdp_transformer_layer_cls_to_wrap": launch.BLOCKS[model_type]} if model_type in launch.BLOCKS else {}
    return told | {
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
