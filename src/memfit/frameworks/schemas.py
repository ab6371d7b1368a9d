"""The keys of each framework that memfit does not read: those that change no memory, and what the others change.

A key in neither table may change memory, too: it is newer than the version named here, or misspelled.
tests/test_schemas.py holds the tables against the frameworks' own lists of keys.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from fnmatch import fnmatchcase

from memfit.frameworks.keys import words
from memfit.nouns.architecture import Architecture
from memfit.nouns.plan import NotUnderstood


@dataclass(frozen=True, slots=True)
class Schema:
    """The keys of one block of a framework's file that are not read; patterns as in a shell."""

    name: str  # with the version whose keys these are
    harmless: tuple[str, ...]  # keys that change no memory
    adds: Mapping[str, str] = field(default_factory=dict)  # what it adds -> keys that can only add memory
    frees: Mapping[str, str] = field(default_factory=dict)  # what it frees -> keys that can only free memory
    changes: Mapping[str, str] = field(default_factory=dict)  # what it changes -> keys that change it in either way

    def reason(self, key: str) -> NotUnderstood | None:
        """Return what a key changes; None if neither table has it."""
        for table in (self.adds, self.frees, self.changes):
            for why, keys in table.items():
                if any(fnmatchcase(key, pattern) for pattern in keys.split()):
                    return NotUnderstood(key, why, adds=table is self.adds, frees=table is self.frees)
        return None


# what several frameworks have
_LABEL_SMOOTHING = "log-probabilities of all logits are kept beside them"
_NEFTUNE = "noise of the size of the embedded batch"
_MODULES_TO_SAVE = "whole modules are trained beside the adapters"
_DORA = "DoRA normalises every adapted weight"
_VOCABULARY = "the embedding grows and may be trained whole"
_PREFERENCE = "preference or reinforcement training: more models, or several forwards, than in supervised fine-tuning"
_PRECOMPUTED = "the reference passes before the training, in which its model is not: less memory than is counted"
_PARALLEL = "each card holds a part of every layer, or of every sequence, on a mesh that memfit does not know"
_OTHER_ATTENTION = "an attention kernel that memfit does not know"
_OTHER_QUANTIZATION = "a quantisation that memfit does not know"
_OTHER_ADAPTER = "adapters or parts of the weights that memfit does not know"
_OTHER_OPTIMIZER = "an optimizer, or settings of one, that memfit does not know"
_OTHER_LOSS = "a loss that memfit does not know"
_OTHER_DTYPE = "numbers in another dtype"
_OTHER_COMPILER = "a compiler or kernels that memfit does not know"
_EVALUATION = "evaluation in larger batches than training, or with logits that are kept"
_IMAGES = "the number of image, video or audio tokens"
_REDUCED_LAST = "whole gradients stay on every card between micro-batches, as sync_each_batch is not set"
_DETERMINISTIC = "deterministic kernels accumulate in more buffers"
_ROUTER = "router logits of all layers are kept for another loss"
_FROZEN = "parts of the model stay frozen: less memory than is counted"
_SPREAD = "one process spreads the model over the cards it sees, or over card and host"
_FOUND = "found while the run goes on, from the memory that is left"

# keys that only concern models with image, video or audio towers
OF_TOWERS = words("""
    image_* video_* audio_* crop_to_patches use_audio_in_video freeze_vision_tower freeze_multi_modal_projector
    freeze_mm_modules freeze_vit freeze_aligner vit_gradient_checkpointing processor_* image_size image_resize_algorithm
""")

