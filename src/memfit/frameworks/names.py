"""Hugging Face's names, read and written: optimizer, dtypes, quantisation, attention, torch.compile, LoRA."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from memfit.closed_form.numerics import lora_modules
from memfit.errors import BadInput, Unsupported
from memfit.frameworks.keys import Key, Keys, KeyTable, word
from memfit.nouns.architecture import Architecture
from memfit.nouns.job import Recipe
from memfit.tables import precisions
from memfit.tables.adapters import adapter
from memfit.tables.optimizers import OPTIM_KEYS, OPTIMIZERS, optimizer, optimizer_named
from memfit.tables.quantization import four_bit, quantization

Dtype = Literal["bfloat16", "float16", "float32"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Numbers:
    """A precision by Hugging Face's names: the dtype weights are loaded in, and the autocast dtype ("no": none)."""

    weights: Dtype
    mixed: Literal["bf16", "fp16", "no"]

    @property
    def compute(self) -> Dtype:
        """Return the dtype of matrix products."""
        return {"bf16": "bfloat16", "fp16": "float16", "no": self.weights}[self.mixed]  # type: ignore[return-value]


DTYPES: dict[precisions.Dtype, Dtype] = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
# TrainingArguments' keys, which LLaMA-Factory has as well
KEYS = KeyTable(
    Key("micro_batch", "per_device_train_batch_size", 8),
    Key("accumulation", "gradient_accumulation_steps", 1),
)
EVALUATION, EVALUATED = "per_device_eval_batch_size", 8  # the key and its default, whatever the training batch is
ACCELERATOR = "accelerator_config"
COMPILE = "torch_compile"
ATTENTION = {"eager": "eager", "sdpa": "sdpa", "flash": "flash_attention_2"}
# attention settings of files -> the kernel
_KERNELS = {name: kernel for kernel, name in ATTENTION.items()} | dict.fromkeys(
    (
        "flash",
        "flash_attention_3",
        "kernels-community/flash-attn2",
        "kernels-community/flash-attn3",
        "kernels-community/vllm-flash-attn3",
    ),
    "flash",
)
# GaLore's and APOLLO's rank and modules as in the optimizer table, for every framework; other optimizers ignore them
_LOW_RANK = [
    pair for row in OPTIMIZERS.values() if row.rank_of for one in row.settings.values() for pair in one.items()
]


def optim(recipe: Recipe, framework: str) -> dict[str, Any]:
    """Return the settings that choose the optimizer. Raises Unsupported if the framework has none."""
    found = optimizer(recipe.optimizer)
    settings = found.settings_in("transformers" if framework == "trl" else framework)
    if not settings:
        raise Unsupported(f"{framework} has no switch for {found.title}", hint=f"choose {found.instead}")
    return dict(settings)


def read_optim(keys: Keys, framework: str, default: str) -> dict[str, str]:
    """Return the optimizer of a file; one that is not in memfit's table is reported as unknown."""
    name = OPTIM_KEYS.get(framework, "optim")
    found = optimizer_named(keys.text(name) or default)
    if found is None:
        keys.not_expressed(name)
        return {}
    arguments = keys.data.get("optim_args")
    if found.key == "sgd" and isinstance(arguments, str | Mapping) and "momentum" in arguments:
        found = optimizer("sgd-momentum")
        keys.take("optim_args")
    keys.take(*(key for key, value in _LOW_RANK if keys.data.get(key) == value))
    return {"optimizer": found.key}


def read_attention(keys: Keys, value: object, key: str) -> dict[str, str]:
    """Return the attention kernel; the default is SDPA, as in transformers."""
    if value is not None and value != "auto" and word(value) not in _KERNELS:
        keys.not_expressed(key)
    return {"attention": _KERNELS.get(word(value), "sdpa")}


def read_evaluation(keys: Keys, micro_batch: int) -> None:
    """Report evaluation in larger batches than training; the formulas evaluate in micro-batches."""
    strategy = word(keys.take("eval_strategy", "evaluation_strategy", default="no"))
    if keys.number(EVALUATION, default=EVALUATED) > micro_batch and strategy not in ("no", "False"):
        keys.inexpressible.append(EVALUATION)


