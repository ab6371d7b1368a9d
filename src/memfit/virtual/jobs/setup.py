"""The noun Setup: everything a training job is told, by the names its libraries use."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """One job. Sizes are in tokens and sequences."""

    config: dict[str, Any]  # the model's config.json
    trainer: Literal["torch", "transformers", "trl"] = "trl"
    method: Literal["full", "lora", "qlora"] = "full"
    dtype: Literal["bf16", "fp16", "fp32"] = "bf16"  # of the loaded weights
    autocast: Literal["", "bf16", "fp16"] = ""
    quantization: dict[str, Any] = field(default_factory=dict)  # arguments of BitsAndBytesConfig
    prepare_kbit: bool = True
    rank: int = 16
    alpha: int = 32
    dropout: float = 0.0
    targets: str | tuple[str, ...] = "all-linear"
    widen: bool = False  # adapters become fp32 after the trainer has made them 16-bit
    optimizer: str = "adamw_torch_fused"  # a row of optimizers.py, by its key or by transformers' name
    checkpointing: Literal["none", "nonreentrant", "reentrant", "selective", "offload"] = "none"
    attention: str = "sdpa"
    compile: bool = False  # torch.compile of the whole model
    micro_batch: int = 1
    sequence: int = 512
    packing: bool = False  # every sequence is several short ones end to end
    accumulation: int = 1
    clip: float = 1.0  # largest norm of the gradients; 0: no clipping
    steps: int = 2
    evaluate: bool = False
    save: bool = False  # a trainer saves a checkpoint after the last step, and is resumed from it
    merge: bool = False  # put the adapters into the weights at the end
    load: Literal["host", "checkpoint", "zero3", "device", "meta"] = (
        "host"  # built there, or read from a file to the card or its share
    )
    world_size: int = 1  # cards; below, what several do
    shard: Literal["none", "parameters"] = "none"  # DDP, FSDP2
    reshard: bool = True  # FSDP2 frees a block's parameters after its forward
    offload: bool = False  # FSDP2 keeps the shards on the host
    sync_each: bool = False  # gradients are reduced after every micro-batch
    bucket_view: bool = False  # DDP's gradients lie in its buckets
    deepspeed: dict[str, Any] = field(
        default_factory=dict
    )  # its ds_config.json; then it spreads the job, not DDP or FSDP2
    mask: Literal["ones", "none", "padded"] = "ones"
    labelled: float = 1.0  # share of positions with a label
    holds_outputs: bool = False  # the hand-written loop keeps `outputs` through backward
    use_cache: bool | None = None  # None: as the config says
    arguments: dict[str, Any] = field(default_factory=dict)  # further arguments of the trainer's own
