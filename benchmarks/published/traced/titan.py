"""torchtitan's Llama 3 8B: its own model, checkpointing and FSDP2, in the loop of its train.py of December 2024."""

from __future__ import annotations

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
OURS = "9dec370ad"  # the commit that is traced
EXPANDABLE = "PR #996"
# train_configs/llama3_8b.toml and models/llama/__init__.py
LLAMA_8B: dict[str, Any] = {
    "dim": 4096, "n_layers": 32, "n_heads": 32, "n_kv_heads": 8, "ffn_dim_multiplier": 1.3, "multiple_of": 1024,
    "rope_theta": 500000, "vocab_size": 128256, "norm_type": "rmsnorm",
}  # fmt: skip


def tape(row: Row, gpu: Gpu) -> Tape:
    """Return the tape of rank 0. Raises NotCovered for other models, and for linear layers in 8 bits."""
    if "Llama 3" not in row.model or "8B" not in row.model or "float8" in row.weight_dtype:
        raise NotCovered("another model, or linear layers in 8 bits")
    if "compiled" in row.loss_kernel and OURS not in row.framework_version:
        raise NotCovered("later releases compile the loss too, by another Inductor")
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


def _train(row: Row, length: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torchtitan.models.llama.model import ModelArgs, Transformer
    from torchtitan.parallelisms.parallelize_llama import apply_ac, apply_compile, apply_fsdp

    with torch.device("meta"):
        model = Transformer.from_model_args(ModelArgs(**LLAMA_8B, max_seq_len=length))
    every = "op" if "(op)" in row.checkpointing else "2"
    if row.checkpointing != "off":
        mode = "full" if row.checkpointing == "full" else "selective"
        apply_ac(model, SimpleNamespace(mode=mode, selective_ac_option=every))
    if "compiled" in row.loss_kernel:  # in this release that is the blocks alone
        apply_compile(model)
    mesh = init_device_mesh("cuda", (row.number("n_gpus"),))
    apply_fsdp(model, mesh, torch.bfloat16, torch.float32, pp_enabled=False)
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
        losses.append(loss)  # logged every ten steps


def _loss(logits: torch.Tensor, labels: torch.Tensor, chunks: int) -> Any:
    score, pairs = torch.nn.functional.cross_entropy, zip(logits.chunk(chunks, 1), labels.chunk(chunks, 1), strict=True)
    return sum(score(part.flatten(0, 1).float(), wanted.flatten(0, 1)) for part, wanted in pairs) / chunks
