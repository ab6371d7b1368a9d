"""Signs: what frames, messages of libraries and settings point at, one row each, and the patterns the rows are made of.

A row names a cause and a weight. It matches where every pattern is found, none of the excluded ones is, and the run
failed in one of the row's phases. Patterns match what programs print: identifiers of code, file names, keys of
settings, messages and command lines. Sentences that people write about a failure are not matched. Text is in lower case
with single spaces.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from memfit.explain.evidence import FAINT, FIRM, STRONG, SURE, WEAK
from memfit.explain.frames import CONVOLUTIONS
from memfit.explain.phases import When
from memfit.nouns.finding import Cause

# ---- patterns that several rows share: what runs ---------------------------------------------------------------------

FSDP = r"fsdp|fully_shard|fully[- ]sharded"
ZERO3 = r"zero[-_ /]?(?:stage)?[-_ ]?3|zero\W+stage\W+3|\"stage\": 3|stage[- ]?3|deepspeed stage 3|ds_?z3"
ZERO12 = r"zero[-_ /]?(?:stage)?[-_ ]?[12]\b|stage\W{1,3}[12]\b|ds_?z[12]"
MANY = (
    r"\bddp\b|distributed|torchrun|horovod|multi[- ]?gpu|accelerate launch|num_processes|local_rank|world_size|"
    r"\branks?\b|"
    r"\b(?:[2-9]|[1-9]\d+) ?(?:x (?!\d)|gpus|cards|ranks|process)"
)
FOUR_BIT = r"4[- ]?bit|qlora|nf4|\bbnb|bitsandbytes|quantization_config|int4|\bhqq\b"
QUANTIZED = r"fp8|mxfp4|nvfp4|gptq|\bawq\b|int8|8[- ]?bit"
ADAPTER = r"peft|lora|adapter"
DIFFUSION = (
    r"diffus|\bflux|\bsd(?:xl?|3|15)?\b|dreambooth|\bvae\b|text[_ ]?encoder|\bt5\b|\bunet\b|\bwan ?2|hunyuan|"
    r"cogvideo|\bltx|controlnet|qwen[- ]?image|z-?image|pixart|kandinsky|auraflow|\bsana\b|kolors|hidream|mochi|"
    r"musubi|kohya|onetrainer|simpletuner|ai-toolkit"
)
PREFERENCE = r"\bdpo|\borpo\b|\bkto\b|\bcpo\b|\bsimpo\b|concatenated_forward"
ROLLOUTS = r"\bgrpo|\brloo|\bgspo|\bdapo"
RL = rf"{ROLLOUTS}|\bppo\b|\bverl\b|openrlhf|skyrl|nemo[- ]?rl"
ENGINE = (
    r"(?<![\w-])vllm(?!-project)|(?<!/)\bsglang|gpu_memory_utilization|cache blocks|warming up sampler|sleep_mode|"
    r"lmdeploy|tensorrt[- ]?llm|mem_fraction_static|max_num_seqs|free_cache_engine|use_vllm|engine_core|llm_engine"
)
VISION = r"\bvl\b|llava|\bvlm\b|vision_(?:tower|model)|multi_?modal"

# ---- and what is done ------------------------------------------------------------------------------------------------

# losses over classes, and what shows that the classes are the words of a vocabulary
LOSSES = (
    r"cross_?entropy|nll_loss|log_softmax|masked_?ce\b|logits\.float\(|logits\.to\(torch\.float32|"
    r"convert_(?:outputs_)?to_fp32|"
    r"tensor\.float\(\)|shift_logits|entropy_from_logits|logprobs_from_logits|logsumexp|causallmloss|parallel_cross|"
    r"log_probs_from_logits|gather_log_prob|generalized_jsd|token_logprobs"
)
CAUSAL = (
    r"causallm|lm_head|vocab|shift_logits|unembed|(?:sft|dpo|grpo|kto|orpo|gkd)_?trainer|"
    r"(?:view|reshape)\(-1, ?\w*logits|logprobs?_from_logits|parallel_cross|llama|qwen|mistral|mixtral|gemma|"
    r"\bphi-?\d|deepseek|\bgpt|falcon|bloom|\bopt-"
)
# shapes whose last or first size is a vocabulary, and shapes that name one: [b, t, vocab_size], (32768, 151936)
LOGITS_SHAPE = (
    r"[\[(](?:(?:b|n|t|s|l|bsz?|batch\w*|seq\w*|len\w*|tokens?\w*|[\d.]+k?) ?[,x*×] ?)+v[\])]|"
    r"[\[(](?:[\w*.]+ ?[,x*×] ?)+(?:\w*vocab\w*|(?:3[02]|49|[5-9]\d|1\d\d|2[0-6]\d)\d{3})[\])]|"
    r"[\[(](?:12[89]|15[012]|25[0-9]|26[0-3])\d{3}, \d+"
)
GENERATION = r"predict_with_generate|\bgenerate\b|generation/utils|num_beams|beam_search|max_new_tokens"
OPTIMIZER = r"optimi[sz]er|\boptim\b|\badam\w*|\bsgd\b|adafactor|prodigy|\blion\b|momentum|exp_avg"
STATES = (
    r"exp_avg|momentum_buffer|\bqmap|master_(?:weights|param)|fp32_from|fp32_groups|single_partition_of_fp32|"
    r"state_steps"
)
FP32 = r"fp32|float32|\.float\(\)"
CLIP = r"clip_grad_|clip_by_\w*norm|clip_coef|unscale_(?:and_clip_)?grads|multi_tensor_l2norm|foreach_norm"
AS_IT_COMES = r"(?:[\W_]{1,60}500,?000,?000|\W{1,4}auto)\b"  # DeepSpeed's default, as it prints it in every run
SHARDED_SAVE = r"load_full_state|load_state|set_model_state|broadcast_from_rank0"


@dataclass(frozen=True, slots=True)
class Sign:
    """One row: all of `words` must match, `never` must not, and the run must have failed in one of `at`, if any."""

    cause: Cause
    weight: int
    words: tuple[str, ...] = ()
    at: tuple[When, ...] = ()
    never: str = ""
    patterns: tuple[re.Pattern[str], ...] = field(init=False, compare=False)
    forbidden: re.Pattern[str] | None = field(init=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "patterns", tuple(map(re.compile, self.words)))
        object.__setattr__(self, "forbidden", re.compile(self.never) if self.never else None)


PASS: tuple[When, ...] = ("", "forward", "backward", "loss")  # the training step without the optimizer
STEP: tuple[When, ...] = (*PASS, "optimizer")
BEGIN: tuple[When, ...] = ("load", "init", "prepare", "")
EVAL: tuple[When, ...] = ("eval", "predict")

SIGNS: tuple[Sign, ...] = (
    # the loss and its logits
    Sign("logits", SURE, (LOSSES, CAUSAL), never="binary_cross|nested_concat"),
    Sign("logits", 84, (LOSSES,), never="binary_cross|nested_concat"),  # a classifier has logits as well
    Sign("logits", SURE, (r"selective_log_softmax",)),
    Sign("logits", 86, (LOGITS_SHAPE,), never=r"(\d{4,})[,x* ]+\1|modules_to_save"),
    Sign("logits", 75, (r"\blogits|lm_head|unembed|(?<!chunked_)log_?probs?\b",), at=PASS,
         never=r"\beval|modules_to_save"),
    Sign("logits", STRONG, (), at=("loss",)),
    Sign("logits", FIRM, (RL, r"update_(?:policy|actor)|compute_(?:old_)?log_?prob|entropy_from|max_token_len|"
                              r"logits?\b"), never=r"num_generations|cache blocks"),
    Sign("logits", FIRM, (r"distill|teacher_", r"logits|kl_?div|jsd")),
    Sign("logits", 73, (r"\bverl\b|openrlhf|skyrl|nemo[- ]?rl",), at=("forward", "backward", "loss")),
    Sign("logits", 72, (r"\bdpo", r"qwen|llama-?3|gemma"), never=FOUR_BIT + r"|\b(?:q?lora|peft)\b"),
    Sign("group-batch", FIRM, (r"per_token_logps", ROLLOUTS), never=r"vllm|\blogits"),
    Sign("group-batch", 78, (ROLLOUTS, r"num_generations|rollout\W{0,3}n\b|\bn=\d+"),
         never="vllm|colocat|logits_to_keep"),
    Sign("group-batch", WEAK, (ROLLOUTS,), at=PASS, never="vllm|colocat"),
    # evaluation
    Sign("eval-logits", SURE, (r"nested_concat|pad_and_concatenate|pad_across_processes|preds_host|logits_host|"
                               r"all_preds\b|eval_accumulation_steps|preprocess_logits|distributed_concat|"
                               r"gather_for_metrics|batch_eval_metrics|include_(?:inputs_)?for_metrics|"
                               r"evalprediction",), at=(*EVAL, ""), never="training_step"),
    Sign("eval-logits", SURE, (r"prediction_loop|evaluation_loop", r"torch\.cat|concat")),
    Sign("eval-logits", FIRM, (r"compute_metrics",), at=EVAL, never=GENERATION),
    Sign("eval-logits", STRONG, (r"\blogits|torch\.cat|prediction_loop|evaluation_loop",), at=EVAL, never=GENERATION),
    Sign("eval-logits", FAINT, (), at=("eval",)),
    Sign("eval-generate", SURE, (GENERATION,), at=EVAL),
    Sign("eval-generate", FIRM, (r"predict_with_generate|model\.generate",), at=("",), never=RL),
    Sign("eval-generate", STRONG, (), at=("predict",)),
    Sign("eval-generate", STRONG, (r"generation/utils\.py|model\.generate\(\*\*",), never=RL),
    Sign("eval-batch", 79, (r"eval_batch_size|per_device_eval|val_batch_size",), at=("eval",)),
    Sign("eval-batch", 78, (r"yolo|ultralytics",), at=EVAL),  # its loader of the validation takes twice the batch
    Sign("eval-batch", 58, (r"(?:micro_batch\w*|train_batch_size)\W{0,3}1\b",), at=("eval",), never=GENERATION),
    # the optimizer: what asked last is never certain, since anything may have filled the card before
    Sign("optimizer-step", 84, (r"exp_avg_sq|_foreach_(?:sqrt|div|mul|add)|_multi_tensor_|_single_tensor_|zeropower|"
                                r"newton_?schulz|multi_tensor_appl|denom = |foreach|addcdiv|addcmul|exp_avg\.mul|"
                                r"fp32_partitioned_groups|" + CLIP,), never="load_state|zeros_like|_init_group|"
                                                                            "get_state_buffer"),
    Sign("optimizer-states", SURE, (r"bit16_groups.{0,80}\.float\(\)|_init_group|initialize_optimizer_states|"
                                    r"_setup_for_real_optimizer|zeros_like\(p|state\[.exp_avg|init_state|"
                                    r"get_state_buffer|momentum_buffer|lazy_init(?!_scale)",)),
    Sign("optimizer-states", 86, (STATES, FP32 + r"|8[-_ ]?bit|\bqmap"), at=("prepare", "init", "optimizer")),
    Sign("optimizer-states", STRONG, (OPTIMIZER + "|8bit|8-bit",), at=("optimizer",), never="mpirun|local_rank"),
    Sign("optimizer-states", WEAK, (), at=("optimizer",), never="mpirun|local_rank|compile"),
    # resuming
    Sign("resume-states", SURE, (r"optimizer\.(?:pt|bin)|_load_optimizer|distributed_?optimizer|"
                                 r"(?<!off)load_optimizer|optim\w*\.load_state_dict|optim\w*_state_dict_to_load|"
                                 r"zero_pp_rank|optim_states|_load_zero_checkpoint|"
                                 r"load_fsdp_optimizer",), at=("resume",)),
    Sign("resume-states", FIRM, (r"load_checkpoint|load_state\b",), at=("resume", "load")),
    Sign("resume-states", STRONG, (), at=("resume",)),
    Sign("stale-checkpoint", SURE, (r"checkpoint\s?=\s?torch\.load|init_from\W+resume|dcp_load",), at=("resume", "",
         "load")),
    Sign("stale-checkpoint", 83, (r"serialization\.py", r"torch\.load\([^)\n]{0,200}map_location\W{1,12}(?:device|"
                                                        r"cuda)"), at=("resume", "load", "")),
    Sign("stale-checkpoint", 75, (r"nanogpt|\.pkl\b|\.pth?\b|\.ckpt",), at=("resume",),
         never=rf"trainer|accelerat|megatron|{OPTIMIZER}|zero|{FSDP}|{MANY}"),
    # saving and merging
    Sign("save-gather", SURE, (r"full_state_dict|gather_16bit_weights|rank0_only|"
                               r"get_(?:model_)?state_dict",), at=("save",), never=SHARDED_SAVE),
    # a setting shows no event
    Sign("save-gather", 62, (r"full_state_dict|gather_16bit_weights|rank0_only",), at=("",)),
    Sign("save-gather", SURE, (r"state_dict_hook|consolidated_16bit|_unshard|ema_model\.state_dict|"
                               r"summon_full_params|full_tensor\(|get_(?:model_)?state_dict",), at=("save", ""),
                               never=SHARDED_SAVE),
    Sign("save-gather", 86, (FSDP + "|zero|deepspeed|shard",), at=("save",)),
    Sign("save-gather", 60, (), at=("save",)),
    Sign("merge", SURE, (r"undo_layout|8[- ]?bit|int8|4[- ]?bit|dequant",), at=("save", "merge"), never=FSDP),
    Sign("merge", SURE, (r"merge_and_unload|save_pretrained_merged|_merge_lora\b|merging 4bit and lora|merged_16bit|"
                         r"merge_lora|merge_adapter|fuse_lora|get_delta_weight|dequantize.{0,20}(?:merge|save|"
                         r"state_dict)",)),
    Sign("merge", FIRM, (r"state_dict|export_model|save_pretrained", r"dequantize|\bgguf"), never="mxfp4"),
    Sign("merge", 86, (), at=("merge",)),
    # loading
    Sign("two-copies", 80, (r"deepcopy\(",), at=("", "forward", "prepare", "init"), never="optimi"),
    Sign("wrong-dtype", 86, (r"torch_dtype\W{1,4}(?:torch\.)?float32|"
                             r"(?<![\w_])dtype\W{1,4}(?:torch\.)?float32",), at=("load", "prepare"),
                             never=f"{FSDP}|logits"),
    Sign("wrong-dtype", 87, (r"\b(?:model|net\w*|module|base_model|unet|transformer|backbone)\.(?:float\(\)|"
                             r"to\((?:dtype ?= ?)?torch\.float(?:32)?\b)",), at=BEGIN, never=f"{FSDP}|logits"),
    Sign("dequantized", SURE, (r"mxfp4|dequantize\s?=\s?true|convert_moe_packed|default(?:s|ing)? to dequantiz|"
                               r"run_compressed\s?=\s?false",)),
    Sign("dequantized", 86, (r"gpt-?oss",), at=("load", "save", "prepare")),
    Sign("dequantized", 84, (QUANTIZED, r"dequantiz"), at=(*BEGIN, "save"), never="merge|state_dict"),
    Sign("quantize-peak", SURE, (r"loading_workers",)),
    # or the model is too large as it is
    Sign("quantize-peak", FIRM, (r"quantize_4bit|params4bit|hqq_quant|quantize_blockwise",)),
    Sign("quantize-peak", 74, (FOUR_BIT, r"loading checkpoint shards:? +\d+%"), at=("load",),
         never=f"{FSDP}|{ZERO3}|gpt-?oss"),
    Sign("kbit-upcast", SURE, (r"prepare_model_for_(?:kbit|int8)_training",), never="does not require grad"),
    Sign("kbit-upcast", 74, (FOUR_BIT + "|8[- ]?bit|k-?bit",), at=("prepare",), never=FSDP),
    Sign("fsdp-upcast", SURE, (FSDP, r"up-?cast|mixed_precision"), at=("prepare",)),
    # accelerate's warning
    Sign("fsdp-upcast", 84, (FSDP, r"upcast(?:ed|ing)? of low precision|upcast\w* .{0,30}param"), at=("",),
         never="logits|state_dict"),
    Sign("modules-to-save", SURE, (r"modules_to_save|additional_target|embed_tokens.{0,12}lm_head|"
                                   r"lm_head.{0,12}embed_tokens",)),
    Sign("modules-to-save", 80, (r"resize_token_embeddings", ADAPTER), never=ZERO3),
    Sign("replicated", SURE, (r"device_map\W{1,4}(?:\"\"|'')\W{1,4}\w*(?:rank|index|device)",), never="mxfp4"),
    # DDP's own start
    Sign("replicated", 84, (r"_sync_module_states|_sync_params_and_buffers|_ddp_init_helper",), at=("prepare",)),
    Sign("replicated", 76, (ZERO12,), at=("load",)),
    Sign("replicated", 80, (r"device_map.{0,6}auto", r"\bddp\b|torchrun|accelerate launch|local_rank|"
                                                     r"distributed"), never="mxfp4|gpt-?oss"),
    Sign("zero3-init", SURE, (r"_initialize_missing_keys|gatheredparameters|hfdeepspeedconfig|partition_parameters|"
                              r"_zero_init|(?<!activating )zero\.init\b|zero3_init|is_zero_init|"
                              r"is_deepspeed_zero3_enabled",), at=(*BEGIN, "forward")),
    Sign("zero3-init", 86, (ZERO3, r"missing_keys|resize_token|_init_weights"), at=BEGIN, never=FSDP),
    Sign("zero3-init", 58, (ZERO3,), at=("load",), never=FSDP),
    Sign("load-peak", 86, (FSDP, r"low_cpu_fsdp|cpu_ram_efficient|qlora_sharded|_broadcast_|distribute_tensor|"
                                 r"to_empty|param_init_fn|materialize|sync_module_states|load_full_state|"
                                 r"set_model_state"), at=BEGIN),
    Sign("load-peak", FIRM, (FSDP,), at=("load", "init")),
    Sign("quantized-unsharded", SURE, (r"bnb_4bit_quant_storage|quant_storage",)),
    Sign("quantized-unsharded", 86, (FSDP, FOUR_BIT), at=("backward", "forward", "loss")),
    Sign("fsdp-wrap", SURE, (FSDP, r"auto_wrap|wrap(?:ping)?_policy|flat_?param|layer_cls"), at=PASS),
    Sign("fsdp-wrap", 74, (FSDP, r"all_?gather|unshard|reshard|prefetch"), at=PASS, never=FOUR_BIT),
    Sign("fsdp-wrap", WEAK, (FSDP,), at=("backward", "forward"), never=FOUR_BIT),
    Sign("companion-models", FIRM, (DIFFUSION, r"encoder|\bvae\b|\bt5\b|\bclip\b|latents"), at=BEGIN[:3]),
    Sign("companion-models", STRONG, (DIFFUSION, r"encoder|\bvae\b|\bt5\b|\bclip\b|latents"), at=("",)),
    Sign("companion-models", 62, (DIFFUSION,), at=("load", "init")),
    Sign("companion-models", 72, (DIFFUSION,), at=EVAL),
    Sign("companion-models", FAINT, (DIFFUSION,), at=("", "forward", "backward")),
    # checkpointing, attention, the cache
    Sign("activations", 56, (r"(?:gradient|activation)_checkpointing\W{1,3}(?:false|off|no)\b",), at=("forward",
         "backward", ""), never=ADAPTER),
    Sign("activations", 57, (CONVOLUTIONS,), at=("forward", "backward"), never="tokens|transformers"),
    Sign("input-grads", SURE, (r"not requir\w* grad|not have a grad_fn|make_inputs_require_grad|"
                               r"none of the inputs have requires_grad|enable_input_require_grads|"
                               r"requires?_grad=true\. gradients will be none",)),
    Sign("input-grads", 86, (r"use_reentrant(?!\W{0,4}false)",)),
    Sign("kv-cache", SURE, (r"use_cache(?!`?\W{1,3}false)|past_key_value|past_kv|(?:dynamic|hybrid|static|offloaded|"
                            r"encoderdecoder)_?cache|key_states = torch\.cat",), at=PASS,
                            never=rf"\beval|validat|{ENGINE}"),
    Sign("attention", SURE, (r"eager_attention_forward|(?<!, )attn_weights = |attention_scores = |attn_scores|"
                             r"attn_probs|torch\.(?:bmm|matmul)\(q|_prepare_4d|attention_probs|baddbmm|softcap|"
                             r"scaled_dot_product.{0,20}math|@ ?k\w*\.(?:transpose|mt\b|t\b|permute)|(?:matmul|"
                             r"bmm)\([^)]{0,60}\bk\w*\.(?:transpose|t\b)|"
                             r"einsum\(['\"][^'\"]*->[^'\"]*['\"], ?q\w*, ?k",)),
    Sign("attention", 84, (r"(?<!log_)(?<!log)softmax\b",), at=("forward", "backward", ""), never="cross|logits|loss"),
    Sign("attention", 86, (r"(?:flash[-_ ]?att\w*|xformers)\W+(?:\w+ )?(?:not|isn't) (?:installed|available|found|"
                           r"supported)",)),
    Sign("attention", 86, (r"attn_impl\w*\W+(?:torch|eager|naive|math)|\(\d+, \d+, (\d{4,}), \1\)|"
                           r"\[\d+, \d+, (\d{4,}), \2\]",), at=(*PASS, "eval")),
    # data
    Sign("long-sample", FIRM, (r"group_by_length|lengthgrouped|max_duration|is longer than the specified maximum|"
                               r"truncation\W{1,3}(?:false|none|off)",), at=PASS, never=PREFERENCE),
    Sign("image-tokens", SURE, (r"max_pixels|min_pixels|anyres|max_slice|longest_edge|num_crops|image_grid_thw|"
                                r"smart_resize|max_num_tiles|dynamic_patch|image_max",), never="latents"),
    Sign("image-tokens", FIRM, (r"pixel_values", VISION + "|input_ids|language|\\bvision"), never="latents"),
    Sign("image-tokens", STRONG, (VISION,), at=("forward",), never=rf"{CONVOLUTIONS}|{DIFFUSION}|fsdp|zero"),
    # preference and reinforcement
    Sign("inference-engine", 88, (ENGINE,), at=(*BEGIN[:3], "eval", "predict", "save")),
    Sign("inference-engine", 56, (ENGINE,), at=("",)),  # it runs, but nothing shows that it failed there
    Sign("inference-engine", 86, (ENGINE, r"mem\w*_(?:fraction|util)|gpu_memory_utili[sz]ation"), at=("forward",
         "backward", "loss", "optimizer", "resume")),
    # the engine is there, but the run fails in training
    Sign("inference-engine", 66, (ENGINE,), at=("forward", "backward", "loss", "optimizer", "resume")),
    Sign("inference-engine", 78, (r"vllm_mode\W{1,4}colocate|colocate_|wake_up\(|resume_memory_occupation|"
                                  r"hybrid_?engine",)),
    Sign("reference-model", SURE, (r"ref_model|ref_policy|ref_logps|reference_(?:model|policy)|"
                                   r"create_reference_model|compute_ref_log",)),
    Sign("reference-model", STRONG, (PREFERENCE,), never=FOUR_BIT + r"|\b(?:q?lora|peft)\b"),
    Sign("pairs", 76, (PREFERENCE, FOUR_BIT + "|" + ADAPTER), never="ref_model|reference"),
    Sign("pairs", FIRM, (PREFERENCE, "concatenated|chosen|rejected"), never="ref_model|reference"),
    # processes and cards
    Sign("ranks-on-one-gpu", SURE, (r"mpirun|set_device(?!\(\d)",), never="device_map.{0,8}local"),
    Sign("ranks-on-one-gpu", 86, (r"map_location|device_ids(?!\W{1,3}[\w.]*(?:rank|gpu|device))", MANY),
         never=r"(?<!distributed)dataparallel|gather|vllm"),
    Sign("data-parallel", SURE, (r"parallel_apply|(?<!sharded_)data_parallel\.py|scatter_gather\.py|"
                                 r"reduce_add_coalesced|gather_map|parallel/replicate|cuda_available_devices|"
                                 r"replicas = ",)),
    Sign("data-parallel", 86, (r"(?<!distributed)(?<!sharded)dataparallel\b|nn\.dp\b",)),
    Sign("data-parallel", 76, (r"\bn_gpu\W{1,4}[2-9]\b",)),
    Sign("nccl", 80, (r"comminit|commcreate|nccl_cumem",)),
    Sign("nccl", 84, (r"nccl\b.{0,40}out of memory",)),
    Sign("nccl", 86, (r"nccl_buffsize",)),
    Sign("buckets", SURE, (rf"(?<!broadcast_)bucket_size(?!{AS_IT_COMES})|gradient_as_bucket_view|bucket_cap",)),
    Sign("buckets", 80, (r"ipg_bucket|grad_buffer|param_and_grad_buffer|main_grad",), at=(*STEP, "init")),
    # over time
    Sign("fragmentation", 80, (r"alloc_retries|cudamalloc retries",)),  # torch.cuda.memory_summary and memory_stats
    Sign("leak", 86, (r"retain_graph ?= ?true|create_graph ?= ?true|\.append\(loss|loss\w* \+= |running_loss|"
                      r"loss_history",), at=STEP),
    Sign("exception", SURE, (r"except \(?(?:runtimeerror|torch\.(?:cuda\.)?outofmemory)",)),
    # the host
    # pinned memory is the host's; PyTorch names the thread of a DataLoader that pins its batches
    Sign("host-ram", SURE, (r"_groups\S{0,8}\.pin_memory|_accelerator\.py pin_memory|cudahostalloc|"
                            r"cachinghostalloc|cudahostregister|in pin memory thread|_utils/pin_memory\.py",)),
    Sign("host-ram", SURE, (r"\.pin_memory\(|pin_memory ?= ?true\)", r"cuda error: out of memory"),
         never="tried to allocate|dataloader\\("),
    Sign("host-ram", 88, (r"abruptly died during map operation",)),  # of datasets: one of the processes was killed
    Sign("host-ram", SURE, (r"bad_alloc|node running low on memory|workers? (?:was |were )?killed due to memory|"
                            r"oomkilled|slurmstepd: .{0,60}memory|oom[-_ ]kill|return ?code -9|"
                            r"dataloader worker \(pid|bus error|line \d+: +\d+ killed|terminated with code -9",)),
)  # fmt: skip
