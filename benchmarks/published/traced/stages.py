"""Run fsdp_qlora's notebook that reads what is allocated after a forward pass (nbs/00-profile_lora_qlora.ipynb)."""

from __future__ import annotations

from typing import Any

import torch

from published.case import fixed_length
from published.rows import Row
from published.traced import old_bitsandbytes

PACKAGES = ("transformers", "peft", "bitsandbytes")
SIZE = {
    "hidden_size": 2048, "num_hidden_layers": 24, "num_attention_heads": 16, "num_key_value_heads": 16,
    "intermediate_size": 4096,
}  # fmt: skip


def run(row: Row) -> dict[str, int]:
    """Return the bytes allocated after the forward of a model that was built on the host; then run its backward."""
    old_bitsandbytes.prepare()
    model = built(row).to("cuda", torch.bfloat16)
    ids = torch.ones((1, fixed_length(row)), dtype=torch.long)
    output = model(ids.to("cuda"))
    kept = torch.cuda.memory_allocated()
    output.logits.mean().backward()
    return {"allocated": kept}


def built(row: Row) -> Any:
    """The notebook's Llama of 1B, with 4-bit weights and adapters where the row has them."""
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(LlamaConfig(**SIZE))
    if row.method == "qlora":
        _quantise(model)
    if not row.method.startswith("full"):
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", r=8, lora_alpha=32, lora_dropout=0.1))
    if row.checkpointing.startswith("on"):
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def _quantise(model: torch.nn.Module) -> None:
    """Put bitsandbytes' layers in place of all linear ones but the head; moving them to the card quantises them."""
    import bitsandbytes

    for name, child in model.named_children():
        if isinstance(child, torch.nn.Linear) and name != "lm_head":
            made = bitsandbytes.nn.Linear4bit(
                child.in_features, child.out_features, bias=False, compute_dtype=torch.bfloat16,
                compress_statistics=False, quant_type="nf4",
            )  # fmt: skip
            setattr(model, name, made)
        else:
            _quantise(child)