OF_EXPERTS = words("router_aux_loss_coef moe_aux_loss_coef quantize_moe_experts llama4_linearized_experts")
# keys of TRL's other configurations (1.16 and older): any of them, whatever its value, says that it is not SFT
TRL_OTHER_TASKS = words("""
    beta cache_implementation cast_lm_head_to_fp32 center_rewards_coefficient chat_template_kwargs cpo_alpha delta
    desirable_weight disable_dropout discopop_tau ds3_gather_for_generation entropy_* epsilon epsilon_high
    f_alpha_divergence_coef f_divergence_type force_use_ref_model generate_during_eval generation_batch_size
    generation_kwargs gpt_* importance_sampling_level is_encoder_decoder label_smoothing ld_alpha lmbda
    log_completions* log_multimodal log_unique_prompts loss_weights mask_truncated_completions max_completion_length
    max_new_tokens max_prompt_length max_tool_calling_iterations min_p missing_eos_penalty model_adapter_name
    multi_objective_aggregation normalize_advantages num_completions_to_print num_generations num_generations_eval
    num_iterations num_ppo_epochs off_policy_mask_threshold off_policy_mask orpo_alpha kl_coef
    precompute_ref_batch_size precompute_ref_log_probs ref_adapter_name ref_model ref_model_* reference_free
    repetition_penalty response_length reward_clip_range reward_func* reward_model* reward_weights rpo_alpha sapo_*
    scale_rewards simpo_gamma sft_model_path steps_per_generation sync_ref_model teacher_model* temperature
    top_entropy_quantile top_k top_p transformers_continuous_batching_config undesirable_weight use_adaptive_entropy
    use_bias_correction_kl use_transformers_continuous_batching use_transformers_paged use_vllm use_weighting vespo_*
    vllm_*
""")

# transformers 5.23 (TrainingArguments) and TRL 1.16 (SFTConfig, ModelConfig, ScriptArguments)
# what axolotl passes on to TrainingArguments by the same name
_PASSED_ON = words("""
    output_dir learning_rate weight_decay adam_* max_grad_norm max_steps lr_* warmup_* save_* seed hub_* tf32 debug
    logging_steps eval_strategy evaluation_strategy eval_steps dataset_* dataloader_* remove_unused_columns
    load_best_model_at_end metric_for_best_model greater_is_better resume_from_checkpoint group_by_length local_rank
    ddp_timeout ddp_find_unused_parameters ddp_broadcast_buffers ddp_bucket_cap_mb accelerator_config trackio_*
    torch_empty_cache_steps trust_remote_code chat_template wandb_* use_rslora ray_*
""")
TRAINER = Schema(
    "transformers 5.23 and TRL 1.16",
    _PASSED_ON
    + words("""
    do_* eval_delay eval_on_start eval_do_concat_batches eval_use_gather_object eval_accumulation_steps eval_packing
    num_train_epochs log_* logging_* data_seed push_to_hub report_to run_name project disable_tqdm label_names
    ignore_data_skip length_column_name ddp_backend ddp_static_graph include_* batch_eval_metrics
    average_tokens_across_devices restore_callback_states_from_checkpoint use_cpu skip_memory_metrics
    train_sampling_strategy prediction_loss_only enable_jit_checkpoint _* chat_template_path eos_token pad_token
    completion_only_loss assistant_only_loss truncation_mode shuffle_dataset packing_strategy model_revision revision
    ignore_bias_buffers bnb_4bit_compute_dtype
    """)
    # of older versions
    + words("""
    overwrite_output_dir no_cuda fp16_backend half_precision_backend fp16_opt_level use_mps_device
    use_ipex jit_mode_eval mp_parameters split_batches dispatch_batches
    generation_max_length generation_num_beams generation_config sortish_sampler
    fsdp_transformer_layer_cls_to_wrap
    past_index tpu_* push_to_hub_* num_of_sequences chars_per_token xpu_backend
    """)
    # of training scripts beside the trainer: alignment-handbook, open-r1
    + words("""
    system_prompt preprocessing_num_workers benchmarks callbacks overwrite_hub_revision
    push_to_hub_revision auto_insert_empty_system_msg num_eval_samples
    """),
    adds={
        _LABEL_SMOOTHING: "label_smoothing_factor",
        _NEFTUNE: "neftune_noise_alpha",
        _DORA: "use_dora",
        _ROUTER: "router_aux_loss_coef",
        _DETERMINISTIC: "full_determinism",
        _EVALUATION: "per_device_eval_batch_size predict_with_generate",
        _REDUCED_LAST: "accelerator_config",
        "keys and values of all tokens are kept for generation": "use_cache",
        "sequences longer than the file's": "pad_to_multiple_of",
    },
    frees={_PRECOMPUTED: "precompute_ref_log_probs"},
    changes={
        _PREFERENCE: " ".join(TRL_OTHER_TASKS),
        _PARALLEL: "parallelism_config",
        _FOUND: "auto_find_batch_size",
        _OTHER_DTYPE: "bf16_full_eval fp16_full_eval bnb_4bit_quant_storage fp8 dtype torch_dtype",
        _OTHER_OPTIMIZER: "optim optim_args optim_target_modules",
        _OTHER_COMPILER: "torch_compile_backend torch_compile_mode liger_kernel_config torchdynamo",
        _OTHER_ATTENTION: "attn_implementation",
        _OTHER_LOSS: "loss_type",
        _OTHER_ADAPTER: "lora_target_parameters lora_task_type",
        "the batch has one long row instead of padded ones": "padding_free",
        "which blocks are recomputed": "activation_checkpointing_kwargs gradient_checkpointing_kwargs"
        " activation_offloading",
        "how the weights are spread over cards": "fsdp fsdp_config deepspeed",
    },
)  # fmt: skip
MODEL_INIT = Schema(
    "transformers' from_pretrained",
    words("trust_remote_code revision device_map use_cache low_cpu_mem_usage token use_safetensors cache_dir"),
    changes={_OTHER_QUANTIZATION: "quantization_config"},
)

