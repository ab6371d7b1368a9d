"""Adopts accelerate's launcher file: processes, sharding, mixed precision."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import memfit.frameworks.harmless_keys as harmless
import memfit.frameworks.shared_keys as spread
from memfit.frameworks.adopted import Adopted, Keys, build, word

NAME = "accelerate"
# what training in a mixed precision stores, by who holds the weights
_MIXED = {
    ("fsdp", "bf16"): "bf16-mixed", ("fsdp", "fp16"): "fp16-mixed", ("deepspeed", "bf16"): "bf16-master",
    ("deepspeed", "fp16"): "fp16-mixed", ("", "fp16"): "fp16-mixed", ("", "bf16"): "bf16",
}  # fmt: skip


def matches(data: dict[str, Any]) -> bool:
    return "distributed_type" in data or "compute_environment" in data


def adopt(data: dict[str, Any], path: Path) -> Adopted:
    """Cards, shard, offload and precision; nothing is said about the model."""
    keys = Keys(data, path.name)
    kind = word(keys.take("distributed_type", default="NO")).upper()
    found = spread.Spread()
    if kind == "FSDP":
        found = spread.fsdp(keys.table("fsdp_config"), "fsdp_config")
    elif kind == "DEEPSPEED":
        found = _deepspeed(keys.table("deepspeed_config"), path)
    processes = keys.number("num_processes", default=1)
    changes = {"num_gpus": 1 if kind == "NO" else max(1, processes), **found.changes}
    changes |= {"checkpointing": found.checkpointing} if found.checkpointing else {}
    changes |= _compiled(keys)
    mixed = word(keys.take("mixed_precision", default="no"))
    assumed = list(found.assumed)
    precision = _MIXED.get((found.kind, mixed))
    if precision and "precision" not in changes:
        changes["precision"] = precision
        assumed += [] if found.kind else [f"mixed_precision {mixed}: weights taken as stored in {precision[:4]}"]
    unread = {"fsdp": ("deepspeed_config",), "deepspeed": ("fsdp_config",)}.get(
        found.kind, ("fsdp_config", "deepspeed_config")
    )
    ignored, unknown = keys.rest((*harmless.ACCELERATE, *unread))
    return Adopted(
        format=NAME,
        recipe=build(path.name, changes),
        effective_batch=found.batch,
        stated=tuple(changes),
        assumed=tuple(assumed),
        ignored=ignored,
        unknown=(*found.unknown, *unknown),
    )


def _compiled(keys: Keys) -> dict[str, bool]:
    """torch.compile by dynamo_config, or by the bare keys of older files."""
    table = keys.table("dynamo_config")
    found = table if table.data else keys
    backend = word(found.take("dynamo_backend", default="no")).lower()
    if backend in ("no", "false"):
        return {}
    found.take("dynamo_use_dynamic", "dynamo_use_fullgraph")
    made = spread.inductor(found, True, backend, found.text("dynamo_mode"), ("dynamo_backend", "dynamo_mode"))
    if table.rest(())[1]:
        keys.odds("dynamo_config")
    return made


def _deepspeed(keys: Keys, path: Path) -> spread.Spread:
    """accelerate's own short form of a DeepSpeed configuration, or the file it names."""
    named = keys.text("deepspeed_config_file")
    if named:
        found = spread.deepspeed(named, path, "deepspeed_config.deepspeed_config_file")
    else:
        short = {"stage": keys.number("zero_stage", default=2)}
        devices = {
            side: word(keys.take(f"{side}_device", default="none")) for side in ("offload_optimizer", "offload_param")
        }
        blocks = {side: {"device": device} for side, device in devices.items()}
        found = spread.zero(Keys({"zero_optimization": short | blocks, "bf16": {"enabled": "auto"}}, keys.where))
        if keys.take("gradient_accumulation_steps", default="auto") != "auto":
            found.changes["accumulation"] = keys.number("gradient_accumulation_steps", default=1)
    left = keys.rest(harmless.ACCELERATE_DEEPSPEED)[1]
    found.unknown += [f"deepspeed_config.{name}" for name in left]
    return found
