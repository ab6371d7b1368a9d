"""Keys of each format that do not move memory, as patterns: schedules, logging, saving, reading of data."""

from __future__ import annotations


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


TRAINER = _words("""
    output_dir overwrite_* do_* eval_strategy eval_steps eval_delay eval_on_* eval_do_* eval_use_* learning_rate
    weight_decay adam_* max_grad_norm num_train_epochs max_steps lr_* warmup_* log_* logging_* save_* seed data_seed
    hub_* push_to_hub* report_to run_name project trackio_* dataloader_* disable_tqdm remove_unused_columns
    label_names load_best_* metric_* greater_is_better ignore_data_skip length_column_name ddp_timeout ddp_backend
    ddp_find_* ddp_broadcast_* debug include_* accelerator_config average_tokens_* trust_remote_code
    resume_from_checkpoint restore_* tf32 use_cpu skip_memory_metrics full_determinism local_rank
    train_sampling_strategy revision model_revision batch_eval_metrics prediction_loss_only _*
""")
SFT = _words("""
    chat_template_path dataset_* eos_token pad_token completion_only_loss assistant_only_loss truncation_mode
    shuffle_dataset packing_strategy
""")
MODEL = _words("""
    trust_remote_code revision device_map use_cache low_cpu_mem_usage token
""")
AXOLOTL = _words("""
    model_type tokenizer_* special_tokens tokens chat_template* val_set_size dataset_* test_datasets shuffle_*
    output_dir num_epochs max_steps learning_rate lr_* cosine_* warmup_* weight_decay adam_* max_grad_norm seed
    logging_steps save_* saves_per_epoch eval_strategy eval_steps evals_per_epoch wandb_* mlflow_* comet_* trackio_*
    hub_* hf_use_auth_token trust_remote_code tf32 train_on_inputs group_by_length early_stopping_patience
    resume_from_checkpoint auto_resume_* local_rank loss_watchdog_* debug strict excess_length_strategy
    min_sample_len sample_packing_* eval_sample_packing roles* revision_of_model lora_model_dir loraplus_*
    pad_to_sequence_len datasets ddp_timeout use_tensorboard gc_steps load_best_*
""")
LLAMAFACTORY = _words("""
    stage do_* dataset* eval_dataset template max_samples overwrite_* preprocessing_* output_dir logging_* save_*
    plot_loss report_to learning_rate num_train_epochs max_steps lr_* warmup_* weight_decay adam_* ddp_timeout
    resume_from_checkpoint val_size eval_strategy eval_steps trust_remote_code seed run_name tokenized_path
    dataloader_* max_grad_norm mask_history train_on_prompt media_dir buffer_size loraplus_* use_rslora include_*
    swanlab_* use_swanlab mix_strategy data_* default_system enable_thinking *_hub_token model_revision
    use_fast_tokenizer cache_dir streaming push_to_hub
""")
ACCELERATE = _words("""
    compute_environment debug machine_rank main_process_* main_training_function num_machines rdzv_backend
    same_network tpu_* gpu_ids enable_cpu_affinity downcast_bf16 use_cpu
""")
ACCELERATE_DEEPSPEED = _words("""
    zero3_* deepspeed_multinode_launcher deepspeed_hostfile gradient_clipping deepspeed_moe_*
""")
# what is left of zero_optimization does: buckets, prefetch, live parameters, quantised communication
ZERO = _words("""
    overlap_comm contiguous_gradients round_robin_gradients stage3_gather_* load_from_* elastic_* ignore_unused_*
    reduce_scatter allgather_partitions
""")
DEEPSPEED = _words("""
    gradient_clipping steps_per_print wall_clock_breakdown scheduler optimizer zero_allow_* zero_force_* tensorboard
    csv_monitor wandb flops_profiler dump_state prescale_gradients gradient_predivide_factor communication_data_type
    comms_config monitor_config
""")
FSDP = _words("""
    version auto_wrap_policy transformer_layer_cls_to_wrap cpu_ram_efficient_loading *state_dict_type
    sync_module_states use_orig_params min_num_params backward_prefetch xla*
""")
