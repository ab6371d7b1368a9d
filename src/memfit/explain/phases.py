"""In which part of a run it failed: by the frames of a traceback, else by code, settings and log lines of that part."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal

When = Literal[
    "", "load", "prepare", "forward", "loss", "backward", "optimizer", "eval", "predict", "save", "merge", "resume",
    "init", "data"
]  # fmt: skip
NEAR = 12  # innermost frames that are looked at, except for the parts below
AROUND = ("save", "merge", "resume", "predict", "eval")  # their own frames stand far outside of the pass that fails

# (part, pattern of a frame's path, function and code); the first row that matches any frame decides
FRAMES: tuple[tuple[When, str], ...] = (
    ("save", r"save_model|save_pretrained|_save_checkpoint|save_16bit_model|save_sharded|dcp\.save|async_save|"
             r"consolidate_|zero_to_fp32|get_fp32_state|_gather_state_dict|state_dict_hook|(?<!load_)full_state_dict|"
             r"save_checkpoint|fsdp_save"),
    ("merge", r"merge_and_unload|save_pretrained_merged|_merge\b|export_model|merge_lora|merge_adapter|fuse_lora|"
              r"_unload_and_optionally_merge|convert_(?:hf_)?to_gguf"),
    ("resume", r"_load_zero_checkpoint|load_optimizer_state|load_fsdp_optimizer|restore_checkpoint|"
               r"load_training_state|optim\S* load_state_dict|_load_optimizer|load_checkpoint|_load_from_checkpoint|"
               r"optimizer\.pt"),
    ("predict", r"\bpredict\b|predict_with_generate"),
    ("eval", r"evaluation_loop|prediction_loop|prediction_step|\bevaluate\b|nested_concat|_maybe_log_save_evaluate|"
             r"validat|eval_step|eval_epoch|eval_loop|val_loop|_run_eval"),
    ("optimizer", r"torch/optim/|bitsandbytes/optim|optimizer\.step|adamw?\.py|_foreach_|exp_avg|optimizer_step|"
                  r"clip_grad|unscale_|deepspeed/ops/adam|apex/optimizers|torch_optimizer|_take_model_step|muon|"
                  r"adafactor\.py|lion\.py"),
    ("backward", r"autograd/__init__|_tensor\.py|\.backward\(|run_backward|_engine_run|autograd/graph\.py|"
                 r"autograd/function\.py apply .{0,20}user_fn"),
    ("loss", r"cross_entropy|nll_loss|loss_utils|log_softmax|masked_ce|convert_to_fp32|logits\.float|logps\b|"
             r"logprobs|linear_cross|compute_logits|causallmloss|compute_loss\b.*logits"),
    ("load", r"from_pretrained|load_pretrained|load_full_state_dict|_load_state_dict_into|load_model|load_state_dict\b|"
             r"load_checkpoint_in_model|dispatch_model|set_module_tensor_to_device|caching_allocator_warmup|"
             r"materialize|to_empty|_apply\b"),
    ("prepare", r"prepare_model_for_kbit|get_peft_model|fully_shard|_cast_adapter|_sync_module_states|"
                r"_sync_params_and_buffers|_ddp_init_helper"),
    ("forward", r"\bforward\b|_call_impl"),
    ("load", r"\.to\(device|\.cuda\(\)"),  # last: any line that calls a model may move a batch, too
)  # fmt: skip
# the same for a text without frames: identifiers, settings and log lines that belong to one part alone
NAMES: tuple[tuple[When, str], ...] = (
    ("load", r"set_(?:model_)?state_dict|load_full_state_dict|broadcast_from_rank0"),
    ("resume", r"resume_from_checkpoint|init_from.resume|\bresuming (?:training )?from\b|optimizer\.load_state_dict|"
               r"optim_state_dict_to_load|"
     r"(?<!off)load_optimizer|load_(?:training_)?checkpoint\b|accelerator\.load_state\b"),
    ("merge", r"save_pretrained_merged|merge_and_unload|export_model|merge_lora|export_dir"),
    ("save", r"saving model checkpoint|save_ckpt|save_pretrained|save_model|summon_full_params|_?save_checkpoint|"
             r"_save_to_state_dict|"
     r"\.state_dict\(\)|zero_to_fp32"),  # keys of settings that save are set in every run
    ("predict", r"trainer\.predict|do_predict"),
    ("eval", r"\*{3} running evaluation|trainer\.evaluate|compute_metrics|evaluation_loop|prediction_loop|"
             r"prediction_step"),
    ("optimizer", r"optimizer\.step"),
    ("load", r"loading checkpoint shards|error loading model|state_dict_into_meta|from_pretrained"),
    ("prepare", r"prepare_model_for_kbit_training"),
    ("loss", r"_loss_step|loss_fn\(|loss_fct\(|criterion\("),
    ("backward", r"loss\.backward\("),
)  # fmt: skip
_FRAMES = [(when, re.compile(words, re.IGNORECASE)) for when, words in FRAMES]
_NAMES = [(when, re.compile(words)) for when, words in NAMES]


def when_it_failed(frames: Sequence[str], text: str) -> When:
    """Return the part of a run that a failure lies in, "" where nothing shows it.

    frames: outermost first, each its path, function and code. text: in lower case, on one line. Frames decide first.
    """
    for when, pattern in _FRAMES:
        if any(pattern.search(line) for line in (frames if when in AROUND else frames[-NEAR:])):
            return when
    return next((when for when, pattern in _NAMES if pattern.search(text)), "")