# accelerate 1.15: ClusterConfig
ACCELERATE = Schema(
    "accelerate 1.15",
    words("""
    compute_environment debug machine_rank main_process_* main_training_function num_machines rdzv_backend
    same_network tpu_* gpu_ids enable_cpu_affinity downcast_bf16 use_cpu command_file commands mpirun_config
    """),
    changes={
        _OTHER_DTYPE: "fp8_config mixed_precision",
        _PARALLEL: "parallelism_config megatron_lm_config distributed_type",
        _OTHER_COMPILER: "dynamo_config dynamo_backend dynamo_mode",
    },
)
ACCELERATE_DEEPSPEED = Schema(
    "accelerate 1.15",
    words("""
    zero3_* deepspeed_multinode_launcher deepspeed_hostfile deepspeed_inclusion_filter deepspeed_exclusion_filter
    gradient_clipping deepspeed_moe_layer_cls_names offload_*_nvme_path
    """),
    adds={"gradients are copied to be reduced": "seq_parallel_communication_data_type"},
    changes={"how the weights are spread over cards": "deepspeed_config_file"},
)
FSDP = Schema(
    "accelerate 1.15",
    words("""
    version fsdp_version transformer_layer_cls_to_wrap cpu_ram_efficient_loading *state_dict_type sync_module_states
    use_orig_params min_num_params backward_prefetch* xla* cpu_offload_pin_memory limit_all_gathers
    """),
    adds={"the weights of more blocks are whole at once": "forward_prefetch auto_wrap_policy"},
    changes={
        _OTHER_DTYPE: "mixed_precision_policy",
        "how the weights are spread over cards": "reshard_after_forward sharding_strategy",
    },
)

