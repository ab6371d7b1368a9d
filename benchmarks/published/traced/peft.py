"""Run PEFT's method comparison: the loop of its run.py, on padded batches of the longest length."""

from __future__ import annotations

import re
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from memfit.catalogue import config as catalogued
from memfit.catalogue import names
from published.case import NotCovered
from published.rows import Row
from published.traced.experiments import adapted, experiment_of, stated

PACKAGES = ("transformers", "peft")
STEPS = 2
# The first days of runs that measured a text's loss before they trained, and that did so with adapters disabled:
# enabling them again makes everything in them trainable, also what the optimizer or the method had frozen.
FORGETTING, DISABLED = "2025-12-03", "2026-07-14"


def run(row: Row) -> None:
    """Build, adapt, train; every batch is as long as the longest that the run allows."""
    limit = re.fullmatch(r"<=(\d+) dynamic", row.seq_len)
    if limit is None:
        raise NotCovered(f"sequence length '{row.seq_len}' is not known")
    experiment = experiment_of(row, "text")
    model = model_of(row.model)
    if experiment["train"].get("use_gc"):
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable()
    model = adapted(model, experiment)
    optimizer = optimizer_of(model, experiment["train"])
    stated(row, model)
    shape = (experiment["train"].get("batch_size", 4), int(limit[1]))
    _loss_before(row, model, shape)
    model.train()
    host = _batch(shape)
    for step in range(1, STEPS + 1):
        batch = {name: value.to("cuda") for name, value in host.items()}
        optimizer.zero_grad()
        outputs = model(**batch, num_items_in_batch=batch["attention_mask"].sum().item())
        loss = outputs.loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if experiment["config"].get("peft_type") == "ADALORA":
            model.base_model.update_and_allocate(step)


def _batch(shape: tuple[int, int]) -> dict[str, Tensor]:
    host = {name: torch.ones(shape, dtype=torch.long) for name in ("input_ids", "attention_mask", "labels")}
    host["attention_mask"][0, -8:] = 0  # samples of a batch differ in length
    return host


@torch.inference_mode()
def _loss_before(row: Row, model: Any, shape: tuple[int, int]) -> None:
    """Measure the loss of texts of the same length, as the scripts of later days do before they train."""
    created = re.search(r"created ([\d-]+)", row.notes)
    day = created[1] if created else ""
    if day < FORGETTING:
        return
    model.eval()
    off = day >= DISABLED and hasattr(model, "peft_config")
    with model.disable_adapter() if off else nullcontext():
        batch = {name: value.to("cuda") for name, value in _batch(shape).items() if name != "labels"}
        logits = model(**batch).logits
        for logit, target in zip(logits, batch["input_ids"], strict=True):
            own = logit[-len(target) :]  # without virtual tokens
            torch.nn.functional.cross_entropy(own[:-1], target[1:], reduction="none")


def model_of(name: str) -> Any:
    """The pretrained model in bf16, as if it had been read onto the card."""
    import transformers

    entry = names.find(name)
    assert entry is not None
    given = {k: v for k, v in catalogued(entry).items() if k not in ("torch_dtype", "dtype", "architectures")}
    config = transformers.AutoConfig.for_model(str(given.pop("model_type")), **given)
    with torch.device("cuda"):
        model = transformers.AutoModelForCausalLM.from_config(config, torch_dtype=torch.bfloat16)
    model.tie_weights()
    return model


def optimizer_of(model: Any, train: dict[str, Any]) -> Any:
    """torch's AdamW, or PEFT's own LoRA-FA."""
    if train.get("optimizer_type") == "lora-fa":
        from peft.optimizers import create_lorafa_optimizer

        return create_lorafa_optimizer(model, lr=1e-4, **train["optimizer_kwargs"])
    return torch.optim.AdamW(model.parameters(), lr=1e-4)
