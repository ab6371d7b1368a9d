"""Rows of axolotl's examples: QLoRA and LoRA on packed text, with cut cross entropy."""

from __future__ import annotations

import re

from memfit.nouns.job import Recipe
from published.case import Case, NotCovered, accumulation, architecture_of, gpu_of, one_gpu, optimizer_of
from published.profiles.axolotl import AXOLOTL
from published.rows import Row

OPTIMIZERS = ((r"adamw_bnb_8bit", "adamw-8bit"), (r"adamw_torch_8bit", "adamw-8bit-torchao"))


def case(row: Row) -> Case:
    """A row as a Case. Raises NotCovered. A packed batch is one row, which flash attention does not mask."""
    one_gpu(row)
    packed = re.fullmatch(r"(\d+) packed", row.seq_len)
    if packed is None:
        raise NotCovered(f"sequence length '{row.seq_len}' is not known")
    if not re.fullmatch(r"\w+(\+\w+)*", row.lora_targets):
        raise NotCovered("adapters on a part of a model with images")
    if row.method not in ("lora", "qlora") or row.loss_kernel != "cut cross entropy":
        raise NotCovered(f"{row.method} with {row.loss_kernel}")
    architecture = architecture_of(row.model)
    if any(kind.mlp.kind == "moe" for kind in architecture.kinds):
        raise NotCovered("experts that axolotl's own code quantises")
    recipe = Recipe(
        method=row.method, precision="bf16", quantization="nf4-double" if row.method == "qlora" else "none",
        lora_rank=row.number("lora_rank", 32), lora_targets=tuple(row.lora_targets.split("+")),
        optimizer=optimizer_of(OPTIMIZERS, row.optimizer), micro_batch=1, accumulation=accumulation(row),
        sequence_length=row.number("micro_batch", 1) * int(packed[1]), loss="fused",
        checkpointing="full" if row.checkpointing == "on" else "none", attention="flash", trainer="axolotl-loss",
    )  # fmt: skip
    # "uses about 4.76 GiB VRAM" is taken for what PyTorch reserves, which axolotl logs
    return Case(
        architecture=architecture, recipe=recipe, gpu=gpu_of(row, "rtx-a6000"), profile=AXOLOTL,
        compared="reserved", remark="quantity taken as reserved",
    )  # fmt: skip
