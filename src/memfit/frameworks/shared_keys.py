"""Reading the parts several formats share: DeepSpeed and FSDP blocks, optimizers, quantisation, LoRA, attention."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import memfit.frameworks.harmless_keys as harmless
from memfit.errors import BadInput
from memfit.frameworks.adopted import Keys, beside, word
from memfit.frameworks.names import our_optimizer
from memfit.frameworks.parsing import parse

STAGES = ("none", "optimizer", "gradients", "parameters")
KERNELS = {
    "eager": "eager", "sdpa": "sdpa", "flash": "flash", "flash_attention_2": "flash", "flash_attention_3": "flash",
    "kernels-community/flash-attn2": "flash", "kernels-community/flash-attn3": "flash",
}  # fmt: skip
_ZERO_DEFAULTS = {"sub_group_size": 1e9, "stage3_max_live_parameters": 1e9, "stage3_max_reuse_distance": 1e9}
_SHARDING = {
    "FULL_SHARD": "parameters",
    "SHARD_GRAD_OP": "gradients",
    "NO_SHARD": "none",
    "1": "parameters",
    "2": "gradients",
}


@dataclass(slots=True)
class Spread:
    """What a DeepSpeed or FSDP block decides. `changes` are recipe fields; `master`: who keeps an fp32 copy."""

    changes: dict[str, Any] = field(default_factory=dict)
    kind: str = ""  # "deepspeed", "fsdp" or ""
    pure: bool = False  # bf16 without an fp32 master copy
    unknown: list[str] = field(default_factory=list)
    assumed: list[str] = field(default_factory=list)
    batch: int | None = None
    checkpointing: str = ""


def deepspeed(value: object, path: Path, key: str = "deepspeed") -> Spread:
    """A DeepSpeed setting: the block itself, or the name of its file."""
    if isinstance(value, Mapping):
        return zero(Keys(value, key))
    if not isinstance(value, str) or not value:
        return Spread()
    target = beside(path, value)
    if target.is_file():
        data = parse(target)
        return zero(Keys(data, value)) if isinstance(data, Mapping) else Spread(unknown=[key])
    return _by_name(value, key)


def _by_name(name: str, key: str) -> Spread:
    """The stage a well-known file name promises: deepspeed_configs/zero3_bf16_cpuoffload_all.json."""
    words = Path(name).name.lower().replace("_", "").replace("-", "")
    stage = next((n for n in (3, 2, 1, 0) if f"zero{n}" in words or f"z{n}" in words), None)
    if stage is None:
        return Spread(kind="deepspeed", unknown=[key])
    changes = {"shard": STAGES[stage]}
    if "offload" in words:
        changes["offload"] = "parameters" if stage == 3 else "optimizer"
    return Spread(changes, "deepspeed", assumed=[f"{name} is not here: read as ZeRO-{stage} from its name"])


def zero(keys: Keys) -> Spread:
    """A DeepSpeed configuration: stage, offload, precision, batch."""
    block = keys.table("zero_optimization")
    stage = block.number("stage", default=0)
    if not 0 <= stage <= 3:
        raise BadInput(f"`stage` in {block.where} must be 0 to 3, not {stage}", hint="check the file")
    found = Spread({"shard": STAGES[stage]}, "deepspeed")
    optimizer_device = block.table("offload_optimizer").take("device", default="none")
    parameter_device = block.table("offload_param").take("device", default="none")
    if parameter_device != "none":
        found.changes["offload"] = "parameters"
    elif optimizer_device != "none":
        found.changes["offload"] = "optimizer"
    found.changes |= _precision(keys, found)
    for ours, theirs in (
        ("micro_batch", "train_micro_batch_size_per_gpu"),
        ("accumulation", "gradient_accumulation_steps"),
    ):
        if keys.take(theirs, default="auto") != "auto":
            found.changes[ours] = keys.number(theirs, default=1)
    if keys.take("train_batch_size", default="auto") != "auto":
        found.batch = keys.number("train_batch_size", default=1)
    left = [n for n in block.rest(harmless.ZERO)[1] if block.data[n] != _ZERO_DEFAULTS.get(n)]
    inner = [f"zero_optimization.{n}" for n in left]
    found.unknown = [*inner, *keys.rest(harmless.DEEPSPEED)[1]]
    return found


def _precision(keys: Keys, found: Spread) -> dict[str, str]:
    bf16, fp16 = keys.table("bf16"), keys.table("fp16")
    if bf16.flag("enabled"):
        found.pure = bf16.flag("bf16_master_weights_and_grads")
        return {"precision": "bf16" if found.pure else "bf16-master"}
    if fp16.flag("enabled"):
        return {"precision": "fp16-mixed"}
    left_to_the_trainer = "auto" in (bf16.take("enabled"), fp16.take("enabled"))
    return {} if left_to_the_trainer else {"precision": "fp32"}


def fsdp(keys: Keys, where: str) -> Spread:
    """An FSDP block, with or without the `fsdp_` prefix accelerate uses."""
    block = Keys({name.removeprefix("fsdp_"): value for name, value in keys.data.items()}, where)
    keys.used.update(keys.data)
    found = Spread({"shard": "parameters"}, "fsdp")
    reshard = word(block.take("reshard_after_forward", "sharding_strategy", default=True)).upper()
    strategy = {"TRUE": "parameters", "FALSE": "gradients"} | _SHARDING
    if reshard in strategy:
        found.changes["shard"] = strategy[reshard]
    else:
        found.unknown.append(f"{where}.reshard_after_forward")
    if block.flag("offload_params", "cpu_offload"):
        found.changes["offload"] = "parameters"
    if block.flag("activation_checkpointing"):
        found.checkpointing = "offload" if block.flag("activation_checkpointing_offload") else "full"
    left = block.rest(harmless.FSDP)[1]
    found.unknown += [f"{where}.{name}" for name in left]
    return found


def optimizer(keys: Keys, name: str, default: str) -> dict[str, str]:
    """The optimizer under a key; one memfit has no row for is listed as unknown."""
    value = keys.text(name) or default
    ours = our_optimizer(value)
    if ours is None:
        keys.odds(name)
        return {}
    settings = keys.data.get("optim_args")
    if ours == "sgd" and isinstance(settings, str | Mapping) and "momentum" in settings:
        ours = "sgd-momentum"
        keys.take("optim_args")
    if settings in ("rank=128", {"rank": 128}):  # GaLore and APOLLO as their rows have them
        keys.take("optim_args")
    if keys.data.get("optim_target_modules") in ("all-linear", "all_linear"):
        keys.take("optim_target_modules")
    return {"optimizer": ours}


def attention(keys: Keys, value: object, key: str) -> dict[str, str]:
    """The attention kernel; SDPA, the default of transformers, when the file does not say."""
    if value is None or value == "auto":
        return {"attention": "sdpa"}
    if word(value) in KERNELS:
        return {"attention": KERNELS[word(value)]}
    keys.odds(key)
    return {"attention": "sdpa"}


def compiled(keys: Keys) -> dict[str, bool]:
    """torch.compile as TrainingArguments have it, and tools that hand theirs on; naming a backend or a mode switches it on."""
    on = keys.flag("torch_compile") or keys.data.get("torch_compile") == "auto"  # axolotl's: wherever PyTorch can
    backend, mode = keys.text("torch_compile_backend"), keys.text("torch_compile_mode")
    return inductor(keys, on or bool(backend or mode), backend, mode, ("torch_compile_backend", "torch_compile_mode"))


def inductor(keys: Keys, on: bool, backend: str | None, mode: str | None, names: tuple[str, str]) -> dict[str, bool]:
    """Inductor in its default mode is modelled; the keys of other backends and modes are not understood."""
    by_inductor = word(backend or "inductor").lower() == "inductor"
    if not by_inductor:
        keys.odds(names[0])
    if mode not in (None, "", "default"):
        keys.odds(names[1])
    return {"compile": on and by_inductor}


def four_bit(kind: str, double: bool, where: str) -> str:
    """memfit's name of a bitsandbytes 4-bit type."""
    if kind not in ("nf4", "fp4"):
        raise BadInput(f"the 4-bit type {kind!r} in {where} is neither nf4 nor fp4", hint="bitsandbytes has these two")
    return f"{kind}-double" if double and kind == "nf4" else kind
