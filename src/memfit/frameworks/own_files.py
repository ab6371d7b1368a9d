"""How the user's own file of each framework is revised: one row a framework, with the keys that belong together."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import memfit.frameworks.accelerate as accelerate
import memfit.frameworks.arguments as arguments
import memfit.frameworks.axolotl as axolotl
import memfit.frameworks.deepspeed as deepspeed
import memfit.frameworks.llamafactory as llamafactory
import memfit.frameworks.transformers as transformers
from memfit.frameworks import process_layout, refusals
from memfit.frameworks.dataset_layout import layout_for
from memfit.frameworks.text_edit import KeyPath
from memfit.nouns.plan import Plan


@dataclass(frozen=True, slots=True)
class KeyGroup:
    """Keys that say one thing together, and older or other names of them, which go when one of the keys is set."""

    keys: tuple[str, ...]
    aliases: tuple[KeyPath, ...] = ()


def _group(keys: str, aliases: str = "") -> KeyGroup:
    return KeyGroup(tuple(keys.split()), tuple(tuple(one.split(".")) for one in aliases.split()))


@dataclass(frozen=True, slots=True)
class Own:
    """One row: how a framework's own file is revised. `file` is its name; "": the user's."""

    file: str
    config: Callable[[Plan, Mapping[str, Any]], dict[str, Any]]
    groups: tuple[KeyGroup, ...]
    model: KeyPath = ()
    deepspeed: KeyPath = ()  # the key of a DeepSpeed file or block
    data: Callable[[Plan], tuple[dict[str, Any], dict[str, str]]] | None = None  # settings and files of other data
    command: Callable[[Plan], str] | None = None
    launcher: bool = False  # beside a script, which holds the rest of the recipe
    by_script: tuple[KeyPath, ...] = ()  # what that script switches on itself, and what fails if both do
    version: str = ""


def _axolotl(plan: Plan, _data: Mapping[str, Any]) -> dict[str, Any]:
    axolotl.check(plan.recipe)
    return axolotl.config(plan)


def _llamafactory(plan: Plan, _data: Mapping[str, Any]) -> dict[str, Any]:
    llamafactory.check(plan.recipe)
    return llamafactory.config(plan, layout_for(plan.job, "LLaMA-Factory"))


def _accelerate(plan: Plan, _data: Mapping[str, Any]) -> dict[str, Any]:
    kind = process_layout.backend(plan.recipe)
    refusals.check(plan.recipe, kind)
    compiled = {"dynamo_config": {"dynamo_backend": "INDUCTOR"}} if plan.recipe.compile else {}
    return accelerate.config(plan.recipe, kind, plan.job.architecture.model_type) | compiled


def _deepspeed(plan: Plan, data: Mapping[str, Any]) -> dict[str, Any]:
    """Return DeepSpeed's settings, with the batch in numbers where the file has numbers."""
    recipe = plan.recipe
    refusals.check(recipe, "deepspeed")
    sizes = {
        deepspeed.MICRO_BATCH: recipe.micro_batch, deepspeed.ACCUMULATION: recipe.accumulation,
        deepspeed.BATCH: recipe.effective_batch,
    }  # fmt: skip
    said = {name: size for name, size in sizes.items() if isinstance(data.get(name), int)}
    return {name: v for name, v in deepspeed.config(recipe).items() if v != "auto"} | said


def _data_of_axolotl(plan: Plan) -> tuple[dict[str, Any], dict[str, str]]:
    return {axolotl.DATASETS: [axolotl.dataset(layout_for(plan.job, "axolotl"))]}, {}


def _data_of_llamafactory(plan: Plan) -> tuple[dict[str, Any], dict[str, str]]:
    info = llamafactory.dataset_info(plan, layout_for(plan.job, "LLaMA-Factory"))
    return {"dataset": llamafactory.DATASET, "dataset_dir": "."}, {llamafactory.INFO_FILE: info}


def _data_of_trl(plan: Plan) -> tuple[dict[str, Any], dict[str, str]]:
    return {"dataset_name": plan.job.dataset}, {}


