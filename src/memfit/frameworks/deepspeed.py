"""DeepSpeed's ds_config.json (0.19), read and written: ZeRO stage, buckets, offload, precision and batch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from memfit.errors import BadInput
from memfit.frameworks import process_layout
from memfit.frameworks.keys import Adopted, Key, Keys, KeyTable, Sharding, adopted_from, parse, short, word
from memfit.frameworks.schemas import DEEPSPEED as SCHEMA
from memfit.frameworks.schemas import HALF, ZERO
from memfit.frameworks.schemas import OFFLOAD as OFFLOAD_SCHEMA
from memfit.nouns.job import Recipe
from memfit.nouns.plan import Plan
from memfit.nouns.zero_settings import (
    AUTO,
    BUCKET_OF_DEEPSPEED,
    FILLED,
    LARGEST,
    PREFETCH_OF_DEEPSPEED,
    ZeroSettings,
    given_sizes,
)
from memfit.tables.precisions import meaning

NAME = "deepspeed"
STAGES = tuple(process_layout.STAGES)  # the recipe's `shard` by ZeRO stage
MICRO_BATCH, ACCUMULATION, BATCH = "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size"
KEYS = KeyTable(Key("micro_batch", MICRO_BATCH, 1), Key("accumulation", ACCUMULATION, 1))
# `offload` -> a block of zero_optimization, and the older switch for it
OFFLOAD = {"optimizer": ("offload_optimizer", "cpu_offload"), "parameters": ("offload_param", "cpu_offload_param")}
# of the bf16 block: no fp32 master copy, and no fp32 states
PURE, STATES = "bf16_master_weights_and_grads", "bf16_optimizer_states"
# sizes of zero_optimization by ZeroSettings' names: the first stage that uses them, and DeepSpeed's own default
SIZES = {
    "reduce_bucket_size": (1, BUCKET_OF_DEEPSPEED), "prefetch_bucket_size": (3, PREFETCH_OF_DEEPSPEED),
    "param_persistence_threshold": (3, 100_000), "max_live_parameters": (3, 1_000_000_000),
    "max_reuse_distance": (3, 1_000_000_000), "sub_group_size": (3, 1_000_000_000),
}  # fmt: skip
# and their keys, the newer first
_KEYS_OF = {
    name: (name,) if name in ("reduce_bucket_size", "sub_group_size") else (f"stage3_{name}", name) for name in SIZES
}


# ---- reading


def matches(data: dict[str, Any]) -> bool:
    return "zero_optimization" in data or MICRO_BATCH in data


def adopt(data: dict[str, Any], path: Path) -> Adopted:
    """Return the ZeRO stage, offload, precision and batch sizes; the file does not name the model."""
    keys = Keys(data, path.name)
    found = read(keys)
    keys.half_open = decide_precision(found)
    return adopted_from(NAME, keys, SCHEMA.harmless, found.changes, found)


LEFT_OPEN = "the file leaves the precision to the trainer: bf16, TRL's default (--precision sets it)"


def decide_precision(found: Sharding) -> bool:
    """Set the precision that the file leaves to the trainer: TRL's default, bf16. Return whether it left it."""
    if "precision" in found.changes:
        return False
    found.changes["precision"] = "bf16-mixed" if found.kind == "fsdp" else "bf16-master"
    found.assumed.append(LEFT_OPEN)
    return True


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
    """Return the stage in a common file name, as in deepspeed_configs/zero3_bf16_cpuoffload_all.json.

    The sizes are those of axolotl's and LLaMA-Factory's own files: `auto` for ZeRO-3, else DeepSpeed's defaults.
    """
    plain = Path(name).name.lower().replace("_", "").replace("-", "")
    stage = next((n for n in (3, 2, 1, 0) if f"zero{n}" in plain or f"z{n}" in plain), None)
    if stage is None:
        return Sharding(kind=NAME, unknown=[key])
    changes = {"shard": STAGES[stage]}
    if stage:
        automatic = [f"{name}:{AUTO}" for name in FILLED] if stage == 3 else []
        changes["zero_conf"] = ",".join(automatic or [f"reduce_bucket_size:{BUCKET_OF_DEEPSPEED}"])
    if "offload" in plain:
        changes["offload"] = "parameters" if stage == 3 else "optimizer"
    return Sharding(changes, NAME, assumed=[f"{name} is not here: read as ZeRO-{stage} from its name"])