# DeepSpeed 0.19.8: runtime/config.py, zero/config.py
DEEPSPEED = Schema(
    "DeepSpeed 0.19",
    words("""
    gradient_clipping steps_per_print wall_clock_breakdown scheduler zero_allow_* zero_force_* tensorboard
    csv_monitor wandb comet flops_profiler dump_state prescale_gradients gradient_predivide_factor
    comms_config comms_logger monitor_config aio checkpoint elasticity nebula memory_breakdown
    activation_checkpointing
    _comment dataloader_drop_last disable_allgather seq_parallel_communication_data_type
    """),
    adds={"gradients are copied to be reduced": "communication_data_type"},
    changes={
        _OTHER_OPTIMIZER: "optimizer",
        _OTHER_DTYPE: "amp data_types torch_autocast fp8",
        _PARALLEL: "tensor_parallel pipeline sequence_parallel_size",
        _PREFERENCE: "hybrid_engine",
        _OTHER_COMPILER: "compile sparse_attention",
        "the batch and the sequences change while training": "curriculum_learning data_efficiency",
        "weights are pruned or quantised": "compression_training quantize_training progressive_layer_drop eigenvalue",
        _FOUND: "autotuning",
    },
)
ZERO = Schema(
    "DeepSpeed 0.19",
    words("""
    overlap_comm contiguous_gradients round_robin_gradients stage3_gather_* gather_16bit_weights_on_model_save
    load_from_* elastic_* ignore_unused_* reduce_scatter allgather_partitions allgather_sequential
    stage3_allgather_sequential cpu_offload_use_pin_memory compute_grad_norm enable_sanity_checks legacy_stage1
    log_trace_cache_warnings memory_efficient_linear pipeline_loading_checkpoint override_module_apply
    stage3_use_all_reduce_for_fetch_params use_all_reduce_for_fetch_params use_multi_rank_bucket_allreduce
    stage3_model_persistence_threshold model_persistence_threshold parameter_alignment
    save_muon_momentum_buffer_in_memory grad_hooks allgather_bucket_size
    """),
    changes={
        "weights are kept whole or quantised on a part of the cards":
            "zero_hpz_partition_size zero_quantized_* mics_* leaf_module stage3_module_granularity_threshold"
            " module_granularity_threshold",
        "a part of the optimizer stays on the card": "zenflow",
    },
)  # fmt: skip
HALF = Schema(
    "DeepSpeed 0.19",
    words("""
    enabled auto_cast check_grad_overflow immediate_grad_update loss_scale* initial_scale_power hysteresis
    consecutive_hysteresis min_loss_scale
    """),
    changes={_OTHER_DTYPE: "bf16_optimizer_states bf16_master_weights_and_grads fp16_master_weights_and_grads"},
)
OFFLOAD = Schema(
    "DeepSpeed 0.19",
    words("device pin_memory nvme_path buffer_count buffer_size max_in_cpu pipeline* fast_init cpuadam_cores_perc"),
    changes={"a part of the optimizer stays on the card": "ratio super_offload"},
)