_ADAPTER = "lora_rank lora_alpha lora_dropout"
OWN: dict[str, Own] = {
    axolotl.NAME: Own(
        axolotl.FILE, _axolotl,
        (
            _group("micro_batch_size gradient_accumulation_steps accelerator_config", "batch_size"),
            _group("attn_implementation",
                   "flash_attention sdp_attention eager_attention xformers_attention flex_attention"),
            _group("bf16 fp16", "bfloat16 float16"),
            _group("plugins liger_fused_linear_cross_entropy liger_rms_norm liger_glu_activation liger_rope"
                   " chunked_cross_entropy", "cut_cross_entropy liger_swiglu"),
            _group("gradient_checkpointing gradient_checkpointing_kwargs selective_checkpointing activation_offloading",
                   "fsdp_config.activation_checkpointing fsdp_config.fsdp_activation_checkpointing"),
            _group("adapter load_in_4bit load_in_8bit bnb_config_kwargs lora_r lora_alpha lora_dropout"
                   " lora_target_linear lora_target_modules"),
            _group("fsdp_config fsdp_version deepspeed", "fsdp"),
            _group("optimizer optim_args optim_target_modules"),
            _group("torch_compile", "torch_compile_backend torch_compile_mode"),
            _group("sequence_len sample_packing pad_to_sequence_len"),
        ),
        model=("base_model",), deepspeed=("deepspeed",), data=_data_of_axolotl, command=axolotl.command,
        version=axolotl.VERSION,
    ),
    llamafactory.NAME: Own(
        llamafactory.FILE, _llamafactory,
        (
            _group("per_device_train_batch_size gradient_accumulation_steps accelerator_config"),
            _group("bf16 fp16 pure_bf16"),
            _group("disable_gradient_checkpointing use_unsloth_gc use_reentrant_gc", "gradient_checkpointing"),
            _group(f"finetuning_type quantization_bit quantization_type double_quantization lora_target {_ADAPTER}"),
            _group("deepspeed", "fsdp fsdp_config"),
            _group("optim", " ".join(llamafactory.SWITCH_KEYS)),
            _group("packing neat_packing"),
            _group("cutoff_len"), _group("flash_attn"), _group("enable_liger_kernel"),
            _group("torch_compile", "torch_compile_backend torch_compile_mode"),
        ),
        model=("model_name_or_path",), deepspeed=("deepspeed",), data=_data_of_llamafactory,
        command=llamafactory.command, version=llamafactory.VERSION,
    ),
    transformers.NAME: Own(
        "", arguments.config,
        (
            _group("per_device_train_batch_size gradient_accumulation_steps accelerator_config"),
            _group("bf16 fp16 dtype model_init_kwargs attn_implementation",
                   "torch_dtype model_init_kwargs.torch_dtype"),
            _group("gradient_checkpointing gradient_checkpointing_kwargs activation_checkpointing"
                   " activation_checkpointing_kwargs",
                   "activation_offloading fsdp_config.activation_checkpointing"
                   " fsdp_config.fsdp_activation_checkpointing"),
            _group("use_peft load_in_4bit load_in_8bit bnb_4bit_quant_type use_bnb_nested_quant"
                   " bnb_4bit_quant_storage lora_r lora_alpha lora_dropout lora_target_modules",
                   "bnb_4bit_use_double_quant"),
            _group("fsdp fsdp_config deepspeed"),
            _group("optim optim_args optim_target_modules"),
            _group("max_length", "max_seq_length"), _group("packing"), _group("use_liger_kernel"),
            _group("torch_compile", "torch_compile_backend torch_compile_mode"),
        ),
        model=("model_name_or_path",), deepspeed=("deepspeed",), data=_data_of_trl,
    ),
    accelerate.NAME: Own(
        process_layout.ACCELERATE_FILE, _accelerate,
        (
            _group("distributed_type num_processes mixed_precision fsdp_config deepspeed_config",
                   "deepspeed_config.zero_stage deepspeed_config.offload_optimizer_device"
                   " deepspeed_config.offload_param_device deepspeed_config.gradient_accumulation_steps"
                   " deepspeed_config.gradient_clipping deepspeed_config.zero3_save_16bit_model"
                   " fsdp_config.fsdp_activation_checkpointing fsdp_config.fsdp_sharding_strategy"),
            _group("dynamo_config", "dynamo_backend dynamo_mode"),
        ),
        deepspeed=("deepspeed_config", "deepspeed_config_file"), launcher=True,
        by_script=(("fsdp_config", "fsdp_activation_checkpointing"),), version="accelerate",
    ),
    deepspeed.NAME: Own(
        process_layout.DEEPSPEED_FILE, _deepspeed,
        (_group("bf16 fp16"), _group("zero_optimization")), launcher=True,
    ),
}  # fmt: skip
