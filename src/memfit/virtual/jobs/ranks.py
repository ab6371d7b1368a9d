"""A hand-written loop's model on several cards: DDP, or FSDP2 wrapped as accelerate wraps it."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from memfit.virtual.jobs.models import DTYPES
from memfit.virtual.jobs.setup import Setup


def distributed(setup: Setup, model: Any) -> Any:
    """What the loop calls in the place of the model; parameters on the meta device get their memory here."""
    if setup.world_size > 1 and setup.shard == "parameters":
        _shard(setup, model)
    if setup.load == "meta":
        model.to_empty(device="cpu" if setup.offload else "cuda")
        model.tie_weights()
    _buffers_to_card(model)
    if setup.world_size > 1 and setup.shard == "none":
        from torch.nn.parallel import DistributedDataParallel

        return DistributedDataParallel(model, device_ids=[0], gradient_as_bucket_view=setup.bucket_view)
    return model


def unsynchronised(setup: Setup, model: Any, last: bool) -> AbstractContextManager[Any]:
    """Around one micro-batch: gradients are reduced with the last one of a step, or each time if the setup says so."""
    quiet = not last and not setup.sync_each
    if setup.world_size > 1 and setup.shard == "parameters":
        model.set_requires_gradient_sync(not quiet)
    elif quiet and setup.world_size > 1:
        return model.no_sync()
    return nullcontext()


def _shard(setup: Setup, model: Any) -> None:
    """accelerate's fsdp2_prepare_model: blocks, the embedding, and the last norm with the head in groups of their own."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    words: dict[str, Any] = {"mesh": init_device_mesh("cuda", (setup.world_size,))}
    if setup.autocast:
        low = DTYPES[setup.autocast]
        words["mp_policy"] = MixedPrecisionPolicy(param_dtype=low, reduce_dtype=low, output_dtype=low)
        for p in model.parameters():
            if p.requires_grad:
                p.data = p.data.to(torch.float32)
    if setup.offload:
        words["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
    whole = model.get_base_model() if setup.method != "full" else model
    blocks = set(whole._no_split_modules or ())
    for module in whole.modules():
        if type(module).__name__ in blocks:
            fully_shard(module, reshard_after_forward=setup.reshard, **words)
    embedding, head = whole.get_input_embeddings(), whole.get_output_embeddings()
    norm = whole.base_model.norm
    if embedding.weight is head.weight:
        fully_shard([norm, embedding, head], reshard_after_forward=False, **words)
    else:
        fully_shard(embedding, reshard_after_forward=setup.reshard, **words)
        fully_shard([norm, head], reshard_after_forward=False, **words)
    fully_shard(model, **words)


def _buffers_to_card(model: Any) -> None:
    for module in model.modules():
        for name, buffer in list(module._buffers.items()):
            if buffer is not None and not buffer.is_cuda:
                module._buffers[name] = torch.empty_like(buffer, device="cuda")
