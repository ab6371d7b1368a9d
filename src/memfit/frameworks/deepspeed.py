"""DeepSpeed's ds_config.json (0.19), read and written: ZeRO stage, buckets, offload, precision and batch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from memfit.closed_form.parallel.zero import BUCKET
from memfit.errors import BadInput
from memfit.frameworks import process_layout
from memfit.frameworks.keys import Adopted, Key, Keys, KeyTable, Sharding, build, parse, words
from memfit.nouns.job import Recipe
from memfit.tables.precisions import meaning

NAME = "deepspeed"
STAGES = tuple(process_layout.STAGES)  # the recipe's `shard` by ZeRO stage
MICRO_BATCH, ACCUMULATION, BATCH = "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size"
KEYS = KeyTable(Key("micro_batch", MICRO_BATCH, 1), Key("accumulation", ACCUMULATION, 1))
OFFLOAD = {"optimizer": "offload_optimizer", "parameters": "offload_param"}  # `offload` -> a block of zero_optimization
PURE = "bf16_master_weights_and_grads"  # of the bf16 block: no fp32 master copy
# keys that change no memory
HARMLESS = words("""
    gradient_clipping steps_per_print wall_clock_breakdown scheduler optimizer zero_allow_* zero_force_* tensorboard
    csv_monitor wandb flops_profiler dump_state prescale_gradients gradient_predivide_factor communication_data_type
    comms_config monitor_config
""")
# other keys of zero_optimization change memory: buckets, prefetch, live parameters, quantised communication
HARMLESS_ZERO = words("""
    overlap_comm contiguous_gradients round_robin_gradients stage3_gather_* load_from_* elastic_* ignore_unused_*
    reduce_scatter allgather_partitions
""")
_ZERO_DEFAULTS = {"sub_group_size": 1e9, "stage3_max_live_parameters": 1e9, "stage3_max_reuse_distance": 1e9}


# ---- reading


def matches(data: dict[str, Any]) -> bool:
    return "zero_optimization" in data or MICRO_BATCH in data


def adopt(data: dict[str, Any], path: Path) -> Adopted:
    """Return the ZeRO stage, offload, precision and batch sizes; the file does not name the model."""
    keys = Keys(data, path.name)
    found = read(keys)
    return Adopted(
        format=NAME,
        recipe=build(path.name, found.changes),
        effective_batch=found.batch,
        stated=tuple(found.changes),
        ignored=keys.rest(HARMLESS)[0],
        unknown=tuple(found.unknown),
    )


def read_setting(value: object, path: Path, key: str = "deepspeed") -> Sharding:
    """Read the `deepspeed` setting of the file `path`: a block, or the name of a file, absolute or beside `path`."""
    if isinstance(value, Mapping):
        return read(Keys(value, key))
    if not isinstance(value, str) or not value:
        return Sharding()
    target = path.parent / value
    if target.is_file():
        data = parse(target)
        return read(Keys(data, value)) if isinstance(data, Mapping) else Sharding(unknown=[key])
    return _by_name(value, key)


def _by_name(name: str, key: str) -> Sharding:
    """Return the stage in a common file name, as in deepspeed_configs/zero3_bf16_cpuoffload_all.json."""
    plain = Path(name).name.lower().replace("_", "").replace("-", "")
    stage = next((n for n in (3, 2, 1, 0) if f"zero{n}" in plain or f"z{n}" in plain), None)
    if stage is None:
        return Sharding(kind=NAME, unknown=[key])
    changes = {"shard": STAGES[stage]}
    if "offload" in plain:
        changes["offload"] = "parameters" if stage == 3 else "optimizer"
    return Sharding(changes, NAME, assumed=[f"{name} is not here: read as ZeRO-{stage} from its name"])


def read(keys: Keys) -> Sharding:
    """Read a DeepSpeed configuration."""
    block = keys.table("zero_optimization")
    stage = block.number("stage", default=0)
    if not 0 <= stage <= 3:
        raise BadInput(f"`stage` in {block.where} must be 0 to 3, not {stage}", hint="check the file")
    found = Sharding({"shard": STAGES[stage]}, NAME)
    for ours, name in OFFLOAD.items():  # offloading parameters includes the optimizer
        if block.table(name).take("device", default="none") != "none":
            found.changes["offload"] = ours
    found.changes |= _read_precision(keys, found)
    for ours, row in KEYS.items():
        if keys.take(row.name, default="auto") != "auto":
            found.changes[ours] = row.read(keys)
    if keys.take(BATCH, default="auto") != "auto":
        found.batch = keys.number(BATCH, default=1)
    left = [n for n in block.rest(HARMLESS_ZERO)[1] if block.data[n] != _ZERO_DEFAULTS.get(n)]
    found.unknown = [*(f"zero_optimization.{n}" for n in left), *keys.rest(HARMLESS)[1]]
    return found


def _read_precision(keys: Keys, found: Sharding) -> dict[str, str]:
    bf16, fp16 = keys.table("bf16"), keys.table("fp16")
    if bf16.flag("enabled"):
        found.pure = bf16.flag(PURE)
        return {"precision": "bf16" if found.pure else "bf16-master"}
    if fp16.flag("enabled"):
        return {"precision": "fp16-mixed"}
    left_to_the_trainer = "auto" in (bf16.take("enabled"), fp16.take("enabled"))
    return {} if left_to_the_trainer else {"precision": "fp32"}


# ---- writing


def text(recipe: Recipe) -> str:
    """Return the text of ds_config.json."""
    return json.dumps(config(recipe), indent=2, ensure_ascii=False) + "\n"


def config(recipe: Recipe) -> dict[str, Any]:
    """Return DeepSpeed's settings. The Trainer sets batch sizes and clipping, which are "auto", and refuses others."""
    auto = (BATCH, MICRO_BATCH, ACCUMULATION, "gradient_clipping")
    return dict.fromkeys(auto, "auto") | _precision(recipe) | {"zero_optimization": _zero(recipe)}


def _precision(recipe: Recipe) -> dict[str, Any]:
    meant = meaning(recipe, "deepspeed")
    if meant.computed == "fp32":
        return {}
    if meant.computed == "fp16":
        return {"fp16": {"enabled": True}}
    settings = {"enabled": True}
    if not meant.master:  # else bf16 weights get an fp32 master copy
        settings |= {PURE: True, "bf16_optimizer_states": True}
    return {"bf16": settings}


def _zero(recipe: Recipe) -> dict[str, Any]:
    stage = process_layout.zero_stage(recipe)
    settings: dict[str, Any] = {"stage": stage}
    if stage:
        settings |= {"reduce_bucket_size": BUCKET, "contiguous_gradients": True, "overlap_comm": True}
    if stage in (1, 2):
        settings["allgather_bucket_size"] = BUCKET
    if stage == 3:
        settings |= {"stage3_prefetch_bucket_size": BUCKET, "stage3_gather_16bit_weights_on_model_save": True}
    on_cpu = {"device": "cpu", "pin_memory": True}
    if recipe.offload != "none":
        settings[OFFLOAD["optimizer"]] = on_cpu
    if recipe.offload == "parameters":
        settings[OFFLOAD["parameters"]] = on_cpu
    return settings
