"""Export target llamafactory: llamafactory.yaml with its dataset_info.json. Keys of LLaMA-Factory 0.9.5."""

from __future__ import annotations

import json
from typing import Any

import memfit.frameworks.deepspeed.write as deepspeed
import memfit.frameworks.names as names
import memfit.frameworks.process_layout as launch
from memfit.errors import Unsupported
from memfit.frameworks.dataset_layout import Layout, layout_for
from memfit.frameworks.llamafactory.templates import template
from memfit.frameworks.savings import savings
from memfit.frameworks.script import learning_rate
from memfit.frameworks.text import stamp, summary, with_environment, yaml_text
from memfit.nouns.job import Recipe
from memfit.nouns.plan import Plan

FILE, DATASET = "llamafactory.yaml", "train"
_ATTENTION = {"eager": "disabled", "sdpa": "sdpa", "flash": "fa2"}
_TOLD = {
    "quantization": "quantization_bit", "method": "finetuning_type", "checkpointing": "disable_gradient_checkpointing",
    "optimizer": "optim", "micro_batch": "per_device_train_batch_size", "loss": "enable_liger_kernel",
    "attention": "flash_attn", "shard": "deepspeed", "offload": "deepspeed",
}  # fmt: skip


def command(plan: Plan) -> str:
    """The line that starts training."""
    line = f"llamafactory-cli train {FILE}"
    if _spread(plan.recipe) or plan.recipe.num_gpus > 1:
        line = f"FORCE_TORCHRUN=1 NPROC_PER_NODE={plan.recipe.num_gpus} {line}"
    return with_environment(plan.recipe, line)


def export(plan: Plan) -> dict[str, str]:
    """llamafactory.yaml, dataset_info.json (+ ds_config.json). Raises Unsupported for what it cannot be told."""
    recipe = plan.recipe
    check(recipe)
    saved, layout = savings(plan), layout_for(plan.job.dataset, "LLaMA-Factory")
    notes = {key: saved[field] for field, key in _TOLD.items() if field in saved}
    head = [f"# {summary(plan)}", f"# {stamp('LLaMA-Factory 0.9.5')}", f"# {command(plan)}"]
    files = {FILE: yaml_text(config(plan, layout), notes, head), "dataset_info.json": _dataset_info(layout)}
    if _spread(recipe):
        files[launch.DEEPSPEED_FILE] = deepspeed.to_json(deepspeed.config(recipe))
    return files


def check(recipe: Recipe) -> None:
    """Refuse what LLaMA-Factory cannot be told. Raises Unsupported."""
    names.check_method(recipe)
    if _spread(recipe):  # its documented way to shard is DeepSpeed, for the weights too
        launch.check_deepspeed(recipe)
        if names.row(recipe).rank_of:
            raise Unsupported(
                "LLaMA-Factory's GaLore and APOLLO do not run under DeepSpeed", hint="--optimizer adamw-8bit"
            )
    if recipe.loss == "chunked":
        raise Unsupported("LLaMA-Factory has no chunked loss", hint="--loss fused (Liger), or --target trl")
    if recipe.checkpointing == "selective":
        raise Unsupported("LLaMA-Factory has no selective checkpointing", hint="--checkpointing full, or --target trl")
    if recipe.quantization == "int8" and recipe.shard == "parameters":
        raise Unsupported("int8 weights cannot be sharded", hint="--quantization nf4-double, or --shard none")
    if recipe.precision == "bf16" and recipe.method == "full" and launch.zero_stage(recipe) == 3:
        raise Unsupported("LLaMA-Factory has no pure bf16 under ZeRO-3", hint="--precision bf16-master")


