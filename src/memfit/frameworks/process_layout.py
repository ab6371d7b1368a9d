"""The process layout of a recipe: plain, DDP, FSDP2 or DeepSpeed, and the launch command."""

from __future__ import annotations

from dataclasses import dataclass

import memfit.frameworks.names as names
from memfit.nouns.job import Recipe
from memfit.tables.loading import loading_of
from memfit.tables.precisions import Backend as Backend
from memfit.tables.precisions import backend as backend
from memfit.tables.precisions import meaning

ACCELERATE_FILE, DEEPSPEED_FILE = "accelerate.yaml", "ds_config.json"
# blocks that FSDP2 wraps, for model types whose `_no_split_modules` name classes that the text model lacks:
# accelerate refuses those (transformers 5.23)
BLOCKS = {
    "qwen3_5": "Qwen3_5DecoderLayer", "qwen3_5_text": "Qwen3_5DecoderLayer",
    "qwen3_5_moe": "Qwen3_5MoeDecoderLayer", "qwen3_5_moe_text": "Qwen3_5MoeDecoderLayer",
}  # fmt: skip
STAGES = {"none": 0, "optimizer": 1, "gradients": 2, "parameters": 3}


def zero_stage(recipe: Recipe) -> int:
    """Return the ZeRO stage; offloading needs a stage that shards what it moves."""
    stage = STAGES[recipe.shard]
    if recipe.offload == "parameters":
        return 3
    return 2 if recipe.offload == "optimizer" and stage == 0 else stage


@dataclass(frozen=True, slots=True)
class Launch:
    """How train.py is started: the backend, and accelerate.yaml, a cluster's own line (`started_by`) or python."""

    backend: Backend
    by_accelerate: bool
    started_by: str = ""

    @property
    def command(self) -> str:
        """Return the line that starts training."""
        if self.started_by:
            return self.started_by
        by = f"accelerate launch --config_file {ACCELERATE_FILE}" if self.by_accelerate else "python"
        return f"{by} train.py"


def quantised_on_host(recipe: Recipe) -> bool:
    """Return whether 4-bit weights are made on the host, so that no card ever has the whole model."""
    return recipe.method == "qlora" and loading_of(recipe) == "host"


# the argument of from_pretrained that does it
ON_HOST = ("device_map", '{"": "cpu"}', "quantised on the host and sharded from there: no card holds the whole model")


def reduction(recipe: Recipe) -> dict[str, dict[str, dict[str, bool]]]:
    """Return the setting that reduces gradients after every micro-batch under FSDP2.

    By default accelerate reduces only in the last micro-batch and keeps whole gradients on every card until then.
    """
    if backend(recipe) != "fsdp" or recipe.method != "full" or recipe.accumulation == 1:
        return {}
    return {"accelerator_config": {"gradient_accumulation_kwargs": {"sync_each_batch": True}}}


def launch_of(recipe: Recipe, target: str = "") -> Launch:
    """Return the launch of a recipe. The targets "accelerate" and "deepspeed" always have the launcher's file."""
    kind = "deepspeed" if target == "deepspeed" else backend(recipe)
    return Launch(kind, kind != "plain" or target == "accelerate")


def numbers(recipe: Recipe, kind: Backend) -> names.Numbers:
    """Return the dtypes of weights and autocast under a backend."""
    meant = meaning(recipe, kind)
    if meant.autocast == "never" or meant.computed == "fp32":
        return names.Numbers(weights=names.DTYPES[meant.stored], mixed="no")
    return names.Numbers(weights=names.DTYPES[meant.stored], mixed=meant.computed)
