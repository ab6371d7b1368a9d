"""Rows of the Qwen READMEs: finetune.py, a transformers Trainer on samples padded to the full length.

Its scripts run Q-LoRA and full fine-tuning under DeepSpeed, also on one card.
"""

from __future__ import annotations

import re
from dataclasses import replace

from memfit.closed_form.parallel.sharding import NCCL_LEAST
from memfit.nouns.job import Recipe
from published.case import Case, NotCovered, accumulation, architecture_of, fixed_length, gpu_of, one_gpu
from published.profiles.legacy import DEEPSPEED, FOREACH_20, SWIFT
from published.rows import Row

# finetune/ds_config_zero2.json, ds_config_zero3.json
BUCKETS = {
    2: "reduce_bucket_size:200000000",
    3: "reduce_bucket_size:auto,prefetch_bucket_size:auto,param_persistence_threshold:auto",
}


def case(row: Row) -> Case:
    """A row as a Case. Raises NotCovered."""
    zero, cards = re.match(r"DeepSpeed ZeRO-([23])", row.sharding), row.number("n_gpus", 1)
    if zero is None:
        one_gpu(row)
    elif zero[1] == "3" and row.method != "full":
        raise NotCovered(f"{cards} GPUs: adapters under ZeRO-3")
    if row.quant not in ("none", "GPTQ int4"):
        raise NotCovered(f"quantisation {row.quant}")
    stage = int(zero[1]) if zero else 0
    targets, _, saved = row.lora_targets.removesuffix(" (modules_to_save)").partition(" + trainable ")
    recipe = Recipe(
        method=row.method, precision="bf16-master" if stage else "bf16", lora_rank=row.number("lora_rank", 64),
        quantization="none" if row.quant == "none" else "gptq-int4",
        lora_targets=tuple(targets.split("+")) if targets else ("all-linear",), lora_dropout=0.05,
        modules_to_save=tuple(saved.split(",")) if saved else (),
        optimizer="adamw-foreach" if stage else FOREACH_20, micro_batch=row.number("micro_batch", 1),
        accumulation=accumulation(row), sequence_length=fixed_length(row),
        shard="gradients" if stage == 2 else "parameters" if cards > 1 else "none",
        zero_conf=BUCKETS.get(stage, "") if cards > 1 or stage == 2 else "", num_gpus=cards,
        checkpointing="full" if row.checkpointing == "on" else "none",
        attention="flash" if row.attention.startswith("flash") else "eager", trainer="transformers",
    )  # fmt: skip
    card = gpu_of(row)
    if stage and cards == 1:  # DeepSpeed opens a communicator on one card too
        card = replace(card, context_bytes=card.context_bytes + NCCL_LEAST)
    # the README says only "memory", measured beside speed on a card of its own: what nvidia-smi shows
    return Case(
        architecture=architecture_of(row.model.removesuffix("-Int4")), recipe=recipe, gpu=card,
        profile=DEEPSPEED if stage else SWIFT, compared="device" if row.quantity == "unknown" else "reserved",
        torch=row.version("torch"),
    )  # fmt: skip