def read_reduction(keys: Keys, changes: Mapping[str, Any], kind: str) -> None:
    """Report full fine-tuning under FSDP that reduces gradients only in the last micro-batch, which is the default.

    The formulas reduce them after every one, as the files that memfit writes do (process_layout.reduction).
    """
    settings = keys.data.get(ACCELERATOR)
    inner = settings.get("gradient_accumulation_kwargs") if isinstance(settings, Mapping) else None
    each = isinstance(inner, Mapping) and inner.get("sync_each_batch")
    if kind == "fsdp" and changes["method"] == "full" and changes["accumulation"] > 1 and not each:
        keys.inexpressible.append(ACCELERATOR)


def read_compile(keys: Keys) -> dict[str, bool]:
    """Return whether the model is compiled; a backend or a mode switches it on."""
    on = keys.flag(COMPILE) or keys.data.get(COMPILE) == "auto"  # axolotl's "auto": wherever PyTorch can
    names = f"{COMPILE}_backend", f"{COMPILE}_mode"
    backend, mode = keys.text(names[0]), keys.text(names[1])
    return inductor(keys, on or bool(backend or mode), backend, mode, names)


def compiled(recipe: Recipe) -> dict[str, bool]:
    """Return the setting of torch.compile, if the recipe uses it."""
    return {COMPILE: True} if recipe.compile else {}


def inductor(keys: Keys, on: bool, backend: str | None, mode: str | None, names: tuple[str, str]) -> dict[str, bool]:
    """Return whether Inductor compiles the model; other backends and modes are reported as unknown keys."""
    by_inductor = word(backend or "inductor").lower() == "inductor"
    if not by_inductor:
        keys.not_expressed(names[0])
    if mode not in (None, "", "default"):
        keys.not_expressed(names[1])
    return {"compile": on and by_inductor}


def bitsandbytes(recipe: Recipe) -> dict[str, Any]:
    """Return the keywords of BitsAndBytesConfig; {} when the base is not quantised."""
    if recipe.quantization == "none":
        return {}
    found = quantization(recipe.quantization)
    if found.bits == 8:
        return {"load_in_8bit": True}
    return {
        "load_in_4bit": True,
        "bnb_4bit_quant_type": found.kind,
        **({"bnb_4bit_use_double_quant": True} if found.double else {}),
        "bnb_4bit_compute_dtype": DTYPES[precisions.meaning(recipe).computed],
    }


def read_four_bit(kind: str, double: bool, where: str) -> str:
    """Return memfit's name for a bitsandbytes 4-bit type."""
    found = four_bit(kind, double)
    if found is None:
        raise BadInput(f"the 4-bit type {kind!r} in {where} is neither nf4 nor fp4", hint="bitsandbytes has these two")
    return found.key


def adapter_words(recipe: Recipe, architecture: Architecture) -> dict[str, Any]:
    """Return the arguments of PEFT's class for a recipe's adapters. Raises Unsupported for an unknown number of layers.

    A dropout of LoRA that is off is left out, as in PEFT's own examples.
    """
    row, layers = adapter(recipe.adapter), len(architecture.layers)
    if row.layers and not layers:
        raise Unsupported(f"memfit does not know the number of layers, which {row.title} takes", hint="--adapter lora")
    named = targets(recipe, architecture) if row.targets == "modules" else ""
    found = row.words(recipe.lora_rank, recipe.lora_alpha, recipe.lora_dropout, named, layers)
    return {name: value for name, value in found.items() if (name, value) != ("lora_dropout", 0.0)}


def targets(recipe: Recipe, architecture: Architecture) -> str | list[str]:
    """Return PEFT's `target_modules`: "all-linear", or module names, into which "attention" is expanded."""
    if recipe.lora_targets == ("all-linear",):
        return "all-linear"
    return sorted(lora_modules(architecture, recipe.lora_targets))
