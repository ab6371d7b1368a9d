"""torchtitan's Llama 3 8B: its own model, checkpointing and FSDP2, in the loop of its train.py of December 2024."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import torch

from memfit.nouns.gpu import Gpu
from memfit.nouns.tape import Tape
from memfit.virtual.observer import Observer
from memfit.virtual.virtual_gpu import virtual_gpu
from published.case import NotCovered, fixed_length
from published.rows import Row

PACKAGES = ()
STEPS = 3
# the log "with the changes" of pull request 996, which scores the logits in eight chunks (the table says plain);
# the log before them says 49.58 GiB, as the trace does. Both come from run_train.sh, which sets the allocator
CHUNKED = ("titan-048",)
# versions whose compiled rows are traced: until March 2025 torchtitan compiled the blocks alone, later the loss too
BLOCKS = ("9dec370", "torchtitan 0.0.2")
EXPANDABLE = "PR #996"
# train_configs/llama3_8b.toml and models/llama/__init__.py
LLAMA_8B: dict[str, Any] = {
    "dim": 4096, "n_layers": 32, "n_heads": 32, "n_kv_heads": 8, "ffn_dim_multiplier": 1.3, "multiple_of": 1024,
    "rope_theta": 500000, "vocab_size": 128256, "norm_type": "rmsnorm",
}  # fmt: skip


def tape(row: Row, gpu: Gpu) -> Tape:
    """Return the tape of rank 0. Raises NotCovered for other models, and for what the source does not state."""
    if "Llama 3" not in row.model or "8B" not in row.model:
        raise NotCovered("another model")
    if "compiled" in row.loss_kernel and not any(one in row.framework_version for one in BLOCKS):
        raise NotCovered("later releases compile the loss too")
    if "float8" in row.weight_dtype and not _eight_bits(row):
        raise NotCovered("linear layers in 8 bits, whose scaling the source does not state")
    length = fixed_length(row)
    with virtual_gpu(gpu, world_size=row.number("n_gpus"), capacity=None) as card:
        observer = Observer(card)
        # PyTorch of its time preferred flash attention on Hopper, whose output selective checkpointing keeps. cuDNN's,
        # which is preferred today, is not among the operators that it keeps
        torch.backends.cuda.enable_cudnn_sdp(False)
        try:
            with observer.watching():
                _train(row, length)
        finally:
            torch.backends.cuda.enable_cudnn_sdp(True)
        return observer.tape({"alloc_conf": "expandable_segments:True"} if EXPANDABLE in row.source else {})


def _eight_bits(row: Row) -> dict[str, Any]:
    """Float8LinearConfig's arguments as torchao's benchmark sets them (torchtitan_benchmark.sh); {} if not stated."""
    if "tensorwise" in row.framework:
        return {"enable_fsdp_float8_all_gather": True, "force_recompute_fp8_weight_in_bwd": True}
    return {"recipe": "rowwise"} if "rowwise" in row.framework else {}


def _converted(model: Any, words: dict[str, Any]) -> Any:
    """Return the model with 8-bit linear layers in its blocks, and what the optimizer's step is followed by."""
    from torchao.float8 import (
        Float8LinearConfig,
        convert_to_float8_training,
        precompute_float8_dynamic_scale_for_fsdp,
    )

    named = words.pop("recipe", None)
    made = Float8LinearConfig.from_recipe_name(named) if named else Float8LinearConfig(**words)
    convert_to_float8_training(model, config=made, module_filter_fn=lambda _, name: name != "output")
    return (lambda: None) if named else (lambda: precompute_float8_dynamic_scale_for_fsdp(model))


def _train(row: Row, length: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh

    at = "torchtitan.parallelisms" if find_spec("torchtitan.parallelisms") else "torchtitan.models.llama"
    steps, llama = import_module(f"{at}.parallelize_llama"), import_module("torchtitan.models.llama.model")
    arguments = getattr(llama, "ModelArgs", None) or llama.TransformerModelArgs
    with torch.device("meta"):
        model = llama.Transformer.from_model_args(arguments(**LLAMA_8B, max_seq_len=length))
    words = _eight_bits(row)
    after_step = _converted(model, words) if words else lambda: None
    every = "op" if "(op)" in row.checkpointing else "2"
    if row.checkpointing != "off":
        mode = "full" if row.checkpointing == "full" else "selective"
        steps.apply_ac(model, SimpleNamespace(mode=mode, selective_ac_option=every))
    if "compiled" in row.loss_kernel:  # in this release that is the blocks alone
        steps.apply_compile(model)
    mesh = init_device_mesh("cuda", (row.number("n_gpus"),))
    steps.apply_fsdp(model, mesh, torch.bfloat16, torch.float32, pp_enabled=False)
    model.to_empty(device="cuda")
    with torch.no_grad():
        model.init_weights(buffer_device=None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    losses = []
    for _ in range(STEPS):
        tokens, labels = (torch.zeros(row.number("micro_batch", 1), length, dtype=torch.long).cuda() for _ in range(2))
        optimizer.zero_grad()
        logits = model(tokens)
        loss = _loss(logits, labels, 8 if row.id in CHUNKED else 1)
        del logits
        loss.backward()
        torch.nn.utils.clip_grad_norm_(list(model.parameters()), 1.0, foreach=True)
        optimizer.step()
        after_step()
        losses.append(loss)  # logged every ten steps


def _loss(logits: torch.Tensor, labels: torch.Tensor, chunks: int) -> Any:
    score, pairs = torch.nn.functional.cross_entropy, zip(logits.chunk(chunks, 1), labels.chunk(chunks, 1), strict=True)
    return sum(score(part.flatten(0, 1).float(), wanted.flatten(0, 1)) for part, wanted in pairs) / chunks
