"""From a Recipe to the Setup that its trainer is told: what memfit's exports write, or a refusal that says what to take."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import Any, Literal, get_args

from memfit.errors import Unsupported
from memfit.frameworks import deepspeed as deepspeed_file
from memfit.frameworks import names as names
from memfit.frameworks import process_layout as launch
from memfit.models import families
from memfit.nouns.job import Recipe
from memfit.tables.optimizers import OPTIMIZERS, optimizer
from memfit.tables.trainers import trainer
from memfit.virtual.jobs.setup import Setup

TrainerName = Literal["torch", "transformers", "trl"]
_TRAINERS: tuple[str, ...] = get_args(TrainerName)
_DTYPES: dict[names.Dtype, Literal["bf16", "fp16", "fp32"]] = {
    "bfloat16": "bf16", "float16": "fp16", "float32": "fp32"
}  # fmt: skip
MICRO_STEPS = 2  # of an accumulation; from the second on every one finds the memory as the one before left it


def setup_of(recipe: Recipe, config: dict[str, Any]) -> Setup:
    """What the recipe's trainer is told. Raises Unsupported for what it cannot be told, or what has no job yet."""
    name: Any = trainer(recipe.trainer).name
    for wrong, what, hint in _refused(recipe, name):
        if wrong:
            raise Unsupported(f"trace cannot run {what}", hint=hint)
    kind = launch.backend(recipe)
    numbers = names.NUMBERS[recipe.precision] if name == "torch" else launch.numbers(recipe, kind)
    half = recipe.method != "full" and recipe.precision == "fp16-mixed"  # a frozen base needs no fp32 weights
    mixed: Any = "" if numbers.mixed == "no" else numbers.mixed
    return Setup(
        config=config, trainer=name, method=recipe.method, dtype="fp16" if half else _DTYPES[numbers.weights],
        autocast="" if name == "torch" and not recipe.precision.endswith("mixed") else mixed,
        quantization=_quantization(recipe, numbers), prepare_kbit=trainer(recipe.trainer).kbit_prepare and kind != "fsdp", rank=recipe.lora_rank,
        alpha=recipe.lora_alpha, dropout=recipe.lora_dropout, targets=_targets(recipe, config), widen=_scales_bf16(recipe),
        optimizer=_optimizer(recipe, name), checkpointing="nonreentrant" if recipe.checkpointing == "full" else recipe.checkpointing,
        attention=names.ATTENTION[recipe.attention], compile=recipe.compile, micro_batch=recipe.micro_batch, sequence=recipe.sequence_length,
        packing=recipe.padding == "packing", accumulation=min(recipe.accumulation, MICRO_STEPS), clip=1.0, steps=2,
        evaluate=True, save=name != "torch", mask="padded" if recipe.micro_batch > 1 and recipe.padding == "longest" else "ones",
        merge=recipe.shard != "parameters", load=_load(recipe, name), world_size=recipe.num_gpus,
        shard="parameters" if kind == "fsdp" else "none", deepspeed=deepspeed_file.config(recipe) if kind == "deepspeed" else {},
        arguments=_arguments(recipe, name),
    )  # fmt: skip


Refusal = tuple[bool, str, str]  # does it hold, what cannot be run, what to take instead


def _refused(recipe: Recipe, name: str) -> tuple[Refusal, ...]:
    loop, plain = name == "torch", name == "transformers"
    return (
        (name not in _TRAINERS, f"trainer {name}", f"--trainer {', '.join(_TRAINERS)}"),
        *_absent(recipe, name),
        (loop and recipe.zero, "DeepSpeed's part in a hand-written loop", "--trainer transformers or trl"),
        (recipe.padding == "packing" and name != "trl", f"--padding packing: {name} does not pack", "--trainer trl, or --padding longest"),
        (plain and recipe.loss == "chunked", "--loss chunked: transformers.Trainer has none", "--loss fused (Liger), or --trainer trl"),
        (loop and recipe.loss != "full", f"--loss {recipe.loss}: the model computes its own in a hand-written loop", "--loss full, or --trainer trl"),
        (plain and recipe.checkpointing == "selective", "--checkpointing selective: transformers.Trainer has none", "--checkpointing full, or --trainer trl"),
    )  # fmt: skip


def _absent(recipe: Recipe, name: str) -> list[Refusal]:
    """What the recipe needs and is not installed: its trainer's version, packages."""
    found: list[Refusal] = []
    _, _, asked = recipe.trainer.partition("==")
    there = installed_version(name)
    if asked and there and not f"{there.partition('+')[0]}.".startswith(f"{asked}."):
        hint = f"pip install {recipe.trainer}, or --trainer {name} for the installed one; memfit estimate knows others"
        found.append((True, f"{recipe.trainer}: {there} is installed", hint))
    packages = [optimizer(recipe.optimizer).package]
    packages += ["bitsandbytes"] * (recipe.quantization != "none")
    packages += ["liger-kernel"] * (name == "transformers" and recipe.loss == "fused")
    packages += ["deepspeed"] * recipe.zero
    for package in packages:
        hint = f"pip install {package}; memfit estimate answers without it"
        found.append((not installed_version(package), f"this without {package}, which is not installed", hint))
    return found


def installed_version(package: str) -> str:
    """'' where it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _load(recipe: Recipe, name: str) -> Literal["checkpoint", "zero3", "meta", "host"]:
    """A loop that shards builds the model nowhere at first; the Trainers shard what the host holds, ZeRO-3 what is read."""
    if recipe.quantization != "none":
        return "checkpoint"
    if recipe.zero and launch.zero_stage(recipe) == 3:
        return "zero3"
    return "meta" if name == "torch" and recipe.shard != "none" else "host"


def _quantization(recipe: Recipe, numbers: names.Numbers) -> dict[str, Any]:
    """FSDP2 shards 4-bit weights that are stored in the dtype of the others."""
    given = names.bitsandbytes(recipe)
    return given | {"bnb_4bit_quant_storage": numbers.weights} if given and launch.backend(recipe) == "fsdp" else given


def _targets(recipe: Recipe, config: dict[str, Any]) -> str | tuple[str, ...]:
    """PEFT's target_modules; only "attention" and names need the model's own."""
    if recipe.method == "full" or recipe.lora_targets == ("all-linear",):
        return "all-linear"
    return tuple(names.targets(recipe, families.architecture(config, str(config.get("model_type")))))


def _scales_bf16(recipe: Recipe) -> bool:
    """TRL makes QLoRA adapters bf16, whose gradients fp16's loss scaler cannot take: memfit's scripts widen them."""
    return trainer(recipe.trainer).name == "trl" and recipe.method == "qlora" and recipe.precision == "fp16-mixed"


def _optimizer(recipe: Recipe, name: str) -> str:
    row = optimizer(recipe.optimizer)
    if name == "torch":
        if not row.loop:
            known = ", ".join(row.key for row in OPTIMIZERS.values() if row.loop)
            raise Unsupported(f"trace's own loop has no {row.key}", hint=f"choose one of {known}")
        return row.key
    return str(names.optim(recipe, name)["optim"])


def _arguments(recipe: Recipe, name: str) -> dict[str, Any]:
    """Further words of TrainingArguments or SFTConfig."""
    if name == "torch":
        return {}
    liger = {"use_liger_kernel": True} if name == "transformers" and recipe.loss == "fused" else {}
    beside = {key: value for key, value in names.optim(recipe, name).items() if key != "optim"}
    return {**beside, **launch.reduction(recipe), **liger}
