"""From a Recipe to the Setup that its trainer is told; what cannot be traced is refused with what could be."""

from __future__ import annotations

from typing import Any, Literal

from memfit import framework_names as names
from memfit.errors import Unsupported
from memfit.job import Recipe
from memfit.optimizers import optimizer
from memfit.trainers import trainer
from memfit.virtual.jobs.setup import Setup

_TRAINERS: dict[str, Literal["torch", "transformers", "trl"]] = {
    "torch": "torch", "transformers": "transformers", "trl": "trl"
}  # fmt: skip
_DTYPES: dict[str, Literal["bf16", "fp16", "fp32"]] = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
_QUANTIZED: dict[str, dict[str, Any]] = {
    "nf4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    "nf4-double": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
    "fp4": {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4"},
    "int8": {"load_in_8bit": True},
}
MICRO_STEPS = 2  # of an accumulation; from the second on every one finds the memory as the one before left it
# a hand-written loop makes these itself
_LOOP = {
    "adamw": "adamw_torch_fused", "adamw-foreach": "adamw_torch", "adamw-forloop": "adamw_forloop", "sgd": "sgd",
    "sgd-momentum": "sgd_momentum", "adafactor": "adafactor", "muon": "muon", "adamw-8bit": "adamw_bnb_8bit",
    "adamw-32bit": "adamw_32bit", "paged-adamw-8bit": "paged_adamw_8bit", "paged-adamw-32bit": "paged_adamw_32bit",
    "lion": "lion_32bit", "lion-8bit": "lion_8bit",
}  # fmt: skip


def setup_of(recipe: Recipe, config: dict[str, Any]) -> Setup:
    """What the recipe's trainer is told. Raises Unsupported for what has no job yet."""
    row = trainer(recipe.trainer)
    _check(recipe, row.name)
    numbers = names.NUMBERS[recipe.precision]
    frozen = recipe.method != "full"
    dtype = _DTYPES[numbers.weights if not (frozen and recipe.precision == "fp16-mixed") else "float16"]
    mixed: Literal["", "bf16", "fp16"] = "" if numbers.mixed == "no" else numbers.mixed
    if row.name == "torch" and not recipe.precision.endswith("mixed"):
        mixed = ""
    return Setup(
        config=config, trainer=_TRAINERS[row.name], method=recipe.method, dtype=dtype, autocast=mixed,
        quantization=_QUANTIZED.get(recipe.quantization, {}), prepare_kbit=row.kbit_prepare, rank=recipe.lora_rank,
        alpha=recipe.lora_alpha, dropout=recipe.lora_dropout, targets=_targets(recipe), optimizer=_optimizer(recipe, row.name),
        checkpointing="none" if recipe.checkpointing == "none" else "nonreentrant",
        attention=names.ATTENTION[recipe.attention], micro_batch=recipe.micro_batch, sequence=recipe.sequence_length,
        accumulation=min(recipe.accumulation, MICRO_STEPS), clip=1.0, steps=2, evaluate=True, mask=_mask(recipe), merge=True,
        load="checkpoint" if recipe.quantization != "none" else "host", arguments=_arguments(recipe, row.name),
    )  # fmt: skip


def _check(recipe: Recipe, name: str) -> None:
    refused = (
        (name not in _TRAINERS, f"trainer {name}", f"--trainer {', '.join(_TRAINERS)}"),
        (recipe.num_gpus > 1 or recipe.shard != "none", "several GPUs", "trace one GPU, or memfit estimate for all"),
        (recipe.offload != "none", f"--offload {recipe.offload}", "memfit estimate knows it"),
        (recipe.precision == "bf16-master", "bf16-master", "it is DeepSpeed's; memfit estimate knows it"),
        (recipe.attention == "flash", "--attention flash", "--attention sdpa runs the same kernel without a package"),
    )
    for wrong, what, hint in refused:
        if wrong:
            raise Unsupported(f"trace cannot run {what} yet", hint=hint)


def _mask(recipe: Recipe) -> Literal["ones", "padded"]:
    """Sequences of one batch differ in length, unless they are packed or alone."""
    return "padded" if recipe.micro_batch > 1 and recipe.padding == "longest" else "ones"


def _targets(recipe: Recipe) -> str | tuple[str, ...]:
    if recipe.lora_targets == ("all-linear",):
        return "all-linear"
    if recipe.lora_targets == ("attention",):
        return ("q_proj", "k_proj", "v_proj", "o_proj")
    return recipe.lora_targets


def _optimizer(recipe: Recipe, name: str) -> str:
    key = optimizer(recipe.optimizer).key
    if name == "torch":
        if key not in _LOOP:
            raise Unsupported(f"trace's own loop has no {key}", hint=f"choose one of {', '.join(_LOOP)}")
        return _LOOP[key]
    return names.optim(recipe, name).optim


def _arguments(recipe: Recipe, name: str) -> dict[str, Any]:
    """Further words of TrainingArguments or SFTConfig."""
    if name == "torch":
        return {}
    words = dict(names.optim(recipe, name).extra)
    if recipe.checkpointing in ("selective", "offload"):
        words["gradient_checkpointing_kwargs"] = {"use_reentrant": False, recipe.checkpointing: True}
    if name == "transformers" and recipe.loss == "fused":
        words["use_liger_kernel"] = True
    return words
