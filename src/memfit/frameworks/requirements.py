"""requirements.txt of an export: the packages its script imports, in the ranges memfit models."""

from __future__ import annotations

import memfit.frameworks.names as names
import memfit.frameworks.process_layout as launch
from memfit.nouns.job import Recipe

PINS = {
    "torch": "torch>=2.11",
    "transformers": "transformers>=5.23,<6",  # activation_checkpointing_kwargs with offload
    "trl": "trl>=1.15,<2",  # the fused LM head
    "peft": "peft>=0.18,<1",
    "accelerate": "accelerate>=1.12,<2",
    "datasets": "datasets>=4.0",
    "bitsandbytes": "bitsandbytes>=0.48",
    "deepspeed": "deepspeed>=0.19",  # bf16_optimizer_states
    "torchao": "torchao>=0.17",
    "galore-torch": "galore-torch",
    "apollo-torch": "apollo-torch",
    "liger-kernel": "liger-kernel>=0.8",
    "kernels": "kernels",  # flash attention without a compiler: transformers fetches the built kernel
}


def requirements(recipe: Recipe, framework: str, kind: launch.Backend) -> str:
    """The text of requirements.txt for a script of `framework` ("trl" or "transformers")."""
    return "".join(f"{PINS[name]}\n" for name in packages(recipe, framework, kind))


def packages(recipe: Recipe, framework: str, kind: launch.Backend) -> list[str]:
    """The distributions that script needs."""
    needed = ["torch", "transformers", "accelerate", "datasets"]
    needed += ["trl"] if framework == "trl" else []
    needed += ["peft"] if recipe.method != "full" else []
    needed += ["bitsandbytes"] if recipe.quantization != "none" else []
    needed += ["deepspeed"] if kind == "deepspeed" else []
    needed += ["kernels"] if recipe.attention == "flash" else []
    needed += ["liger-kernel"] if framework == "transformers" and recipe.loss == "fused" else []
    package = names.row(recipe).package
    return needed + ([package] if package in PINS and package not in needed else [])
