"""Export target axolotl: axolotl.yaml, and ds_config.json where the recipe needs DeepSpeed. Keys of axolotl 0.19."""

from __future__ import annotations

from typing import Any

import memfit.frameworks.deepspeed.write as deepspeed
import memfit.frameworks.names as names
import memfit.frameworks.process_layout as launch
from memfit.errors import Unsupported
from memfit.frameworks.dataset_layout import Layout, layout_for
from memfit.frameworks.savings import savings
from memfit.frameworks.script import learning_rate, whole
from memfit.frameworks.text import stamp, summary, with_environment, yaml_text
from memfit.nouns.job import Recipe
from memfit.nouns.plan import Plan
from memfit.tables.trainers import trainer

FILE = "axolotl.yaml"
_LIGER = "axolotl.integrations.liger.LigerPlugin"
# axolotl quantises to nf4 with double quantisation unless told otherwise
_QUANTIZED: dict[str, dict[str, Any]] = {
    "nf4": {"bnb_4bit_use_double_quant": False},
    "fp4": {"bnb_4bit_quant_type": "fp4", "bnb_4bit_use_double_quant": False},
}
_CHECKPOINTING: dict[str, dict[str, Any]] = {
    "none": {},
    "full": {},
    "selective": {"selective_checkpointing": True},
    "offload": {"activation_offloading": "hidden_states"},
}
_LIGER_LAYERS = ("liger_rms_norm", "liger_glu_activation", "liger_rope")  # what `use_liger_kernel` brings with its loss
_LOSS: dict[str, dict[str, Any]] = {
    "full": {},
    "chunked": {"chunked_cross_entropy": True},
    "fused": {"plugins": [_LIGER], "liger_fused_linear_cross_entropy": True},
}
# recipe field -> the key that its saving is told at
_TOLD = {
    "quantization": "load_in_4bit", "method": "adapter", "checkpointing": "gradient_checkpointing",
    "optimizer": "optimizer", "micro_batch": "micro_batch_size", "loss": "plugins",
    "attention": "attn_implementation", "offload": "deepspeed", "precision": "bf16",
}  # fmt: skip


def command(plan: Plan) -> str:
    """The line that starts training; axolotl starts one process per visible GPU."""
    return with_environment(plan.recipe, f"axolotl train {FILE}")


def export(plan: Plan) -> dict[str, str]:
    """axolotl.yaml (+ ds_config.json). Raises Unsupported for what axolotl cannot be told."""
    names.check_method(plan.recipe)
    launch.check(plan.recipe, launch.backend(plan.recipe))
    if plan.recipe.optimizer == "muon" and launch.backend(plan.recipe) == "deepspeed":
        raise Unsupported(
            "axolotl's Muon does not run under DeepSpeed", hint="--shard parameters, or --optimizer adamw"
        )
    saved = savings(plan)
    notes = {key: saved[field] for field, key in _TOLD.items() if field in saved}
    notes |= {
        spread: saved["shard"] for spread in ("fsdp_config", "deepspeed") if "shard" in saved and spread not in notes
    }
    head = [f"# {summary(plan)}", f"# {stamp('axolotl 0.19')}", f"# {command(plan)}"]
    files = {FILE: yaml_text(config(plan), notes, head)}
    if launch.backend(plan.recipe) == "deepspeed":
        files[launch.DEEPSPEED_FILE] = deepspeed.to_json(deepspeed.config(plan.recipe))
    return files


def _loss(r: Recipe) -> dict[str, Any]:
    layers = _LIGER_LAYERS if r.loss == "fused" and trainer(r.trainer).liger_layers else ()
    return {**_LOSS[r.loss], **dict.fromkeys(layers, True)}


def config(plan: Plan) -> dict[str, Any]:
    """The settings in the order axolotl's own examples have them."""
    r, training = plan.recipe, plan.job.training
    spelled = names.optim(r, "axolotl")
    settings: dict[str, Any] = {"base_model": plan.job.architecture.name, **_loss(r), **_adapter(plan)}
    settings["datasets"] = [_dataset(layout_for(plan.job.dataset, "axolotl"))]
    settings |= {
        "sequence_len": r.sequence_length,
        "excess_length_strategy": "truncate",
        "sample_packing": r.padding == "packing",
        "pad_to_sequence_len": r.padding == "packing",
        "micro_batch_size": r.micro_batch,
        "gradient_accumulation_steps": r.accumulation,
        **launch.reduction(r),
        "num_epochs": whole(training.epochs),
        **({"max_steps": training.max_steps} if training.max_steps > 0 else {}),
        "learning_rate": float(learning_rate(plan)),
        "optimizer": spelled.optim,
        **spelled.extra,
        **_precision(r),
        "gradient_checkpointing": r.checkpointing != "none",
    }
    if r.checkpointing != "none":
        settings |= {"gradient_checkpointing_kwargs": {"use_reentrant": False}, **_CHECKPOINTING[r.checkpointing]}
    return settings | {
        "attn_implementation": names.ATTENTION[r.attention],
        **({"torch_compile": True} if r.compile else {}),
        "output_dir": "output",
        **_spread(r, plan.job.architecture.model_type),
    }


