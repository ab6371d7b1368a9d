"""accelerate.yaml, read, written, or as environment variables; and the FSDP block of any framework's file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import memfit.frameworks.deepspeed as deepspeed
import memfit.frameworks.names as names
from memfit.frameworks import process_layout
from memfit.frameworks.keys import Adopted, Keys, Sharding, adopted_from, word
from memfit.frameworks.names import inductor
from memfit.frameworks.schemas import ACCELERATE, ACCELERATE_DEEPSPEED
from memfit.frameworks.schemas import FSDP as FSDP_SCHEMA
from memfit.frameworks.text import yaml_text
from memfit.nouns.job import Recipe
from memfit.nouns.plan import Plan
from memfit.tables.loading import loading_of

NAME = "accelerate"
TYPE, PROCESSES, MIXED, FSDP, DEEPSPEED = (
    "distributed_type", "num_processes", "mixed_precision", "fsdp_config", "deepspeed_config",
)  # fmt: skip
PARALLELISM, _BACKENDS = "parallelism_config", {"cp": "torch", "sp": "deepspeed"}
ZERO_FILE, WRAPPED = "deepspeed_config_file", "TRANSFORMER_BASED_WRAP"
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


# ---- reading


def matches(data: dict[str, Any]) -> bool:
    return TYPE in data or "compute_environment" in data


def adopt(data: dict[str, Any], path: Path) -> Adopted:
    """Return the number of GPUs, shard, offload and precision; the file does not name the model."""
    keys = Keys(data, path.name)
    kind = word(keys.take(TYPE, default=TYPES["plain"])).upper()
    found = Sharding()
    if kind == TYPES["fsdp"]:
        found = read_fsdp(keys.table(FSDP), version=1)
        if not any("auto_wrap_policy" in name for name in keys.table(FSDP).data):
            found.assumed.append(
                f"no fsdp_auto_wrap_policy is set: read as {WRAPPED}; without one every card gathers it all"
            )
    elif kind == TYPES["deepspeed"]:
        found = _read_deepspeed(keys.table(DEEPSPEED), path)
    elif kind not in (*TYPES.values(), "MULTI_NPU", "MULTI_XPU"):
        keys.not_expressed(TYPE)
    found.changes |= read_parallelism(keys, found)
    _read_precision(keys, found)
    processes = keys.number(PROCESSES, default=1)
    changes = {"num_gpus": 1 if kind == TYPES["plain"] else max(1, processes), **found.changes}
    changes |= {"checkpointing": found.checkpointing} if found.checkpointing else {}
    changes |= _read_compile(keys)
    unread = [block for block, used in ((FSDP, "fsdp"), (DEEPSPEED, "deepspeed")) if used != found.kind]
    return adopted_from(NAME, keys, (*ACCELERATE.harmless, *unread), changes, found)


def read_parallelism(keys: Keys, found: Sharding) -> dict[str, Any]:
    """Return how many GPUs share each sequence; other meshes are reported as unknown."""
    table = keys.table(PARALLELISM)
    prefix = f"{PARALLELISM}_"
    block = Keys({name.removeprefix(prefix): value for name, value in table.data.items()}, table.where)
    sizes = {side: block.number(f"{side}_size", default=1) for side in ("cp", "sp", "tp", "dp_replicate")}
    block.take("dp_shard_size", "sp_seq_length", "sp_seq_length_is_variable", "cp_seq_length_is_variable")
    # older files have DeepSpeed's Ulysses as a backend of `cp`
    backends = {side: word(block.take(f"{side}_backend", default=usual)) for side, usual in _BACKENDS.items()}
    ulysses = sizes["sp"] > 1 or backends["cp"] == "deepspeed"
    kernel = word(block.take("sp_attn_implementation", "cp_attn_implementation", default="sdpa"))
    rotated = word(block.take("cp_comm_strategy", default="allgather"))
    shared = sizes["cp"] * sizes["sp"]
    known = (
        sizes["tp"] == sizes["dp_replicate"] == min(sizes["cp"], sizes["sp"]) == 1 and backends["sp"] == "deepspeed"
        and (shared == 1 or (found.kind == ("deepspeed" if ulysses else "fsdp") and rotated == "allgather"))
        and not block.rest(())[1]
    )  # fmt: skip
    if not known:
        keys.not_expressed(PARALLELISM)
    if not known or shared == 1:
        return {}
    return {"context_parallel": shared, **names.read_attention(keys, kernel, PARALLELISM)}


def _read_precision(keys: Keys, found: Sharding) -> None:
    """Set the precision by `mixed_precision`, unless DeepSpeed's own file has it."""
    mixed = word(keys.take(MIXED, default="no"))
    if mixed not in ("no", "False", "bf16", "fp16"):
        keys.not_expressed(MIXED)
    precision = _MIXED.get((found.kind, mixed))
    if precision and "precision" not in found.changes:
        found.changes["precision"] = precision
        found.assumed += [] if found.kind else [f"mixed_precision {mixed}: weights taken as stored in {precision[:4]}"]
    if found.kind:
        keys.half_open = deepspeed.decide_precision(found)


