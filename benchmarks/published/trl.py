"""Rows of TRL's long-context benchmark: SFTTrainer on nodes of 8 H100, sharded by FSDP2 or ZeRO-3."""

from __future__ import annotations

import re
from dataclasses import replace

from memfit.nouns.job import Recipe
from published.case import Case, NotCovered, architecture_of, compared_of, fixed_length, gpu_of
from published.profiles.trl import PROFILE
from published.rows import Row

# Bytes of an H100 as NVML and nvidia-smi know it. trackio reads nvmlDeviceGetMemoryInfo, whose `used` is the sum of
# what is allocated and what the driver reserves for itself (NVML API reference, nvmlMemory_t): the difference to CUDA's
NVML_TOTAL = 81_559 << 20


def case(row: Row) -> Case:
    """A row as a Case. Raises NotCovered.

    The runs were recorded from 2026-04-17 to 04-30. The benchmark's launch script set expandable_segments from 05-04 on
    (commit 8c274d681), so they ran under the default settings of the allocator, whatever the notes say.
    """
    parallel = {name: int(size) for name, size in re.findall(r"(\w+)=(\d+)", row.sharding)}
    if not parallel or parallel.keys() - {"DP", "CP", "SP"}:
        raise NotCovered(f"sharding {row.sharding}")
    zero = row.sharding.startswith("DeepSpeed ZeRO-3")
    recipe = Recipe(
        method="full", precision="bf16-master" if zero else "bf16-mixed", optimizer="adamw",
        micro_batch=row.number("micro_batch", 1), sequence_length=fixed_length(row), checkpointing="full",
        attention="flash" if "FA" in row.attention else "sdpa", loss="fused" if "liger" in row.loss_kernel else "full",
        shard="parameters", num_gpus=row.number("n_gpus", 1), loading="auto" if zero else "sharded",
        context_parallel=parallel.get("CP", parallel.get("SP", 1)), trainer="trl==1.1",
        # accelerate passes no sizes on, so DeepSpeed's own hold
        zero_conf="reduce_bucket_size:500000000" if zero else "",
    )  # fmt: skip
    gpu = gpu_of(row)
    own = NVML_TOTAL - gpu.total_bytes
    return Case(
        architecture=architecture_of(row.model), recipe=recipe, profile=PROFILE, compared=compared_of(row),
        gpu=replace(gpu, total_bytes=NVML_TOTAL, context_bytes=gpu.context_bytes + own), torch=row.version("torch"),
    )  # fmt: skip