# axolotl 0.19: utils/schemas/config.py, and the arguments of its integrations
AXOLOTL = Schema(
    "axolotl 0.19",
    _PASSED_ON
    + words("""
    model_type base_model_config axolotl_config_path tokenizer_* special_tokens tokens chat_template_* val_set_size
    datasets test_datasets pretraining_dataset pretraining_sample_concatenation pretrain_multipack_* shuffle_* streaming
    streaming_multipack_buffer_size skip_prepare_dataset push_dataset_to_hub preprocess_iterable merge_lora merge_method
    num_dataset_shards_to_save is_preprocess curriculum_sampling default_system_message eot_tokens
    added_tokens_overrides num_epochs total_num_tokens total_supervised_tokens embedding_lr embedding_lr_scale cosine_*
    saves_per_epoch evals_per_epoch eval_table_size use_wandb mlflow_* use_mlflow hf_mlflow_* comet_* use_comet
    use_trackio swanlab_* use_swanlab use_tensorboard use_otel_metrics otel_metrics_* hf_use_auth_token hf_token
    train_on_inputs early_stopping_patience auto_resume_* world_size ddp loss_watchdog_* strict excess_length_strategy
    min_sample_len sample_packing_* eval_sample_packing multipack_real_batches roles* revision_of_model loraplus_*
    pad_to_sequence_len gc_steps gc_collect_steps include_tkps include_tokens_per_second profiler_steps
    profiler_steps_start is_*_derived_model type_of_model float32 device device_map low_cpu_mem_usage lora_on_cpu
    lora_fan_in_fan_out lora_alpha_pattern peft peft_init_lora_weights peft_use_rslora loftq_config
    mean_resizing_embeddings torchdistx_path gpu_memory_limit max_memory experimental_skip_move_to_device
    qlora_sharded_model_loading fsdp_final_state_dict_type generate_samples generation_* num_generation_samples
    max_prompt_len rl_beta dpo_* kto_* orpo_alpha cpo_alpha simpo_gamma precompute_ref_log_probs
    center_rewards_coefficient eaft_alpha eaft_k pose_* galore_* qgalore_* dion_* scaling_softmax_* heads_k_stride
    ring_attn_func chunked_cross_entropy_num_chunks tiled_mlp_num_shards tiled_mlp_use_original_mlp sdpa_varlen
    num_labels mask_history bench_* eta_min base_model_ignore_patterns eval_max_new_tokens use_ray resources_per_worker
    gradio_* lm_eval_* jagged_restart_* expert_parallel_backend
    """),
    adds={
        _NEFTUNE: "neftune_noise_alpha noisy_embedding_alpha",
        _MODULES_TO_SAVE: "peft_trainable_token_indices peft_ensure_weight_tying",
        _DORA: "peft_use_dora",
        _VOCABULARY: "resize_token_embeddings_to_32x",
        _REDUCED_LAST: "accelerator_config",
        _EVALUATION: "eval_batch_size eval_sequence_len do_bench_eval do_causal_lm_eval eval_causal_lm_metrics",
        "sequences longer than the file's": "pad_to_multiple_of",
        "a moving average of the gradients": "grokfast_*",
    },
    changes={
        _PREFERENCE: "rl reward_model process_reward_model trl vllm ebft hatchery nemo_gym_*",
        "a teacher model, or its logits": "kd_*",
        _PARALLEL: "context_parallel_size sequence_parallel_degree tensor_parallel_size dp_shard_size"
        " dp_replicate_size expert_parallel_size expert_parallel_*",
        _FOUND: "auto_find_batch_size dynamic_checkpoint",
        _OTHER_ADAPTER: "adapter lora_model_dir lora_rank_pattern lora_target_parameters peft_layers_* peft_layer_*"
        " peft_autocast_adapter_dtype relora* lisa_* mora spectrum_* unfrozen_parameters fix_untrained_tokens"
        " shrink_embeddings reinit_weights quantize_moe_experts llama4_linearized_experts",
        _OTHER_QUANTIZATION: "gptq gptq_* quantization qat model_quantization_config* llmcompressor"
        " nonexpert_quantization gemma4_*_nonexpert nvfp4_*",
        _OTHER_DTYPE: "fp8 fp8_* fp32_norms fp32_norm_classes embeddings_skip_upcast use_onebitllms"
        " mixed_precision_policy",
        _OTHER_OPTIMIZER: "optimizer optim_args optim_target_modules flash_optimum",
        _OTHER_ATTENTION: "attn_implementation flex_attention flex_attn_compile_kwargs sage_attention"
        " xformers_attention s2_attention flash_attn_d512 flash_attn_fuse_* flash_attn_rms_norm"
        " gemma4_hybrid_attn_impl scaling_softmax"
        " large_head_attention batch_flattening",
        _OTHER_COMPILER: "torch_compile_backend torch_compile_mode torch_compile_options deepcompile use_kernels"
        " fused_attn_kernel lora_*_kernel unsloth_* liger_kernel_impl experts_implementation trainer_cls"
        " use_scattermoe use_sonicmoe dense_mixer use_dsv4_kernels use_glm_dsa_kernels dsv4_*"
        " expert_backend moe_*",
        _OTHER_LOSS: "liger_cross_entropy flash_attn_cross_entropy liger_use_token_scaling use_eaft"
        " label_smoothing_factor",
        "which blocks are recomputed, or where weights are kept": "layer_offloading ple_cpu_offload"
        " gradient_checkpointing_kwargs",
        "layers are computed in pieces": "tiled_mlp liger_layer_norm liger_rms_norm_gated",
        _IMAGES: "freeze_mm_modules processor_kwargs processor_type image_size image_resize_algorithm",
        "positions are skipped": "use_pose",
        "keys of the model's config.json": "model_config overrides_of_model_config",
        "another task than a language model's": "diffusion",
        "another head than a language model's": "cls_model_config",
        "how the weights are spread over cards": "fsdp fsdp_config deepspeed",
        "a plugin that may change the model": "plugins",
    },
)  # fmt: skip


