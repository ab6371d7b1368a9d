"""What words mean: one row per sign, with the cause it points at and how often that is right.

A sign is a mechanism's own words (a frame of the code that does it, the key that turns it on: SURE) or several concepts that
belong together (TOLD and below). Rows are judged together in `text.py`; the heaviest wins. Words are matched against text in
small letters with single spaces.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from memfit.explain.clue import FAINT, STRONG, SURE, TOLD, WEAK
from memfit.explain.concepts import (
    ADAPTER,
    AS_IT_COMES,
    CAUSAL,
    CLIP,
    CONVOLUTIONS,
    DIFFUSION,
    EACH,
    ENGINE,
    EVALUATION,
    FOUR_BIT,
    FP32,
    FSDP,
    GENERATION,
    GROWS,
    HELPS,
    IMAGES,
    LATER,
    LOADING,
    LONGEST,
    LOSSES,
    MANY,
    ONE_CARD,
    OPTIMIZER,
    PREFERENCE,
    QUANTIZED,
    RESERVED,
    RL,
    ROLLOUTS,
    SHAPES,
    STATES,
    SUDDEN,
    UNEVEN,
    WHOLE,
    WITHOUT,
    ZERO3,
    ZERO12,
)  # fmt: skip
from memfit.explain.phases import When
from memfit.nouns.finding import Cause


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


PASS: tuple[When, ...] = ("", "forward", "backward", "loss")  # the training step itself
STEP: tuple[When, ...] = (*PASS, "optimizer")
BEGIN: tuple[When, ...] = ("load", "init", "prepare", "")
EVAL: tuple[When, ...] = ("eval", "predict")

SIGNS: tuple[Sign, ...] = (
    # the loss and its logits
    Sign("logits", SURE, (LOSSES, CAUSAL), never="binary_cross|nested_concat"),
    Sign("logits", 84, (LOSSES,), never="binary_cross|nested_concat"),  # of a classifier as well
    Sign("logits", SURE, (r"selective_log_softmax|cross entropy",), never="binary|eval"),
    Sign("logits", 86, (r"[\[(](?:(?:b|n|t|s|l|bsz?|batch\w*|seq\w*|len\w*|tokens?\w*|[\d.]+k?) ?[,x*×] ?)+v[\])]|[\[(](?:[\w*.]+ ?[,x*×] ?)+(?:\w*vocab\w*|(?:3[02]|49|[5-9]\d|1\d\d|2[0-6]\d)\d{3})[\])]|[\[(](?:[\w*.]+ ?[x*×] ?)+(?:3[02]|49|[5-9]\d|1\d\d|2[0-6]\d)[, ]\d{3}[\])]|[\[(](?:12[89]|15[012]|25[0-9]|26[0-3])\d{3}, \d+|(?:full|whole|entire)[- ]vocab|(?:tokens|seq\w*|batch) ?[x*×] ?vocab",), never=r"(\d{4,})[,x* ]+\1|modules_to_save"),
    Sign("logits", 75, (r"\blogits|lm[_ -]?head|(?<!saving )vocab|output (?:layer|projection|embedding)|unembed|(?<!chunked)(?<!chunked[_ ])log[- _]?prob",), at=PASS, never=r"\beval|train\w* (?:the )?(?:lm_head|embed)|cast\w* (?:of )?(?:the )?(?:lm_|embed|head|layer)|expected"),
    Sign("logits", STRONG, (), at=("loss",)),
    Sign("logits", TOLD, (RL, r"update_(?:policy|actor)|compute_(?:old_)?log_?prob|entropy|max_token_len|logits?\b"), never=r"num_generations|cache blocks"),
    Sign("logits", TOLD, (r"distill|teacher", r"logits|kl[_ -]?div|vocab")),
    Sign("logits", 73, (r"\bverl\b|openrlhf|skyrl|nemo[- ]?rl",), at=("forward", "backward", "loss")),
    Sign("group-batch", TOLD, (r"per_token_logps", ROLLOUTS), never=r"vllm|\blogits"),
    Sign("group-batch", 78, (ROLLOUTS, r"generations|group(?: size| of)|rollout\W{0,3}n\b|\bn=\d+|(?:samples|completions|responses|rollouts) per|per[- ]prompt"), never="vllm|colocat|logits_to_keep|prompt logits"),
    Sign("group-batch", 62, (ROLLOUTS, "batch|completion"), never="vllm|colocat|logits_to_keep|prompt"),
    Sign("group-batch", WEAK, (ROLLOUTS,), at=PASS, never="vllm|colocat"),
    # evaluation
    Sign("eval-logits", SURE, (r"nested_concat|pad_and_concatenate|pad_across_processes|preds_host|logits_host|all_preds\b|eval_accumulation_steps|preprocess_logits|distributed_concat|gather_for_metrics|batch_eval_metrics|include_(?:inputs_)?for_metrics|evalprediction",), at=(*EVAL, ""), never="training_step"),
    Sign("eval-logits", SURE, (r"prediction_loop|evaluation_loop", r"torch\.cat|concat"),),
    Sign("eval-logits", TOLD, (EVALUATION, GROWS), at=(*EVAL, ""), never=f"no_grad|{GENERATION}|after (?:each |every |the )?eval"),
    Sign("eval-logits", TOLD, (EVALUATION, r"compute_metrics|(?:all|keep\w*|stor\w*|gather\w*|collect\w*|concat\w*|accumulat\w*|cache\w*) (?:\w+ ){0,2}(?:logits|predictions|outputs|preds)|argmax"), at=(*EVAL, ""), never=GENERATION),
    Sign("eval-logits", 75, (r"(?:after|at) (?:~|about )?\d{2,} (?:\w+ )?(?:eval\w*|valid\w*|batches|steps|iterations|samples)|\d+%|creep",), at=EVAL, never=GENERATION),
    Sign("eval-logits", STRONG, (r"outputs|\blogits|predictions|torch\.cat|prediction_loop|evaluation_loop",), at=EVAL, never=GENERATION),
    Sign("eval-logits", FAINT, (), at=("eval",)),
    Sign("eval-leftovers", 88, (r"(?:right |directly |immediately )?after (?:the )?(?:first |an? |each |every )?(?:eval|validat)\w*\b|(?:until|up to) the (?:first )?(?:eval|validat)\w*[^.]{0,30}then",), never=r"return to training after|after (?:the )?evaluat\w* (?:starts|begins)"),
    Sign("eval-leftovers", 88, (r"only (?:when|if|with|after|once) (?:\w+ ){0,3}eval",), never=r"eval\w* (?:starts|begins)"),
    Sign("eval-leftovers", 80, (r"eval\w* (?:\w+ )?(?:in the middle of|during|between) (?:the )?train",)),
    Sign("eval-leftovers", 84, (r"(?:once|when) (?:the )?(?:eval|validat)\w* (?:has |is )?(?:run|ran|finish\w*|done|over|complete\w*)|(?:eval|validat)\w* ran|(?:with|if) (?:the )?(?:eval|validat)\w* (?:is )?(?:off|disabled)|(?:without|disabl\w+|no) (?:eval|validat)\w* (?:it )?(?:works|runs|is fine|fits)",)),
    Sign("eval-leftovers", 88, (r"(?:return(?:ing)?|back|resum\w+) (?:to )?train\w*.{0,30}after|train after eval",)),
    Sign("eval-generate", SURE, (GENERATION,), at=EVAL),
    Sign("eval-generate", TOLD, (r"sampl\w+ (?:text|images|completions)|completions|inference pipeline",), at=EVAL),
    Sign("eval-generate", TOLD, (EVALUATION, r"predict_with_generate|kv[- ]?cache|generation-based|model\.generate|rouge|bleu|num_beams"), at=(*EVAL, "")),
    Sign("eval-generate", 78, (r"\beval\w*|validation", GENERATION), at=("",), never=RL),
    Sign("eval-generate", STRONG, (), at=("predict",)),
    Sign("eval-generate", STRONG, (r"generation/utils\.py|model\.generate\(\*\*",), never=RL),
    Sign("eval-batch", 79, (r"eval[_ ](?:batch|bs\b)|per_device_eval|eval_batch_size|(?:eval\w*|validation|val) batch(?: size| of)|(?:eval\w*|validation) uses? (?:a )?batch",), at=("eval",)),
    Sign("eval-batch", 78, (r"yolo|ultralytics",), at=EVAL),  # its loader of the validation takes twice the batch
    Sign("eval-batch", 78, (r"eval[_ ](?:batch|bs\b)|per_device_eval|eval_batch_size|validation batch(?: size| of)|eval\w* uses (?:a )?batch", r"(?:\boom|memory\b|fail\w*|crash\w*).{0,60}(?:\beval|validat)|(?:\beval|validat)\w*\b.{0,60}(?:\boom|memory\b|fail|crash)"), at=("",)),
    Sign("eval-batch", 72, (r"(?:whenever|as soon as|immediately|when|once|every time|each time|at) (?:the )?(?:first )?(?:eval|validat)\w* (?:starts?|begins?|runs?|kicks|step|batch|is (?:called|reached|triggered))|(?:reach|enter|get|hit)\w* (?:to )?(?:the )?(?:eval|validat)|(?:first|start of|begin\w* of) (?:the )?(?:eval|validat)",), at=("eval", "")),
    Sign("eval-batch", 74, (EVALUATION, r"(?<!train_)(?<!train )batch[_ ]size"), at=("eval",), never=GENERATION),
    Sign("eval-batch", 72, (r"(?:eval|validat)\w*\W.{0,20}(?:immediately|at once|right away|straight away|directly)|(?:immediately|right away).{0,20}(?:eval|validat)",), at=("eval", "")),
    Sign("eval-batch", 58, (r"(?:micro[_ ]?batch\w*|train_batch_size|\bbatch(?: size)?|\bm?bs)\W{0,3}1\b",), at=("eval",), never=GENERATION),
    Sign("eval-graph", 84, (EVALUATION, r"no_grad|inference_mode|set_grad_enabled|\.eval\(\)", WITHOUT)),
    # the optimizer
    # never certain: it asked last, and what filled the card may be anything
    Sign("optimizer-step", 84, (r"exp_avg_sq|_foreach_(?:sqrt|div|mul|add)|_multi_tensor_|_single_tensor_|zeropower|newton_?schulz|multi_tensor_appl|denom = |foreach|addcdiv|addcmul|exp_avg\.mul|fp32_partitioned_groups|" + CLIP,), never="load_state|zeros_like|_init_group|get_state_buffer"),
    Sign("optimizer-step", 78, (r"temporar|intermediate|copy of (?:the |all )?(?:param|weights)|cop(?:y|ies) of (?:the )?(?:param|weights|grad)|spike|peak",), at=("optimizer",)),
    Sign("optimizer-step", 80, (r"(?:init|materiali[sz]e)s? all states|lazy init",), at=("optimizer", "")),
    Sign("optimizer-states", SURE, (r"bit16_groups.{0,80}\.float\(\)|_init_group|initialize_optimizer_states|_setup_for_real_optimizer|zeros_like\(p|state\[.exp_avg|init_state|get_state_buffer|momentum_buffer|lazy_init(?!_scale)|shadow step|batch probe",)),
    Sign("optimizer-states", 86, (STATES, FP32 + r"|8[-_ ]?bit|\bqmap"), at=("prepare", "init", "optimizer")),
    Sign("optimizer-states", TOLD, (r"\badam|prodigy|ademamix|optimi[sz]er", r"\bsgd\b|8[-_ ]?bit|adafactor|\blion\b|paged", r"instead of|switch|than|became|chang|replac|from|\bvs\b|but|with"), at=STEP, never=r"resum|packing|leak"),
    Sign("optimizer-states", 84, (r"(?:second|2nd|next) (?:step|iteration|batch)|(?:step|iteration) 2\b|second (?:backward|forward)", r"not (?:in |on |at |during )?(?:the )?first|first (?:step|iteration|batch|one)?|backward|" + OPTIMIZER), never="unallocated|reserved|segment|fragment|retry|resum"),
    Sign("optimizer-states", 78, (r"after (?:one|1|a single|the first) (?:optimi[sz]er |training )?(?:step|iteration|update)|first (?:optimi[sz]er )?(?:step|update)\b", OPTIMIZER), at=STEP, never="resum|init|unallocated"),
    Sign("optimizer-states", 74, (rf"(?:{OPTIMIZER})\W+(?:\w+\W+){{0,4}}(?:states?\b|buffers|moments?|doubles|twice|2x|memory)",), at=STEP, never="resum|leak|grow|offload"),
    Sign("optimizer-states", STRONG, (OPTIMIZER + "|8bit|8-bit",), at=("optimizer",), never="mpirun|local_rank"),
    Sign("optimizer-states", WEAK, (), at=("optimizer",), never="mpirun|local_rank|compile"),
    # resuming
    Sign("resume-states", SURE, (r"optimizer\.(?:pt|bin)|_load_optimizer|distributedoptimizer|distributed optimizer|(?<!off)load_optimizer|optim\w*\.load_state_dict|optim\w*_state_dict_to_load|zero_pp_rank|optim_states|_load_zero_checkpoint|load_fsdp_optimizer",), at=("resume",), never=UNEVEN),
    Sign("resume-states", TOLD, (r"load\w* (?:\w+ ){0,3}(?:optimi[sz]er|optim)\b|load_checkpoint|load_state\b",), at=("resume", "load")),
    Sign("resume-states", STRONG, (), at=("resume",)),
    Sign("stale-checkpoint", SURE, (r"checkpoint dict|checkpoint\s?=\s?torch\.load|init_from\W+resume|module-level reference|dcp_load",), at=("resume", "", "load")),
    Sign("stale-checkpoint", 83, (r"serialization\.py", r"torch\.load\([^)\n]{0,200}map_location\W{1,12}(?:device|cuda)"), at=("resume", "load", "")),
    Sign("stale-checkpoint", SURE, (r"reserved [\d.,]+ ?[mg]i?b (?:vs|against|but) ?(?:\w+ )?(?:allocated )?[\d.,]+ ?[mg]i?b",), at=("resume",)),
    Sign("stale-checkpoint", 86, (r"checkpoint|ckpt|state[_ ]?dict|torch\.load", r"(?:still |stays? |kept |is |are |being )(?:\w+ )?(?:referenc|alive|on (?:the )?(?:gpu|cuda)|in (?:gpu )?memory)|(?:never|not) (?:freed|released|deleted|garbage)|\bdel (?:the )?(?:checkpoint|ckpt|state|loaded)"), never=f"{FSDP}|process"),
    Sign("stale-checkpoint", 87, (r"checkpoint|ckpt|state[_ ]?dict|torch\.load", r"(?:second|another|extra|two|additional) (?:\w+ )?cop(?:y|ies)|twice"), at=("resume", ""), never=f"{OPTIMIZER}|process|rank"),
    Sign("stale-checkpoint", 75, (r"nanogpt|train\.py",), at=("resume",), never="trainer|accelerat|megatron"),
    Sign("stale-checkpoint", 75, (r"\bpkl\b|pickle|\.pth?\b|\.ckpt|snapshot",), at=("resume",), never=rf"trainer|accelerat|megatron|{OPTIMIZER}|zero|{FSDP}|{MANY}"),
    Sign("ranks-on-one-gpu", 71, (rf"{MANY}|\b[2-9]\d* ?x\b",), at=("resume",), never=rf"{FSDP}|zero|deepspeed|megatron|optimi[sz]er"),
    Sign("ranks-on-one-gpu", 87, (r"gpu ?0 holds \d+ processes|as many processes as|(?:loaded|put|lands?|go(?:es)?)(?: \w+,?){0,3} on (?:one|the same|the first) (?:card|gpu)|(?:all|every)[\w ]{0,30} (?:on|onto) (?:gpu|cuda:) ?0\b",), never="visible|dataparallel"),
    Sign("ranks-on-one-gpu", 86, (r"only.{0,20}multi[- ]gpu|every rank|each rank|all (?:ranks|processes)|map_location|" + ONE_CARD,), at=("resume",), never=r"world_size|gpu 0; |gpu 0 has a total|gpu 0 total"),
    # saving and merging
    Sign("save-gather", SURE, (r"full_state_dict|gather_16bit_weights|rank0_only|get_(?:model_)?state_dict",), at=("save",), never="load_full_state|load_state|set_model_state|broadcast_from_rank0"),
    Sign("save-gather", 84, (r"full_state_dict|gather_16bit_weights|rank0_only", r"gather\w* (?:all|the|full|whole|every)"), at=("",)),
    Sign("save-gather", 62, (r"full_state_dict|gather_16bit_weights|rank0_only",), at=("",), never=LATER),  # a setting, no event
    Sign("save-gather", SURE, (r"state_dict_hook|consolidated_16bit|_unshard|ema_model\.state_dict|summon_full_params|full_tensor\(|get_(?:model_)?state_dict",), at=("save", ""), never="load_full_state|load_state|set_model_state|broadcast_from_rank0"),
    Sign("save-gather", 86, (FSDP + "|zero|deepspeed|shard",), at=("save",)),
    Sign("save-gather", 60, (), at=("save",)),
    Sign("merge", SURE, (r"undo_layout|8[- ]?bit|int8|4[- ]?bit|dequant",), at=("save", "merge"), never=FSDP),
    Sign("merge", SURE, (r"merge_and_unload|save_pretrained_merged|_merge_lora\b|merging 4bit and lora|merged_16bit|merge_lora|merge_adapter|fuse_lora|get_delta_weight|dequantize.{0,20}(?:merge|save|state_dict)",)),
    Sign("merge", TOLD, (r"state[_ ]?dict|export|sav(?:e|ing)|gguf|merg(?:e|ing)", r"dequant|(?:back )?to (?:16[- ]?bit|bf16|fp16)|gguf|into the base"), never=f"mxfp4|{LOADING} time"),
    Sign("merge", 86, (), at=("merge",)),
    # loading
    Sign("two-copies", 80, (r"deepcopy|\bema\b.{0,20}(?:copy|model|network|weights)|copy of the (?:model|network)|on the gpu twice|(?:old|previous|first) model (?:is )?(?:not|still|never)|two copies of the (?:model|weights)",), at=("", "forward", "prepare", "init"), never=f"optimi|{PREFERENCE}|process|rank|each|checkpoint"),
    Sign("wrong-dtype", 86, (rf"(?:load|stor|keep|kept|base|weights?|model|stay|end)\w*\b.{{0,25}}\b(?:in|as|to) (?:{FP32})",), never=f"master|upcast|embed|norm|head|logits|{FSDP}|mxfp4"),
    Sign("wrong-dtype", SURE, (r"(?:without|forgot|missing|no|omit\w*|unset) (?:an? |the |passing |setting |specifying )*(?:torch_)?dtype|4 bytes ?/ ?param|default(?:s to)? (?:dtype )?float32|dtype\W{1,3}(?:torch\.)?float32 default|defaults? to (?:fp32|float32)",), at=("load", "prepare", "forward", "")),
    Sign("wrong-dtype", 87, (r"\b(?:model|net\w*|module|base_model|unet|transformer|backbone)\.(?:float\(\)|to\((?:dtype ?= ?)?torch\.float(?:32)?\b)|float32 copy of the model",), at=BEGIN, never=f"{FSDP}|logits"),
    Sign("wrong-dtype", 78, (FP32, r"bf16|bfloat16|fp16|half", r"load|checkpoint|dtype"), at=BEGIN, never=f"master|upcast|embed|norm|head|logits|{FSDP}|{ZERO3}|optim|prepare|mixed"),
    Sign("dequantized", SURE, (r"mxfp4|dequantize\s?=\s?true|convert_moe_packed|default(?:s|ing)? to dequantiz|run_compressed\s?=\s?false",)),
    Sign("dequantized", 86, (r"gpt-?oss",), at=("load", "save", "prepare")),
    Sign("dequantized", 77, (r"gpt-?oss", r"lora|train|fine"), at=("",)),
    Sign("dequantized", 84, (QUANTIZED, r"dequant|unpack|(?:convert|upcast|cast|expand)\w* (?:back )?(?:to|into) (?:bf16|fp16|bfloat16|16)"), at=(*BEGIN, "save"), never=f"merge|state_dict|{ADAPTER} weights"),
    Sign("quantize-peak", SURE, (r"load\w* ?(?:&|and|then|while|,) ?quanti|quanti\w+ (?:while|during|on|at|when) (?:the )?load|loading_workers|quantize.{0,20}worker",)),
    Sign("quantize-peak", TOLD, (r"quantize_4bit|params4bit|hqq_quant|quantize_blockwise",)),  # or the model is too large as it is
    Sign("quantize-peak", 80, (FOUR_BIT + "|8[-_ ]?bit|int8|quanti[sz]", r"peak|before (?:\w+ ){0,2}(?:quanti|conver|compress)|then quanti|first|although|temporar", "load"), at=BEGIN, never=f"{FSDP}|{ZERO3}|gpt-?oss|{EACH}"),
    Sign("quantize-peak", 74, (FOUR_BIT, r"shards? \d+ ?(?:of|/)|\d+% of (?:the )?shards"), at=("load",), never=f"{FSDP}|{ZERO3}|gpt-?oss"),
    Sign("quantize-peak", 77, (r"quanti[sz](?:e|es|ing)\b",), at=("load", "prepare"), never=f"{FSDP}|{ZERO3}"),
    Sign("kbit-upcast", SURE, (r"prepare_model_for_(?:kbit|int8)_training",), never="does not require grad"),
    Sign("kbit-upcast", SURE, (r"upcast|fp32|float32", r"embed|layer ?norm|non-quanti"), at=("prepare",)),
    Sign("kbit-upcast", 74, (FOUR_BIT + "|8[- ]?bit|k-?bit",), at=("prepare",), never=FSDP),
    Sign("kbit-upcast", 84, (f"upcast|cast\\w* (?:\\w+ )?to (?:{FP32})|(?:in|to) (?:{FP32})", r"embed|layer ?norm|lm_head|non-quanti|head\b", FOUR_BIT + "|peft|k-?bit|lora"), never=f"{FSDP}|master|resiz|trained|tokens"),
    Sign("fsdp-upcast", SURE, (FSDP, r"upcast|fp32 master|float32 master|mixed[_ ]precision"), at=("prepare",)),
    Sign("fsdp-upcast", 84, (FSDP, "up-?cast"), at=("prepare", ""), never="logits|state_dict"),
    Sign("fsdp-upcast", 85, (FSDP, FP32, r"up-?cast|master|trainable|mixed|\bparam\w*|weights|held|kept|keeps|doubl\w*"), at=("", "prepare", "forward", "optimizer", "backward"), never=f"init|state_dict|logits|{STATES.replace('|master (?:weights|cop|param)', '')}"),
    Sign("fsdp-upcast", 80, (r"fsdp ?(?:v ?)?2\b|fully_shard", r"more (?:\w+ ){0,2}memory|higher|larger|increas|twice|double|regress", r"fsdp ?(?:v ?)?1\b"), never="logits"),
    Sign("modules-to-save", SURE, (r"modules_to_save|additional_target|train\w* (?:the )?(?:lm_head|embed)|embed_tokens.{0,12}lm_head|lm_head.{0,12}embed_tokens",)),
    Sign("modules-to-save", 80, (r"resize_token_embeddings|resiz\w+ (?:the )?embed|(?:add\w*|new|special|extra) (?:\w+ )?tokens|tokens? (?:are |were )?added|trainable embedding|embedding layers? (?:is|are) trained|trains? (?:\w+ ){0,2}embed", ADAPTER), never=ZERO3),
    Sign("replicated", SURE, (r"device_map\W{1,4}(?:\"\"|'')\W{1,4}\w*(?:rank|index|device)",), never="mxfp4"),
    Sign("replicated", 84, (r"_sync_module_states|_sync_params_and_buffers|_ddp_init_helper",), at=("prepare",)),  # DDP's own start
    Sign("replicated", 84, (r"(?:model|weights|\d+b) (?:\w+ ){0,3}(?:on|onto) (?:each|every|all) (?:of the )?(?:\d+ )?(?:gpu|card)",), never=f"{ZERO3}|{FSDP}"),
    Sign("replicated", 86, (ZERO12, r"(?:whole|full|entire|complete) (?:\w+ )?(?:model|copy)|on each gpu|(?:param\w*|weights) (?:are |is )?not|not shard|does(?:n't| not) (?:shard|partition|split)|replicat"),),
    Sign("replicated", 76, (ZERO12,), at=("load",)),
    Sign("replicated", TOLD, (r"\bddp\b|distributed|device_map|torchrun|accelerate|multi[- ]?gpu|process|data parallel", EACH, rf"(?:{WHOLE}|loads?|holds?|own) (?:\w+ ){{0,2}}(?:model|weights|copy|\d+b)|cop(?:y|ies)|replica"), never=f"{ZERO3}|{FSDP}|dataparallel\\(|ref|mxfp4|context"),
    Sign("replicated", 80, (r"device_map.{0,6}auto", r"\bddp\b|process|torchrun|accelerate launch|ranks?\b|distributed"), never="mxfp4|gpt-?oss"),
    Sign("zero3-init", SURE, (r"_initialize_missing_keys|gatheredparameters|hfdeepspeedconfig|partition_parameters|_zero_init|(?<!activating )zero\.init\b|zero3_init|is_zero_init|is_deepspeed_zero3_enabled",), at=(*BEGIN, "forward")),
    Sign("zero3-init", SURE, (ZERO3, rf"{EACH}|args built after|host ram|before (?:the )?(?:model|training_?arg)|whole model|full model|all (?:the )?param|not (?:active|partition|shard)|(?:is|are|get)? ?not partition"), at=BEGIN, never=FSDP),
    Sign("zero3-init", 86, (ZERO3, r"gather|missing keys|resize_token|new tokens|init(?:iali[sz])?ation|\binit\b"), at=BEGIN, never=FSDP),
    Sign("zero3-init", 58, (ZERO3,), at=("load",), never=FSDP),
    Sign("zero3-init", 52, (ZERO3, r"although|though|even with|despite|in spite"), at=("",), never=f"{FSDP}|batch|step|seq"),
    Sign("load-peak", 86, (FSDP, r"low_cpu_fsdp|cpu_ram_efficient|qlora_sharded|fp32 init|meta init|meta device|_broadcast_|distribute_tensor|to_empty|param_init_fn|materiali[sz]|rank ?0 (?:loads|holds|reads)|sync_module_states|before (?:it is |being )?(?:shard|wrap)|broadcast|load_full_state|set_model_state"), at=BEGIN),
    Sign("load-peak", TOLD, (FSDP,), at=("load", "init"), never=r"host (?:\w+ )?oom|oom on (?:the )?(?:cpu|host)"),
    Sign("quantized-unsharded", SURE, (r"bnb_4bit_quant_storage|quant_storage",)),
    Sign("quantized-unsharded", 86, (FSDP, FOUR_BIT), at=("backward", "forward", "loss")),
    Sign("quantized-unsharded", 86, (FSDP, FOUR_BIT, rf"(?:not|isn't|aren't|never|without|un)[ -]?(?:being )?(?:shard|flatten|split|partition)|ignored|{EACH} (?:\w+ )?(?:{WHOLE})|as much|same (?:memory|usage)|no (?:memory )?(?:sav|reduc)"), at=PASS),
    Sign("fsdp-wrap", SURE, (FSDP, r"auto_wrap|wrap(?:ping)?[_ ]policy|single (?:flat|unit)|one (?:\w+ )?unit|flat[_ ]?param|layer_cls|root (?:module|unit)|expected"), at=PASS),
    Sign("fsdp-wrap", 74, (FSDP, r"all-?gather|unshard|wrap|unit|reshard|prefetch"), at=PASS, never=FOUR_BIT),
    Sign("fsdp-wrap", 68, (FSDP, r"[\d.]+ ?g\w* ?(?:-+>|vs\.?|against|instead of|compared (?:to|with)) ?[\d.]+ ?g"), at=PASS, never=FOUR_BIT + "|reserved|fp32|float32"),
    Sign("fsdp-wrap", WEAK, (FSDP,), at=("backward", "forward"), never=FOUR_BIT),
    Sign("fsdp-wrap", 70, (FSDP, r"regress|upgrad|since v?\d|after updat|downgrad|doubled|used to|previous version|twice"), never="upcast|float32|fp32"),
    Sign("companion-models", TOLD, (DIFFUSION, r"encoder|\bvae\b|\bt5\b|\bclip\b|cache|latents|resident"), at=BEGIN, never="second run|zombie"),
    Sign("companion-models", 62, (DIFFUSION,), at=("load", "init"), never="second run|zombie|(?:whole|entire) model"),
    Sign("companion-models", 72, (DIFFUSION,), at=EVAL),
    Sign("companion-models", FAINT, (DIFFUSION,), at=("", "forward", "backward")),
    # checkpointing, attention, the cache
    Sign("activations", 56, (r"(?:without|no|disabl\w*|not using) (?:gradient|activation|grad)[_ ]checkpoint|(?:gradient|activation|grad)_checkpoint\w*\W{1,3}(?:false|off|no)\b",), at=("forward", "backward", ""), never=ADAPTER),
    Sign("activations", 57, (CONVOLUTIONS,), at=("forward", "backward"), never="tokens|transformers"),
    Sign("input-grads", SURE, (r"not requir\w* grad|not have a grad_fn|make_inputs_require_grad|none of the inputs have requires_grad|enable_input_require_grads|requires?_grad=true\. gradients will be none",)),
    Sign("input-grads", 86, (r"use_reentrant(?!\W{0,4}false)|(?<![\w-])reentrant\b",)),
    Sign("input-grads", TOLD, (ADAPTER, r"\bgc\b|(?:gradient|activation)[_ ]checkpoint\w*", r"slower|no effect|same memory|not (?:reduce|sav|work|help|take)|does(?:n't| not) (?:reduce|sav|work|help)|ignored|no (?:memory )?(?:sav|reduc|differ|change)|unchanged|(?:not|n't) change"), never=FSDP),
    Sign("input-grads", 76, (ADAPTER, r"\bgc\b|(?:gradient|activation)[_ ]checkpoint\w*", r"(?:is|are|was|be|when|must|to) (?:\w+ )?(?:off|disabled|dropped|removed)|turn\w* off|without (?:gradient|activation)")),
    Sign("kv-cache", SURE, (r"use_cache(?!`?\W{1,3}false)|without use_cache|past_key_value|past_kv|(?:dynamic|hybrid|static|offloaded|encoderdecoder)_?cache|key_states = torch\.cat|kv[- ]cache (?:is )?(?:kept|built|created) (?:in|during) train",), at=PASS, never=f"{EVALUATION}|{ENGINE}"),
    Sign("attention", SURE, (r"eager_attention_forward|(?<!, )attn_weights = |attention_scores = |attn_scores|attn_probs|torch\.(?:bmm|matmul)\(q|_prepare_4d|attention_probs|baddbmm|softcap|scaled_dot_product.{0,20}math|@ ?k\w*\.(?:transpose|mt\b|t\b|permute)|(?:matmul|bmm)\([^)]{0,60}\bk\w*\.(?:transpose|t\b)|einsum\(['\"][^'\"]*->[^'\"]*['\"], ?q\w*, ?k",)),
    Sign("attention", 84, (r"\b(\d{2,6}k?) ?[x×*] ?\1\b", r"attention|mask|scores|softmax")),
    Sign("attention", 84, (r"(?<!log_)(?<!log)softmax\b|attention scores",), at=("forward", "backward", ""), never="cross|logits|loss"),
    Sign("attention", 86, (r"(?:flash[- _]?att\w*|xformers|sdpa)\W+(?:\w+ )?(?:not|un|isn|missing|fail|disabled|off)",)),
    Sign("attention", 86, (r"attn_impl\w*\W+(?:torch|eager|naive|math)|naive attention|(?:without|no|not using|disabl\w+) (?:flash|xformers|sdpa|memory[- ]efficient)|attention (?:matri\w+|scores|weights|mask) (?:of|is|shape)|quadratic|\beager\b(?! mode)|\(\d+, \d+, (\d{4,}), \1\)|\[\d+, \d+, (\d{4,}), \2\]",), at=(*PASS, "eval")),
    # the question itself
    Sign("capacity", 66, (r"how (?:much|many) (?:\w+ ){0,3}(?:v?ram|memory|gpus?|cards)|(?:v?ram|memory|hardware|gpu) requirements?|requirements? (?:for|to|of) (?:full |lora )?(?:fine|train)|minimum (?:\w+ )?(?:v?ram|memory|gpu|hardware)|smallest batch|is (?:it|\w+) (?:enough|sufficient)",), never=r"\beval|resum|(?:host|system|cpu) (?:ram|memory)"),
    # data
    Sign("long-sample", TOLD, (LONGEST,), at=(*PASS, "data"), never=f"{IMAGES}|{PREFERENCE}|{RESERVED}|generations|(?<!by pytorch but )unallocated|kernel"),
    Sign("long-sample", 68, (r"on some (?:data|images|samples|batches)|(?:objects|boxes|instances|(?:ground )?truths|gt) per image|\d+\+? (?:boxes|objects|instances)|very many boxes|dense (?:images|datasets)|way into training|median \d+ tokens?, max",), at=STEP),
    Sign("long-sample", 72, (LATER,), at=PASS, never=rf"{GROWS}|{IMAGES}|{EVALUATION}|swap|inactive|{RESERVED}|\bleak|fragment|{PREFERENCE}|host|\bram\b|contiguous"),
    Sign("long-sample", 84, (r"\b(?:one|a single) \w+ (?:with|of|has) [\d,.]{2,}k?\b",), at=PASS, never=r"\bimages|pictures|pages"),
    Sign("long-sample", 78, (SUDDEN,), at=PASS, never=rf"{IMAGES}|\beval|engine"),
    Sign("image-tokens", SURE, (r"max_pixels|min_pixels|anyres|max_slice|longest_edge|num_crops|image_grid_thw|smart_resize|max_num_tiles|dynamic_patch|image_max|large images|(?:image|visual|vision) tokens|high[- ]res",), never="latents"),
    Sign("image-tokens", TOLD, (r"pixel_values", r"\bvl\b|llava|\bvlm\b|multi-?modal|input_ids|language|\bvision"), never="latents"),
    Sign("image-tokens", TOLD, (r"screenshot|1080p|4k images|(?:image |video |input |full )resolution|(?:some|large|big|high-res\w*|many|\d+) (?:images|pictures|pages)|image (?:size|count)|tiles|patches|video",), at=(*PASS, "init"), never=f"latents|{DIFFUSION}|coco|detection|ground|\\d+ images x"),
    Sign("image-tokens", STRONG, (r"image|\bvision\b|\bvl\b|llava|\bvlm\b",), at=("forward", ""), never=rf"{GROWS}|{CONVOLUTIONS}|{DIFFUSION}|coco|detection|\bpx\b|fsdp|zero|over \d+ (?:epochs|steps)"),
    # preference and reinforcement
    Sign("inference-engine", 88, (ENGINE,), at=("", *BEGIN[:3], "eval", "predict", "save"), never="long sample|\\d completion|completion \\d"),
    Sign("inference-engine", 86, (ENGINE, r"mem\w* (?:fraction|util)|mem\w*_(?:fraction|util)|gpu_memory_utili[sz]ation"), at=("forward", "backward", "loss", "optimizer", "resume"), never="long sample"),
    Sign("inference-engine", 66, (ENGINE,), at=("forward", "backward", "loss", "optimizer", "resume"), never="long sample"),  # it is there, and trains
    Sign("inference-engine", 78, (r"colocat|wake_?up|rollout engine|inference engine|hybrid engine",), never=r"unallocated"),
    Sign("reference-model", SURE, (r"ref_model|ref_policy|ref_logps|reference[ _](?:model|policy)|ref model|create_reference_model|compute_ref_log",)),
    Sign("reference-model", 80, (r"(?:ref|reference|value|reward|critic|teacher)\b.{0,25}\bmodels?\b|two models",), never=f"optimi[sz]er|{ROLLOUTS}"),
    Sign("reference-model", 80, (r"second model\b", rf"{PREFERENCE}|{RL}|frozen|teacher|reference|distill"), never=f"optimi[sz]er|{ROLLOUTS}"),
    Sign("reference-model", STRONG, (PREFERENCE,), never=FOUR_BIT + r"|\b(?:q?lora|peft)\b"),
    Sign("pairs", 76, (PREFERENCE, FOUR_BIT + "|" + ADAPTER), never="ref_model|reference"),
    Sign("pairs", TOLD, (PREFERENCE, "concat|chosen|twice the (?:batch|memory)|pairs?\\b"), never="ref_model|reference"),
    Sign("logits", 72, (r"\bdpo", r"qwen|llama-?3|gemma|152k|vocab"), never=FOUR_BIT + r"|\b(?:q?lora|peft)\b"),
    # processes and cards
    Sign("ranks-on-one-gpu", SURE, (r"(?:no|without|ignor\w+|unset|forgot) local_rank|mpirun|extra processes|cuda:0 oom|set_device(?!\(\d)|contexts? (?:of other ranks|on gpu 0)",), never="device_map.{0,8}local"),
    Sign("ranks-on-one-gpu", 86, (rf"(?:all|every|each|other|both|second|another|extra|more|\d+) (?:\w+ )?(?:process\w*|ranks?|workers?)\b.{{0,40}}(?:{ONE_CARD})|(?:processes|contexts)\b.{{0,50}}\bon (?:the )?(?:{ONE_CARD})",), never="nccl|fsdp.{0,30}full"),
    Sign("ranks-on-one-gpu", 86, (rf"(?:{ONE_CARD}).{{0,40}}(?:processes|contexts?|more (?:\w+ )?(?:memory|than|process|thread)|much process|extra|larger|fuller|from (?:other|all|every))|map_location|device_ids(?!\W{{1,3}}[\w.]*(?:rank|gpu|device))", MANY), never=r"(?<!distributed)dataparallel|gather|vllm"),
    Sign("ranks-on-one-gpu", 75, (ONE_CARD, r"ranks|processes|torchrun|\bddp\b|usable of|only|larger|more than"), at=("init", "load"), never=FSDP + "|quantization|gpu 0; |gpu 0 has a total"),
    Sign("ranks-on-one-gpu", 89, (UNEVEN, r"process|\branks?\b|\bddp\b|torchrun|accelerate launch|horovod|distributed"), never=r"(?<!distributed)dataparallel|vllm"),
    Sign("data-parallel", 78, (UNEVEN,), at=STEP, never=f"process|ranks?\\b|{FSDP}|ddp|torchrun|zero|horovod|vllm|device_map|pipeline"),
    Sign("data-parallel", SURE, (r"parallel_apply|(?<!sharded_)data_parallel\.py|scatter_gather\.py|reduce_add_coalesced|gather_map|parallel/replicate|cuda_available_devices|replicas = ",)),
    Sign("data-parallel", 86, (r"(?<!distributed)(?<!distributed )(?<!sharded)dataparallel|nn\.dp\b",)),
    Sign("data-parallel", 86, (r"python \S*\.py with (?:several|multiple|\d+) gpus|trainer dp\b|without torchrun|plain python",)),
    Sign("data-parallel", 80, (r"gpu ?0\W+(?:has |uses |takes )?[\d.]+ ?[gm]\w*\W.{0,15}(?:others?|rest|gpu ?1)|gpu ?0 (?:is )?full.{0,15}gpu ?1|gpu ?1 (?:is )?(?:half|empty|idle|free)",), never=r"\branks?\b|\bddp|torchrun"),
    Sign("data-parallel", 70, (r"\bpython3? \S+\.py", r"\b[2-9]\d* ?(?:x\b|gpus|cards)")),
    Sign("data-parallel", 76, (r"sees \d gpus|gpu ?0 (?:is |much |far |uses |takes )*(?:fuller|more)|imbalanc|unbalanc|multiple visible gpus|\bn_gpu\b|other (?:gpus?|cards?)? ?(?:are |is )?(?:half |nearly |almost )?(?:empty|idle|free)|second gpu",), never=r"\branks?\b|ddp|torchrun"),
    Sign("other-process", 88, (r"zombie|(?:dead|ghost|stale|(?<!memory: )killed) process|process\w* (?:that )?(?:is |are )?(?:dead|gone|no longer)|shared (?:node|server|machine)|someone else|colleague|\bollama\b|lm studio|(?:memory|vram) (?:is )?(?:still )?(?:held|occupied)|(?:after|when) the (?:run|process|job|training|script) (?:\w+ )?(?:ended|finished|died|exited|crashed|killed)|defunct|orphan",)),
    Sign("other-process", TOLD, (r"(?:previous|earlier|crashed|last) (?:run|session|process|job)|(?:an)?other (?:user|process|job|program|script|app)\w*|jupyter kernel|notebook kernel|left ?over|still (?:holds?|held|occup|in use|running)|nvidia-smi shows no process|without any process",), never=f"second run inside|{MANY}|checkpoint|state_dict"),
    Sign("other-process", 80, (r"nothing (?:else )?(?:runs|is running|running)|no (?:other )?process\w* (?:is )?(?:running|listed|shown)|restart\w* (?:of )?(?:the |my )?(?:runtime|kernel|notebook|machine|server|container|pc|computer)|(?<!keyboard)interrupt|ctrl-?c|kill -9|nvidia-smi shows (?:\w+ )?(?:python|process)",), never=f"{MANY}|checkpoint"),
    Sign("other-process", 78, (r"\bheld by|second run|re-?run(?:ning)?\b|run(?:ning)? (?:it |the \w+ )?(?:again|twice)|\bserver process|deploy",), at=("load", "init", ""), never=f"second run inside|{MANY}|checkpoint|state_dict|{ROLLOUTS}"),
    Sign("nccl", 80, (r"communicators?\b|comminit|commcreate|nccl_cumem|symmetric memory",)),
    Sign("nccl", 84, (r"out[- ]of[- ]memory error from nccl|nccl\b.{0,40}out of memory|memory_reserved\W+(?:is )?(?:well |far )?below|although \S*reserved\S* .{0,30}below",)),
    Sign("nccl", 86, (r"(?:process groups?\b|process_group(?![,)])|communicators?).{0,80}(?:\d ?[gm]i?b\b|\bper\b|nccl)|(?:\d ?[gm]i?b\b|\bper\b|nccl).{0,80}(?:process groups?\b|process_group(?![,)])|communicators?)|nccl (?:buffer|communicator)|nccl_buffsize",), never="init_process_group\\("),
    Sign("nccl", 80, (r"\bnccl\b", r"(?:per|each|every) (?:[\w-]+ )?(?:process )?group|[\d.]+ ?[gm]i?b (?:per|each)")),
    Sign("nccl", 72, (r"\bnccl\b", r"buffer|communicator|outside|overhead|nccl\W+(?:\w+\W+){0,3}alloc")),
    Sign("buckets", SURE, (rf"(?<!broadcast_)bucket_size(?!{AS_IT_COMES})|gradient_as_bucket_view|bucket_cap",)),
    Sign("buckets", 80, (r"stage 1 (?:\w+ ){0,3}(?:trains|works|runs|fits)\b.{0,20}stage 2|higher the stage|more memory (?:\w+ )?(?:stage|zero)",)),
    Sign("buckets", 86, (rf"(?<!broadcast_)(?<!position_)bucket(?!(?:[_ ]size)?{AS_IT_COMES})", r"zero|deepspeed|\bddp\b|gradient|buffer"), never="length|bucketing by|aspect|resolution"),
    Sign("buckets", 80, (r"ipg_bucket|grad_buffer|param_and_grad_buffer|main_grad|flat(?:tened)? (?:gradient|grad) buffer",), at=(*STEP, "init")),
    Sign("buckets", 72, (r"\bbuffers?\b", ZERO12 + r"|deepspeed|\bddp\b"), at=(*STEP, "init"), never="nccl|activation|replay|cache|optimi"),
    Sign("buckets", 87, (r"(?:zero|stage)[-_ /]*[12]\b.*(?:\boom|out of memory|\bfail|crash).*(?:works?|fits?|runs|fine|trains|ok\b).{0,40}(?:zero[-_ /]*[01]\b|\bddp\b)|(?:zero|stage)[-_ /]*[12]\b.{0,60}(?:\boom|out of memory|\bfail|crash).{0,30}(?:zero[-_ /]*[01]|\bddp) (?:\w+ )?(?:works|fits|runs|trains|is fine|does not)",), never=ZERO3),
    Sign("buckets", 80, (r"zero[-/ \d]*[12] ?(?:>|uses more|needs more|takes more|more (?:gpu )?memory|higher)|more (?:memory )?than (?:zero-?[01]|ddp|plain)",)),
    # over time
    Sign("fragmentation", 86, (r"fragment(?:ed|ation|ing|s\b(?! of))",), never=f"eval|resum|{ENGINE}"),
    Sign("fragmentation", 86, (r"segments?\b.{0,30}(?:split|small)|no contiguous|not contiguous|contiguous (?:block|memory|chunk)|cannot be (?:reserved|reused|released)",)),
    Sign("fragmentation", 80, (r"alloc_retries|cudamalloc retries|malloc retries|defrag",)),
    Sign("fragmentation", 84, (SHAPES, f"{GROWS}|reserved|cache|empty_cache|oom|memory"), at=STEP, never=f"eval|{LONGEST}|dynamic padding|tiles"),
    Sign("fragmentation", 88, (r"(?:large|big|lots?|much|many|high|huge|[\d.]+ ?gi?b|%)\W+(?:\w+ ){0,2}reserved[- ]but[- ]un",), never="tried to allocate"),
    Sign("fragmentation", 84, (r"sample[_ ]packing without padding|without pad|pad_to_sequence_len",)),
    Sign("fragmentation", 75, (r"\bcoco\b|detection|grounding|multi-?scale", f"{GROWS}|steps")),
    Sign("fragmentation", 88, (r"[\d.]+ gi?b reserved-?(?: ?but)?-?(?: ?un)allocated|reserved\W+(?:\w+\W+){0,3}[\d.,]+ ?[mg]i?b?.{0,30}allocated|reserved\W+(?:\w+ ){0,3}(?:above|more than|larger than|higher than|exceeds|vs|>+|grows)",), at=STEP, never="tried to allocate"),
    Sign("fragmentation", 86, (r"reserved (?:memory )?(?:\w+ )?[\d.,]+ ?(?:[gm]i?b )?(?:-+>|to) ?[\d.]+",), at=STEP),
    Sign("fragmentation", 80, (r"expandable_segments|max_split_size|garbage_collection_threshold|empty_cache", HELPS), at=STEP, never=f"vllm|{EVALUATION}|except|process"),
    Sign("leak", 86, (GROWS,), at=STEP, never=rf"packing|coco|detection|{SHAPES}|{EVALUATION}|empty_cache|{RESERVED}|alloc_retries|max_split|{LONGEST}|fragment"),
    Sign("leak", 86, (r"(?:not|non|never|un|without|missing|no)[- ]?detach|detach\w* (?:is |was )?missing|(?<!float\(\)\.)detach\(|running_loss|retain_graph|memory leak|create_graph|hooks? (?:keeps?|stores?|holds?)|total_loss \+=|\bleak(?:s|ing|ed)?\b|without \.?item|\.append\(loss|loss\w* \+= |(?:keep|kept|hold|stor|accumul)\w* (?:\w+ ){0,3}(?:graph|losses)|gc\.collect|reference cycle",), at=STEP),
    Sign("leak", 76, (r"(?:outputs|tensors|losses|results|history|buffer\w*|activations|features)\b.{0,40}(?:(?:are|is|get|being) (?:kept|stored|cached|collected|saved)|stays? (?:on|alive)|not (?:freed|released)|never (?:freed|released))|with (?:its|their) graph",), at=STEP, never="checkpoint|state_dict"),
    Sign("leak", 78, (r"(?:memory|vram|gpu|card) (?:is |gets? |becomes? |was )?(?:full|exhausted|filled|used up) after|fills up",), at=STEP, never=f"{IMAGES}|{RESERVED}"),
    Sign("leak", 80, (r"loss(?:es)?_(?:history|list|log)|\bhistory\b", r"after|grow|full|increas"), at=STEP),
    Sign("leak", 80, (r"[\d.]+ ?(?:-+>|to) ?[\d.]+ ?gi?b (?:over|after|in|within|during) (?:\d+|an?|one|the|each|every)\b|over \d+ (?:steps|iterations|epochs)|more (?:each|every|per) (?:step|iteration|batch|epoch)|[1-9][\d.]* ?[mg]i?b (?:more )?(?:per|each|every|an?) (?:optimi[sz]er |training )?(?:step|iteration|episode|epoch|batch|update|call)\b",), never="mfu"),
    Sign("leak", WEAK, (r"at step \d{3,}|after (?:~ ?)?\d+ epochs?",), at=STEP, never="group|length|cross_entropy"),
    Sign("exception", SURE, (r"retry after oom|(?:second|2nd|next) (?:try|attempt)|inside (?:the )?except|except (?:runtime|outofmemory|torch\.cuda)|exception (?:holds|keeps)|traceback (?:holds|keeps)",)),
    Sign("exception", 84, (r"retr(?:y|ies|ied)|tr(?:y|ied) again|smaller batch", r"except\b|caught|catch|after (?:an |the )?(?:oom|out of memory)|recover"), never="vllm|ray"),
    # the host
    Sign("host-ram", TOLD, (r"host oom|host (?:ram|memory)|system (?:ram|memory)|cpu (?:ram|memory)|cgroup|oom[- ]?kill|sigkill|signal 9|exit(?: ?code)? ?\(?-9|\bram\b",), never=rf"per rank|shared|instead of oom|fall|efficient|{FSDP}|vram"),
    Sign("host-ram", SURE, (r"_groups\S{0,8}\.pin_memory|_accelerator\.py pin_memory|cudahostalloc|cachinghostalloc",)),  # pinned memory is the host's
    Sign("host-ram", SURE, (r"bad_alloc|node running low on memory|\bray oom|workers? (?:was |were )?killed due to memory|oomkilled|slurmstepd: .{0,60}memory|oom[-_ ]kill|return ?code -9|dataloader worker \(pid|bus error|\bhost (?:\w+ )?oom|\boom (?:\w+ )?(?:on|in) (?:the )?(?:host|cpu)|(?:host|cpu|system) (?:runs? |ran |is )?out of memory",)),
    Sign("host-ram", 88, ("offload", r"\d ?[gt]i?b (?:of )?(?:host |system |cpu )?ram\b|(?:cpu|host|system) (?:ram|memory)"), at=(*BEGIN, "optimizer"), never="cuda out of memory|tried to allocate"),
    Sign("host-ram", 89, (r"\b(?:ram|cpu memory|host memory)\b", r"process\w*|workers|ranks", r"\d ?g\w* (?:each|per)|each (?:\w+ )?(?:takes|uses|loads|holds|needs)"), never="vram"),
    Sign("host-ram", 84, (r"(?:cpu|host|system) (?:memory|ram) (?:\w+ ){0,2}(?:above|over|exceed|full|exhaust|runs? out|grow|more than|usage|peak)|ram (?:usage|is full|full|runs? out|exhaust|explod|overflow)",), never="vram|gpu ram"),
    Sign("host-ram", 84, (r"(?:oom|memory|killed|crash\w*) (?:while|when|during|in) (?:the )?(?:packing|tokeni|mapping|preprocess|(?:data ?set|data) (?:load|prep)|filter|shuffl)",)),
    Sign("host-ram", 89, (r"(?:prints?|then|just|got|gets|is|was|dies|and|process|says) ['\"]?killed\b|\bkilled while|: killed\b|killed$",), never="cuda out of memory|tried to allocate"),
    Sign("host-ram", 76, (), at=("data",)),
    Sign("host-ram", SURE, (r"(?:host|system|machine'?s|node|cpu)(?:'s)? (?:memory|ram)\b[^.;]{0,40}(?:jump|grow|climb|exhaust|limit|\bfull|above|runs? out|kill|increas|ris(?:es|ing)|goes over)|line \d+: +\d+ killed|low (?:node )?memory|terminated with code -9|cpu oom",), never="efficient"),
    Sign("host-ram", SURE, (r"killed|\bram\b|host memory|memory error", r"tokeniz|dataset|packing|preprocess|dataloader|pin_memory|num_workers|pinned"), never="cuda out of memory"),
    Sign("spill", 88, (r"shared (?:gpu |video |system )?(?:memory|ram|vram)|[\d.]+ ?gi?b shared|dedicated (?:\+|and)|sysmem|unified memory|oversubscri|memory fallback|\bwsl|falls? back to (?:system|host|cpu)|spill",), never="shared memory \\(shm|/dev/shm|apple|macbook|metal|out of resource"),
    Sign("spill", STRONG, (r"no oom|without oom|does(?:n't| not) (?:oom|crash)", r"slow|hours|\d+ ?h\b|s/it"),),
    Sign("spill", 84, (r"\d s(?:ec\w*)? (?:per|an?|/) ?it|\bs/it\b|(?:extremely|very|much) slow|(?:iteration|step) time (?:ris|gr|incr)|slows down",), never=r"out of memory|\boom"),
)  # fmt: skip
