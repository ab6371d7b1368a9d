"""Run PEFT's method comparison: the loop of its run.py, on padded batches of the longest length."""

from __future__ import annotations

import re
from typing import Any

import torch

from memfit.catalogue import config as catalogued
from memfit.catalogue import names
from memfit.errors import BadInput
from memfit.tables.adapters import adapter, key_of
from published.case import NotCovered
from published.rows import Row

PACKAGES = ("transformers", "peft")
STEPS = 2
# in the names of experiments: settings that leave the number of trained weights as it is, and are in no column
VARIANTS = ("-bat;", "-mini;", "-para;", "-ff;", "-fast;", "-batch_size-")


def run(row: Row) -> None:
    """Build, adapt, train; every batch is as long as the longest that the run allows."""
    limit = re.fullmatch(r"<=(\d+) dynamic", row.seq_len)
    if limit is None:
        raise NotCovered(f"sequence length '{row.seq_len}' is not known")
    model = adapted(row, model_of(row.model))
    model.train()
    optimizer = optimizer_of(row, model)
    shape = (row.number("micro_batch", 1), int(limit[1]))
    host = {name: torch.ones(shape, dtype=torch.long) for name in ("input_ids", "attention_mask", "labels")}
    host["attention_mask"][0, -8:] = 0  # samples of a batch differ in length
    for _ in range(STEPS):
        batch = {name: value.to("cuda") for name, value in host.items()}
        optimizer.zero_grad()
        outputs = model(**batch)
        loss = outputs.loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


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


def adapted(row: Row, model: Any) -> Any:
    """The model under the row's PEFT method. Raises NotCovered."""
    if row.method == "full":
        return model
    if any(variant in row.notes for variant in VARIANTS):
        raise NotCovered(f"a variant of {row.method} whose settings the row does not state")
    from peft import get_peft_model

    from memfit.virtual.jobs.models import adapter_config
    from memfit.virtual.jobs.recipe import Setup

    try:
        method = adapter(key_of(row.method))
        config = adapter_config(
            Setup(
                config=model.config.to_dict(), method="lora", adapter=method.key,
                rank=row.number("lora_rank", method.usual), targets=tuple(row.lora_targets.split("+")),
            )
        )  # fmt: skip
    except BadInput as error:
        raise NotCovered(error.message) from error
    made = get_peft_model(model, config)
    trained, stated = sum(p.numel() for p in made.parameters() if p.requires_grad), row.stated("trainable")
    if trained != stated:
        raise NotCovered(f"settings of {row.method} that the row does not state: {stated:,} trained weights")
    return made


def optimizer_of(row: Row, model: Any) -> Any:
    """torch's AdamW, or PEFT's own LoRA-FA."""
    if row.optimizer == "lora-fa":
        from peft.optimizers import create_lorafa_optimizer

        return create_lorafa_optimizer(model, r=row.number("lora_rank", 8), lora_alpha=64, lr=1e-4)
    return torch.optim.AdamW(model.parameters(), lr=1e-4)
