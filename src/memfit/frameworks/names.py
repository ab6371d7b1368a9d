"""What other frameworks call memfit's choices: optimizers, dtypes, attention kernels, and the packages they need."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from memfit.closed_form.numerics import lora_modules
from memfit.errors import Unsupported
from memfit.nouns.architecture import Architecture
from memfit.nouns.job import Recipe
from memfit.tables import precisions
from memfit.tables.optimizers import OPTIMIZERS, Optimizer, optimizer

Dtype = Literal["bfloat16", "float16", "float32"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Numbers:
    """A precision in Hugging Face words: the dtype weights are loaded in, and the autocast dtype ("no": none)."""

    weights: Dtype
    mixed: Literal["bf16", "fp16", "no"]

    @property
    def compute(self) -> Dtype:
        """The dtype matrix products run in."""
        return {"bf16": "bfloat16", "fp16": "float16", "no": self.weights}[self.mixed]  # type: ignore[return-value]


DTYPES: dict[precisions.Dtype, Dtype] = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
ATTENTION = {"eager": "eager", "sdpa": "sdpa", "flash": "flash_attention_2"}


@dataclass(frozen=True, slots=True)
class Framework:
    """How one framework is told about an optimizer: the value of its `optim` key and what goes beside it."""

    optim: str
    extra: dict[str, Any] = field(default_factory=dict)


# optimizers whose name alone does not say it all; every other one is its `hf_name` in all three frameworks
_HF: dict[str, Framework] = {
    "sgd-momentum": Framework("sgd", {"optim_args": "momentum=0.9"}),
    "galore": Framework("galore_adamw", {"optim_target_modules": "all-linear", "optim_args": "rank=128"}),
    "apollo": Framework("apollo_adamw", {"optim_target_modules": "all-linear", "optim_args": "rank=128"}),
}
_AXOLOTL: dict[str, Framework] = {
    "sgd-momentum": Framework("sgd", {"optim_args": {"momentum": 0.9}}),
    "galore": Framework("galore_adamw", {"optim_target_modules": "all_linear", "optim_args": {"rank": 128}}),
    "apollo": Framework("apollo_adamw", {"optim_target_modules": "all_linear", "optim_args": {"rank": 128}}),
    "muon": Framework("muon"),
}
_LLAMAFACTORY: dict[str, Framework] = {
    "sgd-momentum": _HF["sgd-momentum"],
    "galore": Framework("adamw_torch", {"use_galore": True, "galore_target": "all", "galore_rank": 128}),
    "apollo": Framework("adamw_torch", {"use_apollo": True, "apollo_target": "all", "apollo_rank": 128}),
    "muon": Framework("adamw_torch", {"use_muon": True}),
}
_SPECIAL = {"trl": _HF, "transformers": _HF, "axolotl": _AXOLOTL, "llamafactory": _LLAMAFACTORY}
# the Trainer family has no switch for torch's for-loop AdamW, and no optimizer of its own inside backward
_NO_SWITCH = {
    "adamw-forloop": "--optimizer adamw: the fused step needs no temporaries either",
    "adamw-in-backward": "--optimizer adamw-8bit or adafactor, or write the training loop yourself",
    "muon": "--optimizer adamw-8bit, or --target axolotl",
}


def optim(recipe: Recipe, framework: str) -> Framework:
    """The optimizer as `framework` spells it. Raises UnknownName, or Unsupported where it has no such optimizer."""
    row = optimizer(recipe.optimizer)
    special = _SPECIAL[framework].get(row.key)
    if special is not None:
        return special
    if row.key in _NO_SWITCH or not row.hf_name:
        raise Unsupported(
            f"{framework} has no switch for {row.title}", hint="choose " + _NO_SWITCH.get(row.key, "--optimizer adamw")
        )
    return Framework(row.hf_name)


def our_optimizer(name: str) -> str | None:
    """A framework's optimizer name -> memfit's key; None when memfit has no such row."""
    key = _ALIASES.get(name, name).replace("_", "-")
    by_name = {row.hf_name.replace("_", "-"): row.key for row in reversed(OPTIMIZERS.values()) if row.hf_name}
    return by_name.get(key) or (key if key in OPTIMIZERS else None)


_ALIASES = {
    "adamw_8bit": "adamw_bnb_8bit", "adamw_hf": "adamw_torch", "paged_adamw": "paged_adamw_32bit", "lion": "lion_32bit",
    "ao_adamw_8bit": "adamw_torch_8bit", "ao_adamw_4bit": "adamw_torch_4bit",
}  # fmt: skip


def row(recipe: Recipe) -> Optimizer:
    """The optimizer's row in memfit's own table."""
    return optimizer(recipe.optimizer)


def targets(recipe: Recipe, architecture: Architecture) -> str | list[str]:
    """PEFT's `target_modules`: "all-linear" or module names; "attention" becomes the model's own names."""
    if recipe.lora_targets == ("all-linear",):
        return "all-linear"
    return sorted(lora_modules(architecture, recipe.lora_targets))


def four_bit(recipe: Recipe) -> dict[str, Any]:
    """BitsAndBytesConfig keywords of the recipe's quantisation; {} when the base is not quantised."""
    if recipe.quantization == "none":
        return {}
    if recipe.quantization == "int8":
        return {"load_in_8bit": True}
    settings: dict[str, Any] = {
        "load_in_4bit": True,
        "bnb_4bit_quant_type": recipe.quantization.removesuffix("-double"),
    }
    if recipe.quantization.endswith("-double"):
        settings["bnb_4bit_use_double_quant"] = True
    return settings | {"bnb_4bit_compute_dtype": DTYPES[precisions.meaning(recipe).computed]}


def check_method(recipe: Recipe) -> None:
    """Refuse what no framework can be told: a quantised base without adapters, QLoRA without quantisation."""
    if recipe.method == "full" and recipe.quantization != "none":
        raise Unsupported("a quantised base cannot be fully fine-tuned", hint="--method qlora, or --quantization none")
    if recipe.method == "qlora" and recipe.quantization == "none":
        raise Unsupported("QLoRA needs a quantisation", hint="--quantization nf4-double, or --method lora")
