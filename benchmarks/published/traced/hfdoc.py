"""Hugging Face's guide to training on one GPU: its Trainer around BERT-large on samples of 512 random tokens."""

from __future__ import annotations

import tempfile
from functools import partialmethod
from typing import Any

import torch

from memfit.catalogue import config as catalogued
from memfit.catalogue import names
from memfit.virtual.patching import patched
from published.case import NotCovered, fixed_length
from published.rows import Row
from published.traced import old_bitsandbytes

PACKAGES = ("transformers", "accelerate", "bitsandbytes")
STEPS = 2


class Samples(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Samples of one length with a label."""

    def __init__(self, length: int, count: int) -> None:
        self._length, self._count = length, count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, _: int) -> dict[str, Any]:
        return {"input_ids": torch.ones(self._length, dtype=torch.long), "labels": 0}


def run(row: Row) -> None:
    """The guide's script on PyTorch 1.10: gradients are zeroed, not freed, and softmax saves its input too."""
    if "sequence classification" not in row.model:
        raise NotCovered(f"{row.model} under a plain transformers Trainer")
    if "bnb" in row.optimizer:
        old_bitsandbytes.prepare()
    import transformers

    entry = names.find(row.model.split()[0])
    assert entry is not None
    given = {
        k: v for k, v in catalogued(entry).items() if k not in ("torch_dtype", "dtype", "architectures", "model_type")
    }
    config = transformers.BertConfig(**given, attn_implementation="eager")
    model = transformers.BertForSequenceClassification(config).to("cuda")
    batch, accumulation = row.number("micro_batch", 1), row.number("grad_accum", 1)
    old = (
        patched(torch.nn.Module, zeroing(torch.nn.Module)),
        patched(torch.nn.functional, {"softmax": softmax_of_its_time(torch.nn.functional.softmax)}),
    )
    with tempfile.TemporaryDirectory() as folder, old[0], old[1]:
        words = {
            "output_dir": folder, "per_device_train_batch_size": batch, "gradient_accumulation_steps": accumulation,
            "fp16": "AMP" in row.weight_dtype, "gradient_checkpointing": row.checkpointing == "on", "max_steps": STEPS,
            "report_to": [], "save_strategy": "no", "logging_strategy": "no",
            "optim": "adafactor" if row.optimizer == "Adafactor" else "adamw_hf" if "HF" in row.optimizer
            else "adamw_torch",
        }  # fmt: skip
        optimizer = eight_bit(model) if "bnb" in row.optimizer else None
        data = Samples(fixed_length(row), batch * accumulation * (STEPS + 1))
        trainer = transformers.Trainer(
            model=model, args=transformers.TrainingArguments(**words), train_dataset=data, optimizers=(optimizer, None)
        )
        trainer.train()


def zeroing(owner: Any) -> dict[str, Any]:
    """zero_grad with the default of its time."""
    return {"zero_grad": partialmethod(owner.zero_grad, set_to_none=False)}


class Kept(torch.autograd.Function):
    """The identity, saving what it passes on."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


def softmax_of_its_time(now: Any) -> Any:
    """Before 1.11 softmax kept its input, of which the backward needs the dtype alone (PyTorch pull request 65242)."""

    def softmax(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        wide = x.float() if torch.is_autocast_enabled("cuda") else x
        return now(Kept.apply(wide) if wide.requires_grad else wide, *args, **kwargs)

    return softmax


def eight_bit(model: Any) -> Any:
    """bitsandbytes' Adam8bit over every weight."""
    import bitsandbytes

    return bitsandbytes.optim.Adam8bit(model.parameters(), lr=1e-4)
