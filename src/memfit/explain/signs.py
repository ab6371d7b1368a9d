"""What words mean: one row per sign, with the cause it points at and how often that is right.

A sign is a mechanism's own words: a frame of the code that does it, the key that turns it on, the phase it happens in. Rows
are judged together in `text.py`; the heaviest wins. Words are matched against text in small letters with single spaces.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from memfit.explain.clue import FAINT, STRONG, SURE, WEAK
from memfit.explain.phases import When
from memfit.finding import Cause


@dataclass(frozen=True, slots=True)
class Sign:
    """All of `words` must be there, none of `never`, and it must have failed at one of `at` (empty: anywhere)."""

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


_FSDP = r"fsdp|fully_shard|fully sharded"
_ZERO3 = r"zero[-_ ]?3|zero\W+stage\W+3|\"stage\": 3|stage3|deepspeed stage 3"
_ZERO12 = r"zero[-_ ]?[12]\b|stage\W{1,3}[12]\b|ds_z[12]"
_FOUR_BIT = r"4[- ]?bit|qlora|nf4|bnb|bitsandbytes|quantization_config|int4|\bhqq\b"
_DIFFUSION = r"diffusers|\bflux|stable[- ]diffusion|\bsdxl?\b|dreambooth|\bvae\b|text[_ ]encoder"
_DPO = r"\bdpo|\borpo\b|\bkto\b|\bcpo\b|concatenated_forward"
_ADAPTER = r"peft|lora|adapter"

SIGNS: tuple[Sign, ...] = (
    # the loss and its logits
    Sign("logits", SURE, (r"cross_entropy|nll_loss|log_softmax|masked_?ce\b|maskedcrossentropy",), never="binary_cross|nested_concat"),
    Sign("logits", SURE, (r"logits\.float\(|logits\.to\(torch\.float32|selective_log_softmax|convert_(?:outputs_)?to_fp32|tensor\.float\(\)",)),
    Sign("logits", STRONG, (r"logits|lm_head|vocab",), at=("loss", "forward", "backward", ""), never="eval|logits_host"),
    Sign("logits", STRONG, (), at=("loss",)),
    Sign("group-batch", STRONG, (r"get_per_token_logps|num_generations", r"grpo|rloo|generations"), never="vllm"),
    Sign("group-batch", 85, (r"get_per_token_logps|per_token_logps", r"grpo|rloo|gspo"), never="vllm"),
    Sign("group-batch", 75, (r"\bgrpo|\brloo", r"num_generations|generations|group size|rollout\W{0,3}n\b|\bn=\d+|batch"), never="vllm|colocat|logits_to_keep|prompt"),
    Sign("group-batch", WEAK, (r"\bgrpo|\brloo",), at=("loss", "forward", "backward"), never="vllm|colocat"),
    # evaluation
    Sign("eval-logits", SURE, (r"nested_concat|pad_and_concatenate|pad_across_processes|preds_host|logits_host|all_preds\b|eval_accumulation_steps|preprocess_logits",)),
    Sign("eval-logits", SURE, (r"prediction_loop|evaluation_loop", r"torch\.cat|concat"),),
    Sign("eval-logits", WEAK, (r"compute_metrics|torch\.cat|prediction_loop|evaluation_loop",), at=("eval", "predict")),
    Sign("eval-logits", STRONG, (r"outputs|logits|predictions|list|append|accumulat|grow|creep|increas|compute_metrics",), at=("eval", "predict"), never="generat"),
    Sign("eval-logits", FAINT, (), at=("eval",)),
    Sign("eval-leftovers", SURE, (r"after (?:the )?(?:first |an |each )?eval(?:uation)?\b",), never="return to training after"),
    Sign("eval-leftovers", SURE, (r"only (?:when|if|with|after|once) (?:\w+ ){0,3}eval",)),
    Sign("eval-leftovers", SURE, (r"(?:return(?:ing)? to|back to|resum\w+) train\w*.{0,30}after|train after eval",)),
    Sign("eval-generate", SURE, (r"predict_with_generate|generat(?:e|ion)|num_beams|beam search",), at=("eval", "predict")),
    Sign("eval-generate", STRONG, (), at=("predict",)),
    Sign("eval-batch", SURE, (r"eval[_ ]batch|per_device_eval|eval bs\b|eval_batch_size",), at=("eval",), never="cutoff|zero"),
    Sign("eval-graph", STRONG, (r"no_grad|inference_mode", r"forgot|without|missing"), at=("eval", "predict")),
    # the optimizer
    Sign("optimizer-step", SURE, (r"exp_avg_sq|_foreach_(?:sqrt|div|mul|add)|_multi_tensor_|multi_tensor_appl|denom = |foreach",), never="load_state"),
    Sign("optimizer-step", STRONG, (r"(?:init|materiali[sz]e)s? all states|lazy init",), at=("optimizer", "")),
    Sign("optimizer-states", SURE, (r"_init_group|initialize_optimizer_states|_setup_for_real_optimizer|zeros_like\(p|state\[.exp_avg|init_state|shadow step|batch probe",)),
    Sign("optimizer-states", SURE, (r"(?:second|2nd) step|step 2\b", r"not (?:in )?the first|first step (?:is )?(?:fine|works|ok)|backward"), never="unallocated|reserved"),
    Sign("optimizer-states", STRONG, (r"prodigy|adamw?\b|adafactor|8bit|8-bit|optim",), at=("optimizer",), never="mpirun|local_rank"),
    Sign("optimizer-states", WEAK, (), at=("optimizer",), never="mpirun|local_rank|compile"),
    # resuming
    Sign("resume-states", SURE, (r"optimizer\.pt|_load_optimizer|distributedoptimizer|distributed optimizer|load_optimizer",), at=("resume",)),
    Sign("resume-states", STRONG, (), at=("resume",)),
    Sign("stale-checkpoint", SURE, (r"checkpoint dict|checkpoint\s?=\s?torch\.load|init_from\W+resume|module-level reference|dcp_load",), at=("resume", "")),
    Sign("stale-checkpoint", SURE, (r"reserved [\d.,]+ ?[mg]i?b (?:vs|against|but) ?(?:\w+ )?(?:allocated )?[\d.,]+ ?[mg]i?b",), at=("resume",)),
    Sign("stale-checkpoint", 75, (r"nanogpt|train\.py",), at=("resume",), never="trainer|accelerat|megatron"),
    Sign("ranks-on-one-gpu", 85, (r"only.{0,20}multi[- ]gpu|every rank|each rank|map_location",), at=("resume",), never="world_size"),
    # saving and merging
    Sign("save-gather", SURE, (r"full_state_dict|state_dict_hook|_unshard|ema_model\.state_dict|gather_16bit_weights",), at=("save", "")),
    Sign("save-gather", 85, (_FSDP + "|zero|shard",), at=("save",)),
    Sign("save-gather", WEAK, (), at=("save",)),
    Sign("merge", SURE, (r"undo_layout|8[- ]?bit|int8|4[- ]?bit|dequant",), at=("save", "merge"), never=_FSDP),
    Sign("merge", SURE, (r"merge_and_unload|save_pretrained_merged|_merge_lora\b|merging 4bit and lora|merged_16bit|dequantize.{0,20}(?:merge|save|state_dict)",)),
    Sign("merge", 85, (), at=("merge",)),
    # loading
    Sign("wrong-dtype", 85, (r"(?:load|stor|keep|kept|base|weights?|model)\w*\b.{0,25}\b(?:in|as|to) (?:float ?32|fp32|32[- ]bit|full precision)",), never="master|upcast|embedding|norm"),
    Sign("dequantized", SURE, (r"mxfp4|dequantize\s?=\s?true",)),
    Sign("dequantized", 85, (r"gpt-oss",), at=("load", "save", "prepare")),
    Sign("quantize-peak", SURE, (r"load\w* ?(?:&|and|then|while|,) ?quanti|quanti\w+ (?:while|during) load|loading_workers|quantize.{0,20}worker",)),
    Sign("wrong-dtype", SURE, (r"without (?:a )?(?:torch_)?dtype|4 bytes ?/ ?param|default(?:s to)? (?:dtype )?float32|dtype\W{1,3}(?:torch\.)?float32 default",), at=("load", "prepare", "forward", "")),
    Sign("kbit-upcast", SURE, (r"prepare_model_for_kbit_training",), never="does not require grad"),
    Sign("kbit-upcast", SURE, (r"upcast|fp32|float32", r"embedding|layer ?norm|non-quanti"), at=("prepare",)),
    Sign("fsdp-upcast", SURE, (_FSDP, r"upcast|fp32 master|float32 master|mixed[_ ]precision"), at=("prepare",)),
    Sign("modules-to-save", SURE, (r"modules_to_save|train\w* (?:the )?(?:lm_head|embed)|embed_tokens.{0,12}lm_head|lm_head.{0,12}embed_tokens",)),
    Sign("replicated", SURE, (r"device_map\W{1,4}(?:\"\"|'')\W{1,4}\w*(?:rank|index|device)",), never="mxfp4"),
    Sign("replicated", SURE, (_ZERO12, r"(?:whole|full|entire|complete) (?:model|copy)|on each gpu|parameters? (?:are )?not"),),
    Sign("replicated", STRONG, (_ZERO12,), at=("load",)),
    Sign("replicated", STRONG, (r"(?:full|whole|entire) (?:copy|model) (?:on|per|in) (?:each|every)|each (?:gpu|rank|process) loads",), never=_ZERO3),
    Sign("zero3-init", SURE, (r"_initialize_missing_keys|gatheredparameters|hfdeepspeedconfig|zero\.init\b",)),
    Sign("zero3-init", SURE, (_ZERO3, r"per rank|each (?:gpu|rank|process) loads|every (?:gpu|rank|process) loads|args built after|host ram"), at=("load", "init")),
    Sign("zero3-init", WEAK, (_ZERO3,), at=("load",), never=_FSDP),
    Sign("load-peak", 85, (_FSDP, r"low_cpu_fsdp|cpu_ram_efficient|qlora_sharded|fp32 init|meta init|sync_module_states"), at=("load", "")),
    Sign("load-peak", 80, (_FSDP,), at=("load",)),
    Sign("quantized-unsharded", SURE, (r"bnb_4bit_quant_storage|quant_storage",)),
    Sign("quantized-unsharded", 85, (_FSDP, _FOUR_BIT), at=("backward", "forward", "loss")),
    Sign("fsdp-wrap", SURE, (_FSDP, r"auto_wrap|wrap(?:ping)?[_ ]policy|single flat|flat[_ ]?param|transformer_layer_cls|single unit|expected"), at=("backward", "forward")),
    Sign("fsdp-wrap", WEAK, (_FSDP,), at=("backward", "forward"), never=_FOUR_BIT),
    Sign("companion-models", 75, (_DIFFUSION,), at=("load",), never="second run|zombie"),
    Sign("zero3-init", 85, (_ZERO3, r"gather|missing keys|resize_token|new tokens|init(?:iali[sz])?ation"), at=("load", "init", "prepare")),
    Sign("fsdp-wrap", 65, (_FSDP, r"regress|upgrad|since v?\d|after updat|downgrad|doubled"), never="upcast|float32|fp32"),
    # checkpointing, attention, the cache
    Sign("input-grads", SURE, (r"does not require grad|none of the inputs have requires_grad|enable_input_require_grads",)),
    Sign("input-grads", 85, (r"use_reentrant|reentrant",)),
    Sign("input-grads", 75, (_ADAPTER, r"\bgc\b|gradient[_ ]checkpointing|activation[_ ]checkpointing", r"slower|no effect|same memory|not (?:reduce|save)")),
    Sign("kv-cache", SURE, (r"use_cache|past_key_value|dynamiccache|dynamic_cache|key_states = torch\.cat",), at=("forward", "backward", "loss", ""), never="eval"),
    Sign("attention", SURE, (r"eager_attention_forward|attn_weights = |attention_scores = |attention_probs|baddbmm|softcap|scaled_dot_product.{0,20}math",)),
    Sign("attention", 85, (r"attn_impl\w*\W+(?:torch|eager|naive|math)|naive attention|(?:without|no|not using) flash|attention (?:matrix|scores|mask) (?:of|is)",)),
    Sign("attention", 85, (r"\beager\b",), never=r"\beager mode"),
    # data
    Sign("long-sample", SURE, (r"group_by_length|lengthgrouped|longest (?:sample|batch|group|example|sequence)|variable[- ]length batch",)),
    Sign("long-sample", 65, (r"oom (?:at|after) (?:step )?\d{3,}|after \d{2,}\+? steps|at step \d{3,}",), never=r"grow|climb|increas|image|swap|inactive"),
    Sign("long-sample", 60, (r"randomly|(?:at|after) (?:\d+ )?(?:hours?|several|various|some|many|a few|thousands)|mid[- ]?(?:run|training|epoch)|later in training|in the (?:second|2nd|third|middle) ?(?:epoch)?",), at=("", "forward", "backward", "loss"), never=r"grow|climb|increas|image|reserved|\bleak|grpo|some images"),
    Sign("image-tokens", SURE, (r"max_pixels|image_max|large images|image tokens|pixel_values|high[- ]res",), never="latents"),
    Sign("image-tokens", 80, (r"screenshot|1080p|4k images|resolution|(?:some|large|big|high-res\w*|many) (?:images|pictures|pages)|image (?:size|tokens)|tiles|video|frames per",), never="latents|diffus|flux|coco|detection"),
    Sign("image-tokens", 70, (r"image|\bvision\b|\bvl\b|llava",), at=("forward", ""), never=r"grow|climb|increas|diffus|flux|coco|512 px|fsdp"),
    # preference and reinforcement
    Sign("inference-engine", SURE, (r"vllm(?!-project)|sglang|gpu_memory_utilization|vllm_mode|cache blocks|warming up sampler|sleep_mode",), never="long sample|completion"),
    Sign("inference-engine", 75, (r"colocat",), never=r"unallocated"),
    Sign("reference-model", 80, (r"(?:ref|reference|value|reward|critic|teacher)\b.{0,25}\bmodels?\b|two models|second model",), never="optimizer"),
    Sign("reference-model", SURE, (r"ref_model|reference model|ref model|create_reference_model|compute_ref_log",)),
    Sign("pairs", 75, (_DPO, _FOUR_BIT + "|" + _ADAPTER)),
    Sign("reference-model", STRONG, (_DPO,), never=_FOUR_BIT + r"|\b(?:q?lora|peft)\b"),
    Sign("logits", 72, (r"\bdpo", r"qwen|llama-?3|gemma|152k|vocab"), never=_FOUR_BIT + r"|\b(?:q?lora|peft)\b"),
    # processes and cards
    Sign("ranks-on-one-gpu", 85, (r"(?:all|every|each|other|both) (?:process\w*|ranks?)\b.{0,40}(?:on|to|onto|in) (?:the )?(?:gpu ?0|cuda:0|same gpu|one gpu|first gpu)",)),
    Sign("ranks-on-one-gpu", 85, (r"(?:processes|contexts?) of (?:all|other|every) ranks|rank[- ]0 (?:gpu )?(?:uses|has|takes) more",)),
    Sign("data-parallel", 75, (r"sees \d gpus|gpu ?0 (?:is |much |far |uses |takes )*(?:fuller|more)|imbalanc|without torchrun|multiple visible gpus|n_gpu\b",), never="rank"),
    Sign("other-process", 80, (r"previous run|another (?:user|process|job|program)|other (?:user|job)s?\b|jupyter kernel|left over process|nvidia-smi shows no process",), never="second run inside"),
    Sign("nccl", 70, (r"\bnccl\b", r"buffer|communicator|outside|overhead"), never="nccl error"),
    Sign("buckets", 85, (r"bucket", r"zero|deepspeed|ddp|gradient|buffer"), never="length|bucketing by"),
    Sign("modules-to-save", 75, (r"resize_token_embeddings|added tokens|new tokens|trainable embedding|embedding layers? (?:is|are) trained", _ADAPTER), never=_ZERO3),
    Sign("ranks-on-one-gpu", SURE, (r"(?:no|without|ignor\w+|unset) local_rank|mpirun|extra processes|cuda:0 oom|set_device|contexts? (?:of other ranks|on gpu 0)|horovod",), never="device_map.{0,8}local"),
    Sign("ranks-on-one-gpu", 75, (r"rank 0|gpu 0\b|cuda:0", r"ranks|processes|torchrun|ddp|usable of|only"), at=("init", "load"), never=_FSDP + "|quantization"),
    Sign("data-parallel", SURE, (r"dataparallel|parallel_apply|data_parallel\.py|cuda_available_devices|replicas = ",), never="distributeddataparallel|fullyshardeddataparallel"),
    Sign("data-parallel", 85, (r"python \S*\.py with (?:several|multiple|\d+) gpus|trainer dp\b",)),
    Sign("other-process", SURE, (r"zombie|(?:memory|vram) (?:is )?(?:still )?held|(?:after|when) the process (?:ended|died|exited)|defunct",)),
    Sign("nccl", SURE, (r"process group|nccl (?:buffer|communicator)|nccl_buffsize|process_group", r"gb|gib|mb|mib|per"), never="init_process_group\\("),
    Sign("buckets", SURE, (r"reduce_bucket_size|allgather_bucket_size|bucket_size",)),
    Sign("buckets", 75, (r"zero-?2 ?(?:>|uses more|needs more|more memory)|more (?:memory )?than zero-?1",)),
    # over time
    Sign("fragmentation", 85, (r"sample[_ ]packing without padding|without pad|pad_to_sequence_len|different shapes|var(?:ying|iable) (?:image |input )?(?:sizes|shapes|lengths)",)),
    Sign("fragmentation", 75, (r"\bcoco\b|detection|grounding|multi-?scale", r"grow|steps")),
    Sign("fragmentation", SURE, (r"[\d.]+ gi?b reserved-?(?: ?but)?-?(?: ?un)allocated", r"step|colocate|churn|after"), never="tried to allocate"),
    Sign("fragmentation", 85, (r"reserved\W+(?:\w+ ){0,3}(?:above|more than|larger than|higher than|exceeds|vs|>+) (?:the )?allocated|fragmentation|multi_scale",), never="to avoid fragmentation|eval|resume"),
    Sign("fragmentation", 78, (r"expandable_segments|max_split_size", r"[\d.]+ ?(?:-+>|to) ?[\d.]+ ?gi?b|helps|fix|drops|reduc"), never="vllm|to avoid fragmentation"),
    Sign("leak", 85, (r"(?:memory|usage|vram)?\s*(?:keeps )?(?:grow|climb|increas|creep)(?:s|ing|es)?\b",), at=("", "forward", "backward", "loss", "optimizer"), never=r"packing|coco|detection|shapes|sizes"),
    Sign("leak", 85, (r"(?:not|non|never|un|without)[- ]?detach|detach\(|running_loss|retain_graph|memory leak|\bleak(?:s|ing)?\b",), at=("", "forward", "backward", "loss", "optimizer")),
    Sign("leak", 80, (r"[\d.]+ ?-+> ?[\d.]+ gi?b over \d+ steps|over \d+ steps",), never="mfu"),
    Sign("leak", WEAK, (r"at step \d{3,}",), never="group|length|cross_entropy"),
    Sign("exception", SURE, (r"retry after oom|(?:second|2nd|next) (?:try|attempt)|inside (?:the )?except|except (?:runtime|outofmemory|torch\.cuda)",)),
    # the host
    Sign("host-ram", 80, (r"host oom|host (?:ram|memory)|system ram|cgroup|oom-?kill",), never=r"per rank"),
    Sign("host-ram", SURE, (r"killed|\bram\b|host memory|memory error", r"tokeniz|dataset|packing|preprocess|dataloader|pin_memory|num_workers|pinned"), never="cuda out of memory"),
    Sign("spill", SURE, (r"shared (?:gpu )?memory|dedicated \+|dedicated and|sysmem|wsl",)),
)  # fmt: skip
