"""Rows of the Qwen README: finetune.py, a transformers Trainer on samples padded to the full length."""

from __future__ import annotations

from memfit.nouns.job import Recipe
from published.case import Case, NotCovered, accumulation, architecture_of, fixed_length, gpu_of, one_gpu
from published.profiles.legacy import DEEPSPEED, SWIFT
from published.rows import Row


def case(row: Row) -> Case:
    """A row as a Case. Raises NotCovered."""
    alone = row.sharding.startswith("DeepSpeed ZeRO-3") and row.n_gpus == "1" and row.method == "full"
    if not alone:  # where ZeRO has no card to share with, its fp32 master weights are left
        one_gpu(row)
    if "modules_to_save" in row.lora_targets:
        raise NotCovered("trained copies of embedding and head (modules_to_save) are not modelled")
    if row.quant != "none":
        raise NotCovered(f"quantisation {row.quant}")
    recipe = Recipe(
        method=row.method, precision="bf16-master" if alone else "bf16", lora_rank=row.number("lora_rank", 64),
        lora_targets=tuple(row.lora_targets.split("+")) if row.lora_targets else ("all-linear",), lora_dropout=0.05,
        optimizer="adamw-foreach", micro_batch=row.number("micro_batch", 1), accumulation=accumulation(row),
        sequence_length=fixed_length(row),
        checkpointing="full" if row.checkpointing == "on" else "none",
        attention="flash" if row.attention.startswith("flash") else "eager", trainer="transformers",
    )  # fmt: skip
    # the README says only "memory", measured beside speed on a card of its own: what nvidia-smi shows
    return Case(
        architecture=architecture_of(row.model), recipe=recipe, gpu=gpu_of(row), profile=DEEPSPEED if alone else SWIFT,
        compared="device" if row.quantity == "unknown" else "reserved", torch=row.version("torch"),
    )  # fmt: skip
