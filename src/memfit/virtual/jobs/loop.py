"""A hand-written PyTorch loop around a transformers model, on one card, under DDP or under FSDP2."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from memfit.virtual.jobs.models import CHECKPOINTING, DTYPES, batch_of_one, load, make_optimizer, merge, with_adapters
from memfit.virtual.jobs.recipe import Setup
from memfit.virtual.observer import Observer


def run(setup: Setup, observer: Observer) -> None:
    """Load the model, train `setup.steps` optimizer steps, and evaluate if the setup says so."""
    model = _prepared(setup)
    called = distributed(setup, model)
    model.train()
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = make_optimizer(setup.optimizer, parameters)
    one = batch_of_one(setup)
    for _ in range(setup.steps):
        for micro in range(setup.accumulation):
            batch = {name: torch.cat([row] * setup.micro_batch).to("cuda") for name, row in one.items()}
            with gradient_sync(setup, called, micro == setup.accumulation - 1):
                if setup.holds_outputs:
                    with _autocast(setup):
                        outputs = called(**batch)
                        loss = outputs.loss
                else:
                    with _autocast(setup):
                        loss = called(**batch).loss
                if setup.accumulation > 1:
                    loss = loss / setup.accumulation
                loss.backward()
        if setup.clip:
            observer.mark(observer.phase, "clip")
            torch.nn.utils.clip_grad_norm_(parameters, setup.clip)
        optimizer.step()
        observer.mark(observer.phase, "zero_grad")
        optimizer.zero_grad()
    if setup.evaluate:
        model.eval()
        with torch.no_grad(), _autocast(setup):
            outputs = model(**batch)
        del outputs
    if setup.merge and setup.method != "full":
        observer.mark("merge", "merging the adapters")
        merge(setup, model)


def _autocast(setup: Setup) -> Any:
    return torch.autocast("cuda", DTYPES[setup.autocast]) if setup.autocast else nullcontext()


def _prepared(setup: Setup) -> Any:
    model = load(setup)
    if setup.load == "host":
        model = model.to("cuda")
    if setup.method != "full":
        model = with_adapters(setup, model)
        model = model.to("cuda") if setup.load == "host" else model
    prepared = setup.method == "qlora" and setup.prepare_kbit and setup.checkpointing in ("nonreentrant", "reentrant")
    if setup.checkpointing != "none" and not prepared:
        _checkpoint(setup, model)
    if setup.compile:
        model.compile()
    return model


def _checkpoint(setup: Setup, model: Any) -> None:
    words = dict(CHECKPOINTING[setup.checkpointing])
    if words.pop("selective", False):
        from trl.models.selective_activation_checkpointing import enable_selective_activation_checkpointing

        enable_selective_activation_checkpointing(model)
    offload = words.pop("offload", False)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=words, **({"offload": True} if offload else {}))
    if setup.method != "full":
        model.enable_input_require_grads()


# --- several cards ---


def distributed(setup: Setup, model: Any) -> Any:
    """Give meta parameters their memory, wrap the model for several ranks, and return what the loop calls."""
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


def gradient_sync(setup: Setup, model: Any, last: bool) -> AbstractContextManager[Any]:
    """Return the context of a micro-batch, in which gradients are reduced if it is the last or `sync_each` is set."""
    reduce = last or setup.sync_each
    if setup.world_size > 1 and setup.shard == "parameters":
        model.set_requires_gradient_sync(reduce)
    elif setup.world_size > 1 and not reduce:
        return model.no_sync()
    return nullcontext()


def _shard(setup: Setup, model: Any) -> None:
    """Shard as accelerate's fsdp2_prepare_model: each block, the embedding, and the last norm with the head.

    ends_in_root: as accelerate before 1.14, which shards the blocks and leaves all else to the root.
    """
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
    inner = model.get_base_model() if setup.method != "full" else model
    blocks = set(inner._no_split_modules or ())
    for module in inner.modules():
        if type(module).__name__ in blocks:
            fully_shard(module, reshard_after_forward=setup.reshard, **words)
    if setup.ends_in_root:
        fully_shard(model, reshard_after_forward=setup.reshard, **words)
        return
    embedding, head = inner.get_input_embeddings(), inner.get_output_embeddings()
    norm = inner.base_model.norm
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
