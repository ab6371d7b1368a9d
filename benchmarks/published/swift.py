"""Rows of ms-swift's 2024 benchmarks: sft on one A100, samples of many lengths, those beyond --max_length dropped.

The lengths of its comparison of methods (ms-agent, ms-bench) are not published: full fine-tunes are bounds at
--max_length. Runs with adapters reserve half as much again as at one length, which depends on lengths and their order.
"""

from __future__ import annotations

import re

from memfit.nouns.architecture import Architecture
from memfit.nouns.job import Recipe
from published.case import Case, NotCovered, accumulation, architecture_of, compared_of, fixed_length, gpu_of, one_gpu
from published.lengths import DATASETS, drawn
from published.profiles.legacy import SWIFT
from published.rows import Row

QUANTIZATIONS = {"none": "none", "int4 (bnb)": "nf4-double", "int4 (gptq)": "gptq-int4", "int8 (gptq)": "gptq-int8"}
DEFAULTS = (("c_attn",), ("query_key_value",), ("W_pack",), ("q_proj", "k_proj", "v_proj"))  # swift's LoRATM table
VARIANTS = ("", "no_mix")  # of the data
# openbuddy-zephyr-7b-v14.1 is Zephyr trained on: a Mistral of the 7.24 B parameters that its rows state
MODELS = {"openbuddy-zephyr-7b-chat": "mistral-7b-v0.1"}
METHODS = {"lora": "lora", "rslora": "lora", "qlora": "qlora", "full": "full"}


def case(row: Row) -> Case:
    """A row as a Case. Raises NotCovered."""
    one_gpu(row)
    named = re.fullmatch(r"(\w+)(?:\+([\w+]+))?(?: \(\w+\))?", row.method)
    method, variant = (named[1], named[2] or "") if named else ("", "")
    if method not in METHODS or variant not in VARIANTS:
        raise NotCovered(f"method {row.method} is not modelled")
    if row.quant == "int4 (bnb)":
        raise NotCovered(
            "bitsandbytes weights: 5 to 20 GiB above the same run on GPTQ weights; what holds them is not known"
        )
    dataset = next((d for name, d in DATASETS.items() if name in row.notes), None)
    if dataset is None and not (row.bound and method == "full"):
        raise NotCovered("the lengths of its dataset are not published")
    longest, flash = row.number("seq_len") if row.bound else fixed_length(row), row.attention.startswith("flash")
    # scripts/benchmark/test_memory_time/run_single.py: 1000 samples "to save time", all of them up to 2048 tokens
    orders: tuple[tuple[int, ...], ...] = ()
    if dataset is not None:
        orders = drawn(dataset, dataset.samples if longest <= 2048 else 1000, longest, row.number("micro_batch", 1))
    architecture = architecture_of(MODELS.get(row.model, row.model))
    recipe = Recipe(
        method=METHODS[method], precision="bf16", quantization=QUANTIZATIONS[row.quant],
        lora_rank=row.number("lora_rank", 8), lora_dropout=0.05,
        lora_targets=_targets(row, architecture),
        optimizer="adamw-foreach", micro_batch=row.number("micro_batch", 1), accumulation=accumulation(row),
        sequence_length=longest, checkpointing="full" if row.checkpointing == "on" else "none",
        attention="flash" if flash else "sdpa", trainer="transformers",
    )  # fmt: skip
    return Case(
        architecture=architecture, recipe=recipe, gpu=gpu_of(row), profile=SWIFT,
        compared=compared_of(row), padded=not flash, orders=orders,
        torch=row.version("torch"),
    )  # fmt: skip


def _targets(row: Row, architecture: Architecture) -> tuple[str, ...]:
    if row.lora_targets == "ALL":
        return ("all-linear",)
    if not row.lora_targets.startswith("DEFAULT"):
        return tuple(row.lora_targets.split("+"))
    present = {w.module for w in architecture.layers[0].weights}
    return next(names for names in DEFAULTS if set(names) <= present)