def read(keys: Keys) -> Sharding:
    """Read a DeepSpeed configuration."""
    block = keys.table("zero_optimization")
    stage = block.number("stage", default=0)
    if not 0 <= stage <= 3:
        raise BadInput(f"`stage` in {block.where} must be 0 to 3, not {stage}", hint="check the file")
    found = Sharding({"shard": STAGES[stage], **_read_sizes(block, stage)}, NAME)
    for ours, (name, older) in OFFLOAD.items():  # offloading parameters includes the optimizer
        side = block.table(name)
        if block.flag(older) or side.take("device", default="none") != "none":
            found.changes["offload"] = ours
        if side.take("ratio", default=1) != 1:
            side.not_expressed("ratio")
        found.unknown += [f"{name}.{n}" for n in side.rest(OFFLOAD_SCHEMA.harmless)[1]]
    found.changes |= _read_precision(keys, found)
    for ours, row in KEYS.items():
        if keys.take(row.name, default="auto") != "auto":
            found.changes[ours] = row.read(keys)
    if word(keys.table("optimizer").take("type", default="AdamW")).lower() not in ("adam", "adamw", "auto"):
        keys.not_expressed("optimizer")
    if keys.take(BATCH, default="auto") != "auto":
        found.batch = keys.number(BATCH, default=1)
    found.unknown += [*(f"zero_optimization.{n}" for n in block.rest(ZERO.harmless)[1]), *keys.rest(SCHEMA.harmless)[1]]
    return found


def _read_sizes(block: Keys, stage: int) -> dict[str, str]:
    """Return `zero_conf`: the sizes that this stage uses and that differ from those of memfit's exports."""
    found = []
    for name, (since, default) in SIZES.items():
        value = block.take(*_KEYS_OF[name], default=default)
        if value == AUTO and name not in FILLED:
            value = default  # the Trainer fills in no others
        if value != AUTO and not (type(value) in (int, float) and 0 <= value <= LARGEST):
            raise BadInput(f"`{name}` in {block.where} must be a number of elements, not {short(value)}",
                           hint="check the file")  # fmt: skip
        if stage >= since and value != getattr(ZeroSettings(), name):
            found.append(f"{name}:{value if value == AUTO else int(value)}")
    return {"zero_conf": ",".join(found)} if found else {}


def _read_precision(keys: Keys, found: Sharding) -> dict[str, str]:
    bf16, fp16 = keys.table("bf16"), keys.table("fp16")
    pure, states = bf16.flag(PURE), bf16.flag(STATES)
    if bf16.flag("enabled"):
        found.pure = pure
        found.unknown += [] if pure == states else [f"bf16.{STATES}"]
        found.unknown += [f"bf16.{n}" for n in bf16.rest(HALF.harmless)[1]]
        return {"precision": "bf16" if found.pure else "bf16-master"}
    if fp16.flag("enabled"):
        found.unknown += [f"fp16.{n}" for n in fp16.rest(HALF.harmless)[1]]
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


def revised_settings(plan: Plan, data: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a plan changes in a file with this content: the batch where that has numbers. Raises Unsupported."""
    recipe = plan.recipe
    process_layout.check(recipe, NAME)
    sizes = {MICRO_BATCH: recipe.micro_batch, ACCUMULATION: recipe.accumulation, BATCH: recipe.effective_batch}
    said = {name: size for name, size in sizes.items() if isinstance(data.get(name), int)}
    return {name: value for name, value in config(recipe).items() if value != "auto"} | said


def _precision(recipe: Recipe) -> dict[str, Any]:
    meant = meaning(recipe, "deepspeed")
    if meant.computed == "fp32":
        return {}
    if meant.computed == "fp16":
        return {"fp16": {"enabled": True}}
    settings = {"enabled": True}
    if not meant.master:  # else bf16 weights get an fp32 master copy
        settings |= {PURE: True, STATES: True}
    return {"bf16": settings}


def _zero(recipe: Recipe) -> dict[str, Any]:
    stage = process_layout.zero_stage(recipe)
    settings: dict[str, Any] = {"stage": stage}
    sizes = asdict(ZeroSettings()) | given_sizes(recipe.zero_conf)
    if stage:
        reduced = sizes.pop("reduce_bucket_size")
        settings |= {"reduce_bucket_size": reduced, "contiguous_gradients": True, "overlap_comm": True}
    if stage in (1, 2):
        settings["allgather_bucket_size"] = reduced
    if stage == 3:
        written = (n for n in sizes if n == "prefetch_bucket_size" or sizes[n] != SIZES[n][1])
        settings |= {_KEYS_OF[n][0]: sizes[n] for n in written} | {"stage3_gather_16bit_weights_on_model_save": True}
    on_cpu = {"device": "cpu", "pin_memory": True}
    if recipe.offload != "none":
        settings[OFFLOAD["optimizer"][0]] = on_cpu
    if recipe.offload == "parameters":
        settings[OFFLOAD["parameters"][0]] = on_cpu
    return settings
