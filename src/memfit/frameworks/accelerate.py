"""accelerate.yaml, read, written, or as environment variables; and the FSDP block of any framework's file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import memfit.frameworks.deepspeed as deepspeed
from memfit.frameworks import process_layout
from memfit.frameworks.keys import Adopted, Keys, Sharding, build, word, words
from memfit.frameworks.names import inductor
from memfit.frameworks.text import yaml_text
from memfit.nouns.job import Recipe
from memfit.nouns.plan import Plan
from memfit.tables.loading import loading_of

NAME = "accelerate"
TYPE, PROCESSES, MIXED, FSDP, DEEPSPEED = (
    "distributed_type", "num_processes", "mixed_precision", "fsdp_config", "deepspeed_config",
)  # fmt: skip
ZERO_FILE = "deepspeed_config_file"
TYPES = {"plain": "NO", "ddp": "MULTI_GPU", "fsdp": "FSDP", "deepspeed": "DEEPSPEED"}  # backend -> distributed_type
# (sharding, mixed_precision) -> the recipe's precision
_MIXED = {
    ("fsdp", "bf16"): "bf16-mixed", ("fsdp", "fp16"): "fp16-mixed", ("deepspeed", "bf16"): "bf16-master",
    ("deepspeed", "fp16"): "fp16-mixed", ("", "fp16"): "fp16-mixed", ("", "bf16"): "bf16",
}  # fmt: skip
# FSDP's `reshard_after_forward`, or its older `sharding_strategy` -> the recipe's `shard`
_RESHARD = {
    "TRUE": "parameters", "FALSE": "gradients", "FULL_SHARD": "parameters", "SHARD_GRAD_OP": "gradients",
    "NO_SHARD": "none", "1": "parameters", "2": "gradients",
}  # fmt: skip
# torch reads PYTORCH_ALLOC_CONF since 2.10, older versions PYTORCH_CUDA_ALLOC_CONF: both are set to the same value
ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
# keys that change no memory
HARMLESS = words("""
    compute_environment debug machine_rank main_process_* main_training_function num_machines rdzv_backend
    same_network tpu_* gpu_ids enable_cpu_affinity downcast_bf16 use_cpu
""")
HARMLESS_DEEPSPEED = words("""
    zero3_* deepspeed_multinode_launcher deepspeed_hostfile gradient_clipping deepspeed_moe_*
""")
HARMLESS_FSDP = words("""
    version auto_wrap_policy transformer_layer_cls_to_wrap *state_dict_type
    sync_module_states use_orig_params min_num_params backward_prefetch xla*
""")


# ---- reading


def matches(data: dict[str, Any]) -> bool:
    return TYPE in data or "compute_environment" in data


def adopt(data: dict[str, Any], path: Path) -> Adopted:
    """Return the number of GPUs, shard, offload and precision; the file does not name the model."""
    keys = Keys(data, path.name)
    kind = word(keys.take(TYPE, default=TYPES["plain"])).upper()
    found = Sharding()
    if kind == TYPES["fsdp"]:
        found = read_fsdp(keys.table(FSDP))
    elif kind == TYPES["deepspeed"]:
        found = _read_deepspeed(keys.table(DEEPSPEED), path)
    processes = keys.number(PROCESSES, default=1)
    changes = {"num_gpus": 1 if kind == TYPES["plain"] else max(1, processes), **found.changes}
    changes |= {"checkpointing": found.checkpointing} if found.checkpointing else {}
    changes |= _read_compile(keys)
    mixed = word(keys.take(MIXED, default="no"))
    assumed = list(found.assumed)
    precision = _MIXED.get((found.kind, mixed))
    if precision and "precision" not in changes:
        changes["precision"] = precision
        assumed += [] if found.kind else [f"mixed_precision {mixed}: weights taken as stored in {precision[:4]}"]
    unread = [block for block, used in ((FSDP, "fsdp"), (DEEPSPEED, "deepspeed")) if used != found.kind]
    ignored, unknown = keys.rest((*HARMLESS, *unread))
    return Adopted(
        format=NAME,
        recipe=build(path.name, changes),
        effective_batch=found.batch,
        stated=tuple(changes),
        assumed=tuple(assumed),
        ignored=ignored,
        unknown=(*found.unknown, *unknown),
    )


def read_fsdp(given: Keys) -> Sharding:
    """Read an FSDP block, with or without the prefix `fsdp_` that accelerate uses."""
    block = Keys({name.removeprefix("fsdp_"): value for name, value in given.data.items()}, FSDP)
    found = Sharding({"shard": "parameters"}, "fsdp")
    reshard = word(block.take("reshard_after_forward", "sharding_strategy", default=True)).upper()
    if reshard in _RESHARD:
        found.changes["shard"] = _RESHARD[reshard]
    else:
        found.unknown.append(f"{FSDP}.reshard_after_forward")
    if block.flag("offload_params", "cpu_offload"):
        found.changes["offload"] = "parameters"
    if not block.flag("cpu_ram_efficient_loading"):
        found.changes["loading"] = "host"
    if block.flag("activation_checkpointing"):
        found.checkpointing = "offload" if block.flag("activation_checkpointing_offload") else "full"
    found.unknown += [f"{FSDP}.{name}" for name in block.rest(HARMLESS_FSDP)[1]]
    return found


def _read_compile(keys: Keys) -> dict[str, bool]:
    """Read torch.compile from dynamo_config, or from the bare keys of older files."""
    table = keys.table("dynamo_config")
    found = table if table.data else keys
    backend = word(found.take("dynamo_backend", default="no")).lower()
    if backend in ("no", "false"):
        return {}
    found.take("dynamo_use_dynamic", "dynamo_use_fullgraph")
    made = inductor(found, True, backend, found.text("dynamo_mode"), ("dynamo_backend", "dynamo_mode"))
    if table.rest(())[1]:
        keys.not_expressed("dynamo_config")
    return made


def _read_deepspeed(keys: Keys, path: Path) -> Sharding:
    """Read accelerate's short form of a DeepSpeed configuration, or the file it names."""
    named = keys.text(ZERO_FILE)
    if named:
        found = deepspeed.read_setting(named, path, f"{DEEPSPEED}.{ZERO_FILE}")
    else:
        stage = {"stage": keys.number("zero_stage", default=2)}
        blocks = {
            side: {"device": word(keys.take(f"{side}_device", default="none"))} for side in deepspeed.OFFLOAD.values()
        }
        found = deepspeed.read(Keys({"zero_optimization": stage | blocks, "bf16": {"enabled": "auto"}}, keys.where))
        accumulation = deepspeed.KEYS["accumulation"]
        if keys.take(accumulation.name, default="auto") != "auto":
            found.changes["accumulation"] = accumulation.read(keys)
    found.unknown += [f"{DEEPSPEED}.{name}" for name in keys.rest(HARMLESS_DEEPSPEED)[1]]
    return found


