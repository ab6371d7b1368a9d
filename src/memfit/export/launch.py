"""How a recipe is spread over processes: plain, DDP, FSDP2 or DeepSpeed, what each cannot do, and the launch line."""

from __future__ import annotations

from typing import Literal

import memfit.framework_names as names
from memfit.errors import Unsupported
from memfit.job import Recipe

Backend = Literal["plain", "ddp", "fsdp", "deepspeed"]
ACCELERATE_FILE, DEEPSPEED_FILE = "accelerate.yaml", "ds_config.json"
_STAGES = {"none": 0, "optimizer": 1, "gradients": 2, "parameters": 3}


def backend(recipe: Recipe) -> Backend:
    """FSDP2 for sharded parameters, DeepSpeed for the rest of ZeRO, for offload and for a master copy."""
    trained_master = recipe.precision == "bf16-master" and recipe.method == "full"
    if recipe.offload != "none" or recipe.shard in ("optimizer", "gradients"):
        return "deepspeed"
    if recipe.shard == "parameters":
        return "fsdp"
    if trained_master:
        return "deepspeed"
    return "ddp" if recipe.num_gpus > 1 else "plain"


def zero_stage(recipe: Recipe) -> int:
    """The ZeRO stage; offload needs a stage that owns what it moves."""
    stage = _STAGES[recipe.shard]
    if recipe.offload == "parameters":
        return 3
    return 2 if recipe.offload == "optimizer" and stage == 0 else stage


def command(recipe: Recipe, script: str = "train.py") -> str:
    """The line that starts training."""
    plain = backend(recipe) == "plain"
    return f"python {script}" if plain else f"accelerate launch --config_file {ACCELERATE_FILE} {script}"


def reduction(recipe: Recipe) -> dict[str, dict[str, dict[str, bool]]]:
    """Under FSDP2 accelerate skips the reduction between micro-batches, which would keep whole gradients on every card."""
    if backend(recipe) != "fsdp" or recipe.method != "full" or recipe.accumulation == 1:
        return {}
    return {"accelerator_config": {"gradient_accumulation_kwargs": {"sync_each_batch": True}}}


def numbers(recipe: Recipe) -> names.Numbers:
    """Weights and autocast dtype under the recipe's backend."""
    found = names.NUMBERS[recipe.precision]
    if backend(recipe) == "fsdp" and recipe.precision == "bf16" and recipe.method == "full":
        # accelerate keeps FSDP2 weights in fp32 whenever mixed precision is on; off, they stay bf16
        return names.Numbers(weights="bfloat16", mixed="no")
    if found.mixed == "fp16" and (backend(recipe) == "deepspeed" or recipe.method != "full"):
        # DeepSpeed holds fp16 weights and an fp32 master copy; a frozen base needs no fp32 weights at all
        return names.Numbers(weights="float16", mixed="fp16")
    return found


def check(recipe: Recipe) -> None:
    """Refuse combinations that the recipe's backend cannot run."""
    kind = backend(recipe)
    if kind == "fsdp":
        _check_fsdp(recipe)
    if kind == "deepspeed":
        check_deepspeed(recipe)
    if kind in ("fsdp", "deepspeed") and recipe.quantization == "int8" and recipe.shard == "parameters":
        raise Unsupported("int8 weights cannot be sharded", hint="--quantization nf4-double, or --shard none")


def _check_fsdp(recipe: Recipe) -> None:
    row = names.row(recipe)
    if row.package in ("bitsandbytes", "galore-torch", "apollo-torch"):
        # their kernels take plain tensors, FSDP2 hands them DTensors (bitsandbytes#1633)
        raise Unsupported(f"{row.title} does not run on FSDP2's sharded weights", hint="--optimizer adamw-8bit-torchao")


def check_deepspeed(recipe: Recipe) -> None:
    """Refuse what DeepSpeed 0.19 cannot do: autocast over fp32 weights, bf16 states on the CPU, and more."""
    row = names.row(recipe)
    pure = recipe.precision == "bf16" and recipe.method == "full"
    if recipe.precision == "bf16-mixed":
        raise Unsupported(
            "DeepSpeed turns fp32 weights into bf16 ones with an fp32 master copy",
            hint="--precision bf16-master: the same 16 bytes per parameter",
        )
    if pure and zero_stage(recipe) == 0:
        raise Unsupported(
            "DeepSpeed trains without a master copy from ZeRO-1 on",
            hint="--shard optimizer, or --precision bf16-master",
        )
    if pure and recipe.offload != "none":
        raise Unsupported("DeepSpeed's CPU Adam keeps fp32 states and weights", hint="--precision bf16-master")
    if recipe.offload != "none" and row.key not in ("adamw", "adamw-foreach"):
        raise Unsupported(
            f"DeepSpeed's CPU step is AdamW, not {row.title}", hint="--optimizer adamw, or --offload none"
        )
    if row.rank_of and zero_stage(recipe):
        raise Unsupported(f"{row.title} needs whole matrices, ZeRO flattens them", hint="--optimizer adamw-8bit")
