"""Rows of torchtune: its single-device recipes on packed or fixed-length data."""

from __future__ import annotations

import re
from dataclasses import replace

from memfit.nouns.job import Recipe
from published.case import (
    Case,
    Compared,
    NotCovered,
    accumulation,
    architecture_of,
    compared_of,
    gpu_of,
    one_gpu,
    optimizer_of,
)
from published.profiles.torchtune import PROFILE
from published.rows import Row

ALPACA_LONGEST = 1300  # tokens of Llama's tokenizer, as the notes of rows 021 and 022 say
TARGETS = {
    "q": ("q_proj",), "k": ("k_proj",), "v": ("v_proj",), "q_proj": ("q_proj",), "k_proj": ("k_proj",),
    "v_proj": ("v_proj",), "output_proj": ("o_proj",), "mlp": ("gate_proj", "up_proj", "down_proj"),
    "output": ("o_proj",), "all linear": ("q_proj", "k_proj", "v_proj", "o_proj"),
}  # fmt: skip
OPTIMIZERS = (
    (r"Paged.*8bit", "paged-adamw-8bit"), (r"Paged", "paged-adamw-32bit"), (r"torchao", "adamw-8bit-torchao"),
    (r"AdamW8bit", "adamw-8bit"),
    (r"fused", "adamw"), (r"AdamW", "adamw"),
)  # fmt: skip


def case(row: Row) -> Case:
    """A row as a Case. Raises NotCovered."""
    one_gpu(row)
    length, varied = re.fullmatch(r"(\d+)( packed)?", row.seq_len), row.seq_len.startswith("alpaca")
    if length is None and not varied:
        raise NotCovered(f"sequence length '{row.seq_len}' is not known")
    if varied and row.method == "qlora":
        raise NotCovered("its peak is that of loading, which quantises weights in a way of torchtune's own")
    checkpointing = row.checkpointing.startswith("on")
    if _compiled(row) and not checkpointing:
        raise NotCovered("compiled blocks without checkpointing: which tensors are kept is the compiler's choice")
    method = row.method
    used = f"{row.optimizer} {row.notes}" if "8bit" in row.optimizer else row.optimizer
    optimizer = optimizer_of(OPTIMIZERS, used)
    recipe = Recipe(
        method=method, precision="bf16", quantization="nf4-double" if method == "qlora" else "none",
        lora_rank=row.number("lora_rank", 8),
        lora_targets=_targets(row),
        optimizer=optimizer, micro_batch=row.number("micro_batch", 1), accumulation=accumulation(row),
        sequence_length=int(length[1]) if length else ALPACA_LONGEST,
        checkpointing="none" if not checkpointing else "offload" if "offload" in row.checkpointing else "full",
        attention="sdpa", loss="full" if "plain" in row.loss_kernel else "chunked", trainer="torch",
    )  # fmt: skip
    # its logger prints torch's peak of allocated bytes first, which is what the tables quote
    compared: Compared = "allocated" if row.quantity == "unknown" else compared_of(row)
    profile = replace(PROFILE, optimizer_in_backward="optimizer_in_bwd" in row.optimizer)
    if _compiled(row):
        profile = replace(profile, heads=(("full", "full"), ("chunked", "torchtune-compiled")))
    return Case(
        architecture=architecture_of(row.model), recipe=recipe, gpu=gpu_of(row, "a100-80gb"), profile=profile,
        compared=compared,
    )  # fmt: skip


def _targets(row: Row) -> tuple[str, ...]:
    """The modules with adapters. Raises NotCovered for names that are none of torchtune's."""
    names = [name.strip() for name in row.lora_targets.split("+") if name]
    if unknown := [name for name in names if name not in TARGETS]:
        raise NotCovered(f"adapters on {', '.join(unknown)}: no module is known by that name")
    return tuple(t for name in names for t in TARGETS[name]) or ("all-linear",)


def _compiled(row: Row) -> bool:
    """The README's ladder adds one flag per line and compiles from its third line on."""
    ladder = "Optimization flags" in row.source and not re.match(r"baseline|\+ packed", row.notes, re.IGNORECASE)
    return ladder or "compile" in row.loss_kernel or "compile on" in row.notes
