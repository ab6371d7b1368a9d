"""Adopts an axolotl YAML (keys and defaults of 0.19)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import memfit.frameworks.harmless_keys as harmless
import memfit.frameworks.shared_keys as spread
from memfit.frameworks.adopted import Adopted, Keys, build, names_of

NAME = "axolotl"
_LEGACY_ATTENTION = {"flash_attention": "flash", "sdp_attention": "sdpa", "eager_attention": "eager"}


def matches(data: dict[str, Any]) -> bool:
    return "base_model" in data


def adopt(data: dict[str, Any], path: Path) -> Adopted:
    """Model, recipe and data of an axolotl run."""
    keys = Keys(data, path.name)
    micro = keys.number("micro_batch_size", default=1)
    total = keys.number("batch_size", default=0)
    changes: dict[str, Any] = {
        "sequence_length": keys.number("sequence_len", default=512),
        "padding": "packing" if keys.flag("sample_packing") else "longest",
        "micro_batch": micro,
        "accumulation": keys.number("gradient_accumulation_steps", default=max(1, total // max(1, micro))),
        **spread.optimizer(keys, "optimizer", "adamw_torch_fused"),
        **_attention(keys),
        **spread.compiled(keys),
        **_loss(keys),
        **_adapter(keys),
    }
    sharding = _spread(keys, path)
    assumed = list(sharding.assumed)
    changes |= {k: v for k, v in sharding.changes.items() if k != "precision"}
    changes["precision"] = _precision(keys, sharding, changes["method"])
    changes["checkpointing"] = sharding.checkpointing or _checkpointing(keys)
    if keys.take("bf16", default="auto") == "auto":
        assumed.append("bf16: auto is true on the card")
    model = keys.text("base_model")
    ignored, unknown = keys.rest(harmless.AXOLOTL)
    return Adopted(
        format=NAME,
        recipe=build(path.name, changes),
        model=model,
        data=_data(keys),
        effective_batch=sharding.batch,
        stated=tuple(changes),
        assumed=tuple(assumed),
        ignored=ignored,
        unknown=(*sharding.unknown, *unknown),
    )


def _data(keys: Keys) -> str | None:
    found = keys.take("datasets")
    first = found[0] if isinstance(found, list) and found else None
    path = first.get("path") if isinstance(first, dict) else None
    return path if isinstance(path, str) else None


def _attention(keys: Keys) -> dict[str, str]:
    for flag, kernel in _LEGACY_ATTENTION.items():
        if keys.flag(flag):
            return {"attention": kernel}
    return spread.attention(keys, keys.take("attn_implementation"), "attn_implementation")


def _loss(keys: Keys) -> dict[str, str]:
    """The loss, and whose account it is: with all of Liger's layers transformers' own, with fewer one that has none."""
    plugins = keys.take("plugins", default=[])
    cut = any("cut_cross_entropy" in p for p in plugins if isinstance(p, str)) if isinstance(plugins, list) else False
    layers = [keys.flag("liger_rms_norm"), keys.flag("liger_glu_activation", "liger_swiglu"), keys.flag("liger_rope")]
    if keys.flag("liger_fused_linear_cross_entropy"):
        return {"trainer": "transformers" if all(layers) else NAME, "loss": "fused"}
    if keys.flag("cut_cross_entropy", default=cut):
        return {"trainer": NAME, "loss": "fused"}
    return {"trainer": "transformers", "loss": "chunked" if keys.flag("chunked_cross_entropy") else "full"}


def _adapter(keys: Keys) -> dict[str, Any]:
    kind = keys.text("adapter")
    four, eight = keys.flag("load_in_4bit"), keys.flag("load_in_8bit")
    if not kind:
        return {"method": "full"}
    if kind not in ("lora", "qlora"):
        keys.odds("adapter")
    bnb = keys.table("bnb_config_kwargs")
    quantization = "int8" if eight else "none"
    if four:
        kind_of = bnb.text("bnb_4bit_quant_type") or "nf4"
        quantization = spread.four_bit(kind_of, bnb.flag("bnb_4bit_use_double_quant", default=True), keys.where)
    linear, modules = keys.flag("lora_target_linear"), keys.take("lora_target_modules")
    rank = keys.number("lora_r", default=8)
    return {
        "method": "qlora" if four or eight else "lora",
        "quantization": quantization,
        "lora_rank": rank,
        "lora_alpha": keys.number("lora_alpha", default=8),
        "lora_dropout": keys.real("lora_dropout", 0.0),
        "lora_targets": ("all-linear",) if linear or modules is None else names_of(modules, keys.where),
    }


def _spread(keys: Keys, path: Path) -> spread.Spread:
    version = keys.take("fsdp_version")
    keys.take("fsdp")  # the old list of options; fsdp_config says the same
    if keys.take("fsdp_config"):
        found = spread.fsdp(keys.table("fsdp_config"), "fsdp_config")
        found.assumed += (
            []
            if version or "fsdp_version" in keys.table("fsdp_config")
            else ["FSDP1, axolotl's default, read as FSDP2"]
        )
        return found
    return spread.deepspeed(keys.take("deepspeed"), path)


def _precision(keys: Keys, sharding: spread.Spread, method: str) -> str:
    """Weights are loaded in the compute dtype; FSDP2 keeps what it trains in fp32, DeepSpeed a master copy."""
    half = keys.flag("fp16", "float16")
    bf16 = keys.flag("bf16", "bfloat16", default=not half)
    if bf16 and method == "full" and sharding.kind == "fsdp":
        return "bf16-mixed"
    if bf16 and method == "full" and sharding.kind == "deepspeed":
        return "bf16" if sharding.pure else "bf16-master"
    if bf16:
        return "bf16"
    return "fp16-mixed" if half else "fp32"


def _checkpointing(keys: Keys) -> str:
    mode = keys.take("gradient_checkpointing", default=False)
    keys.take("gradient_checkpointing_kwargs")
    offloads, selective = keys.flag("activation_offloading"), keys.take("selective_checkpointing")
    if not mode or mode == "no":
        return "none"
    if offloads or (isinstance(mode, str) and mode.startswith("offload")):
        return "offload"
    return "selective" if selective else "full"
