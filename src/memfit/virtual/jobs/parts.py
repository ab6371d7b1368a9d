"""What the trainers' jobs share: adapters, optimizers, batches."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from memfit.tables.optimizers import optimizer
from memfit.virtual.jobs.setup import Setup

# keywords of activation_checkpointing_enable; "selective" is TRL's word
CHECKPOINTING: dict[str, dict[str, bool]] = {
    "nonreentrant": {"use_reentrant": False},
    "reentrant": {"use_reentrant": True},
    "selective": {"use_reentrant": False, "selective": True},
    "offload": {"use_reentrant": False, "offload": True},
}


def lora_config(setup: Setup) -> Any:
    """PEFT's description of the adapters."""
    from peft import LoraConfig

    from memfit.virtual.jobs.models import predicts_masked

    targets = setup.targets if isinstance(setup.targets, str) else list(setup.targets)
    task = None if predicts_masked(setup) else "CAUSAL_LM"  # PEFT has no task for masked tokens
    return LoraConfig(
        r=setup.rank, lora_alpha=setup.alpha, target_modules=targets, lora_dropout=setup.dropout, task_type=task
    )


def with_adapters(setup: Setup, model: Any) -> Any:
    """The model with PEFT's adapters, prepared for k-bit training where it is quantised."""
    from peft import get_peft_model, prepare_model_for_kbit_training

    if setup.method == "qlora" and setup.prepare_kbit:
        on = setup.checkpointing != "none"
        words = {"gradient_checkpointing_kwargs": {"use_reentrant": setup.checkpointing == "reentrant"}} if on else {}
        model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=on, **words)
    return get_peft_model(model, lora_config(setup))


def make_optimizer(name: str, parameters: list[Tensor]) -> Any:
    """Make the optimizer of a hand-written loop, by its key or by transformers' name."""
    row = optimizer(name)
    module, _, kind = row.loop.rpartition(".")
    taken = [p for p in parameters if p.dim() == 2] if row.matrices_only else parameters
    return getattr(import_module(module), kind)(taken, lr=1e-5, **row.arguments)


def sample(setup: Setup) -> dict[str, Tensor]:
    """One sequence of zeros: token ids, labels and the mask as the setup wants them. Each [S], int64."""
    ids = torch.zeros(setup.sequence, dtype=torch.long)
    labels = ids.clone()
    labels[int(setup.sequence * setup.labelled) :] = -100
    made = {"input_ids": ids, "labels": labels}
    if setup.mask != "none":
        made["attention_mask"] = torch.ones_like(ids)
        if setup.mask == "padded":
            made["attention_mask"][-min(8, setup.sequence // 2) :] = 0
    return made