def config(plan: Plan, layout: Layout) -> dict[str, Any]:
    """The settings in the order of LLaMA-Factory's own examples."""
    r, training = plan.recipe, plan.job.training
    stage = "pt" if layout.fields == ("text",) else "sft"  # plain text is learned whole, without a template
    chats = template(plan.job.architecture.name)
    spelled = names.optim(r, "llamafactory")
    return {
        "model_name_or_path": plan.job.architecture.name,
        **_quantization(r),
        "flash_attn": _ATTENTION[r.attention],
        **({"torch_compile": True} if r.compile else {}),
        **({"enable_liger_kernel": True} if r.loss == "fused" else {}),
        **_checkpointing(r),
        "stage": stage,
        "do_train": True,
        **_method(plan),
        "dataset": DATASET,
        "dataset_dir": ".",
        **({"template": chats} if chats else {}),  # unset: parsed from the tokenizer
        "cutoff_len": r.sequence_length,
        "packing": r.padding == "packing",
        **({"neat_packing": True} if r.padding == "packing" and stage == "sft" else {}),
        "output_dir": "output",
        "per_device_train_batch_size": r.micro_batch,
        "gradient_accumulation_steps": r.accumulation,
        **launch.reduction(r),
        "num_train_epochs": float(training.epochs),
        **({"max_steps": training.max_steps} if training.max_steps > 0 else {}),
        "learning_rate": float(learning_rate(plan)),
        "optim": spelled.optim,
        **spelled.extra,
        **_precision(r),
        **_spread(r),
    }


def _quantization(recipe: Recipe) -> dict[str, Any]:
    if recipe.quantization == "none":
        return {}
    if recipe.quantization == "int8":
        return {"quantization_bit": 8}
    kind, _, double = recipe.quantization.partition("-")
    return {"quantization_bit": 4, "quantization_type": kind, "double_quantization": bool(double)}


def _checkpointing(recipe: Recipe) -> dict[str, Any]:
    if recipe.checkpointing == "none":
        return {"disable_gradient_checkpointing": True}
    kept = {"disable_gradient_checkpointing": False}
    return kept | ({"use_unsloth_gc": True} if recipe.checkpointing == "offload" else {"use_reentrant_gc": False})


def _method(plan: Plan) -> dict[str, Any]:
    r = plan.recipe
    if r.method == "full":
        return {"finetuning_type": "full"}
    targets = names.targets(r, plan.job.architecture)
    spelled = "all" if isinstance(targets, str) else ",".join(targets)
    return {
        "finetuning_type": "lora", "lora_rank": r.lora_rank, "lora_alpha": r.lora_alpha, "lora_dropout": r.lora_dropout,
        "lora_target": spelled,
    }  # fmt: skip


def _precision(recipe: Recipe) -> dict[str, Any]:
    """LLaMA-Factory loads the base in the compute dtype and holds what it trains in fp32, unless pure_bf16."""
    trains_all = recipe.method == "full"
    if recipe.precision == "fp32" and trains_all:
        return {"bf16": False, "fp16": False}
    if recipe.precision == "fp16-mixed":
        return {"fp16": True}
    if recipe.precision in ("fp32", "bf16-mixed") and not trains_all:
        raise Unsupported("LLaMA-Factory loads a frozen base in 16 bits", hint="--precision bf16, or --target trl")
    if recipe.precision == "bf16" and trains_all:
        return {"pure_bf16": True, **({"bf16": True} if _spread(recipe) else {})}
    return {"bf16": True}


def _spread(recipe: Recipe) -> dict[str, Any]:
    return {"deepspeed": launch.DEEPSPEED_FILE} if launch.backend(recipe) in ("fsdp", "deepspeed") else {}


def _dataset_info(layout: Layout) -> str:
    """dataset_info.json. Raises Unsupported for samples LLaMA-Factory has no format for."""
    entry: dict[str, Any] = {"file_name" if layout.kind else "hf_hub_url": layout.path}
    if layout.chat and len(layout.fields) == 1:
        tags = {
            "role_tag": layout.role, "content_tag": layout.content, "user_tag": layout.user,
            "assistant_tag": layout.assistant, "system_tag": "system",
        }  # fmt: skip
        entry |= {"formatting": "sharegpt", "columns": {"messages": layout.fields[0]}, "tags": tags}
    elif layout.chat or layout.fields == ("input_ids",):
        raise Unsupported(
            f"LLaMA-Factory has no format for {'messages in ' * layout.chat}{' and '.join(layout.fields)}",
            hint="--target trl",
        )
    else:
        names = ("prompt", "response") if len(layout.fields) == 2 else ("prompt", "query", "response")
        entry |= {"formatting": "alpaca", "columns": dict(zip(names, layout.fields, strict=False))}
    return json.dumps({DATASET: entry}, indent=2, ensure_ascii=False) + "\n"