def _dataset(layout: Layout) -> dict[str, Any]:
    """One entry of `datasets`. Raises Unsupported for samples axolotl has no type for."""
    source: dict[str, Any] = {"path": layout.path} | ({"ds_type": layout.kind} if layout.kind else {})
    if layout.chat and len(layout.fields) == 1:  # a base model has no template of its own
        source |= {"type": "chat_template", "chat_template": "tokenizer_default_fallback_chatml"}
        source |= {"field_messages": layout.fields[0]}
        return source | {"message_property_mappings": {"role": layout.role, "content": layout.content}}
    if layout.fields == ("text",):
        return source | {"type": "completion"}
    if layout.fields[0] == "instruction":
        return source | {"type": "alpaca"}
    if layout.chat or len(layout.fields) != 2:
        raise Unsupported(
            f"axolotl has no type for {'messages in ' * layout.chat}{' and '.join(layout.fields)}", hint="--target trl"
        )
    asked, answer = layout.fields
    plain = {
        "field_instruction": asked,
        "field_output": answer,
        "format": "{instruction}",
        "no_input_format": "{instruction}",
    }
    return source | {"type": plain}


def _adapter(plan: Plan) -> dict[str, Any]:
    r = plan.recipe
    if r.method == "full":
        return {}
    four_bit = r.quantization not in ("none", "int8")
    settings: dict[str, Any] = {"adapter": "qlora" if four_bit else "lora"}
    settings |= {"load_in_4bit": True} if four_bit else {"load_in_8bit": True} if r.quantization == "int8" else {}
    settings |= {"bnb_config_kwargs": _QUANTIZED[r.quantization]} if r.quantization in _QUANTIZED else {}
    targets = names.targets(r, plan.job.architecture)
    linear = {"lora_target_linear": True} if targets == "all-linear" else {"lora_target_modules": targets}
    return settings | {"lora_r": r.lora_rank, "lora_alpha": r.lora_alpha, "lora_dropout": r.lora_dropout, **linear}


def _precision(recipe: Recipe) -> dict[str, Any]:
    """axolotl loads weights in the dtype it computes in: bf16: true -> bf16 weights, fp16: true -> fp16 weights."""
    kind = launch.backend(recipe)
    trains_all = recipe.method == "full"
    if recipe.precision == "fp32":
        return {"bf16": False, "fp16": False}
    if recipe.precision == "bf16-mixed" and kind != "deepspeed" and not (trains_all and kind == "fsdp"):
        raise Unsupported(
            "axolotl loads bf16 weights whenever it computes in bf16", hint="--precision bf16, or --target trl"
        )
    if recipe.precision == "bf16" and trains_all and kind == "fsdp":
        raise Unsupported("under FSDP2 axolotl trains fp32 weights", hint="--precision bf16-mixed, or --target trl")
    if recipe.precision == "fp16-mixed":
        if trains_all and kind != "deepspeed":
            raise Unsupported(
                "axolotl loads fp16 weights whenever it computes in fp16", hint="--precision bf16, or --target trl"
            )
        return {"bf16": False, "fp16": True}
    return {"bf16": True}


def _spread(recipe: Recipe, model_type: str) -> dict[str, Any]:
    kind = launch.backend(recipe)
    if kind == "deepspeed":
        return {"deepspeed": launch.DEEPSPEED_FILE}
    if kind != "fsdp":
        return {}
    sharding = {
        "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "reshard_after_forward": True,
        "offload_params": False,
        "cpu_ram_efficient_loading": recipe.quantization == "none",
        "state_dict_type": "FULL_STATE_DICT",
    }
    if model_type in launch.BLOCKS:
        sharding["transformer_layer_cls_to_wrap"] = launch.BLOCKS[model_type]
    return {"fsdp_version": 2, "fsdp_config": sharding}
