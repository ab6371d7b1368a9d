"""Answer.AI's fsdp_qlora train.py: FSDP1 around every decoder layer and every adapter, on samples of one length."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from memfit.catalogue import config as catalogued
from memfit.catalogue import names
from memfit.nouns.gpu import Gpu
from memfit.nouns.tape import Tape
from memfit.virtual.observer import Observer
from memfit.virtual.virtual_gpu import virtual_gpu
from published.case import NotCovered, fixed_length
from published.rows import Row

PACKAGES = ("transformers", "peft", "bitsandbytes")
STEPS = 3
OFFLOADED = 20  # billions of parameters: a trace holds offloaded ones in real memory
TARGETS = ["k_proj", "q_proj", "v_proj", "up_proj", "down_proj", "gate_proj"]


def tape(row: Row, gpu: Gpu) -> Tape:
    """Return the tape of a rank. Raises NotCovered for a shard on the host that is too large to be held here."""
    if "CPU offload" in row.sharding and float(row.params_b) > OFFLOADED:
        raise NotCovered("offloaded weights, which lie in the memory of the host that traces them")
    with virtual_gpu(gpu, world_size=row.number("n_gpus"), capacity=None) as card:
        observer = Observer(card)
        with observer.watching():
            _train(row)
        return observer.tape({})


def _train(row: Row) -> None:
    model = _wrapped(row)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
    model.train()
    for _ in range(STEPS):
        tokens = torch.ones(row.number("micro_batch", 1), fixed_length(row), dtype=torch.long).cuda()
        output = model(input_ids=tokens, labels=tokens.clone(), attention_mask=None)
        loss = output.loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def _quantise(model: torch.nn.Module) -> None:
    """Quantise every linear layer on the card as the script loads it; what it keeps of the weight lies on the host.

    Its scales stay on the card of every rank: FSDP shards parameters, and they are none.
    """
    from bitsandbytes.nn import Linear4bit

    for name, child in model.named_children():
        if not isinstance(child, torch.nn.Linear):
            _quantise(child)
            continue
        with torch.device("meta"):
            made = Linear4bit(
                child.in_features, child.out_features, child.bias is not None, compute_dtype=torch.bfloat16,
                quant_type="nf4", quant_storage=torch.bfloat16,
            )  # fmt: skip
        read = torch.empty(child.weight.shape, dtype=torch.bfloat16, device="cuda")
        weight: Any = type(made.weight)(read, **made.weight.__dict__).cuda()
        made.weight = type(weight)(weight.data.to("meta"), **weight.__dict__)
        setattr(model, name, made)


def _wrapped(row: Row) -> Any:
    """Return the model with adapters, sharded and checkpointed as the script does it."""
    from peft import LoraConfig, get_peft_model
    from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as wrapping
    from torch.distributed.fsdp import CPUOffload, FullyShardedDataParallel, MixedPrecision, ShardingStrategy
    from torch.distributed.fsdp.wrap import _or_policy, lambda_auto_wrap_policy, transformer_auto_wrap_policy
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer
    from transformers.models.mistral.modeling_mistral import MistralDecoderLayer

    layers = (LlamaDecoderLayer, MistralDecoderLayer)
    entry = names.find(row.model)
    assert entry is not None
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**catalogued(entry)), dtype=torch.bfloat16)
    model.config.use_cache = False
    if row.quant != "none":
        _quantise(model.model)
        model.is_loaded_in_4bit = True
        torch.cuda.empty_cache()
    adapters = LoraConfig(r=row.number("lora_rank"), lora_alpha=16, lora_dropout=0.1, target_modules=TARGETS)
    model = get_peft_model(model, adapters, autocast_adapter_dtype=False)
    model.enable_input_require_grads()

    def adapter(module: torch.nn.Module) -> bool:
        return not list(module.children()) and getattr(getattr(module, "weight", None), "requires_grad", False)

    policies = [
        partial(lambda_auto_wrap_policy, lambda_fn=adapter),
        partial(transformer_auto_wrap_policy, transformer_layer_cls=set(layers)),
    ]
    low = torch.bfloat16
    sharded = FullyShardedDataParallel(
        model, auto_wrap_policy=partial(_or_policy, policies=policies), use_orig_params=False, limit_all_gathers=True,
        sharding_strategy=ShardingStrategy.NO_SHARD if "NO_SHARD" in row.sharding else ShardingStrategy.FULL_SHARD,
        cpu_offload=CPUOffload(offload_params=True) if "CPU offload" in row.sharding else None,
        device_id=torch.cuda.current_device(), sync_module_states=True,
        param_init_fn=lambda module: module.to_empty(device=torch.device("cuda"), recurse=False),
        mixed_precision=MixedPrecision(param_dtype=low, reduce_dtype=low, buffer_dtype=low),
    )  # fmt: skip
    wrapping.apply_activation_checkpointing(
        sharded, checkpoint_wrapper_fn=partial(
            wrapping.checkpoint_wrapper, checkpoint_impl=wrapping.CheckpointImpl.REENTRANT
        ), check_fn=lambda module: isinstance(module, layers),
    )  # fmt: skip
    return sharded
