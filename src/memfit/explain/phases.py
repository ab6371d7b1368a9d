"""In which part of a run it failed: told by the frames of a traceback, else by what a report says in words."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal

When = Literal[
    "", "load", "prepare", "forward", "loss", "backward", "optimizer", "eval", "predict", "save", "merge", "resume", "init", "data"
]  # fmt: skip
NEAR = 12  # innermost frames that tell where it failed
AROUND = ("save", "merge", "resume", "predict", "eval")  # they stand far outside of the pass that fails

# (when, words of a frame's function or file, or of its code), innermost frame first; the first row that has one decides
FRAMES: tuple[tuple[When, str], ...] = (
    ("save", r"save_model|save_pretrained|_save_checkpoint|save_16bit_model|save_sharded|dcp\.save|async_save|consolidate_|zero_to_fp32|get_fp32_state|_gather_state_dict|state_dict_hook|full_state_dict|save_checkpoint|fsdp_save"),
    ("merge", r"merge_and_unload|save_pretrained_merged|_merge\b|export_model|merge_lora|merge_adapter|fuse_lora|_unload_and_optionally_merge|convert_(?:hf_)?to_gguf"),
    ("resume", r"_load_zero_checkpoint|load_optimizer_state|load_fsdp_optimizer|restore_checkpoint|load_training_state|optim\S* load_state_dict|_load_optimizer|load_checkpoint|_load_from_checkpoint|optimizer\.pt"),
    ("predict", r"\bpredict\b|predict_with_generate"),
    ("eval", r"evaluation_loop|prediction_loop|prediction_step|\bevaluate\b|nested_concat|_maybe_log_save_evaluate|validat|eval_step|eval_epoch|eval_loop|val_loop|_run_eval"),
    ("optimizer", r"torch/optim/|bitsandbytes/optim|optimizer\.step|adamw?\.py|_foreach_|exp_avg|optimizer_step|clip_grad|unscale_|deepspeed/ops/adam|apex/optimizers|torch_optimizer|_take_model_step|muon|adafactor\.py|lion\.py"),
    ("backward", r"autograd/__init__|_tensor\.py|\.backward\(|run_backward|_engine_run|autograd/graph\.py|autograd/function\.py apply .{0,20}user_fn"),
    ("loss", r"cross_entropy|nll_loss|loss_utils|log_softmax|masked_ce|convert_to_fp32|logits\.float|logps\b|logprobs|linear_cross|compute_logits|causallmloss|compute_loss\b.*logits"),
    ("load", r"from_pretrained|load_pretrained|_load_state_dict_into|load_model|load_state_dict\b|load_checkpoint_in_model|dispatch_model|set_module_tensor_to_device|caching_allocator_warmup|materialize|to_empty|_apply\b"),
    ("prepare", r"prepare_model_for_kbit|get_peft_model|fully_shard|_cast_adapter|_sync_module_states|_sync_params_and_buffers|_ddp_init_helper"),
    ("forward", r"\bforward\b|_call_impl"),
    ("load", r"\.to\(device|\.cuda\(\)"),  # a batch is moved in any line that calls a model
)  # fmt: skip
# the part that a report names after "phase:", or after "out of memory at": the first row that has one decides
NOUNS: tuple[tuple[When, str], ...] = (
    ("resume", r"resum|optim\w*\.load_state_dict|optim\w*_state_dict_to_load|restor|reload|after load\b|continu\w+ from|load\w* (?:the )?(?:optimizer|(?:training )?checkpoint|training state)|load_(?:training_)?(?:checkpoint|state\b)|(?<!off)load_optim\w*|resume_from"),
    ("merge", r"merg|export|\bfus(?:e|ing) (?:the )?(?:lora|adapter)|convert\w* to (?:hf|gguf|16)"),
    ("save", r"sav(?:e|es|ing)\b|checkpoint(?:ing)? (?:the|a|step|write|writing|save)|consolidat|write|gather\w* (?:the )?(?:full |whole )?(?:state|weights)"),
    ("predict", r"predict|inference"),
    ("eval", r"(?<!after )(?<![/\w])(?:eval|validat|sanity check|metric|dev set|val\b|val_|test (?:set|loop|time|epoch))"),
    ("optimizer", r"optim|\bstep\(\)|(?:weight|parameter) update|grad\w*[ _-](?:norm|clip)|clip\w* (?:the )?grad|clip_grad"),
    ("prepare", r"prepar|wrap"),
    ("load", r"(?<!off)load|start(?:up|s|ing)?\b|from_pretrained|before training|instantiat|model (?:creation|construction)"),
    ("init", r"\binit|probe|vllm|warm"),
    ("data", r"\bdata|preprocess|tokeni"),
    ("loss", r"loss|log[- _]?prob|logps|cross[ _-]?entropy|logits|criterion"),
    ("backward", r"backward|backprop|autograd|gradient comput"),
    ("forward", r"forward"),
)  # fmt: skip
# code, keys and words of one part alone, for texts that do not say where
NAMES: tuple[tuple[When, str], ...] = (
    ("load", r"set_(?:model_)?state_dict|load_full_state_dict|broadcast_from_rank0"),
    ("resume", r"\bon resum|\bresum(?:e|ing)\b|resume_from_checkpoint|init_from.resume|after load\b|optimizer\.load_state_dict|"
     r"断点|恢复训练|继续训练|"
     r"(?:train\w*|start\w*|loading) from (?:an? |the |unfinished |saved |state |last )+checkpoint|"
     r"optim_state_dict_to_load|(?<!off)load_optimizer|load_(?:training_)?checkpoint\b|accelerator\.load_state\b|restor(?:e|ing) (?:the |a |from |best )*(?:checkpoint|run|training)"),
    ("merge", r"save_pretrained_merged|merge_and_unload|export_model|合并|\bexport(?:ing|ed)? (?:the )?(?:model|lora|adapter|gguf|with)|merg(?:e|ing) (?:the )?(?:adapter|lora|model)|export_dir"),
    ("save", r"保存|after a full epoch|(?:last|final) (?:step|save)\b|end of training|saving (?:the )?(?:checkpoint|model)|modelcheckpoint|save_ckpt|save_pretrained|final save|save_model|"
     r"summon_full_params|_?save_checkpoint|save checkpoint|_save_to_state_dict|\.state_dict\(\)|zero_to_fp32"),  # settings of saving are set in every run
    ("predict", r"trainer\.predict|do_predict"),
    ("eval", r"评估|验证|during evaluation|trainer\.evaluate|compute_metrics|evaluation_loop|prediction_loop|prediction_step|"
     r"(?:whenever|when|as soon as) eval|(?:reach|enter|start|begin|hit|run)\w* (?:the )?(?:eval|validat)|"
     r"(?:at|in|on) (?:the )?(?:eval\w*|validation)\b"),
    ("optimizer", r"optimizer\.step|optimi[sz]er step"),
    ("load", r"加载|loading checkpoint shards|state_dict_into_meta|from_pretrained|shards? (?:loading|loaded)|model loading|"
     r"load(?:ing)? (?:the )?(?:model|weights)"),
    ("prepare", r"prepare_model_for_kbit_training"),
    ("loss", r"_loss_step|loss_fn\(|loss_fct\(|criterion\("),
    ("backward", r"loss\.backward\(|\bbackprop\w*|backward pass"),
)  # fmt: skip
_FAILED = r"(?:\boom(?:s|ed|ing)?\b|out of memory|memory|fail\w*|crash\w*|error\w*|spike\w*|dies|killed)"
_PLACE = r"(?: \w+){0,2} (?:at|on|in|while|when|whenever|during|after|before|once)(?: [\w.]+){0,3}? "
_AT = [(when, re.compile(words, re.IGNORECASE)) for when, words in FRAMES]
_SAID = re.compile(r"^phase: (.{0,200})$", re.MULTILINE | re.IGNORECASE)
_NOUN = [(when, re.compile(words, re.IGNORECASE)) for when, words in NOUNS]
_PLACED = [(when, re.compile(rf"{_FAILED}{_PLACE}(?:the )?(?:{words})")) for when, words in NOUNS]
_NAMED = [(when, re.compile(words)) for when, words in NAMES]


def when_it_failed(frames: Sequence[str], text: str, flat: str) -> When:
    """`frames` outermost first, each its path, function and code; `flat` is the text in small letters on one line.

    Frames tell before what the report says, that before what it names. What surrounds a forward pass (eval, save) stands
    far outside of it.
    """
    for when, pattern in _AT:
        if any(pattern.search(line) for line in (frames if when in AROUND else frames[-NEAR:])):
            return when
    if said := _SAID.search(text):
        return _first(_NOUN, said[1])
    return _first(_PLACED, flat) or _first(_NAMED, flat)


def _first(rows: Sequence[tuple[When, re.Pattern[str]]], text: str) -> When:
    return next((when for when, pattern in rows if pattern.search(text)), "")