def read_fsdp(given: Keys, version: object) -> Sharding:
    """Read an FSDP block, with or without accelerate's prefix `fsdp_`; `version` of FSDP if the block names none."""
    block = Keys({name.removeprefix("fsdp_"): value for name, value in given.data.items()}, FSDP)
    found = Sharding({"shard": "parameters"}, "fsdp")
    version = word(block.take("version", "fsdp_version", default=version))
    if version == "1":
        found.changes["fsdp_version"] = 1
        found.assumed.append("FSDP1, which accelerate runs unless fsdp_version is 2")
    else:
        block.take("forward_prefetch")  # FSDP2 as accelerate sets it up has no such option
    reshard = word(block.take("reshard_after_forward", "sharding_strategy", default=True)).upper()
    if reshard in _RESHARD:
        found.changes["shard"] = _RESHARD[reshard]
    else:
        found.unknown.append(f"{FSDP}.reshard_after_forward")
    if block.flag("offload_params", "cpu_offload"):
        found.changes["offload"] = "parameters"
    if block.flag("cpu_ram_efficient_loading"):
        found.changes["loading"] = "sharded"
    if block.flag("activation_checkpointing"):
        found.checkpointing = "offload" if block.flag("activation_checkpointing_offload") else "full"
    if word(block.take("auto_wrap_policy", default=WRAPPED)).upper() != WRAPPED:
        block.not_expressed("auto_wrap_policy")
    found.unknown += [f"{FSDP}.{name}" for name in block.rest(FSDP_SCHEMA.harmless)[1]]
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
            side: {"device": word(keys.take(f"{side}_device", default="none"))}
            for side, _ in deepspeed.OFFLOAD.values()
        }
        found = deepspeed.read(Keys({"zero_optimization": stage | blocks, "bf16": {"enabled": "auto"}}, keys.where))
        accumulation = deepspeed.KEYS["accumulation"]
        if keys.take(accumulation.name, default="auto") != "auto":
            found.changes["accumulation"] = accumulation.read(keys)
    if word(keys.take("seq_parallel_communication_data_type", default="bf16")) not in ("bf16", "bfloat16"):
        keys.not_expressed("seq_parallel_communication_data_type")
    found.unknown += [f"{DEEPSPEED}.{name}" for name in keys.rest(ACCELERATE_DEEPSPEED.harmless)[1]]
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
        block = {**wrapped(model_type), "version": recipe.fsdp_version, **fsdp(recipe)}
        settings[FSDP] = {f"fsdp_{name}": value for name, value in block.items()}
    return settings


def revised_settings(plan: Plan) -> dict[str, Any]:
    """Return what a plan changes in accelerate.yaml. Raises Unsupported."""
    kind = process_layout.backend(plan.recipe)
    process_layout.check(plan.recipe, kind)
    compiled = {"dynamo_config": {"dynamo_backend": "INDUCTOR"}} if plan.recipe.compile else {}
    return config(plan.recipe, kind, plan.job.architecture.model_type) | compiled


def fsdp(recipe: Recipe) -> dict[str, Any]:
    """Return the settings of an FSDP block, without accelerate's prefix."""
    return {
        "auto_wrap_policy": WRAPPED,
        "reshard_after_forward": True if recipe.fsdp_version == 2 else "FULL_SHARD",
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
