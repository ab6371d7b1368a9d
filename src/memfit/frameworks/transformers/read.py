"""Adopts TrainingArguments, as JSON or YAML: transformers 5.23, or TRL 1.16 when SFTConfig's own keys are there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import memfit.frameworks.harmless_keys as harmless
import memfit.frameworks.shared_keys as spread
from memfit.frameworks.adopted import Adopted, Keys, build, names_of, word

NAME = "transformers"
_SFT = {
    "max_length", "packing", "dataset_text_field", "model_init_kwargs", "use_peft", "lora_r", "padding_free",
    "loss_type", "completion_only_loss", "assistant_only_loss",
}  # fmt: skip
_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
_HALF_DEFAULTS = (
    "the file does not say in which dtype the weights are loaded: taken as bf16, transformers' dtype='auto'",
)


def matches(data: dict[str, Any]) -> bool:
    return bool({"per_device_train_batch_size", "output_dir"} & set(data))


def adopt(data: dict[str, Any], path: Path) -> Adopted:
    """Recipe (and model and data, where named) of a Trainer or SFTTrainer run."""
    keys = Keys(data, path.name)
    trl = bool(_SFT & set(data))
    model = _model(keys)
    sharding = _spread(keys, path)
    assumed = list(sharding.assumed)
    changes: dict[str, Any] = {
        "trainer": "trl" if trl else "transformers",
        "micro_batch": keys.number("per_device_train_batch_size", default=8),
        "accumulation": keys.number("gradient_accumulation_steps", default=1),
        **spread.optimizer(keys, "optim", "adamw_torch_fused"),
        **spread.attention(keys, model.take("attn_implementation"), "attn_implementation"),
        **spread.compiled(keys),
        "padding": "packing" if keys.flag("packing") else "longest",
        "loss": _loss(keys, trl),
        "checkpointing": sharding.checkpointing or _checkpointing(keys, trl),
        **_length(keys, trl, assumed),
        **_adapter(keys, model, assumed),
    }
    changes |= {k: v for k, v in sharding.changes.items() if k != "precision"}
    changes["precision"] = _precision(keys, model, sharding, changes["method"], trl, assumed)
    if word(keys.data.get("eval_strategy", "no")) == "no":
        keys.take("per_device_eval_batch_size", "eval_accumulation_steps", "eval_packing")
    name, data_name = keys.text("model_name_or_path", "model"), keys.text("dataset_name")
    ignored, unknown = keys.rest([*harmless.TRAINER, *harmless.SFT])
    return Adopted(
        format=NAME,
        recipe=build(path.name, changes),
        model=name,
        data=data_name,
        effective_batch=sharding.batch,
        stated=tuple(changes),
        assumed=tuple(assumed),
        ignored=ignored,
        unknown=(
            *sharding.unknown,
            *(f"model_init_kwargs.{n}" for n in model.rest(harmless.MODEL)[1] if n not in keys),
            *unknown,
        ),
    )


def _model(keys: Keys) -> Keys:
    """How the model is loaded: TRL's model_init_kwargs, or the flat keys of its command line."""
    inner = keys.table("model_init_kwargs")
    flat = {n: keys.take(n) for n in ("dtype", "torch_dtype", "attn_implementation") if keys.data.get(n) is not None}
    return Keys({**flat, **inner.data}, inner.where)


def _spread(keys: Keys, path: Path) -> spread.Spread:
    if keys.take("fsdp") or keys.take("fsdp_config"):
        found = spread.fsdp(keys.table("fsdp_config"), "fsdp_config")
        return found if keys.take("fsdp") else spread.Spread()
    return spread.deepspeed(keys.take("deepspeed"), path)


def _loss(keys: Keys, trl: bool) -> str:
    kind, liger = word(keys.take("loss_type", default="nll")), keys.flag("use_liger_kernel")
    if kind not in ("nll", "chunked_nll"):
        keys.odds("loss_type")
    return "fused" if liger or trl else "full"


def _checkpointing(keys: Keys, trl: bool) -> str:
    on = keys.flag("activation_checkpointing", "gradient_checkpointing", default=trl)
    settings = keys.table(
        "activation_checkpointing_kwargs"
        if "activation_checkpointing_kwargs" in keys
        else "gradient_checkpointing_kwargs"
    )
    keys.take("gradient_checkpointing_kwargs")
    offloads = settings.flag("offload") or keys.flag("activation_offloading")
    if settings.take("every_n_layers", default=1) != 1:
        keys.odds("activation_checkpointing_kwargs", "gradient_checkpointing_kwargs")
    if not on:
        keys.odds(*(["activation_offloading"] if offloads else []))
        return "none"
    return "offload" if offloads else "selective" if settings.flag("selective") else "full"


def _length(keys: Keys, trl: bool, assumed: list[str]) -> dict[str, int]:
    if trl:
        return {"sequence_length": keys.number("max_length", "max_seq_length", default=1024)}
    if "max_seq_length" in keys:
        return {"sequence_length": keys.number("max_seq_length", default=2048)}
    assumed.append("TrainingArguments do not hold the sequence length: memfit's own default stands")
    return {}


def _adapter(keys: Keys, model: Keys, assumed: list[str]) -> dict[str, Any]:
    four, eight = keys.flag("load_in_4bit"), keys.flag("load_in_8bit")
    kind = keys.text("bnb_4bit_quant_type") or "nf4"
    double = keys.flag("use_bnb_nested_quant", "bnb_4bit_use_double_quant")
    if not (keys.flag("use_peft") or "lora_r" in keys or four or eight):
        return {"method": "full"}
    modules = keys.take("lora_target_modules")
    if modules is None:
        assumed.append("no LoRA modules are named: PEFT's default for Llama-like models, q_proj and v_proj")
    return {
        "method": "qlora" if four or eight else "lora",
        "quantization": "int8" if eight else spread.four_bit(kind, double, keys.where) if four else "none",
        "lora_rank": keys.number("lora_r", default=16),
        "lora_alpha": keys.number("lora_alpha", default=32),
        "lora_dropout": keys.real("lora_dropout", 0.05),
        "lora_targets": ("q_proj", "v_proj") if modules is None else names_of(modules, keys.where),
    }


def _precision(keys: Keys, model: Keys, sharding: spread.Spread, method: str, trl: bool, assumed: list[str]) -> str:
    """Weights as loaded and autocast as switched on; under DeepSpeed 16-bit weights with a master copy."""
    fp16 = keys.flag("fp16")
    bf16 = keys.flag("bf16", default=trl and not fp16)
    dtype = word(model.take("dtype", "torch_dtype", default="float32" if trl else "")).removeprefix("torch.")
    stored = _DTYPES.get(dtype, "bf16")
    if not dtype and (bf16 or fp16):
        assumed += [line for line in _HALF_DEFAULTS if line not in assumed]
    if fp16:
        return "fp16-mixed"
    if bf16 and method == "full" and sharding.kind:
        return ("bf16" if sharding.pure else "bf16-master") if sharding.kind == "deepspeed" else "bf16-mixed"
    if bf16:
        return "bf16-mixed" if stored == "fp32" else "bf16"
    return "bf16" if dtype == "bfloat16" else "fp32"
