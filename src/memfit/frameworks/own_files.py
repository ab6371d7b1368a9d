"""How the user's own file of each framework is revised: one row a framework, with the keys that belong together."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import memfit.frameworks.accelerate as accelerate
import memfit.frameworks.axolotl as axolotl
import memfit.frameworks.deepspeed as deepspeed
import memfit.frameworks.llamafactory as llamafactory
import memfit.frameworks.transformers as transformers
from memfit.frameworks import image_trainers, process_layout
from memfit.frameworks.text_edit import KeyPath
from memfit.nouns.plan import Plan

Group = tuple[tuple[str, ...], tuple[KeyPath, ...]]


def _groups(text: str) -> tuple[Group, ...]:
    """Return the groups of a text, one a line: keys, and behind | older or other names, which go when a key is set."""
    lines = (line.partition("|") for line in text.strip().splitlines())
    return tuple((tuple(keys.split()), tuple(tuple(x.split(".")) for x in others.split())) for keys, _, others in lines)


@dataclass(frozen=True, slots=True)
class OwnFile:
    """One row: how a framework's own file is revised. `name`: of the file; "": the user's."""

    name: str
    config: Callable[[Plan, Mapping[str, Any]], dict[str, Any]]  # a plan's settings, for a file with this content
    groups: tuple[Group, ...]  # keys that say one thing together
    model: KeyPath = ()
    deepspeed: KeyPath = ()  # the key of a DeepSpeed file or block
    data: Callable[[Plan], tuple[dict[str, Any], dict[str, str]]] | None = None  # settings and files of other data
    command: Callable[[Plan], str] | None = None
    start: Callable[[Plan, Path], str] | None = None  # the command, which no row of targets.py has, with the file
    launcher: bool = False  # beside a script, which holds the rest of the recipe
    by_script: tuple[KeyPath, ...] = ()  # what that script switches on itself, and what fails if both do
    version: str = ""
    counts: bool = False  # says on how many cards it runs
    files: Callable[[Mapping[str, Any], Path], dict[KeyPath, str]] | None = None  # named ones that a move would lose


OWN: dict[str, OwnFile] = {
    axolotl.NAME: OwnFile(
        axolotl.FILE, lambda plan, _: axolotl.config(plan),
        _groups("""
            micro_batch_size gradient_accumulation_steps accelerator_config | batch_size
            attn_implementation | flash_attention sdp_attention eager_attention xformers_attention flex_attention
            bf16 fp16 | bfloat16 float16
            plugins liger_fused_linear_cross_entropy liger_rms_norm liger_glu_activation liger_rope \
                chunked_cross_entropy | cut_cross_entropy liger_swiglu
            gradient_checkpointing gradient_checkpointing_kwargs selective_checkpointing activation_offloading \
                | fsdp_config.activation_checkpointing fsdp_config.fsdp_activation_checkpointing
            adapter load_in_4bit load_in_8bit bnb_config_kwargs lora_r lora_alpha lora_dropout lora_target_linear \
                lora_target_modules lora_modules_to_save
            fsdp_config fsdp_version deepspeed | fsdp
            optimizer optim_args optim_target_modules
            torch_compile | torch_compile_backend torch_compile_mode
            sequence_len sample_packing pad_to_sequence_len
        """),
        model=("base_model",), deepspeed=("deepspeed",), data=lambda plan: (axolotl.data(plan), {}),
        command=axolotl.command, version=axolotl.VERSION,
    ),
    llamafactory.NAME: OwnFile(
        llamafactory.FILE, lambda plan, _: llamafactory.config(plan),
        _groups(f"""
            per_device_train_batch_size gradient_accumulation_steps accelerator_config
            bf16 fp16 pure_bf16
            disable_gradient_checkpointing use_unsloth_gc use_reentrant_gc | gradient_checkpointing
            finetuning_type quantization_bit quantization_type double_quantization lora_target lora_rank lora_alpha \
                lora_dropout additional_target
            deepspeed | fsdp fsdp_config
            optim | {" ".join(llamafactory.SWITCH_KEYS)}
            packing neat_packing
            cutoff_len
            flash_attn
            enable_liger_kernel
            torch_compile | torch_compile_backend torch_compile_mode
        """),
        model=("model_name_or_path",), deepspeed=("deepspeed",), data=llamafactory.data, command=llamafactory.command,
        version=llamafactory.VERSION,
    ),
    transformers.NAME: OwnFile(
        "", transformers.config,
        _groups("""
            per_device_train_batch_size gradient_accumulation_steps accelerator_config
            bf16 fp16 dtype model_init_kwargs attn_implementation | torch_dtype model_init_kwargs.torch_dtype
            gradient_checkpointing gradient_checkpointing_kwargs activation_checkpointing \
                activation_checkpointing_kwargs | activation_offloading fsdp_config.activation_checkpointing \
                fsdp_config.fsdp_activation_checkpointing
            use_peft load_in_4bit load_in_8bit bnb_4bit_quant_type use_bnb_nested_quant bnb_4bit_quant_storage lora_r \
                lora_alpha lora_dropout lora_target_modules lora_modules_to_save | bnb_4bit_use_double_quant
            fsdp fsdp_config deepspeed
            optim optim_args optim_target_modules
            max_length | max_seq_length
            packing
            use_liger_kernel
            torch_compile | torch_compile_backend torch_compile_mode
        """),
        model=("model_name_or_path",), deepspeed=("deepspeed",),
        data=lambda plan: ({"dataset_name": plan.job.dataset}, {}),
    ),
    accelerate.NAME: OwnFile(
        process_layout.ACCELERATE_FILE, lambda plan, _: accelerate.revised_settings(plan),
        _groups("""
            distributed_type num_processes mixed_precision fsdp_config deepspeed_config \
                | deepspeed_config.zero_stage deepspeed_config.offload_optimizer_device \
                deepspeed_config.offload_param_device deepspeed_config.gradient_accumulation_steps \
                deepspeed_config.gradient_clipping deepspeed_config.zero3_save_16bit_model \
                fsdp_config.fsdp_activation_checkpointing fsdp_config.fsdp_sharding_strategy
            dynamo_config | dynamo_backend dynamo_mode
        """),
        deepspeed=("deepspeed_config", "deepspeed_config_file"), launcher=True,
        by_script=(("fsdp_config", "fsdp_activation_checkpointing"),), version="accelerate", counts=True,
    ),
    deepspeed.NAME: OwnFile(
        process_layout.DEEPSPEED_FILE, deepspeed.revised_settings, _groups("bf16 fp16\nzero_optimization"),
        launcher=True,
    ),
    image_trainers.SIMPLETUNER: OwnFile(
        "", image_trainers.simpletuner_settings, (), start=image_trainers.start_simpletuner, version="SimpleTuner",
        counts=True, files=image_trainers.moved,
    ),
    image_trainers.KOHYA: OwnFile(
        "", image_trainers.kohya_settings, (), start=image_trainers.start_kohya, version="sd-scripts"
    ),
}  # fmt: skip
