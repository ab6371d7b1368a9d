"""Rows of PEFT's method comparison: run.py on MetaMathQA, a plain loop over padded batches."""

from __future__ import annotations

import re

from memfit.nouns.job import Recipe
from memfit.tables.trainers import trainer
from published.case import Case, NotCovered, accumulation, architecture_of, compared_of, gpu_of, one_gpu
from published.rows import Row

METHODS = {"lora": "lora", "rslora": "lora", "full": "full"}


def case(row: Row) -> Case:
    """A row as a Case. Raises NotCovered."""
    one_gpu(row)
    if row.method not in METHODS:
        raise NotCovered(f"PEFT method {row.method} is not modelled")
    limit = re.fullmatch(r"<=(\d+) dynamic", row.seq_len)
    if limit is None:
        raise NotCovered(f"sequence length '{row.seq_len}' is not known")
    recipe = Recipe(
        method=METHODS[row.method], precision="bf16", lora_rank=row.number("lora_rank", 8),
        lora_targets=tuple(row.lora_targets.split("+")) if row.lora_targets else ("all-linear",),
        optimizer="adamw-foreach", micro_batch=row.number("micro_batch", 1), accumulation=accumulation(row),
        sequence_length=int(limit[1]), checkpointing="full" if row.checkpointing == "on" else "none",
        attention="sdpa", trainer="torch",
    )  # fmt: skip
    return Case(
        architecture=architecture_of(row.model), recipe=recipe, gpu=gpu_of(row, "l40s"), profile=trainer("torch"),
        compared=compared_of(row), padded=True, torch=row.version("torch"),
    )  # fmt: skip