# ---- writing


def files(plan: Plan, how: process_layout.Launch) -> dict[str, str]:
    """Return accelerate.yaml if it starts the script, and ds_config.json if the backend is DeepSpeed."""
    recipe, found = plan.recipe, {}
    if how.by_accelerate:
        settings = config(recipe, how.backend, plan.job.architecture.model_type)
        found[process_layout.ACCELERATE_FILE] = yaml_text(settings, head=[f"# {how.command}"])
    if how.backend == "deepspeed":
        found[process_layout.DEEPSPEED_FILE] = deepspeed.text(recipe)
    return found


def config(recipe: Recipe, kind: process_layout.Backend, model_type: str) -> dict[str, Any]:
    """Return accelerate's ClusterConfig as a dictionary."""
    settings: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        TYPE: TYPES[kind],
        "num_machines": 1,
        PROCESSES: recipe.num_gpus,
    }
    if kind == "deepspeed":  # its own file sets the precision; accelerate refuses to set it again
        stage3 = process_layout.zero_stage(recipe) == 3
        return settings | {DEEPSPEED: {ZERO_FILE: process_layout.DEEPSPEED_FILE, "zero3_init_flag": stage3}}
    settings[MIXED] = process_layout.numbers(recipe, kind).mixed
    if kind == "fsdp":
        block = {**wrapped(model_type), "version": 2, **fsdp(recipe)}
        settings[FSDP] = {f"fsdp_{name}": value for name, value in block.items()}
    return settings


def fsdp(recipe: Recipe) -> dict[str, Any]:
    """Return the settings of an FSDP2 block, without accelerate's prefix."""
    return {
        "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "reshard_after_forward": True,
        "offload_params": recipe.offloaded_by_fsdp,
        # the training script does the checkpointing: with FSDP's own wrapper PEFT saves an adapter without weights
        "activation_checkpointing": False,
        "cpu_ram_efficient_loading": loading_of(recipe) == "sharded",
        "state_dict_type": "FULL_STATE_DICT",  # with SHARDED_STATE_DICT save_model() writes nothing
    }


def wrapped(model_type: str) -> dict[str, str]:
    """Return the setting of the blocks that FSDP2 wraps, for models whose own list accelerate cannot use."""
    return (
        {"transformer_layer_cls_to_wrap": process_layout.BLOCKS[model_type]}
        if model_type in process_layout.BLOCKS
        else {}
    )


# ---- the environment


def environment(recipe: Recipe, model_type: str, folder: Path | None = None) -> dict[str, str]:
    """Return the variables for `torchrun train.py` that `accelerate launch --config_file accelerate.yaml` would set."""
    found = dict.fromkeys(ALLOCATOR, recipe.alloc_conf) if recipe.alloc_conf else {}
    kind = process_layout.backend(recipe)
    if kind == "plain":
        return found
    settings = config(recipe, kind, model_type)
    if kind == "deepspeed":
        block = settings[DEEPSPEED]
        return found | {
            "ACCELERATE_USE_DEEPSPEED": "true",
            "ACCELERATE_DEEPSPEED_CONFIG_FILE": str((folder or Path()) / block[ZERO_FILE]),
            "ACCELERATE_DEEPSPEED_ZERO3_INIT": str(block["zero3_init_flag"]).lower(),
        }  # fmt: skip
    found["ACCELERATE_MIXED_PRECISION"] = str(settings[MIXED])
    if kind == "fsdp":
        found["ACCELERATE_USE_FSDP"] = "true"
        for name, value in settings[FSDP].items():
            variable = name.upper().replace("_LAYER_CLS_", "_CLS_")  # accelerate has two names for the blocks
            found[variable] = str(value).lower() if isinstance(value, bool) else str(value)
        found["FSDP_SYNC_MODULE_STATES"] = "true"  # what cpu_ram_efficient_loading needs
    return found