def _with_trainers(trainers: Mapping[str, str], own: Mapping[str, str]) -> dict[str, str]:
    """Return a table of LLaMA-Factory with the Trainer's keys, which its files have as well."""
    return {why: f"{trainers.get(why, '')} {own.get(why, '')}" for why in {**own, **trainers}}


# LLaMA-Factory 0.9.5: src/llamafactory/hparams; it takes all of TrainingArguments as well
LLAMAFACTORY = Schema(
    "LLaMA-Factory 0.9.5",
    words("""
    dataset* eval_dataset eval_on_each_dataset eval_num_beams template max_samples overwrite_* preprocessing_*
    plot_loss mask_history train_on_prompt media_dir buffer_size loraplus_* use_rslora swanlab_* use_swanlab
    mix_strategy data_* default_system enable_thinking preserve_thinking *_hub_token use_fast_tokenizer cache_dir
    streaming tokenized_path tool_format val_size interleave_probs ignore_pad_token_for_loss disable_shuffling
    split_special_tokens init_special_tokens model_max_length rope_scaling low_cpu_mem_usage device_map
    quantization_device_map offload_folder print_param_status train_from_scratch compute_dtype block_diag_attn
    infer_* use_kv_cache vllm_* sglang_* export_* early_stopping_steps adapter_folder create_new_adapter
    pissa_iter pissa_convert include_effective_tokens_per_second
    pref_* dpo_label_smoothing kto_* simpo_gamma ppo_* ld_alpha ref_model* reward_model* asft_alpha eaft_alpha
    badam_* freeze_trainable_* freeze_extra_modules module_dropout oft_* kt_expert_* kt_lora_* kt_weight_path
    kt_use_lora_experts galore_scale galore_update_interval galore_proj_type apollo_scale* apollo_update_interval
    apollo_proj* hyper_parallel_args fp8_backend
    generation_* fsdp_transformer_layer_cls_to_wrap
    """)
    + TRAINER.harmless,
    adds=_with_trainers(TRAINER.adds, {
        _VOCABULARY: "resize_vocab add_tokens add_special_tokens new_special_tokens_config",
        _ROUTER: "moe_aux_loss_coef",
        "shifted copies of query, key and value": "shift_attn",
        "norms or logits in fp32": "upcast_layernorm upcast_lmhead_output",
        "a decomposition of every adapted weight while loading": "pissa_init",
        _EVALUATION: "compute_accuracy",
    }),
    changes=_with_trainers({why: keys for why, keys in TRAINER.changes.items() if why != _PREFERENCE}, {
        _PREFERENCE: "stage",
        _OTHER_ADAPTER: "finetuning_type adapter_name_or_path use_llama_pro freeze_language_model mixture_of_depths",
        _OTHER_QUANTIZATION: "quantization_bit quantization_method",
        _OTHER_DTYPE: "fp8_enable_fsdp_float8_all_gather",
        _OTHER_OPTIMIZER: "use_badam use_adam_mini use_galore use_apollo"
        " use_muon galore_rank galore_target galore_layerwise apollo_rank apollo_target apollo_layerwise",
        _OTHER_COMPILER: "use_unsloth use_v1_kernels use_kt use_mca use_hyper_parallel",
        _OTHER_ATTENTION: "flash_attn",
        _OTHER_LOSS: "use_dft_loss use_asft_loss use_eaft_loss",
        _IMAGES: " ".join(OF_TOWERS),
    }),
)  # fmt: skip


