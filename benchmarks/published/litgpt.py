"""Rows of lit-gpt and litgpt: finetune/lora.py and finetune/full.py on one card."""

from __future__ import annotations

from dataclasses import replace

from memfit.nouns.job import Recipe
from published.case import Case, NotCovered, accumulation, architecture_of, compared_of, fixed_length, gpu_of, one_gpu
from published.profiles.litgpt import PROFILE
from published.rows import Row

QUANTIZATIONS = {"bnb.nf4": "nf4", "bnb.nf4-dq": "nf4-double", "bnb.fp4": "fp4", "none": "none"}
PRECISIONS = {"bf16-true": "bf16", "bf16-mixed": "bf16-mixed", "32-true": "fp32"}
TARGETS = {"mlp": ("fc_1", "fc_2", "fc", "mlp_projection"), "head": ("lm_head",)}


def case(row: Row, *, several: bool = False) -> Case:
    """A row as a Case; several: also FSDP over several cards. Raises NotCovered."""
    if "adapter" in row.method:
        raise NotCovered(f"{row.method}: prompts inside the attention are not modelled")
    if "thunder" in row.framework and "eager" not in row.framework:
        raise NotCovered("compiled by thunder: which tensors are kept is the compiler's choice")
    sharded = several and row.sharding == "FSDP full shard"
    if not sharded:
        one_gpu(row)
    dtype = row.weight_dtype.split()[0]
    if dtype not in PRECISIONS or row.quant not in QUANTIZATIONS:
        raise NotCovered(f"precision {row.weight_dtype}, quantisation {row.quant}")
    targets = [t for name in row.lora_targets.split("+") if name for t in TARGETS.get(name, (name,))]
    recipe = Recipe(
        method=row.method, precision=PRECISIONS[dtype], quantization=QUANTIZATIONS[row.quant],
        lora_rank=row.number("lora_rank", 8), lora_dropout=0.05, lora_targets=tuple(targets) or ("all-linear",),
        optimizer="paged-adamw-32bit" if "PagedAdamW" in row.optimizer else "adamw-foreach",
        micro_batch=row.number("micro_batch", 1), accumulation=accumulation(row),
        sequence_length=fixed_length(row), checkpointing="full" if row.checkpointing.startswith("on") else "none",
        shard="parameters" if sharded else "none", num_gpus=row.number("n_gpus", 1) if sharded else 1,
        attention="sdpa", loss="full" if "plain" in row.loss_kernel else "chunked", trainer="torch",
    )  # fmt: skip
    # where the longest sample is forced to come first, the step after it is shorter and holds less
    again = "first iteration" not in row.notes
    profile = replace(PROFILE, autocast="mixed" in dtype, keeps_loss=again)
    return Case(
        architecture=architecture_of(row.model), recipe=recipe, gpu=gpu_of(row), profile=profile,
        compared=compared_of(row),
    )  # fmt: skip
