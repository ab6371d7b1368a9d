"""What other tools call the flags of memfit: an option that memfit does not have is answered with the one that it has."""

from __future__ import annotations

# memfit's words -> names of transformers, TRL, PEFT, axolotl, LLaMA-Factory, DeepSpeed, torchrun and of habit
_NAMES = {
    "--micro-batch": "batch batch-size bs per-device-train-batch-size per-device-batch-size micro-batch-size train-batch-size",
    "--accumulation": "gradient-accumulation-steps gradient-accumulation grad-accum grad-accumulation accumulation-steps grad-acc",
    "--effective-batch": "global-batch-size global-batch total-batch-size",
    "--sequence-length": "seq seq-len seq-length sequence-len max-length max-seq-length max-seq-len cutoff-len context-length context ctx"
    " model-max-length block-size",
    "--checkpointing full": "gradient-checkpointing grad-checkpointing activation-checkpointing recompute",
    "--lora-rank": "rank lora-r r lora-dim",
    "--lora-targets": "target-modules lora-target lora-target-modules lora-target-linear",
    "--learning-rate": "lr",
    "--epochs": "num-train-epochs num-epochs",
    "--precision": "dtype torch-dtype mixed-precision amp bf16",
    "--precision fp16-mixed": "fp16",
    "--precision fp32": "fp32 float32",
    "--quantization": "quant quantize bits quantization-bit",
    "--quantization nf4": "load-in-4bit 4bit",
    "--quantization int8": "load-in-8bit 8bit",
    "--method lora": "lora use-lora peft use-peft adapter",
    "--method qlora": "qlora",
    "--method full": "full full-finetune",
    "--attention": "attn attn-implementation",
    "--attention flash": "flash-attn flash-attention use-flash-attn flash-attn-2",
    "--optimizer": "optim",
    "--loss fused": "liger use-liger-kernel",
    "--padding packing": "packing sample-packing",
    "--shard": "zero zero-stage deepspeed ds-config strategy",
    "--shard parameters": "fsdp",
    "--offload": "cpu-offload offload-optimizer fsdp-offload-params",
    "--num-gpus": "gpus n-gpus ngpus world-size num-processes nproc-per-node nproc",
    "--gpu-memory": "vram gpu-mem memory",
    "--compile": "torch-compile",
    "--data": "dataset train-file data-path train-data train-dataset",
    "--eval-data": "eval-dataset eval-file val-data validation-file",
    "--out": "output-dir output output-path",
    "--resume": "resume-from-checkpoint",
}
WORDS: dict[str, str] = {f"--{name}": words for words, names in _NAMES.items() for name in names.split()}


def here(option: str) -> str:
    """The flag, and its value where the name says one, that is meant by an option of another tool; "" where none is known."""
    return WORDS.get(option.replace("_", "-").lower(), "")