# ms-swift 4.6: swift/arguments and swift/trainers/arguments.py; it takes all of TrainingArguments as well
SWIFT = Schema(
    "ms-swift 4.6",
    words("""
    dataset* val_dataset* cached_* split_dataset_ratio data_seed load_from_cache_file strict model_name model_author
    custom_* external_plugins template system agent_template loss_scale use_chat_template norm_bbox response_prefix
    truncation_strategy max_pixels padding_side template_backend enable_thinking preserve_thinking
    add_non_thinking_prefix lazy_tokenize streaming shuffle_buffer_size packing_num_proc packing_strategy
    interleave_prob stopping_strategy model_type model_revision model_kwargs load_args load_data_args use_hf
    hub_token check_model create_checkpoint_symlink add_version ignore_args_error max_new_tokens temperature
    swanlab_* init_weights lorap_lr_ratio resume_only_model train_dataloader_shuffle max_epochs acc_strategy
    eval_limit eval_generation_config eval_metric early_stop_interval safe_serialization max_shard_size num_labels
    problem_type vit_lr aligner_lr rope_scaling max_model_len use_logits_to_keep columns bnb_4bit_compute_dtype
    enable_npu_model_patch num_train_epochs swift_version adapter_* adalora_* boft_* fourier_* llamapro_* reft_*
    vera_* lora_ga_* galore_* lisa_step_interval hqq_axis deepspeed_* ds3_gather_for_generation use_ray
    """)
    + TRAINER.harmless,
    adds=_with_trainers(TRAINER.adds, {
        _VOCABULARY: "new_special_tokens",
        _ROUTER: "router_aux_loss_coef",
    }),
    frees=_with_trainers(TRAINER.frees, {
        _FROZEN: "freeze_vit freeze_aligner freeze_parameters freeze_parameters_ratio freeze_parameters_regex",
    }),
    changes=_with_trainers(TRAINER.changes, {
        _PREFERENCE: "rlhf_type ref_* teacher_* reward_* loss_scale_type",
        _SPREAD: "CUDA_VISIBLE_DEVICES device_map max_memory",
        _PARALLEL: "sequence_parallel_size zero_hpz_partition_size deepspeed_autotp_size NPROC_PER_NODE",
        _OTHER_ADAPTER: "tuner_type train_type freeze_llm trainable_parameters* target_* lora_bias lora_dtype adapters"
        " use_swift_lora",
        _OTHER_QUANTIZATION: "quant_method quant_bits",
        _OTHER_OPTIMIZER: "optimizer use_galore lisa_activated_layers",
        _OTHER_COMPILER: "tuner_backend",
        _OTHER_ATTENTION: "attn_impl",
        _OTHER_LOSS: "task_type enable_dft_loss enable_channel_loss mrl_dims",
        "which blocks are recomputed": "vit_gradient_checkpointing",
    }),
)  # fmt: skip
_HOST_BLOCKS = "weights or activations wait on the host: less memory than is counted"
_VALIDATION = "VAE and text encoders come back to the card to make images between steps"
SIMPLETUNER = Schema(
    "SimpleTuner 4", (),
    adds={
        _VALIDATION: "validation_* num_eval_images eval_steps_interval evaluation_type user_prompt_library",
        "a second copy of the weights": "use_ema ema_*",
        "another network beside the model": "controlnet controlnet_* pretrained_vae_model_name_or_path",
        "text encoders or the VAE stay on the card": "train_text_encoder text_cache_disable vae_cache_disable",
    },
    changes={
        _OTHER_QUANTIZATION: "base_model_precision sdnq_* quantize_activations quantize_via",
        _OTHER_ADAPTER: "lora_type lycoris_config init_lora slider_* fuse_qkv_projections",
        _OTHER_OPTIMIZER: "optimizer optimizer_*",
        _OTHER_ATTENTION: "attention_mechanism",
        _OTHER_COMPILER: "dynamo_*",
        _HOST_BLOCKS: "musubi_* ramtorch* enable_group_offload group_offload_*",
        "activations go to the host on streams of their own: when their memory is free depends on time":
            "gradient_checkpointing_offload_*",
        "which blocks are recomputed": "gradient_checkpointing_*",
        "which model is trained": "model_flavour pretrained_*",
        _OTHER_DTYPE: "mixed_precision gradient_precision",
        _PARALLEL: "context_parallel_* fsdp_*",
        "a second, frozen adapter is quantised with the base, and what its layers keep is not counted":
            "assistant_lora_*",
        "several forwards or models in a step": "distillation_* anyflow tread_config",
    },
)  # fmt: skip
KOHYA = Schema(
    "sd-scripts 0.10", (),
    adds={
        "text encoders are trained, too": "network_train_unet_only train_text_encoder",
        "the VAE stays on the card": "cache_latents",
        "attention keeps the scores of all pairs": "sdpa",
        _VALIDATION: "sample_*",
        "adapters are fp32, in a model of the tool's own": "network_module",
    },
    changes={
        _OTHER_ADAPTER: "network_args network_weights",
        _OTHER_QUANTIZATION: "fp8_base fp8_base_unet",
        _OTHER_DTYPE: "mixed_precision full_bf16 full_fp16",
        _OTHER_OPTIMIZER: "optimizer_type optimizer_args fused_backward_pass blockwise_fused_optimizers",
        _HOST_BLOCKS: "blocks_to_swap cpu_offload_checkpointing lowram highvram",
        _OTHER_COMPILER: "torch_compile dynamo_backend",
    },
)  # fmt: skip
LONGEST_VALUE = 24  # characters of a value that is shown beside its key


