"""Adopts a LLaMA-Factory YAML (keys and defaults of 0.9.5)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import memfit.frameworks.harmless_keys as harmless
import memfit.frameworks.shared_keys as spread
from memfit.frameworks.adopted import Adopted, Keys, build, names_of, word

NAME = "llamafactory"
_ATTENTION = {"disabled": "eager", "sdpa": "sdpa", "fa2": "flash", "fa3": "flash"}
_OWN = {
    "finetuning_type", "stage", "cutoff_len", "lora_target", "quantization_bit", "flash_attn", "template",
    "dataset_dir", "pure_bf16", "enable_liger_kernel", "disable_gradient_checkpointing", "neat_packing",
}  # fmt: skip


def matches(data: dict[str, Any]) -> bool:
    return "model_name_or_path" in data and bool(_OWN & set(data))


def adopt(data: dict[str, Any], path: Path) -> Adopted:
    """Model, recipe and data of a LLaMA-Factory run."""
    keys = Keys(data, path.name)
    packed, neat = keys.flag("packing", default=keys.take("stage") == "pt"), keys.flag("neat_packing")
    sharding = spread.deepspeed(keys.take("deepspeed"), path)
    changes: dict[str, Any] = {
        "trainer": "transformers",
        "sequence_length": keys.number("cutoff_len", default=2048),
        "padding": "packing" if packed or neat else "longest",
        "micro_batch": keys.number("per_device_train_batch_size", default=8),
        "accumulation": keys.number("gradient_accumulation_steps", default=1),
        **_optimizer(keys),
        "attention": _attention(keys),
        **spread.compiled(keys),
        "loss": "fused" if keys.flag("enable_liger_kernel") else "full",
        "checkpointing": _checkpointing(keys),
        **_method(keys),
    }
    changes |= {k: v for k, v in sharding.changes.items() if k != "precision"}
    changes["precision"] = _precision(keys, sharding, changes["method"])
    model, names = keys.text("model_name_or_path"), keys.take("dataset")
    keys.take("fsdp", "fsdp_config")
    keys.odds("fsdp", "fsdp_config", "use_badam", "freeze_trainable_layers")
    ignored, unknown = keys.rest(harmless.LLAMAFACTORY)
    return Adopted(
        format=NAME,
        recipe=build(path.name, changes),
        model=model,
        data=names if isinstance(names, str) else None,
        effective_batch=sharding.batch,
        stated=tuple(changes),
        assumed=tuple(sharding.assumed),
        ignored=ignored,
        unknown=tuple(dict.fromkeys((*sharding.unknown, *unknown))),
    )


def _optimizer(keys: Keys) -> dict[str, str]:
    for flag, ours in (("use_galore", "galore"), ("use_apollo", "apollo"), ("use_muon", "muon")):
        if keys.flag(flag):
            keys.take("optim", "galore_target", "galore_rank", "apollo_target", "apollo_rank")
            return {"optimizer": ours}
    return spread.optimizer(keys, "optim", "adamw_torch_fused")


def _attention(keys: Keys) -> str:
    return _ATTENTION.get(word(keys.take("flash_attn", default="auto")), "sdpa")


def _checkpointing(keys: Keys) -> str:
    keys.take("use_reentrant_gc", "gradient_checkpointing")
    if keys.flag("disable_gradient_checkpointing"):
        return "none"
    return "offload" if keys.flag("use_unsloth_gc") else "full"


def _method(keys: Keys) -> dict[str, Any]:
    kind = word(keys.take("finetuning_type", default="lora"))
    bits = keys.number("quantization_bit", default=0)
    if kind == "full":
        return {"method": "full"}
    if kind != "lora":
        keys.odds("finetuning_type")
    if bits not in (0, 4, 8):
        keys.odds("quantization_bit")
    fours = spread.four_bit(
        keys.text("quantization_type") or "nf4", keys.flag("double_quantization", default=True), keys.where
    )
    rank = keys.number("lora_rank", default=8)
    return {
        "method": "qlora" if bits in (4, 8) else "lora",
        "quantization": {4: fours, 8: "int8"}.get(bits, "none"),
        "lora_rank": rank,
        "lora_alpha": keys.number("lora_alpha", default=2 * rank),
        "lora_dropout": keys.real("lora_dropout", 0.0),
        "lora_targets": names_of(keys.take("lora_target", default="all"), keys.where),
    }


def _precision(keys: Keys, sharding: spread.Spread, method: str) -> str:
    """The base is loaded in the compute dtype; what is trained is held in fp32 unless pure_bf16 or DeepSpeed's."""
    pure, bf16, fp16 = keys.flag("pure_bf16"), keys.flag("bf16"), keys.flag("fp16")
    if method != "full":
        return "fp16-mixed" if fp16 and not bf16 else "bf16"
    if pure:
        return "bf16"
    if bf16:
        return "bf16-master" if sharding.kind == "deepspeed" else "bf16-mixed"
    return "fp16-mixed" if fp16 else "fp32"