def concerns(key: str, a: Architecture) -> bool:
    """Return whether a key concerns a model: those of image towers, experts or LayerNorm do not concern every one."""
    plain = key.rpartition(".")[2]
    if any(fnmatchcase(plain, pattern) for pattern in OF_TOWERS):
        return bool(a.tower) or a.task == "multimodal"
    if plain in OF_EXPERTS:
        return any(layer.mlp.kind == "moe" for layer in a.kinds)
    if plain == "liger_layer_norm":
        return any(norm and norm.kind.startswith("layer") for norm in (a.final_norm, *(x.norm for x in a.kinds)))
    return True


def named(key: str, patterns: Iterable[str]) -> bool:
    """Return whether --ignore names a key: whole, without its block, or by a pattern."""
    return any(fnmatchcase(part, pattern) for part in (key, key.rpartition(".")[2]) for pattern in patterns)


_ALL = (
    AXOLOTL,
    LLAMAFACTORY,
    SWIFT,
    TRAINER,
    MODEL_INIT,
    ACCELERATE,
    ACCELERATE_DEEPSPEED,
    FSDP,
    DEEPSPEED,
    ZERO,
    HALF,
    OFFLOAD,
)
_BY_FORMAT = {"axolotl": AXOLOTL, "llamafactory": LLAMAFACTORY, "ms-swift": SWIFT, "transformers": TRAINER,
              "accelerate": ACCELERATE, "deepspeed": DEEPSPEED, "simpletuner": SIMPLETUNER, "kohya": KOHYA}  # fmt: skip


def _meant(key: str) -> str:
    """Return " (did you mean NAME?)" where a key resembles one of the tables, else ""."""
    known = {
        k
        for row in _ALL
        for table in (row.adds, row.frees, row.changes)
        for text in table.values()
        for k in text.split()
    }
    near = get_close_matches(key, known, n=1, cutoff=0.85)
    return f" (did you mean {near[0]}?)" if near else ""


def reasons(keys: Iterable[str], format: str, values: Mapping[str, str] | None = None) -> tuple[NotUnderstood, ...]:
    """Return what each key of a file that was not understood changes; `zero_optimization.x` is a key of a block."""
    own = _BY_FORMAT.get(format)
    found = []
    for key in keys:
        plain = key.rpartition(".")[2]
        known = (row.reason(plain) for row in (*([own] if own and "." not in key else []), *_ALL))
        row = next((reason for reason in known if reason), None)
        why = row.why if row else f"not a key of {own.name if own else format} as memfit knows it{_meant(plain)}"
        value = (values or {}).get(key, "")
        found.append(replace(row or NotUnderstood(key, why), key=key, value=value * (len(value) <= LONGEST_VALUE)))
    return tuple(found)
